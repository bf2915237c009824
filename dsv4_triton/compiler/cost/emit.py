"""A HIVM function's counts as a generated Python function.

Only what decides the counts is evaluated (`cost.slice`). A region adds the multiplicity of its execution to one cell of
C; what the region's operations count is known beforehand. A loop whose iterations all count the same runs once, with a
multiplied multiplicity.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsv4_triton.compiler.cost.memref import Facet, root_of
from dsv4_triton.compiler.cost.ops import Key
from dsv4_triton.compiler.cost.program import Call, Program, Tally, identifier
from dsv4_triton.compiler.cost.rules import Rule
from dsv4_triton.compiler.cost.slice import Slice
from dsv4_triton.compiler.hivm import Memref
from dsv4_triton.compiler.mlir import Block, Op


class Emitter:
    """Generates `def name(A, block, sub_block)` of an entry, `def name(m, ...)` of a vector function."""

    def __init__(self, program: Program, part: Slice):
        self.program = program
        self.part = part
        self.function = part.function
        self.rules = part.rules
        self.lines: list[str] = []
        self.names: dict[Facet, str] = {}
        self.loops = 0
        self._unsure = self._find_unsure()

    def emit(self, name: str) -> None:
        if self.function.vector:
            wanted = self.part.arguments()
            parameters = [f"p{position}_{kind}" for position, kind in wanted]
            for (position, kind), parameter in zip(wanted, parameters):
                self.names[self.function.args[position][0], kind] = parameter
            self.lines.append(f"def {name}({', '.join(['m', *parameters])}):")
        else:
            for position, (argument, _) in enumerate(self.function.args):
                self.names[argument, "v"] = f"A[{position}]"
                self.names[argument, "s0"] = "UNKNOWN"
            self.lines.append(f"def {name}(A, block, sub_block):")
            self.lines += [" m = 1", " ticks = 0"]
        self._block(self.function.op.body, 1, "m", False)
        if not self.function.vector:
            self.lines.append(" return ticks")
        self.program.sources.append("\n".join(self.lines) + "\n")

    # Values

    def _expr(self, facet: Facet) -> str:
        rule = self.rules.rule(facet)
        if facet in self.names:
            return self.names[facet]
        if rule.alias and not rule.opaque:
            return self._expr(rule.needs[0])
        if not rule.needs and not rule.merge:
            return rule.template
        raise KeyError(f"{facet} has no value here")

    def _name(self, facet: Facet) -> str:
        self.names[facet] = f"x{len(self.names)}"
        return self.names[facet]

    def _sure(self, facet: Facet) -> bool:
        """Whether a facet cannot be unknown."""
        return facet not in self._unsure

    def _find_unsure(self) -> set[Facet]:
        users: dict[Facet, list[Facet]] = {}
        todo: list[Facet] = []
        for facet in self.part.needed:
            rule = self.rules.rule(facet)
            for need in rule.needs:
                users.setdefault(need, []).append(facet)
            if rule.opaque or rule.merge == "load" or (rule.merge == "argument" and self.function.vector):
                todo.append(facet)
        unsure = set(todo)
        while todo:
            for user in users.get(todo.pop(), ()):
                if user not in unsure:
                    unsure.add(user)
                    todo.append(user)
        return unsure

    def _wanted(self, value: str) -> Iterator[Facet]:
        for kind in self._kinds(value):
            if (value, kind) in self.part.needed:
                yield value, kind

    def _kinds(self, value: str) -> list[str]:
        memref = self.function.memref(value)
        if memref is None:
            return ["v"]
        axes = range(len(memref.shape))
        return ["b", "a", *(f"s{i}" for i in axes), *(f"d{i}" for i in axes)]

    def _values(self, op: Op, indent: str) -> None:
        for value in op.results:
            for facet in self._wanted(value):
                rule = self.rules.rule(facet)
                if rule.merge == "load":
                    self.lines.append(f"{indent}{self._name(facet)} = {self._load(op, rule)}")
                elif not rule.merge and not rule.alias and rule.needs:
                    template = rule.template
                    if template.startswith("pick") and all(self._sure(need) for need in rule.needs):
                        template = "({1} if {0} else {2})"
                    text = template.format(*(self._expr(need) for need in rule.needs))
                    self.lines.append(f"{indent}{self._name(facet)} = {text}")

    def _load(self, op: Op, rule: Rule) -> str:
        memref = self.function.memref(op.operands[0])
        assert memref is not None
        base, offset = self._address(list(rule.needs))
        if memref.space == "gm":
            maker, position = root_of(self.function, op.operands[0])
            return f"from_argument({position if maker is None else -1}, {offset})"
        if memref.space == "stack":
            maker, _ = root_of(self.function, op.operands[0])
            return f"stack.get(({self._stack(maker)}, {offset}), UNKNOWN)"
        return f"from_buffer({memref.element!r}, {base}, {offset})"

    def _address(self, needs: list[Facet]) -> tuple[str, str]:
        base, offset, *rest = (self._expr(facet) for facet in needs)
        terms = [offset] if offset != "0" else []
        for index, stride in zip(rest[::2], rest[1::2]):
            if index != "0":
                terms.append(index if stride == "1" else f"{index} * {stride}")
        return base, " + ".join(terms) or "0"

    def _stack(self, maker: Op | None) -> str:
        return repr(maker.result if maker else "")

    # Operations

    def _block(self, block: Block, depth: int, multiplier: str, in_loop: bool) -> None:
        indent = " " * depth
        cell = self.program.cell()
        counts = self.program.cells[cell]
        same: dict[str, Tally] = {}
        self.lines.append(f"{indent}C[{cell}] += {multiplier}")
        for op in block.ops:
            if op.name == "scf.for":
                self._for(op, depth, multiplier)
            elif op.name == "scf.if":
                self._if(op, depth, multiplier, in_loop)
            elif op.name == "scf.while":
                self._while(op, depth, multiplier)
            else:
                self._values(op, indent)
                self._count(op, indent, multiplier, counts, same)
                if op.name == "func.call":
                    self._call(op, indent, multiplier)
                if id(op) in self.part.executed:
                    self._execute(op, indent)

    def _count(self, op: Op, indent: str, multiplier: str, counts: dict[Key, int], same: dict[str, Tally]) -> None:
        count = self.part.counts[id(op)]
        for key, number in count.fixed.items():
            counts[key] = counts.get(key, 0) + number
        for varying in count.varying:
            arguments = []
            for argument in varying.arguments:
                if isinstance(argument, tuple):
                    entries = [str(e) if isinstance(e, int) else self._expr(e) for e in argument]
                    arguments.append(f"({', '.join(entries)},)" if entries else "()")
                else:
                    arguments.append(str(argument))
            text = f"{varying.function} {arguments}"
            if text not in same:
                same[text] = Tally(varying.function, [])
                self.lines.append(f"{indent}T{len(self.program.tallies)}[{', '.join(arguments)}] += {multiplier}")
                self.program.tallies.append(same[text])
            same[text].keys += [(i, key) for i, keys in enumerate(varying.keys) for key in keys]

    def _call(self, op: Op, indent: str, multiplier: str) -> None:
        callee = (op.props.get("callee") or "")[1:]
        if callee not in self.part.vector:
            return
        wanted = self.part.wanted[callee]
        if not wanted:
            cell = self.program.deferred.setdefault(callee, len(self.program.deferred))
            self.lines.append(f"{indent}K[{cell}] += {multiplier}")
            return
        values = [self._expr((op.operands[position], kind)) for position, kind in wanted]
        self.lines.append(f"{indent}{identifier(callee)}({', '.join([multiplier, *values])})")

    def _execute(self, op: Op, indent: str) -> None:
        if op.name == "memref.store":
            memref = self.function.memref(op.operands[1])
            assert memref is not None
            rank = len(op.operands) - 2
            needs: list[Facet] = [(op.operands[1], "b"), (op.operands[1], "a")]
            for axis in range(rank):
                needs += [(op.operands[2 + axis], "v"), (op.operands[1], f"d{axis}")]
            base, offset = self._address(needs)
            value = self._expr((op.operands[0], "v"))
            if memref.space == "stack":
                maker, _ = root_of(self.function, op.operands[1])
                self.lines.append(f"{indent}stack[{self._stack(maker)}, {offset}] = {value}")
            else:
                self.lines.append(f"{indent}to_buffer({memref.element!r}, {base}, {offset}, {value})")
            return
        operands: list[str] = []
        described: list[tuple[Memref, int] | None] = []
        for value in op.operands:
            memref = self.function.memref(value)
            if memref is None:
                operands.append(self._expr((value, "v")))
                described.append(None)
                continue
            root = -1
            if memref.space == "gm":
                maker, root = root_of(self.function, value)
                root = root if maker is None else -1
            axes = range(len(memref.shape))
            sizes = "".join(f"{self._expr((value, f's{i}'))}, " for i in axes)
            strides = "".join(f"{self._expr((value, f'd{i}'))}, " for i in axes)
            base, offset = self._expr((value, "b")), self._expr((value, "a"))
            operands.append(f"({base}, {offset}, ({sizes}), ({strides}))")
            described.append((memref, root))
        callee = self.part.vector.get((op.props.get("callee") or "")[1:]) if op.name == "func.call" else None
        self.program.calls.append(Call(op, described, callee))
        self.lines.append(f"{indent}execute({len(self.program.calls) - 1}, ({', '.join(operands)},))")

    # Control flow

    def _assign(self, targets: list[str], sources: list[str], indent: str, declare: bool) -> None:
        """Give the needed facets of values that control flow assigns those of `sources`, all at once."""
        names: list[str] = []
        values: list[str] = []
        for target, source in zip(targets, sources):
            for facet in self._wanted(target):
                if self.rules.rule(facet).merge in ("carried", "branch"):
                    names.append(self._name(facet) if declare else self.names[facet])
                    values.append(self._expr((source, facet[1])))
        if names:
            self.lines.append(f"{indent}{', '.join(names)} = {', '.join(values)}")

    def _for(self, op: Op, depth: int, multiplier: str) -> None:
        indent = " " * depth
        bounds = [self._expr((value, "v")) for value in op.operands[:3]]
        sure = all(self._sure((value, "v")) for value in op.operands[:3])
        induction, *carried = (name for name, _ in op.body.args)
        self.loops += 1
        number = self.loops
        trips = f"sure_range({', '.join(bounds)})" if not sure else f"range({', '.join(bounds)})"
        if id(op) not in self.part.loops:
            self.lines += [f"{indent}m{number} = {multiplier} * len({trips})", f"{indent}if m{number}:"]
            self._block(op.body, depth + 1, f"m{number}", True)
            return
        self._assign(carried, op.operands[3:], indent, True)
        name = f"i{number}"
        self.names[induction, "v"] = name
        self.lines += [f"{indent}for {name} in {trips}:", *([] if self.function.vector else [f"{indent} ticks += 1"])]
        self._block(op.body, depth + 1, multiplier, True)
        self._assign(carried, op.body.terminator.operands, indent + " ", False)

    def _if(self, op: Op, depth: int, multiplier: str, in_loop: bool) -> None:
        indent = " " * depth
        condition = self._expr((op.operands[0], "v"))
        if not self._sure((op.operands[0], "v")):
            condition = f"({condition} if {condition} is not UNKNOWN else taken())"
        results = [f for value in op.results for f in self._wanted(value) if self.rules.rule(f).merge == "branch"]
        for facet in results:
            self._name(facet)
        for keyword, region in zip((f"if {condition}:", "else:"), op.regions):
            if not region:
                continue
            self.lines.append(f"{indent}{keyword}")
            self._block(region[0], depth + 1, multiplier, in_loop)
            if results:
                self._assign(op.results, region[0].terminator.operands, indent + " ", False)

    def _while(self, op: Op, depth: int, multiplier: str) -> None:
        indent = " " * depth
        before, after = op.body, op.regions[1][0]
        self._assign([name for name, _ in before.args], op.operands, indent, True)
        self.loops += 1
        turn = f"t{self.loops}"
        self.lines += [f"{indent}{turn} = 0", f"{indent}while True:"]
        self._block(before, depth + 1, multiplier, True)
        condition = self._expr((before.terminator.operands[0], "v"))
        if not self._sure((before.terminator.operands[0], "v")):
            condition = f"sure_turn({condition}, {turn})"
        self.lines += [f"{indent} if not {condition}: break", f"{indent} {turn} += 1"]
        if not self.function.vector:
            self.lines.append(f"{indent} ticks += 1")
        self._block(after, depth + 1, multiplier, True)
        self._assign([name for name, _ in before.args], after.terminator.operands, indent + " ", False)
