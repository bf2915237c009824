"""Rewrites on tensors, between the adapter and bufferization.

Operations that upstream MLIR does not have (fp8 casts, sort, scans, gather ...) become upstream ones, reductions become
vectorisable ones, and elementwise operations are fused (host/fuse.py).
"""

from __future__ import annotations

from dsv4_triton.compiler.frontend import KernelCompileError
from dsv4_triton.compiler.host import atomic, external, fp8
from dsv4_triton.compiler.host.fuse import PARALLEL, REDUCTION, Fuser, generic
from dsv4_triton.compiler.mlir import Block, Builder, Module, Op, Shaped, declare_called, rename

_DROPPED = {
    "annotation.mark",
    "gpu.barrier",
    "hivm.hir.sync_block_set",
    "hivm.hir.sync_block_wait",
    "hivm.hir.sync_block_all",
}
_BF16_AS_IS = ("arith.constant", "arith.extf", "arith.truncf", "arith.select", "arith.bitcast")
_ARG_MODES = ('"max_with_index"', '"min_with_index"')
_NEUTRAL = {"arith.maxnumf": ("0xFF800000", "0xFC00", "0xFF80"), "arith.minnumf": ("0x7F800000", "0x7C00", "0x7F80")}


def rewrite(module: Module) -> Module:
    """All rewrites of this module, in place. Raises `KernelCompileError` for an operation that the host lacks."""
    fp8.rewrite(module)
    for function in module.functions:
        _name_results(function, module)
        definitions = {result: op for op in function.walk() for result in op.results}
        for region in function.regions:
            for block in region:
                _rewrite_block(block, module, definitions)
        for block in [b for op in function.walk() for region in op.regions for b in region]:
            block.ops = _bf16_in_f32(block.ops, module)
        _forbid_writes_to_shared_buffers(function)
        Fuser(module, function).run()
    _drop_unused_declarations(module)
    declare_called(module)
    return module


def _name_results(function: Op, module: Module) -> None:
    """Give the two results of an argmax names of their own, so that two operations can define them."""
    mapping: dict[str, str] = {}
    for op in function.walk():
        if op.attrs.get("reduce_mode") in _ARG_MODES and len(op.results) == 2:
            mapping.update({old: module.fresh() for old in op.results})
            op.results = [mapping[old] for old in op.results]
    rename(function, mapping)


def _rewrite_block(block: Block, module: Module, definitions: dict[str, Op]) -> None:
    atomic.rewrite_block(block, module)
    ops: list[Op] = []
    for op in block.ops:
        for region in op.regions:
            for nested in region:
                _rewrite_block(nested, module, definitions)
        callee = (op.props.get("callee") or "") if op.name == "func.call" else ""
        if op.name in _DROPPED:
            continue
        builder = Builder(module, ops)
        if callee.startswith("@triton_") or op.name == "hfusion.histogram":
            external.lower(builder, op, definitions)
        elif op.name == "linalg.reduce":
            _reduce(builder, op, definitions)
        elif op.name == "linalg.matmul":
            _matmul(op, definitions)
            ops.append(op)
        elif op.name.startswith(("tt.", "hfusion.")):
            raise KernelCompileError(f"operation {op.name} is not supported on the host", op.name)
        else:
            ops.append(op)
    block.ops = ops


def _bf16_in_f32(ops: list[Op], module: Module) -> list[Op]:
    """Scalar bf16 arithmetic in fp32, rounded to bf16 after every operation: LLVM for x86 would call a missing
    function.
    """
    result: list[Op] = []
    for op in ops:
        arithmetic = op.name.startswith(("arith.", "math.")) and op.name not in _BF16_AS_IS
        if not arithmetic or "bf16" not in [*op.types, *op.result_types]:
            result.append(op)
            continue
        builder = Builder(module, result)
        for i, kind in enumerate(op.types):
            if kind == "bf16":
                op.operands[i] = builder.op("arith.extf", [(op.operands[i], "bf16")], "f32")
                op.types[i] = "f32"
        result.append(op)
        if op.result_types[0] == "bf16":
            wide, narrow = module.fresh(), op.result
            op.results, op.result_types = [wide], ["f32"]
            builder.op("arith.truncf", [(wide, "f32")], "bf16")
            builder.ops[-1].results = [narrow]
    return result


def _forbid_writes_to_shared_buffers(function: Op) -> None:
    """The adapter marks a buffer's tensor `writable` even where it goes on using the buffer itself (atomics do
    that).
    """
    tensors: dict[str, Op] = {}
    for op in function.walk():
        for value in op.operands:
            if value in tensors and op.name != "bufferization.to_tensor":
                tensors[value].props.pop("writable", None)
        if op.name == "bufferization.to_tensor":
            tensors[op.operands[0]] = op


