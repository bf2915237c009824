"""Values of A5's vector functions (`ave.hir`), where a kernel's control flow follows from what they compute."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from dsv4_triton.compiler.cost.memref import mixed
from dsv4_triton.compiler.cost.rules import Rules
from dsv4_triton.compiler.cost.scalar import SCALARS, UNKNOWN
from dsv4_triton.compiler.cost.slice import accessed_arguments
from dsv4_triton.compiler.cost.vector import BINARY, COMPARE, REDUCE, UNARY, Lanes, cast, elementwise, enum, select
from dsv4_triton.compiler.hivm import Function, bits_of, memref_of
from dsv4_triton.compiler.mlir import Op

_CASTS = {"vextf", "vtruncf", "vsitofp", "vfptosi", "vextsi", "vtrunci", "vextui"}


@lru_cache(maxsize=4096)
def _vector(kind: str) -> tuple[int, str]:
    """Lanes and element of `vector<64xf32>`."""
    found = re.match(r"vector<((?:\d+x)*)([\w.]+)>", kind)
    if found is None:
        return 1, kind
    count = 1
    for extent in found[1].split("x")[:-1]:
        count *= int(extent)
    return count, found[2]


def _resize(lanes: Lanes, count: int) -> Lanes:
    """The first `count` lanes; lanes that do not exist are unknown."""
    values, unknown = np.atleast_1d(lanes.values)[:count], np.atleast_1d(lanes.unknown)[:count]
    if len(values) == len(unknown) == count:
        return Lanes(values, unknown)
    wide, hidden = np.zeros(count, values.dtype), np.ones(count, bool)
    wide[: len(values)], hidden[: len(unknown)] = values, unknown
    return Lanes(wide, hidden)


def _constant_mask(op: Op) -> Lanes:
    """All lanes, or the first ones (`VL16`)."""
    count, _ = _vector(op.result_types[0])
    pattern = re.search(r"<VL(\d+)>", op.props.get("pattern") or "")
    bound = int(pattern[1]) if pattern else count
    return Lanes((np.arange(count) < bound).astype(np.int64), np.zeros(count, bool))


class VectorFunction:
    """A vector function that can be evaluated."""

    def __init__(self, function: Function):
        self.function = function
        self.rules = Rules(function)
        self.reads, self.writes = accessed_arguments(function)
        self.values: dict[str, Any] = {}
        self.steps = 0
        self._scalars: dict[str, Callable[..., Any]] = {}
        self._masks: dict[int, Lanes] = {}

    def run(self, operands: list[Any]) -> int:
        """Evaluate on references (memrefs) and numbers; returns the operations run.

        Where nothing that it reads is known, neither is what it writes, and it is not run.
        """
        if self.reads and not any(operands[i].known_part() for i in self.reads):
            for i in self.writes:
                operands[i].write(Lanes.of(None))
            return 0
        self.values = {name: value for (name, _), value in zip(self.function.args, operands)}
        self.steps = 0
        self.block(self.function.op.body.ops)
        return self.steps

    def block(self, ops: list[Op]) -> list[Any]:
        """Run a block; the values its terminator passes on."""
        self.steps += len(ops)
        for op in ops[:-1]:
            if op.name == "scf.for":
                self._for(op)
            elif op.name == "scf.if":
                self._if(op)
            else:
                self._single(op)
        return [self.values.get(v, UNKNOWN) for v in ops[-1].operands]

    def _for(self, op: Op) -> None:
        lower, upper, step = (self.values[v] for v in op.operands[:3])
        carried = [self.values[v] for v in op.operands[3:]]
        names = [name for name, _ in op.body.args]
        trips = range(1) if any(v is UNKNOWN for v in (lower, upper, step)) else range(lower, upper, step)
        for i in trips:
            self.values.update(zip(names, [i, *carried]))
            carried = self.block(op.body.ops)
        self.values.update(zip(op.results, carried))

    def _if(self, op: Op) -> None:
        condition = self.values[op.operands[0]]
        region = op.regions[0 if condition is UNKNOWN or condition else 1]
        if region:
            self.values.update(zip(op.results, self.block(region[0].ops)))

    def _single(self, op: Op) -> None:
        dialect, _, name = op.name.partition(".")
        if op.name.startswith("ave.hir."):
            self._ave(op, op.name.removeprefix("ave.hir."))
        elif dialect == "memref" and op.results and name != "load":
            self.values[op.result] = self._view(op, name)
        elif op.name == "memref.load":
            lanes = self._element(op.operands[0], op.operands[1:], 1).read()
            self.values[op.result] = UNKNOWN if lanes.unknown.any() else lanes.values.reshape(-1)[0].item()
        elif op.name == "memref.store":
            value = self.values[op.operands[0]]
            place = self._element(op.operands[1], op.operands[2:], 1)
            place.write(Lanes.of(None if value is UNKNOWN else value))
        elif op.name in ("builtin.unrealized_conversion_cast", "vector.bitcast"):
            self.values[op.result] = self._reinterpret(op)
        elif op.results:
            self.values[op.result] = self._number(op)

    def _number(self, op: Op) -> Any:
        """A scalar by the rules that counting uses."""
        rule = self.rules.rule((op.result, "v"))
        if op.result not in self._scalars:
            names = [f"x{i}" for i in range(len(rule.needs))]
            text = f"lambda {', '.join(names)}: {rule.template.format(*names)}"
            self._scalars[op.result] = eval(text, dict(SCALARS))
        return self._scalars[op.result](*(self.values[v] for v, _ in rule.needs))

    # Memrefs

    def _at(self, reference: Any, kind: str, offset: Any, sizes: list[Any], strides: list[Any]) -> Any:
        memref = memref_of(kind)
        assert memref is not None
        place = (reference.base, offset, tuple(sizes), tuple(strides))
        return type(reference)(reference.machine, memref, reference.root, place)

    def _view(self, op: Op, name: str) -> Any:
        source = self.values[op.operands[0]]
        if name in ("cast", "memory_space_cast"):
            return source
        kind = op.result_types[0]
        if name in ("subview", "reinterpret_cast"):
            offsets, sizes, strides = (
                [self.values[e] if isinstance(e, str) else e for e in mixed(op, part)]
                for part in ("offsets", "sizes", "strides")
            )
            if name == "reinterpret_cast":
                return self._at(source, kind, offsets[0], sizes, strides)
            offset = source.offset
            for start, stride in zip(offsets, source.strides):
                offset = offset + start * stride
            steps = [a * b for a, b in zip(strides, source.strides)]
            kept = self.rules.kept_axes(op)
            return self._at(source, kind, offset, [sizes[i] for i in kept], [steps[i] for i in kept])
        memref = memref_of(kind)
        assert memref is not None
        sizes = [1 if s is None else s for s in memref.shape]
        strides = [1 if s is None else s for s in memref.strides]
        return self._at(source, kind, source.offset, sizes, strides)

    def _element(self, value: str, indices: list[str], count: int) -> Any:
        """`count` elements along the last axis from an element on."""
        source = self.values[value]
        offset = source.offset
        for index, stride in zip(indices, source.strides):
            offset = offset + self.values[index] * stride
        return self._at(source, self.function.types[value], offset, [count], [1])

    # Vectors

    def _reinterpret(self, op: Op) -> Any:
        lanes = self.values[op.operands[0]]
        count, element = _vector(op.result_types[0])
        if op.name == "builtin.unrealized_conversion_cast":
            return _resize(lanes, count) if isinstance(lanes, Lanes) else lanes
        if _vector(op.types[0])[1] == element:
            return lanes
        pairs = {("f32", "i32"): (np.float32, np.int32), ("i32", "f32"): (np.int32, np.float32)}
        change = pairs.get((_vector(op.types[0])[1], element))
        if change is None:
            return Lanes.of(None, (count,))
        values = lanes.values.astype(change[0]).view(change[1])
        return Lanes(values if element == "f32" else values.astype(np.int64), lanes.unknown)

    def _lanes(self, op: Op, i: int) -> Lanes:
        value = self.values.get(op.operands[i], UNKNOWN)
        return value if isinstance(value, Lanes) else Lanes.of(None if value is UNKNOWN else value)

    def _ave(self, op: Op, name: str) -> None:
        if name == "masked_store":
            self._store(op)
            return
        if name == "pge":
            if id(op) not in self._masks:
                self._masks[id(op)] = _constant_mask(op)
            self.values[op.result] = self._masks[id(op)]
            return
        count, element = _vector(op.result_types[0])
        result = self._load(op, count) if name == "vload" else self._compute(op, name, count, element)
        for value in op.results:
            self.values[value] = result if result is not None else Lanes.of(None, (count,))

    def _load(self, op: Op, count: int) -> Lanes:
        if "BRC" in (op.props.get("pattern") or ""):
            single = self._element(op.operands[0], op.operands[1:], 1).read()
            return Lanes(np.repeat(single.values, count), np.repeat(single.unknown, count))
        return self._element(op.operands[0], op.operands[1:], count).read()

    def _store(self, op: Op) -> None:
        *indices, mask, value = range(1, len(op.operands))
        flags, lanes = self._lanes(op, mask), self._lanes(op, value)
        count = 1 if "ONEPT" in (op.props.get("pattern") or "") else len(flags.values)
        lanes = _resize(Lanes(*np.broadcast_arrays(lanes.values, lanes.unknown)), count)
        place = self._element(op.operands[0], [op.operands[i] for i in indices], count)
        place.write(select(_resize(flags, count), lanes, place.read()))

    def _compute(self, op: Op, name: str, count: int, element: str) -> Lanes | None:
        lane = np.arange(count)
        known = np.zeros(count, bool)
        plain = name[:-1] if name.endswith("s") and name[:-1] in BINARY else name
        if name in ("broadcast", "scalar_broadcast"):
            first = self._lanes(op, 0)
            values, unknown = first.values.reshape(-1)[:1], first.unknown.reshape(-1)[:1]
            return Lanes(np.broadcast_to(values, count), np.broadcast_to(unknown, count))
        if name in ("plt", "pltm"):
            start, bound = self.values[op.operands[0]], self.values[op.operands[-1]]
            if start is UNKNOWN or bound is UNKNOWN:
                return None
            return Lanes((lane < (bound - start if name == "pltm" else bound)).astype(np.int64), known)
        if name == "vci":
            return elementwise(np.add, self._lanes(op, 0), Lanes(lane, known))
        if name == "vcmp":
            compared = elementwise(COMPARE[enum(op.props.get("cmp"))], self._lanes(op, 0), self._lanes(op, 1))
            return elementwise(np.bitwise_and, compared, self._lanes(op, 2))
        if name == "vsel":
            return select(self._lanes(op, 0), self._lanes(op, 1), self._lanes(op, 2))
        if name in _CASTS:
            return cast(self._lanes(op, 0), _vector(op.types[0])[1], element, enum(op.props.get("rnd")))
        if name == "vtrc":
            modes = {"floor": np.floor, "ceil": np.ceil, "trunc": np.trunc}
            return elementwise(modes.get(enum(op.props.get("rnd")), np.rint), self._lanes(op, 0))
        if name == "vexpdif":
            return elementwise(np.exp, elementwise(np.subtract, self._lanes(op, 0), self._lanes(op, 1)))
        if name == "reduction" and enum(op.props.get("kind")) in REDUCE:
            source, flags = self._lanes(op, 0), self._lanes(op, 1)
            if flags.unknown.any() or not (flags.values != 0).any():
                return None
            chosen = flags.values != 0
            value = REDUCE[enum(op.props.get("kind"))].reduce(source.values[chosen])  # type: ignore[attr-defined]
            return Lanes(np.full(count, value), np.full(count, bool(source.unknown[chosen].any())))
        if plain in BINARY:
            return elementwise(BINARY[plain], self._lanes(op, 0), self._lanes(op, 1))
        if name in UNARY:
            return elementwise(UNARY[name], self._lanes(op, 0))
        if name in ("vnot", "preg.not"):
            return elementwise(np.logical_not if bits_of(element) == 1 else np.invert, self._lanes(op, 0))
        return None
