"""MLIR in its generic textual form: a small parser, printer and builder for rewrites in Python.

The toolchain has no Python bindings for MLIR, but every tool prints and reads the generic form
(`--mlir-print-op-generic`), which has one regular syntax. Values are names (`"%5"`, `"%5#1"`), types and attributes are
text. Only what the generic printer emits is understood: one operation per line, regions opened by `({` at a line's end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_OPEN = {"(": ")", "[": "]", "{": "}"}
_CLOSE = set(_OPEN.values())
_OP = re.compile(r'\s*(?:(%[\w]+)(?::(\d+))? = )?"([\w.$-]+)"\(')


class MlirSyntaxError(ValueError):
    """Text that is not the generic form printed by the toolchain."""


def _balanced(text: str, start: int) -> int:
    """Index just past the bracket that closes the one at `start`; strings are skipped."""
    depth, i, n = 0, start, len(text)
    while i < n:
        c = text[i]
        if c == '"':
            i += 1
            while text[i] != '"':
                i += 2 if text[i] == "\\" else 1
        elif c in _OPEN:
            depth += 1
        elif c in _CLOSE:
            depth -= 1
            if depth == 0:
                return i + 1
        i += 1
    raise MlirSyntaxError(f"unbalanced brackets: {text[start : start + 80]}")


def split_top(text: str, separator: str = ",") -> list[str]:
    """Split at separators outside brackets (`<...>` included, except the `>` of `->`) and strings; parts are
    stripped.
    """
    parts, depth, begin, i, n = [], 0, 0, 0, len(text)
    while i < n:
        c = text[i]
        if c == '"':
            i += 1
            while text[i] != '"':
                i += 2 if text[i] == "\\" else 1
        elif c in "([{<":
            depth += 1
        elif c in ")]}" or (c == ">" and text[i - 1] != "-"):
            depth -= 1
        elif c == separator and depth == 0:
            parts.append(text[begin:i].strip())
            begin = i + 1
        i += 1
    last = text[begin:].strip()
    return [*parts, last] if last or parts else []


def parse_dict(text: str) -> dict[str, str | None]:
    """`a = 1 : i32, unit` as a dictionary; unit attributes map to None."""
    result: dict[str, str | None] = {}
    for item in split_top(text):
        name, equals, value = item.partition(" = ")
        result[name.strip()] = value.strip() if equals else None
    return result


def _print_dict(entries: dict[str, str | None]) -> str:
    return ", ".join(name if value is None else f"{name} = {value}" for name, value in entries.items())


@dataclass(frozen=True)
class Shaped:
    """A parsed `tensor<...>` or `memref<...>` type. Dynamic extents are -1; `layout` is the text after the element."""

    kind: str
    shape: tuple[int, ...]
    element: str
    layout: str = ""

    @classmethod
    def parse(cls, text: str) -> Shaped | None:
        return _parse_shaped(text)

    def __str__(self) -> str:
        extents = "".join(("?" if extent < 0 else str(extent)) + "x" for extent in self.shape)
        return f"{self.kind}<{extents}{self.element}{', ' + self.layout if self.layout else ''}>"

    def of(
        self, *, kind: str | None = None, shape: tuple[int, ...] | None = None, element: str | None = None
    ) -> Shaped:
        """The same type with parts replaced; the layout is dropped (identity)."""
        return Shaped(kind or self.kind, self.shape if shape is None else shape, element or self.element)

    @property
    def static(self) -> bool:
        return all(extent >= 0 for extent in self.shape)

    @property
    def size(self) -> int:
        total = 1
        for extent in self.shape:
            total *= extent
        return total


_SHAPED = re.compile(r"(tensor|memref)<((?:(?:\d+|\?)x)*)([\w!.]+)(?:, (.*))?>$")
_shaped_cache: dict[str, Shaped | None] = {}


def _parse_shaped(text: str) -> Shaped | None:
    if text not in _shaped_cache:
        match = _SHAPED.match(text)
        value = None
        if match:
            shape = tuple(-1 if extent == "?" else int(extent) for extent in match[2].split("x")[:-1])
            value = Shaped(match[1], shape, match[3], match[4] or "")
        _shaped_cache[text] = value
    return _shaped_cache[text]


@dataclass(eq=False)
class Block:
    args: list[tuple[str, str]] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    label: str = "^bb0"

    @property
    def terminator(self) -> Op:
        return self.ops[-1]


@dataclass(eq=False)
class Op:
    name: str
    operands: list[str] = field(default_factory=list)
    types: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    result_types: list[str] = field(default_factory=list)
    props: dict[str, str | None] = field(default_factory=dict)
    attrs: dict[str, str | None] = field(default_factory=dict)
    regions: list[list[Block]] = field(default_factory=list)
    successors: str = ""

    @property
    def result(self) -> str:
        return self.results[0]

    @property
    def body(self) -> Block:
        """The first block of the first region."""
        return self.regions[0][0]

    def ints(self, name: str) -> list[int]:
        """An `array<i64: ...>` property as integers."""
        value = self.props.get(name) or ""
        return [int(v) for v in value.partition(":")[2].rstrip(">").split(",") if v.strip()]

    def segments(self) -> list[list[str]]:
        """Operands grouped by `operandSegmentSizes`."""
        groups, at = [], 0
        for size in self.ints("operandSegmentSizes"):
            groups.append(self.operands[at : at + size])
            at += size
        return groups

    def walk(self) -> Iterator[Op]:
        """This operation and every nested one, parents first."""
        yield self
        for region in self.regions:
            for block in region:
                for op in block.ops:
                    yield from op.walk()


class Module:
    """A parsed module: affine-map aliases, top-level operations, and a supply of fresh names."""

    def __init__(self, aliases: dict[str, str], root: Op):
        self.aliases = aliases
        self.root = root
        self._fresh = 0

    def fresh(self) -> str:
        self._fresh += 1
        return f"%z{self._fresh}"

    @property
    def functions(self) -> list[Op]:
        return [op for op in self.root.body.ops if op.name == "func.func"]

    def expand(self, text: str) -> str:
        """Attribute text with the module's `#map` aliases replaced by what they stand for."""
        if "#" not in text:
            return text
        return re.sub(r"#(\w+)\b(?![.<])", lambda m: self.aliases.get(m[0], m[0]), text)

    def __str__(self) -> str:
        out: list[str] = [f"{name} = {value}\n" for name, value in self.aliases.items()]
        _print_op(self.root, "", out)
        return "".join(out)