def _drop_unused_declarations(module: Module) -> None:
    called = {op.props.get("callee") for op in module.root.walk() if op.name == "func.call"}
    block = module.root.body
    block.ops = [
        op
        for op in block.ops
        if op.name != "func.func" or op.regions[0] or f"@{(op.props['sym_name'] or '').strip(chr(34))}" in called
    ]


def _matmul(op: Op, definitions: dict[str, Op]) -> None:
    """Let a product read its transposed right operand as it lies in memory."""
    producer = definitions.get(op.operands[1])
    if producer is not None and producer.name == "linalg.transpose" and producer.ints("permutation") == [1, 0]:
        op.name = "linalg.matmul_transpose_b"
        op.operands[1], op.types[1] = producer.operands[0], producer.types[0]
        op.attrs.pop("linalg.memoized_indexing_maps", None)


def _reduce(builder: Builder, op: Op, definitions: dict[str, Op]) -> None:
    """`linalg.reduce` as a `linalg.generic` that LLVM can vectorise."""
    count = len(op.operands) // 2
    source = Shaped.parse(op.types[0])
    assert source is not None
    dims = op.ints("dimensions")
    if op.attrs.get("reduce_mode") in _ARG_MODES and count == 2:
        _arg_reduce(builder, op, source, dims)
        return
    initial = [definitions.get(v) for v in op.operands[count:]]
    if any(producer is not None and producer.name == "tensor.empty" for producer in initial):
        _reduce_from_first(builder, op, source, dims[0], count)
        return
    rank = len(source.shape)
    kept = tuple(i for i in range(rank) if i not in dims)
    maps = [tuple(range(rank))] * count + [kept] * count
    iterators = [REDUCTION if i in dims else PARALLEL for i in range(rank)]
    if count == 1:
        _relax(op, builder.module, initial[0], definitions)
    pairs = list(zip(op.operands, op.types, strict=True))
    builder.ops.append(generic(pairs[:count], pairs[count:], maps, iterators, op.body, op.results))


def _relax(op: Op, module: Module, initial: Op | None, definitions: dict[str, Op]) -> None:
    """Allow the order of a reduction to change, without touching what NaN and infinity do.

    Sums and products may be reassociated. `maxnum` ignores NaN; LLVM vectorises it only without NaN, so NaN is
    replaced by the neutral element first, which is the same as long as the initial value is not NaN.
    """
    body = op.body
    value, total = body.args[0], body.args[1]
    if len(body.ops) != 2 or set(body.ops[0].operands) != {value[0], total[0]}:
        return
    combine, element = body.ops[0], value[1]
    if combine.name in ("arith.addf", "arith.mulf"):
        combine.props["fastmath"] = "#arith.fastmath<reassoc>"
    constant = definitions.get(initial.operands[0]) if initial is not None and initial.name == "linalg.fill" else None
    inner = Builder(module)
    if element not in ("f32", "f16"):
        return
    if combine.name in ("arith.maximumf", "arith.minimumf"):
        combine.props = {"callee": f"@dsv4.{combine.name[6:-1]}.{element}"}
        combine.name = "func.call"
    elif combine.name in _NEUTRAL and constant is not None and constant.name == "arith.constant":
        combine.operands = [_without_nan(inner, value[0], element, combine.name), total[0]]
        combine.props = {"callee": f"@dsv4.{combine.name[6:-1]}.{element}"}
        combine.name = "func.call"
    body.ops[:0] = inner.ops


def _without_nan(builder: Builder, value: str, element: str, name: str) -> str:
    """`value`, with NaN replaced by the neutral element of `arith.maxnumf` or `arith.minnumf`."""
    neutral = builder.constant(_NEUTRAL[name][{"f32": 0, "f16": 1, "bf16": 2}[element]], element)
    return builder.select(builder.cmp(14, value, value, element), neutral, value, element)


