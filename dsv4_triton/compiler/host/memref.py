"""Rewrites on buffers: what remains between one-shot bufferization and the lowering to the LLVM dialect.

* Every allocation becomes one fixed buffer of the program (host/llvm.py places them), so a loop cannot grow memory. A
  loop that carries buffers across iterations gets a buffer of its own per carried value, and copies into it: without
  that, the next iteration's allocation would be the very buffer that still holds the carried value.
* Copies become loops, atomics become atomic instructions, matrix products become calls of a micro-kernel.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dsv4_triton.compiler.host.gemm import Gemm
from dsv4_triton.compiler.mlir import Block, Builder, Module, Op, Shaped, declare_called

PARALLEL = "#linalg.iterator_type<parallel>"
ALIASING = {"memref.cast", "memref.subview", "memref.reinterpret_cast", "memref.expand_shape", "memref.collapse_shape"}


def identity_map(rank: int) -> str:
    dims = ", ".join(f"d{i}" for i in range(rank))
    return f"affine_map<({dims}) -> ({dims})>"


def shaped(kind: str) -> Shaped:
    value = Shaped.parse(kind)
    if value is None:
        raise ValueError(f"not a shaped type: {kind}")
    return value


def copy_op(source: str, source_type: str, target: str, target_type: str, module: Module) -> Op:
    """`target[...] = source[...]` as a linalg operation, which lowers to loops (LLVM turns contiguous ones into
    memcpy).
    """
    kind = shaped(target_type)
    rank = len(kind.shape)
    a, b = module.fresh(), module.fresh()
    body = Block([(a, kind.element), (b, kind.element)], [Op("linalg.yield", [a], [kind.element])])
    props: dict[str, str | None] = {
        "indexing_maps": f"[{identity_map(rank)}, {identity_map(rank)}]",
        "iterator_types": "[" + ", ".join([PARALLEL] * rank) + "]",
        "operandSegmentSizes": "array<i32: 1, 1>",
    }
    return Op("linalg.generic", [source, target], [source_type, target_type], props=props, regions=[[body]])


@dataclass
class _Scope:
    """Definitions seen so far, to follow a buffer back to where it comes from."""

    definition: dict[str, Op]

    def root(self, value: str) -> str:
        while value in self.definition and self.definition[value].name in ALIASING:
            value = self.definition[value].operands[0]
        return value


def rewrite(module: Module) -> Module:
    """All rewrites of this module, in place."""
    for function in module.functions:
        scope = _Scope({result: op for op in function.walk() for result in op.results})
        for region in function.regions:
            for block in region:
                _rewrite_block(block, module, scope)
    declare_called(module)
    return module


def _rewrite_block(block: Block, module: Module, scope: _Scope) -> None:
    ops: list[Op] = []
    for op in block.ops:
        for region in op.regions:
            for nested in region:
                _rewrite_block(nested, module, scope)
        if op.name in ("scf.for", "scf.while"):
            ops.extend(_own_carried_buffers(op, module, scope))
            continue
        if op.name == "memref.copy":
            ops.append(copy_op(op.operands[0], op.types[0], op.operands[1], op.types[1], module))
            continue
        if op.name == "memref.alloc":
            op.props.pop("alignment", None)
        elif op.name == "memref.dealloc":
            continue
        elif op.name in ("linalg.matmul", "linalg.batch_matmul", "linalg.matmul_transpose_b"):
            builder = Builder(module, ops)
            _matmul(builder, op)
            continue
        ops.append(op)
    block.ops = ops


def _own_carried_buffers(op: Op, module: Module, scope: _Scope) -> list[Op]:
    """Give each buffer that a loop replaces between iterations a fixed home that is copied into at the loop's end."""
    if op.name == "scf.for":
        first, block = 3, op.body
        args = block.args[1:]
        tail = block.terminator
    else:
        first = 0
        args = op.body.args
        tail = op.regions[1][0].terminator
    changed = [
        i for i, (name, kind) in enumerate(args) if kind.startswith("memref<") and scope.root(tail.operands[i]) != name
    ]  # fmt: skip
    if not changed:
        return [op]
    before = Builder(module)
    homes: dict[int, tuple[str, str]] = {}
    for i in changed:
        _, kind = args[i]
        plain = str(shaped(kind).of())
        home = before.alloc(plain)
        scope.definition[home] = before.ops[-1]
        before.ops.append(copy_op(op.operands[first + i], op.types[first + i], home, plain, module))
        homes[i] = home, plain
        carried = home if plain == kind else before.op("memref.cast", [(home, plain)], kind)
        op.operands[first + i] = carried
    # With several carried buffers a yielded one may be another's home (a swap): go through temporaries then.
    end = Builder(module)
    yielded = {i: (tail.operands[i], tail.types[i]) for i in changed}
    inside = {arg for arg, _ in args}
    if len(changed) > 1 and any(scope.root(value) in inside for value, _ in yielded.values()):
        for i, (value, kind) in yielded.items():
            spare = end.alloc(homes[i][1])
            end.ops.append(copy_op(value, kind, spare, homes[i][1], module))
            yielded[i] = spare, homes[i][1]
    for i, (value, kind) in yielded.items():
        end.ops.append(copy_op(value, kind, *homes[i], module))
        tail.operands[i] = args[i][0] if op.name == "scf.for" else op.operands[first + i]
        tail.types[i] = args[i][1]
    target = op.body if op.name == "scf.for" else op.regions[1][0]
    target.ops[-1:] = [*end.ops, tail]
    return [*before.ops, op]