def parse(text: str) -> Module:
    """Parse a module in generic form; raises `MlirSyntaxError` where the text is something else."""
    lines = text.split("\n")
    aliases: dict[str, str] = {}
    at = 0
    while at < len(lines) and not lines[at].lstrip().startswith('"'):
        name, equals, value = lines[at].partition(" = ")
        if equals:
            aliases[name.strip()] = value.strip()
        at += 1
    if at == len(lines):
        raise MlirSyntaxError("no operation found")
    root, _ = _parse_op(lines, at)
    module = Module(aliases, root)
    for op in root.walk():
        for key, text_value in op.props.items():
            if text_value and "#map" in text_value:
                op.props[key] = module.expand(text_value)
    # Names `%z...` may already be taken when a module that this package printed is read again.
    module._fresh = max((int(n) for n in re.findall(r"%z(\d+)", text)), default=0)
    return module


def _parse_op(lines: list[str], at: int) -> tuple[Op, int]:
    line = lines[at]
    match = _OP.match(line)
    if match is None:
        raise MlirSyntaxError(f"not an operation: {line.strip()[:120]}")
    op = Op(match[3])
    end = _balanced(line, match.end() - 1)
    operands = line[match.end() : end - 1]
    op.operands = operands.split(", ") if operands else []
    if match[1]:
        op.results = [match[1]] if match[2] is None else [f"{match[1]}#{i}" for i in range(int(match[2]))]
    at += 1
    if line[end : end + 1] == "[":
        close = _balanced(line, end)
        op.successors, end = line[end:close], close
    if line.startswith(" <{", end):
        close = _balanced(line, end + 2)
        op.props = parse_dict(line[end + 3 : close - 1])
        end = close + 1
    if line.startswith(" ({", end):
        while True:
            blocks: list[Block] = []
            block = Block()
            while not lines[at].lstrip().startswith("}"):
                stripped = lines[at].strip()
                if stripped.startswith("^"):
                    head = re.match(r"(\^\w+)(?:\((.*)\))?:", stripped)
                    if head is None:
                        raise MlirSyntaxError(f"not a block: {stripped[:120]}")
                    pairs = [a.split(": ", 1) for a in split_top(head[2] or "")]
                    block = Block([(name, kind) for name, kind in pairs], label=head[1])
                    blocks.append(block)
                    at += 1
                elif stripped:
                    if not blocks:
                        blocks.append(block)
                    nested, at = _parse_op(lines, at)
                    block.ops.append(nested)
                else:
                    at += 1
            op.regions.append(blocks)
            line = lines[at].strip()
            at += 1
            if line.startswith("})"):
                end = 2
                break
    rest = line[end:].strip()
    if rest.startswith("{"):
        close = _balanced(rest, 0)
        op.attrs = parse_dict(rest[1 : close - 1])
        rest = rest[close:].strip()
    if not rest.startswith(": "):
        raise MlirSyntaxError(f"no type after operation: {rest[:120]}")
    rest = rest[2:]
    close = _balanced(rest, 0)
    op.types = split_top(rest[1 : close - 1])
    output = rest[close:].strip().removeprefix("->").strip()
    op.result_types = split_top(output[1:-1]) if output.startswith("(") else [output]
    return op, at