def _arg_reduce(builder: Builder, op: Op, source: Shaped, dims: list[int]) -> None:
    """Extremum and its index: the extremum first, then the first (or last) index that has it.

    Rows without any comparable value (all NaN) give the neutral value and index 0.
    """
    module = builder.module
    (values, indices), (value_type, index_type) = op.operands[:2], op.types[:2]
    element, index_element = source.element, Shaped.parse(index_type).element  # type: ignore[union-attr]
    largest = op.attrs["reduce_mode"] == '"max_with_index"'
    first = op.attrs.get("tie_break_left") != '"false"'
    rank = len(source.shape)
    kept = tuple(i for i in range(rank) if i not in dims)
    everything = tuple(range(rank))
    iterators = [REDUCTION if i in dims else PARALLEL for i in range(rank)]
    out_value, out_index = op.types[2], op.types[3]
    floating = element[0] in "fb"
    unsigned = any(
        o.name == "arith.cmpi" and (o.props["predicate"] or "").split(" ")[0] in ("6", "8") for o in op.body.ops
    )
    if floating:
        name = "arith.maxnumf" if largest else "arith.minnumf"
    else:
        name = f"arith.{'max' if largest else 'min'}{'u' if unsigned else 's'}i"

    def filled(constant: str, element_type: str, kind: str) -> str:
        empty = builder.op("tensor.empty", [], kind)
        a, b = module.fresh(), module.fresh()
        body = Block([(a, element_type), (b, element_type)], [Op("linalg.yield", [a], [element_type])])
        props: dict[str, str | None] = {"operandSegmentSizes": "array<i32: 1, 1>"}
        return builder.op("linalg.fill", [(constant, element_type), (empty, kind)], kind, props, [[body]])

    if floating:
        neutral = builder.constant(_NEUTRAL[name][{"f32": 0, "f16": 1, "bf16": 2}[element]], element)
    else:
        bits = int(element[1:])
        low, high = (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        edge = low if largest else high
        neutral = builder.constant(edge if edge < 2 ** (bits - 1) else edge - 2**bits, element)
    x, total = module.fresh(), module.fresh()
    inner = Builder(module)
    if floating:
        clean = _without_nan(inner, x, element, name)
        callee: dict[str, str | None] = {"callee": f"@dsv4.{name[6:-1]}.{element}"}
        known = element in ("f32", "f16")
        best = inner.op(
            "func.call" if known else name, [(clean, element), (total, element)], element, callee if known else {}
        )
    else:
        best = inner.binary(name.removeprefix("arith."), x, total, element)
    inner.op("linalg.yield", [(best, element)])
    block = Block([(x, element), (total, element)], inner.ops)
    builder.ops.append(
        generic(
            [(values, value_type)], [(filled(neutral, element, out_value), out_value)], [everything, kept], iterators,
            block, [op.results[0]],
        )
    )  # fmt: skip

    bits = int(index_element[1:])
    none = (2 ** (bits - 1) - 1) if first else -1
    miss = builder.constant(none, index_element)
    x, i, m, total = (module.fresh() for _ in range(4))
    inner = Builder(module)
    hit = inner.cmp(1 if floating else 0, x, m, element)
    chosen = inner.select(hit, i, miss, index_element)
    best = inner.binary("minsi" if first else "maxsi", chosen, total, index_element)
    inner.op("linalg.yield", [(best, index_element)])
    block = Block([(x, element), (i, index_element), (m, element), (total, index_element)], inner.ops)
    raw = module.fresh()
    inputs = [(values, value_type), (indices, index_type), (op.results[0], out_value)]
    target = filled(miss, index_element, out_index)
    maps = [everything, everything, kept, kept]
    builder.ops.append(generic(inputs, [(target, out_index)], maps, iterators, block, [raw]))

    zero = builder.constant(0, index_element)
    i, old = module.fresh(), module.fresh()
    inner = Builder(module)
    final = inner.select(inner.cmp(0, i, miss, index_element), zero, i, index_element)
    inner.op("linalg.yield", [(final, index_element)])
    block = Block([(i, index_element), (old, index_element)], inner.ops)
    plain = tuple(range(len(kept)))
    empty = builder.op("tensor.empty", [], out_index)
    builder.ops.append(
        generic(
            [(raw, out_index)], [(empty, out_index)], [plain, plain], [PARALLEL] * len(kept), block, [op.results[1]]
        )
    )


def _reduce_from_first(builder: Builder, op: Op, source: Shaped, dim: int, count: int) -> None:
    """A reduction whose combine function has no neutral element: start from the first slice."""
    rank = len(source.shape)
    rest = list(source.shape)
    rest[dim] -= 1
    first_offsets, rest_offsets = [0] * rank, [0] * rank
    rest_offsets[dim] = 1
    single = list(source.shape)
    single[dim] = 1

    def part(value: str, kind: str, result: str, offsets: list[int], sizes: list[int]) -> str:
        props: dict[str, str | None] = {
            "operandSegmentSizes": "array<i32: 1, 0, 0, 0>",
            "static_offsets": f"array<i64: {', '.join(map(str, offsets))}>",
            "static_sizes": f"array<i64: {', '.join(map(str, sizes))}>",
            "static_strides": f"array<i64: {', '.join(['1'] * rank)}>",
        }
        return builder.op("tensor.extract_slice", [(value, kind)], result, props)

    inputs, outputs = [], []
    for i in range(count):
        value, kind = op.operands[i], op.types[i]
        outputs.append((part(value, kind, op.types[count + i], first_offsets, single), op.types[count + i]))
        tail = Shaped.parse(kind)
        assert tail is not None
        tail_type = str(tail.of(shape=tuple(rest)))
        inputs.append((part(value, kind, tail_type, rest_offsets, rest), tail_type))
    kept = tuple(i for i in range(rank) if i != dim)
    maps = [tuple(range(rank))] * count + [kept] * count
    iterators = [REDUCTION if i == dim else PARALLEL for i in range(rank)]
    builder.ops.append(generic(inputs, outputs, maps, iterators, op.body, op.results))
