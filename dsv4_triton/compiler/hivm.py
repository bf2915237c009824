"""Final HIVM text as functions of operations: what `cost` counts in.

The text is the module in MLIR's generic form that the HIVM compilers print before `convert-hivm-to-std`: buffers are
planned, synchronisation is inserted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from dsv4_triton.compiler import mlir
from dsv4_triton.compiler.mlir import Op

DYNAMIC = -9223372036854775808
"""MLIR's mark of a dynamic entry in a static array."""

_BITS = {"index": 64, "bf16": 16, "tf32": 32}


class CostError(ValueError):
    """HIVM text that cannot be counted; the message says what was wrong."""


def bits_of(element: str) -> int:
    """Bits of one element of a type (`bf16`, `i1`, `f8E4M3FN`)."""
    if element in _BITS:
        return _BITS[element]
    number = re.match(r"[a-z]+(\d+)", element)
    if number is None:
        raise CostError(f"unknown element type {element!r}")
    return int(number[1])


@dataclass(frozen=True)
class Memref:
    """A memref type. Extents and strides in elements, None where dynamic; `space` is gm, ub, cbuf (L1), cc (L0C)
    or stack.
    """

    shape: tuple[int | None, ...]
    strides: tuple[int | None, ...]
    element: str
    space: str

    @property
    def bits(self) -> int:
        return bits_of(self.element)


@lru_cache(maxsize=65536)
def memref_of(text: str) -> Memref | None:
    """The memref type that a type's text stands for; None for other types."""
    if not text.startswith("memref<"):
        return None
    shaped = mlir.Shaped.parse(text)
    if shaped is None:
        raise CostError(f"unknown memref type {text!r}")
    shape = tuple(None if extent < 0 else extent for extent in shaped.shape)
    space = re.search(r"address_space<(\w+)>", shaped.layout)
    strided = re.match(r"strided<\[([^\]]*)\]", shaped.layout)
    strides: list[int | None] = [None] * len(shape)
    if strided:
        strides = [None if s.strip() == "?" else int(s) for s in strided[1].split(",") if s.strip()]
    elif "map" not in shaped.layout:
        step: int | None = 1
        for axis in range(len(shape) - 1, -1, -1):
            extent = shape[axis]
            strides[axis] = step
            step = None if step is None or extent is None else step * extent
    return Memref(shape, tuple(strides), shaped.element, space[1] if space else "stack")


@dataclass
class Function:
    """One function with what its values are: `defined[value]` is the operation (a result's) or the region's owner
    with the number of the block argument.
    """

    op: Op
    name: str
    core: str
    vector: bool

    def __post_init__(self) -> None:
        self.args = self.op.body.args if self.op.regions and self.op.regions[0] else []
        self.types: dict[str, str] = dict(self.args)
        self.defined: dict[str, tuple[Op, int]] = {}
        self.block_args: dict[str, tuple[Op, int, int]] = {}
        self.inside: dict[int, list[Op]] = {}
        """Operations inside a region-carrying operation, by its id."""
        self._index(self.op)

    def _index(self, op: Op) -> list[Op]:
        nested: list[Op] = []
        for number, region in enumerate(op.regions):
            for block in region:
                for position, (value, kind) in enumerate(block.args):
                    self.types[value] = kind
                    self.block_args[value] = (op, number, position)
                for child in block.ops:
                    for position, value in enumerate(child.results):
                        self.types[value] = child.result_types[position]
                        self.defined[value] = (child, position)
                    nested.append(child)
                    nested += self._index(child)
        if op.regions:
            self.inside[id(op)] = nested
        return nested

    @property
    def body(self) -> list[Op]:
        return self.op.body.ops

    def memref(self, value: str) -> Memref | None:
        return memref_of(self.types[value])


