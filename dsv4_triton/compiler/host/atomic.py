"""Atomics: the grid is shared between threads, so `tl.atomic_*` must be atomic instructions, and return what they
replaced.

The adapter writes an atomic as a read-modify-write `linalg.generic` on the pointer's buffer, and reads the old value
with a separate copy (before it, for compare-and-swap after it). Here both become one loop of calls, one per element,
to functions that this module defines with LLVM's atomic instructions.
"""

from __future__ import annotations

import re

from dsv4_triton.compiler.frontend import KernelCompileError
from dsv4_triton.compiler.mlir import Block, Builder, Module, Op, Shaped

_DYNAMIC = "-9223372036854775808"
_LLVM_TYPES = {"f16": "half", "bf16": "bfloat", "f32": "float", "f64": "double"}
_INSTRUCTION = {
    "arith.addi": "add", "arith.andi": "and", "arith.ori": "or", "arith.xori": "xor", "arith.maxsi": "max",
    "arith.minsi": "min", "arith.maxui": "umax", "arith.minui": "umin", "arith.addf": "fadd",
    "arith.maximumf": "fmax", "arith.maxnumf": "fmax", "arith.minimumf": "fmin", "arith.minnumf": "fmin",
}  # fmt: skip


def rewrite_block(block: Block, module: Module) -> None:
    """Lower the atomics of a block (not of nested ones), in place."""
    position = 0
    while position < len(block.ops):
        if "GenericAtomicRMW" in block.ops[position].attrs:
            _lower(block, position, module)
        position += 1


def _lower(block: Block, position: int, module: Module) -> None:
    op = block.ops[position]
    kind = (op.attrs["GenericAtomicRMW"] or "").strip('"')
    target, target_type = op.operands[0], op.types[0]
    view = next((o for o in block.ops[:position] if target in o.results and o.name == "memref.subview"), None)
    whole = view.operands[0] if view is not None else target
    shape = Shaped.parse(target_type)
    assert shape is not None
    values = list(zip(op.operands[1:-1], op.types[1:-1], strict=True))
    if kind == "cas":
        instruction = "cas"
    elif kind in ("exch", "xchg"):
        instruction = "xchg"
    else:
        combine = op.body.ops[0].name
        if combine not in _INSTRUCTION:
            raise KernelCompileError(f"atomic {kind} ({combine}) is not supported on the host", "GenericAtomicRMW")
        instruction = _INSTRUCTION[combine]
    old = _old_value(block, position, {target, whole})
    position = block.ops.index(op)
    builder = Builder(module)
    extents = []
    for axis, extent in enumerate(shape.shape):
        if extent >= 0:
            extents.append(builder.index(extent))
        else:
            dim = builder.index(axis)
            extents.append(builder.op("memref.dim", [(target, target_type), (dim, "index")], "index"))

    def element(inner: Builder, i: list[str]) -> None:
        rank = len(i)
        cell_type = f"memref<{shape.element}, strided<[], offset: ?>>"
        props: dict[str, str | None] = {
            "operandSegmentSizes": f"array<i32: 1, {rank}, 0, 0>",
            "static_offsets": f"array<i64: {', '.join([_DYNAMIC] * rank)}>" if rank else "array<i64>",
            "static_sizes": f"array<i64: {', '.join(['1'] * rank)}>" if rank else "array<i64>",
            "static_strides": f"array<i64: {', '.join(['1'] * rank)}>" if rank else "array<i64>",
        }
        cell = inner.op("memref.subview", [(target, target_type), *((x, "index") for x in i)], cell_type, props)
        arguments = [(inner.load(v, t, i), shape.element) for v, t in values]
        callee: dict[str, str | None] = {"callee": f"@dsv4.atomic.{instruction}.{shape.element}"}
        before = inner.op("func.call", [(cell, cell_type), *arguments], shape.element, callee)
        if old is not None:
            inner.store(before, *old, _shifted(inner, view, i))

    def nest(inner: Builder, done: list[str]) -> None:
        if len(done) == len(extents):
            element(inner, done)
        else:
            zero, one = inner.index(0), inner.index(1)
            inner.loop(zero, extents[len(done)], one, lambda deep, x: nest(deep, [*done, x]))

    nest(builder, [])
    block.ops[position : position + 1] = builder.ops


def _shifted(builder: Builder, view: Op | None, i: list[str]) -> list[str]:
    """Indices into the whole buffer of element `i` of its (masked) view."""
    if view is None:
        return i
    dynamic = iter(view.segments()[1])
    result = []
    for index, static in zip(i, view.ints("static_offsets"), strict=True):
        offset = next(dynamic) if str(static) == _DYNAMIC else builder.index(static)
        result.append(builder.binary("addi", index, offset, "index"))
    return result


