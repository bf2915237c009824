"""Operations that the adapter leaves to the device's library: sort, scans, gather, flip, histogram.

Each becomes loops: elements of the operand are read, a new buffer is written and handed back as a tensor. The operand
stays a tensor: were its buffer taken here, bufferization would not see these reads and could reuse the buffer before.
"""

from __future__ import annotations

from collections.abc import Callable

from dsv4_triton.compiler.frontend import KernelCompileError
from dsv4_triton.compiler.mlir import Builder, Op, Shaped


def _constant(value: str, definitions: dict[str, Op]) -> int:
    op = definitions.get(value)
    text = (op.props.get("value") or "") if op is not None and op.name == "arith.constant" else ""
    if not text:
        raise KernelCompileError(f"a library call needs a constant argument, got {value}")
    return {"true": 1, "false": 0}[text] if text in ("true", "false") else int(text.split(" ")[0])


def lower(builder: Builder, op: Op, definitions: dict[str, Op]) -> None:
    """Append the lowering of one library operation; `KernelCompileError` names one that is unknown."""
    if op.name == "hfusion.histogram":
        _histogram(builder, op)
        return
    name = (op.props["callee"] or "").removeprefix("@triton_").rstrip("0123456789").rstrip("_")
    constants = [
        _constant(v, definitions) for v, t in zip(op.operands, op.types, strict=True) if Shaped.parse(t) is None
    ]
    lowering: dict[str, Callable[[Builder, Op, list[int]], None]] = {
        "cumsum": lambda b, o, c: _scan(b, o, c, "add"),
        "cumprod": lambda b, o, c: _scan(b, o, c, "mul"),
        "sort": _sort,
        "gather": _gather,
        "flip": _flip,
    }
    if name not in lowering:
        raise KernelCompileError(f"operation {name} is not supported on the host", op.props["callee"] or name)
    lowering[name](builder, op, constants)


def _source(op: Op, index: int) -> tuple[str, str, Shaped]:
    """An operand, its tensor type, and that type taken apart."""
    shape = Shaped.parse(op.types[index])
    assert shape is not None
    return op.operands[index], op.types[index], shape


def _finish(builder: Builder, op: Op, memref: str, kind: str) -> None:
    builder.op("bufferization.to_tensor", [(memref, kind)], op.result_types[0], {"restrict": None, "writable": None})
    builder.ops[-1].results = op.results


def _output(builder: Builder, op: Op) -> tuple[str, str]:
    kind = Shaped.parse(op.result_types[0])
    assert kind is not None
    memref = str(kind.of(kind="memref"))
    return builder.alloc(memref), memref


def _scan(builder: Builder, op: Op, constants: list[int], what: str) -> None:
    axis, reverse = constants
    source, kind, shape = _source(op, 0)
    target, target_kind = _output(builder, op)
    element = shape.element
    combine = f"{what}{'f' if element[0] in 'fb' else 'i'}"
    length = shape.shape[axis]
    order = list(shape.shape)

    def at(inner: Builder, i: str) -> str:
        return inner.binary("subi", inner.index(length - 1), i, "index") if reverse else i

    def first(inner: Builder, i: list[str]) -> None:
        place = [*i[:axis], inner.index(length - 1 if reverse else 0), *i[axis:]]
        inner.store(inner.load(source, kind, place), target, target_kind, place)

    def step(inner: Builder, i: list[str]) -> None:
        one = inner.index(1)
        now = inner.binary("addi", i[axis], one, "index")
        here = [*i[:axis], at(inner, now), *i[axis + 1 :]]
        previous = [*i[:axis], at(inner, i[axis]), *i[axis + 1 :]]
        sofar, value = inner.load(target, target_kind, previous), inner.load(source, kind, here)
        total = inner.binary(combine, sofar, value, element)
        inner.store(total, target, target_kind, here)

    builder.loops([*order[:axis], *order[axis + 1 :]], first)
    order[axis] -= 1
    builder.loops(order, step)
    _finish(builder, op, target, target_kind)


def _gather(builder: Builder, op: Op, constants: list[int]) -> None:
    (axis,) = constants
    source, kind, _ = _source(op, 0)
    indices, index_kind, index_shape = _source(op, 1)
    target, target_kind = _output(builder, op)

    def body(inner: Builder, i: list[str]) -> None:
        raw = inner.load(indices, index_kind, i)
        where = inner.op("arith.index_cast", [(raw, index_shape.element)], "index")
        value = inner.load(source, kind, [*i[:axis], where, *i[axis + 1 :]])
        inner.store(value, target, target_kind, i)

    builder.loops(list(index_shape.shape), body)
    _finish(builder, op, target, target_kind)


def _flip(builder: Builder, op: Op, constants: list[int]) -> None:
    (axis,) = constants
    source, kind, shape = _source(op, 0)
    target, target_kind = _output(builder, op)

    def body(inner: Builder, i: list[str]) -> None:
        mirrored = inner.binary("subi", inner.index(shape.shape[axis] - 1), i[axis], "index")
        inner.store(inner.load(source, kind, [*i[:axis], mirrored, *i[axis + 1 :]]), target, target_kind, i)

    builder.loops(list(shape.shape), body)
    _finish(builder, op, target, target_kind)