def _print_op(op: Op, indent: str, out: list[str]) -> None:
    out.append(indent)
    if op.results:
        first = op.results[0].partition("#")[0]
        out.append(
            f"{first} = " if len(op.results) == 1 and "#" not in op.results[0] else f"{first}:{len(op.results)} = "
        )
    out.append(f'"{op.name}"({", ".join(op.operands)}){op.successors}')
    if op.props:
        out.append(f" <{{{_print_dict(op.props)}}}>")
    if op.regions:
        for i, region in enumerate(op.regions):
            out.append(" ({\n" if i == 0 else f"{indent}}}, {{\n")
            for j, block in enumerate(region):
                if block.args or j or len(region) > 1:
                    args = ", ".join(f"{name}: {kind}" for name, kind in block.args)
                    out.append(f"{indent}{block.label}{'(' + args + ')' if args else ''}:\n")
                for nested in block.ops:
                    _print_op(nested, indent + "  ", out)
        out.append(f"{indent}}})")
    if op.attrs:
        out.append(f" {{{_print_dict(op.attrs)}}}")
    output = ", ".join(op.result_types)
    out.append(f" : ({', '.join(op.types)}) -> {output if len(op.result_types) == 1 else '(' + output + ')'}\n")


def rename(op: Op, mapping: dict[str, str]) -> None:
    """Replace uses of values inside `op` (nested operations included)."""
    for nested in op.walk():
        nested.operands = [mapping.get(value, value) for value in nested.operands]


def declare_called(module: Module) -> None:
    """Declare the functions that are called (`func.call`) and not known yet."""
    known = {(op.props["sym_name"] or "").strip('"') for op in module.functions}
    for op in list(module.root.walk()):
        name = (op.props.get("callee") or "")[1:] if op.name == "func.call" else ""
        if name and name not in known:
            known.add(name)
            output = op.result_types[0] if len(op.result_types) == 1 else f"({', '.join(op.result_types)})"
            props: dict[str, str | None] = {
                "function_type": f"({', '.join(op.types)}) -> {output}",
                "sym_name": f'"{name}"',
                "sym_visibility": '"private"',
            }
            module.root.body.ops.insert(0, Op("func.func", props=props, regions=[[]]))


def clone(ops: list[Op], mapping: dict[str, str], fresh: Callable[[], str]) -> list[Op]:
    """Copies of `ops` with fresh result names; `mapping` renames operands and receives the new results."""
    copies = []
    for op in ops:
        copy = Op(
            op.name, [mapping.get(v, v) for v in op.operands], list(op.types), [], list(op.result_types),
            dict(op.props), dict(op.attrs), successors=op.successors,
        )  # fmt: skip
        base = fresh() if op.results else ""
        copy.results = [base] if len(op.results) == 1 else [f"{base}#{i}" for i in range(len(op.results))]
        mapping.update(zip(op.results, copy.results, strict=True))
        for region in op.regions:
            blocks = []
            for block in region:
                args = [(fresh(), kind) for _, kind in block.args]
                mapping.update({old: new for (old, _), (new, _) in zip(block.args, args, strict=True)})
                blocks.append(Block(args, clone(block.ops, mapping, fresh), block.label))
            copy.regions.append(blocks)
        copies.append(copy)
    return copies