def _old_value(block: Block, position: int, pointers: set[str]) -> tuple[str, str] | None:
    """The buffer that the adapter copies the old value to, made ready before the atomic; its tensor is taken after it.

    A copy before the atomic stays: it fills the elements that a mask excludes. A copy after it (compare-and-swap) goes.
    """
    before = block.ops[max(0, position - 6) : position]
    after = block.ops[position + 1 : position + 4]
    compare = (block.ops[position].attrs["GenericAtomicRMW"] or "") == '"cas"'
    op = block.ops[position]
    for copy in after if compare else reversed(before):
        if copy is not op and "GenericAtomicRMW" in copy.attrs:
            return None
        if copy.name != "memref.copy" or copy.operands[0] not in pointers:
            continue
        buffer, kind = copy.operands[1], copy.types[1]
        allocation = next((o for o in block.ops if buffer in o.results), None)
        tensor = next((o for o in block.ops if o.name == "bufferization.to_tensor" and o.operands[0] == buffer), None)
        if allocation is None or allocation.name != "memref.alloc" or tensor is None:
            return None
        block.ops.remove(tensor)
        block.ops.insert(block.ops.index(op) + 1, tensor)
        if compare:
            block.ops.remove(copy)
            block.ops.remove(allocation)
            block.ops.insert(block.ops.index(op), allocation)
        return buffer, kind
    return None


_ROUND_BF16 = """  %bits{0} = bitcast float {1} to i32
  %odd{0} = lshr i32 %bits{0}, 16
  %lsb{0} = and i32 %odd{0}, 1
  %bias{0} = add i32 %lsb{0}, 32767
  %sum{0} = add i32 %bits{0}, %bias{0}
  %high{0} = lshr i32 %sum{0}, 16
  %code{0} = trunc i32 %high{0} to i16
  %nan{0} = fcmp uno float {1}, {1}
  %out{0} = select i1 %nan{0}, i16 32704, i16 %code{0}
"""


def emit(name: str) -> str | None:
    """LLVM IR of `dsv4.atomic.<instruction>.<element>`; None for another name."""
    match = re.fullmatch(r"dsv4\.atomic\.(\w+)\.(\w+)", name)
    if match is None:
        return None
    instruction, element = match[1], match[2]
    kind = _LLVM_TYPES.get(element, element)
    head = f"define internal {kind} @{name}(ptr %base, ptr %aligned, i64 %offset, "
    cell = f"  %cell = getelementptr {kind}, ptr %aligned, i64 %offset\n"
    if instruction == "cas":
        bits = f"i{''.join(c for c in element if c.isdigit())}"
        cast = (
            ""
            if kind == bits
            else f"  %e = bitcast {kind} %expected to {bits}\n  %d = bitcast {kind} %desired to {bits}\n"
        )
        e, d = ("%expected", "%desired") if kind == bits else ("%e", "%d")
        end = "  ret {0} %old\n" if kind == bits else "  %back = bitcast {1} %old to {0}\n  ret {0} %back\n"
        return (
            f"{head}{kind} %expected, {kind} %desired) alwaysinline nounwind {{\n{cell}{cast}"
            f"  %pair = cmpxchg ptr %cell, {bits} {e}, {bits} {d} acq_rel acquire\n"
            f"  %old = extractvalue {{ {bits}, i1 }} %pair, 0\n{end.format(kind, bits)}}}\n"
        )
    if element == "bf16" and instruction in ("fadd", "fmax", "fmin"):
        widen = "  %w{0} = zext i16 {1} to i32\n  %s{0} = shl i32 %w{0}, 16\n  %f{0} = bitcast i32 %s{0} to float\n"
        if instruction == "fadd":
            step = "  %new = fadd float %f0, %f1\n"
        else:
            step = f"  %new = call float @llvm.{instruction[1:]}num.f32(float %f0, float %f1)\n"
        declaration = "" if instruction == "fadd" else f"declare float @llvm.{instruction[1:]}num.f32(float, float)\n"
        return (
            f"{declaration}{head}bfloat %v) alwaysinline nounwind {{\nentry:\n{cell}  %raw = bitcast bfloat %v to i16\n"
            f"{widen.format(1, '%raw')}  %first = load atomic i16, ptr %cell monotonic, align 2\n"
            "  br label %again\nagain:\n"
            f"  %seen = phi i16 [ %first, %entry ], [ %now, %again ]\n{widen.format(0, '%seen')}{step}"
            f"{_ROUND_BF16.format(0, '%new')}"
            "  %pair = cmpxchg ptr %cell, i16 %seen, i16 %out0 acq_rel acquire\n"
            "  %now = extractvalue { i16, i1 } %pair, 0\n  %won = extractvalue { i16, i1 } %pair, 1\n"
            "  br i1 %won, label %done, label %again\ndone:\n  %old = bitcast i16 %seen to bfloat\n  ret bfloat %old\n"
            "}\n"
        )
    return (
        f"{head}{kind} %v) alwaysinline nounwind {{\n{cell}"
        f"  %old = atomicrmw {instruction} ptr %cell, {kind} %v acq_rel\n  ret {kind} %old\n}}\n"
    )