def _histogram(builder: Builder, op: Op) -> None:
    source, kind, shape = _source(op, 0)
    mask = _source(op, 1) if len(op.operands) > 1 else None
    target, target_kind = _output(builder, op)
    result = Shaped.parse(target_kind)
    assert result is not None
    element, bins = result.element, result.shape[0]

    def clear(inner: Builder, i: list[str]) -> None:
        inner.store(inner.constant(0, element), target, target_kind, i)

    def count(inner: Builder, i: list[str]) -> None:
        value = inner.load(source, kind, i)
        where = inner.op("arith.index_cast", [(value, shape.element)], "index")
        inside = inner.cmp(6, where, inner.index(bins), "index")
        if mask is not None:
            inside = inner.binary("andi", inside, inner.load(mask[0], mask[1], i), "i1")

        def add(deep: Builder) -> None:
            old = deep.load(target, target_kind, [where])
            deep.store(deep.binary("addi", old, deep.constant(1, element), element), target, target_kind, [where])

        inner.branch(inside, add)

    builder.loops([bins], clear)
    builder.loops(list(shape.shape), count)
    _finish(builder, op, target, target_kind)


def _sort(builder: Builder, op: Op, constants: list[int]) -> None:
    """Bitonic sort of the last axis. Keys that fill it up to a power of two stay behind its own.

    Floats are compared as integers of the same bits, with the bits below the sign flipped for negative numbers: a total
    order in which -0 < +0 and NaN is larger than everything, so that ties and NaN cannot break the network.
    """
    axis, descending = constants
    source, kind, shape = _source(op, 0)
    length = shape.shape[axis]
    if axis != len(shape.shape) - 1:
        raise KernelCompileError(f"sort of axis {axis} of {op.types[0]}: only the last axis", "triton_sort")
    rows, padded = list(shape.shape[:-1]), 1 << (length - 1).bit_length()
    target, target_kind = _output(builder, op)
    floating = shape.element[0] in "fb"
    bits = int("".join(c for c in shape.element if c.isdigit()))
    key_element = f"i{bits}"
    key_kind = f"memref<{'x'.join(map(str, [*rows, padded]))}x{key_element}>"
    keys = builder.alloc(key_kind)
    last_key = 2 ** (bits - 1) - 1 if bits > 1 else 1
    if descending:
        last_key = -(2 ** (bits - 1)) if bits > 1 else 0
    smallest, largest = ("minui", "maxui") if bits == 1 else ("minsi", "maxsi")

    def flip(inner: Builder, code: str) -> str:
        sign = inner.binary("shrsi", code, inner.constant(bits - 1, key_element), key_element)
        low = inner.constant(2 ** (bits - 1) - 1, key_element)
        return inner.binary("xori", code, inner.binary("andi", sign, low, key_element), key_element)

    def encode(inner: Builder, i: list[str]) -> None:
        value = inner.load(source, kind, i)
        if floating:
            # A NaN of either sign sorts last.
            code = inner.op("arith.bitcast", [(value, shape.element)], key_element)
            nan = inner.cmp(14, value, value, shape.element)
            value = inner.select(nan, inner.constant(2 ** (bits - 1) - 1, key_element), flip(inner, code), key_element)
        inner.store(value, keys, key_kind, i)

    def fill(inner: Builder, i: list[str]) -> None:
        at = inner.binary("addi", i[-1], inner.index(length), "index")
        inner.store(inner.constant(last_key, key_element), keys, key_kind, [*i[:-1], at])

    def decode(inner: Builder, i: list[str]) -> None:
        value = inner.load(keys, key_kind, i)
        if floating:
            value = inner.op("arith.bitcast", [(flip(inner, value), key_element)], shape.element)
        inner.store(value, target, target_kind, i)

    def network(inner: Builder, i: list[str]) -> None:
        zero, one, two = inner.index(0), inner.index(1), inner.index(2)
        stages = padded.bit_length() - 1
        half = inner.index(padded // 2)

        def stage(s1: Builder, stage_index: str) -> None:
            width = s1.binary("shli", two, stage_index, "index")
            last = s1.binary("addi", stage_index, one, "index")

            def substage(s2: Builder, step_index: str) -> None:
                shift = s2.binary("subi", stage_index, step_index, "index")
                distance = s2.binary("shli", one, shift, "index")
                blocks = s2.binary("shrui", half, shift, "index")

                def block(s3: Builder, number: str) -> None:
                    base = s3.binary("muli", s3.binary("muli", number, two, "index"), distance, "index")
                    rising = s3.cmp(0, s3.binary("andi", base, width, "index"), zero, "index")
                    if descending:
                        rising = s3.binary("xori", rising, s3.constant(1, "i1"), "i1")

                    def pair(s4: Builder, offset: str) -> None:
                        a = s4.binary("addi", base, offset, "index")
                        b = s4.binary("addi", a, distance, "index")
                        x, y = s4.load(keys, key_kind, [*i, a]), s4.load(keys, key_kind, [*i, b])
                        low, high = s4.binary(smallest, x, y, key_element), s4.binary(largest, x, y, key_element)
                        s4.store(s4.select(rising, low, high, key_element), keys, key_kind, [*i, a])
                        s4.store(s4.select(rising, high, low, key_element), keys, key_kind, [*i, b])

                    s3.loop(zero, distance, one, pair)

                s2.loop(zero, blocks, one, block)

            s1.loop(zero, last, one, substage)

        inner.loop(zero, inner.index(stages), one, stage)

    builder.loops(list(shape.shape), encode)
    if padded > length:
        builder.loops([*rows, padded - length], fill)
    builder.loops(rows, network)
    builder.loops(list(shape.shape), decode)
    _finish(builder, op, target, target_kind)