class Builder:
    """Appends operations to a list; methods return the result's name."""

    def __init__(self, module: Module, ops: list[Op] | None = None):
        self.module = module
        self.ops: list[Op] = [] if ops is None else ops

    def op(
        self, name: str, operands: list[tuple[str, str]], result: str | None = None,
        props: dict[str, str | None] | None = None, regions: list[list[Block]] | None = None,
        attrs: dict[str, str | None] | None = None,
    ) -> str:  # fmt: skip
        """Append an operation on `(value, type)` pairs; the result's name, or "" without a result type."""
        new = Op(
            name, [v for v, _ in operands], [t for _, t in operands],
            [self.module.fresh()] if result else [], [result] if result else [],
            props or {}, attrs or {}, regions or [],
        )  # fmt: skip
        self.ops.append(new)
        return new.results[0] if result else ""

    def constant(self, value: int | float | str, kind: str) -> str:
        if kind == "i1":
            text = "true" if value else "false"
        elif isinstance(value, float):
            text = f"{value!r} : {kind}" if "e" in repr(value) or "." in repr(value) else f"{value!r}.0 : {kind}"
        else:
            text = f"{value} : {kind}"
        return self.op("arith.constant", [], kind, {"value": text})

    def index(self, value: int) -> str:
        return self.constant(value, "index")

    def binary(self, name: str, a: str, b: str, kind: str) -> str:
        return self.op(f"arith.{name}", [(a, kind), (b, kind)], kind)

    def cmp(self, predicate: int, a: str, b: str, kind: str) -> str:
        """`arith.cmpi` (integers, index) or `arith.cmpf`, by MLIR's predicate number."""
        name = "arith.cmpf" if kind[0] in "fb" else "arith.cmpi"
        return self.op(name, [(a, kind), (b, kind)], "i1", {"predicate": f"{predicate} : i64"})

    def select(self, condition: str, a: str, b: str, kind: str) -> str:
        return self.op("arith.select", [(condition, "i1"), (a, kind), (b, kind)], kind)

    def load(self, source: str, kind: str, indices: list[str]) -> str:
        """An element of a memref or of a tensor."""
        shaped = Shaped.parse(kind)
        assert shaped is not None
        name = "tensor.extract" if kind.startswith("tensor<") else "memref.load"
        return self.op(name, [(source, kind), *((i, "index") for i in indices)], shaped.element)

    def store(self, value: str, memref: str, kind: str, indices: list[str]) -> None:
        shaped = Shaped.parse(kind)
        assert shaped is not None
        self.op("memref.store", [(value, shaped.element), (memref, kind), *((i, "index") for i in indices)])

    def alloc(self, kind: str) -> str:
        return self.op("memref.alloc", [], kind, {"operandSegmentSizes": "array<i32: 0, 0>"})

    def loop(self, lower: str, upper: str, step: str, body: Callable[[Builder, str], None]) -> None:
        """An `scf.for` without carried values over `index`."""
        induction = self.module.fresh()
        inner = Builder(self.module)
        body(inner, induction)
        inner.op("scf.yield", [])
        operands = [(lower, "index"), (upper, "index"), (step, "index")]
        self.op("scf.for", operands, None, {}, [[Block([(induction, "index")], inner.ops)]])

    def loops(self, extents: list[int], body: Callable[[Builder, list[str]], None]) -> None:
        """A nest of loops from 0 over static extents."""

        def nest(builder: Builder, done: list[str]) -> None:
            if len(done) == len(extents):
                body(builder, done)
                return
            zero, one = builder.index(0), builder.index(1)
            upper = builder.index(extents[len(done)])
            builder.loop(zero, upper, one, lambda inner, i: nest(inner, [*done, i]))

        nest(self, [])

    def branch(self, condition: str, body: Callable[[Builder], None]) -> None:
        """An `scf.if` without results or else-branch."""
        inner = Builder(self.module)
        body(inner)
        inner.op("scf.yield", [])
        self.op("scf.if", [(condition, "i1")], None, {}, [[Block([], inner.ops)], []])