def _matmul(builder: Builder, op: Op) -> None:
    """A matrix product as a call of its kernel (host/gemm.py), or as loops where that has none."""
    kinds = [shaped(t) for t in op.types]
    m, n = kinds[2].shape[-2:]
    transposed = op.name == "linalg.matmul_transpose_b"
    gemm = Gemm(kinds[0].element, kinds[1].element, kinds[2].element, m, n, kinds[0].shape[-1], transposed)
    if not gemm.supported:
        _matmul_loops(builder, op, kinds, transposed)
        return
    for i, kind in enumerate(kinds):
        if kind.layout and not re.search(r"strided<\[(?:.*, )?1\]", kind.layout):
            if i == 2:
                _matmul_loops(builder, op, kinds, transposed)
                return
            plain = str(kind.of())
            dense = builder.alloc(plain)
            builder.ops.append(copy_op(op.operands[i], op.types[i], dense, plain, builder.module))
            op.operands[i], op.types[i] = dense, plain
    scratch = [(builder.alloc(f"memref<{size}xf32>"), f"memref<{size}xf32>") for size in gemm.scratch]

    def call(inner: Builder, operands: list[tuple[str, str]]) -> None:
        # A symbol has one type, but strides differ from call to call: every operand gets the same dynamic layout.
        general = []
        for value, kind in operands:
            parsed = shaped(kind)
            loose = f"memref<{parsed.shape[0]}x{parsed.shape[1]}x{parsed.element}, strided<[?, ?], offset: ?>>"
            general.append((value if kind == loose else inner.op("memref.cast", [(value, kind)], loose), loose))
        inner.op("func.call", [*general, *scratch], None, {"callee": f"@{gemm.name}"})

    if len(kinds[2].shape) == 2:
        call(builder, list(zip(op.operands, op.types, strict=True)))
        return

    def batch(inner: Builder, i: list[str]) -> None:
        call(inner, [_matrix(inner, v, t, i[0]) for v, t in zip(op.operands, op.types, strict=True)])

    builder.loops([kinds[2].shape[0]], batch)


def _matrix(builder: Builder, value: str, kind: str, index: str) -> tuple[str, str]:
    """The matrix `value[index]` of a batch."""
    parsed = shaped(kind)
    _, rows, columns = parsed.shape
    strides = re.search(r"strided<\[(.*?)\]", parsed.layout)
    inner = strides[1].split(", ")[1:] if strides else [str(columns), "1"]
    result = f"memref<{rows}x{columns}x{parsed.element}, strided<[{', '.join(inner)}], offset: ?>>"
    props: dict[str, str | None] = {
        "operandSegmentSizes": "array<i32: 1, 1, 0, 0>",
        "static_offsets": "array<i64: -9223372036854775808, 0, 0>",
        "static_sizes": f"array<i64: 1, {rows}, {columns}>",
        "static_strides": "array<i64: 1, 1, 1>",
    }
    return builder.op("memref.subview", [(value, kind), (index, "index")], result, props), result


def _matmul_loops(builder: Builder, op: Op, kinds: list[Shaped], transposed: bool) -> None:
    """A matrix product as loops over (row, k, column)."""
    a, b, c = op.operands
    batch = list(kinds[2].shape[:-2])
    m, n = kinds[2].shape[-2:]
    result = kinds[2].element

    def widen(inner: Builder, value: str, element: str) -> str:
        if element == result:
            return value
        return inner.op("arith.extf" if result[0] == "f" else "arith.extsi", [(value, element)], result)

    def body(inner: Builder, i: list[str]) -> None:
        x = widen(inner, inner.load(a, op.types[0], i), kinds[0].element)
        *lead, _, depth = i

        def columns(deep: Builder, j: str) -> None:
            place = [*lead, j, depth] if transposed else [*lead, depth, j]
            y = widen(deep, deep.load(b, op.types[1], place), kinds[1].element)
            add, mul = ("addf", "mulf") if result[0] == "f" else ("addi", "muli")
            at = [*i[:-1], j]
            product = deep.binary(mul, x, y, result)
            deep.store(deep.binary(add, deep.load(c, op.types[2], at), product, result), c, op.types[2], at)

        inner.loop(inner.index(0), inner.index(n), inner.index(1), columns)

    builder.loops([*batch, m, kinds[0].shape[-1]], body)
