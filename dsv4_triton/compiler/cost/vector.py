"""Values of vector operations, where a kernel's control flow follows from them (masks, reduced flags, row numbers)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from dsv4_triton.compiler.hivm import bits_of, memref_of
from dsv4_triton.compiler.mlir import Op


@dataclass
class Lanes:
    """Values (int64 or float32) and which of them are not known."""

    values: np.ndarray
    unknown: np.ndarray

    @classmethod
    def of(cls, value: Any, shape: tuple[int, ...] = ()) -> Lanes:
        """One number in every lane, None for an unknown one."""
        if value is None:
            return cls(np.zeros(shape, np.int64), np.ones(shape, bool))
        dtype = np.float32 if isinstance(value, float) else np.int64
        return cls(np.full(shape, value, dtype), np.zeros(shape, bool))


BINARY: dict[str, Callable[..., np.ndarray]] = {
    "vadd": np.add, "vsub": np.subtract, "vmul": np.multiply, "vmax": np.maximum, "vmin": np.minimum,
    "vsmax": np.maximum, "vsmin": np.minimum,
    "vand": lambda a, b: np.bitwise_and(_bits(a), _bits(b)), "vor": lambda a, b: np.bitwise_or(_bits(a), _bits(b)),
    "vxor": lambda a, b: np.bitwise_xor(_bits(a), _bits(b)), "vdiv": lambda a, b: _divide(a, b),
    "vmod": lambda a, b: a - b * _divide(a, b), "vshl": np.left_shift, "vshr": np.right_shift,
    "preg.and": np.bitwise_and, "preg.or": np.bitwise_or, "preg.xor": np.bitwise_xor,
}  # fmt: skip
UNARY: dict[str, Callable[..., np.ndarray]] = {
    "vabs": np.abs, "vneg": np.negative, "vexp": np.exp, "vln": np.log, "vsqrt": np.sqrt,
    "vrsqrt": lambda a: 1 / np.sqrt(a), "vrec": lambda a: 1 / a, "vrelu": lambda a: np.maximum(a, 0),
}  # fmt: skip
COMPARE: dict[str, Callable[..., np.ndarray]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
REDUCE: dict[str, Callable[..., np.ndarray]] = {
    "sum": np.add, "add": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply, "mul": np.multiply,
    "any": np.logical_or, "all": np.logical_and, "ori": np.bitwise_or, "andi": np.bitwise_and, "xori": np.bitwise_xor,
    "maxui": np.maximum, "minui": np.minimum,
}  # fmt: skip
_SECOND_IS_OUTPUT = {"load", "copy", "vbrc", "fixpipe", "vcumsum", "vtranspose"}
_ROUND: dict[str, Callable[..., np.ndarray]] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "round": np.round,
    "rint": np.rint,
}


def _bits(values: np.ndarray) -> np.ndarray:
    return values if values.dtype.kind in "iub" else values.view(np.int32).astype(np.int64)


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind == "f" or b.dtype.kind == "f":
        return np.divide(a, b)
    safe = np.where(b == 0, 1, b)
    return np.sign(a) * np.sign(safe) * (np.abs(a) // np.abs(safe))


@lru_cache(maxsize=1024)
def enum(text: str | None) -> str:
    """The name in `#hivm.compare_mode<eq>`, lower case."""
    found = re.search(r"<(\w+)>", text or "")
    return found[1].lower() if found else ""


def elementwise(function: Callable[..., np.ndarray], *lanes: Lanes) -> Lanes:
    with np.errstate(all="ignore"):
        values = function(*(lane.values for lane in lanes))
    unknown = lanes[0].unknown
    for lane in lanes[1:]:
        unknown = unknown | lane.unknown
    if values.dtype == np.float64:
        values = values.astype(np.float32)
    return Lanes(values.astype(np.int64) if values.dtype.kind in "bui" else values, unknown)


def select(condition: Lanes, a: Lanes, b: Lanes) -> Lanes:
    chosen = condition.values != 0
    return Lanes(np.where(chosen, a.values, b.values), condition.unknown | np.where(chosen, a.unknown, b.unknown))


def cast(lanes: Lanes, source: str, target: str, mode: str) -> Lanes:
    values = lanes.values
    if target[0] == "i" and values.dtype.kind == "f":
        with np.errstate(all="ignore"):
            values = _ROUND.get(mode, np.rint)(values).astype(np.int64)
    elif target[0] != "i" and values.dtype.kind != "f":
        values = values.astype(np.float32)
    elif target == "i1":
        values = (values != 0).astype(np.int64)
    elif target[0] == "i" and source[0] == "i" and bits_of(target) < 64:
        bits = bits_of(target)
        values = ((values + (1 << (bits - 1))) & ((1 << bits) - 1)) - (1 << (bits - 1))
    return Lanes(values, lanes.unknown)


@lru_cache(maxsize=4096)
def _described(op: Op) -> tuple[str, list[int], list[bool]]:
    """Name, sizes of the groups of operands, and which operands are memrefs."""
    is_memref = [memref_of(kind) is not None for kind in op.types]
    return op.name.removeprefix("hivm.hir."), op.ints("operandSegmentSizes"), is_memref


def run_operation(op: Op, operands: list[Any]) -> bool:
    """Evaluate a `hivm.hir` operation on references and numbers; False where it has no rule (outputs unknown)."""
    name, groups, is_memref = _described(op)

    def lanes(i: int) -> Lanes:
        if is_memref[i]:
            return operands[i].read()
        return Lanes.of(operands[i] if isinstance(operands[i], (int, float)) else None)

    inputs = groups[0] if groups else 1
    if name == "varange":
        target, offset, strides = operands[0], operands[1], operands[2:]
        value = np.asarray(offset if isinstance(offset, int) else 0)
        for size, stride in zip(target.shape, strides):
            value = np.add.outer(value, np.arange(size) * (stride if isinstance(stride, int) else 0))
        target.write(Lanes(value, np.zeros(value.shape, bool)))
        return True
    target = operands[1 if name in _SECOND_IS_OUTPUT else inputs]
    sources = [operands[i] for i in range(inputs) if is_memref[i]]
    if sources and name not in ("load", "vsel") and not any(source.known_part() for source in sources):
        target.write(Lanes.of(None))
        return True
    result: Lanes | None = None
    base = name[:-1] if name.endswith("s") and name[:-1] in BINARY else name
    if name in ("load", "copy", "vbrc"):
        result = lanes(0)
        if name == "load" and groups and groups[2]:
            target.write(lanes(2))
            part = result.values.shape
            place = (target.base, target.offset, part, target.strides)
            type(target)(target.machine, target.memref, target.root, place).write(result)
            return True
    elif base in BINARY and inputs == 2:
        result = elementwise(BINARY[base], lanes(0), lanes(1))
    elif name in UNARY:
        result = elementwise(UNARY[name], lanes(0))
    elif name == "vnot":
        flags = op.types[0].startswith("memref<") and (memref_of(op.types[0]) or operands[0].memref).element == "i1"
        result = elementwise(np.logical_not if flags else np.invert, lanes(0))
    elif name == "vcmp":
        result = elementwise(COMPARE[enum(op.props.get("compare_mode")) or "eq"], lanes(0), lanes(1))
    elif name == "vsel":
        result = select(lanes(0), lanes(1), lanes(2))
    elif name == "vcast":
        result = cast(lanes(0), operands[0].memref.element, target.memref.element, enum(op.props.get("round_mode")))
    elif name == "vreduce" and groups[1] == 1 and enum(op.props.get("arith")) in REDUCE:
        axes = tuple(op.ints("reduce_dims"))
        source = lanes(0)
        values = REDUCE[enum(op.props.get("arith"))].reduce(source.values, axis=axes, keepdims=True)  # type: ignore[attr-defined]
        result = Lanes(values, np.asarray(source.unknown.any(axis=axes, keepdims=True)))
    elif name == "vcumsum":
        axis = op.ints("cum_dims")[0]
        source = lanes(0)
        result = Lanes(np.cumsum(source.values, axis=axis), np.logical_or.accumulate(source.unknown, axis=axis))
    elif name == "vtranspose":
        source, order = lanes(0), op.ints("permutation")
        result = Lanes(source.values.transpose(order), source.unknown.transpose(order))
    if result is None:
        outputs = operands[inputs : inputs + (groups[1] if len(groups) > 1 else 1)] if groups else [operands[1]]
        for output in outputs:
            output.write(Lanes.of(None))
        return name in ("fixpipe", "vsort")
    target.write(result)
    return True