class Kernel:
    """The device functions of a kernel's module: one entry per kind of core, and the vector functions they call."""

    def __init__(self, text: str):
        self.module = mlir.parse(_last_module(text))
        self.entries: dict[str, Function] = {}
        self.vector: dict[str, Function] = {}
        for op in self.module.functions:
            if not op.regions or not op.regions[0]:
                continue
            name = (op.props.get("sym_name") or "").strip('"')
            core = re.search(r"func_core_type<(\w+)>", op.attrs.get("hivm.func_core_type") or "")
            if "hivm.vector_function" in op.attrs:
                self.vector[name] = Function(op, name, "AIV", True)
            elif "hacc.entry" in op.attrs and core:
                self.entries[core[1].lower()] = Function(op, name, core[1], False)
        if not self.entries:
            raise CostError("the HIVM text has no entry function (attributes hacc.entry and hivm.func_core_type)")
        self.mix = len(self.entries) > 1
        """Whether a program runs on a cube core and both its vector cores."""
        self.workspace_bytes = self._host_value("infer_workspace_shape_function")
        self.unrolled = max((_int_attr(op, "multibuffer_unroll_factor") for op in self._all()), default=0)
        """Items that cube and vector cores pipeline in a mixed kernel; 0: they do not."""
        self.one_vector_core = any("limit_sub_block_id0" in op.attrs for op in self._all())
        """Whether some vector work of a mixed kernel is stored by the first of two vector cores only."""

    def _all(self) -> Iterator[Op]:
        for function in self.entries.values():
            yield from function.inside.get(id(function.op), ())

    def _host_value(self, suffix: str) -> int:
        """The constant that a host function of the module returns; 0 without one."""
        for op in self.module.functions:
            if (op.props.get("sym_name") or "").strip('"').endswith(suffix) and op.regions and op.regions[0]:
                for inner in op.body.ops:
                    value = re.match(r"(\d+) :", inner.props.get("value") or "")
                    if inner.name == "arith.constant" and value:
                        return int(value[1])
        return 0


def _int_attr(op: Op, name: str) -> int:
    value = re.match(r"\d+", op.attrs.get(name) or "")
    return int(value[0]) if value else 0


def _last_module(text: str) -> str:
    """The last module of the text (a compiler that retries prints several)."""
    starts = [m.end() for m in re.finditer(r"^// -----// IR Dump [^\n]*\n", text, re.MULTILINE)]
    if starts:
        text = text[starts[-1] :]
    if '"builtin.module"' not in text:
        raise CostError("no HIVM in MLIR's generic form")
    return text


# Affine maps: "(d0)[s0] -> ((-d0 + s0) ceildiv 64, 4)".

_OPERATORS = {"floordiv": "//", "mod": "%"}
_TOKEN = re.compile(r"\s*(\d+|[ds]\d+|floordiv|ceildiv|mod|[-+*(),])")


@lru_cache(maxsize=4096)
def affine_results(text: str) -> tuple[int, tuple[str, ...]]:
    """Number of dimensions; the results as Python expressions with `{0}`, `{1}` ... for dimensions, then symbols."""
    head, _, body = text.removeprefix("affine_map<").removesuffix(">").partition(" -> ")
    dims = len(re.findall(r"\bd\d+", head))
    tokens = [m[1] for m in _TOKEN.finditer(body)]
    at = 0

    def take() -> str:
        nonlocal at
        at += 1
        return tokens[at - 1]

    def peek() -> str:
        return tokens[at] if at < len(tokens) else ""

    def factor() -> str:
        token = take()
        if token == "-":
            return f"-{factor()}"
        if token == "(":
            inner = total()
            take()
            return f"({inner})"
        if token[0] == "d":
            return f"{{{token[1:]}}}"
        if token[0] == "s":
            return f"{{{dims + int(token[1:])}}}"
        return token

    def product() -> str:
        left = factor()
        while peek() in ("*", "floordiv", "ceildiv", "mod"):
            operator, right = take(), factor()
            if operator == "ceildiv":
                left = f"(-(-{left} // {right}))"
            else:
                left = f"({left} {_OPERATORS.get(operator, operator)} {right})"
        return left

    def total() -> str:
        left = product()
        while peek() in ("+", "-"):
            operator = take()
            left = f"{left} {operator} {product()}"
        return left

    results = []
    if take() != "(":
        raise CostError(f"unknown affine map {text!r}")
    while peek() != ")":
        results.append(f"({total()})")
        if peek() == ",":
            take()
    return dims, tuple(results)
