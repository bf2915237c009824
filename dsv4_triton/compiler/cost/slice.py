"""Which values of a HIVM function decide its counts.

Needed are loop bounds, conditions and the extents of what is moved or computed, and everything these follow from. A
needed value that is read from on-chip memory makes every operation that writes that buffer `executed`: it is really
evaluated. Buffers are told apart by their value in the text, through views, choices and loops, not by address, since
planned addresses are shared by buffers that are not alive together.
"""

from __future__ import annotations

from dsv4_triton.compiler.cost.memref import Facet, element_address, memref_facets
from dsv4_triton.compiler.cost.ops import SCALAR_DIALECTS, Count, Counter
from dsv4_triton.compiler.hivm import Function
from dsv4_triton.compiler.mlir import Op

_LOCAL = ("ub", "stack")


def writes_of(op: Op, vector: dict[str, Function]) -> list[str]:
    """Memrefs that an operation writes."""
    if op.name == "memref.store":
        return [op.operands[1]]
    if op.name == "func.call":
        callee = vector.get((op.props.get("callee") or "")[1:])
        return [op.operands[i] for i in accessed_arguments(callee)[1]] if callee else []
    if not op.name.startswith("hivm.hir."):
        return []
    if op.name == "hivm.hir.varange":
        return op.operands[:1]
    if op.ints("operandSegmentSizes") and op.name not in ("hivm.hir.load", "hivm.hir.nd2nz", "hivm.hir.fixpipe"):
        groups = op.segments()
        return groups[1] if len(groups) > 1 else []
    return op.operands[1:2]


def accessed_arguments(function: Function) -> tuple[list[int], list[int]]:
    """Numbers of the arguments that a vector function reads, and of those that it stores to."""
    reads: set[int] = set()
    writes: set[int] = set()
    position = {name: i for i, (name, _) in enumerate(function.args)}
    for op in function.inside[id(function.op)]:
        stores = op.name in ("ave.hir.masked_store", "memref.store")
        if stores or op.name in ("ave.hir.vload", "memref.load"):
            value = op.operands[1 if op.name == "memref.store" else 0]
            while value in function.defined:
                value = function.defined[value][0].operands[0]
            if value in position:
                (writes if stores else reads).add(position[value])
    return sorted(reads), sorted(writes)


class Slice:
    """Facets needed to count a function, and the operations to be executed for them."""

    def __init__(
        self,
        function: Function,
        counter: Counter,
        vector: dict[str, Function],
        wanted: dict[str, list[tuple[int, str]]],
    ):
        """`wanted`: facets of their arguments that the counts of the `vector` functions follow from."""
        self.function = function
        self.rules = counter.rules
        self.vector = vector
        self.wanted = wanted
        self.needed: set[Facet] = set()
        self.executed: set[int] = set()
        self.counts: dict[int, Count] = {}
        self._parents: dict[str, str] = {}
        self._writers: dict[str, list[Op]] = {}
        self._live: set[str] = set()
        self._todo: list[Facet] = []
        self._count_all(function.op, counter, False, {})
        self._alias()
        self._start()
        while self._todo:
            self._follow(self._todo.pop())
        self.loops = {
            id(op) for op in function.inside.get(id(function.op), ()) if op.name == "scf.for" and self._varies(op)
        }
        """Loops whose iterations may count differently."""

    def _count_all(self, op: Op, counter: Counter, in_loop: bool, same: dict[str, str]) -> None:
        """Counts of everything inside an operation; scalar code that repeats an earlier result counts nothing.

        same: a value or the text of a scalar expression, and the first value that is the same.
        """
        for region in op.regions:
            for block in region:
                known = dict(same)
                for child in block.ops:
                    repeats = False
                    if child.name.startswith(SCALAR_DIALECTS):
                        operands = [known.get(v, v) for v in child.operands]
                        text = f"{child.name} {operands} {sorted(child.props.items())} {child.result_types}"
                        repeats = text in known
                        known[child.result] = known.setdefault(text, child.result)
                    self.counts[id(child)] = Count() if repeats else counter.count(child, in_loop)
                    self._count_all(child, counter, in_loop or child.name in ("scf.for", "scf.while"), known)

    def _need(self, facet: Facet) -> None:
        if facet not in self.needed:
            self.needed.add(facet)
            self._todo.append(facet)

    def _start(self) -> None:
        for op in self.function.inside.get(id(self.function.op), ()):
            for varying in self.counts[id(op)].varying:
                for facet in varying.facets:
                    self._need(facet)
            if op.name == "scf.for":
                for value in op.operands[:3]:
                    self._need((value, "v"))
            elif op.name == "scf.if" or op.name == "scf.condition":
                self._need((op.operands[0], "v"))
            elif op.name == "func.call":
                for position, kind in self.wanted.get((op.props.get("callee") or "")[1:], ()):
                    self._need((op.operands[position], kind))

    def _follow(self, facet: Facet) -> None:
        rule = self.rules.rule(facet)
        for need in rule.needs:
            self._need(need)
        value, kind = facet
        if rule.merge == "load":
            source = self.function.defined[value][0].operands[0]
            memref = self.function.memref(source)
            if memref and memref.space in _LOCAL:
                self._buffer(source)
        if kind == "v" and value in self.function.defined and self.function.defined[value][0].name == "scf.while":
            self._need((self.function.defined[value][0].body.terminator.operands[0], "v"))

    # Buffers

    def _find(self, value: str) -> str:
        while self._parents.get(value, value) != value:
            self._parents[value] = self._parents.get(self._parents[value], self._parents[value])
            value = self._parents[value]
        return value

    def _join(self, a: str, b: str) -> None:
        a, b = self._find(a), self._find(b)
        if a != b:
            self._parents[a] = b

    def _local(self, value: str) -> bool:
        memref = self.function.memref(value) if value in self.function.types else None
        return memref is not None and memref.space in _LOCAL

    def _alias(self) -> None:
        for op in self.function.inside.get(id(self.function.op), ()):
            pairs: list[tuple[str, str]] = []
            if op.name.startswith("memref.") and op.results and op.operands:
                pairs = [(op.results[0], op.operands[0])]
            elif op.name == "arith.select":
                pairs = [(op.result, op.operands[1]), (op.result, op.operands[2])]
            elif op.name == "scf.if":
                for region in op.regions:
                    pairs += zip(op.results, region[0].terminator.operands) if region else ()
            elif op.name == "scf.for":
                carried = [name for name, _ in op.body.args[1:]]
                pairs = [*zip(carried, op.operands[3:]), *zip(carried, op.body.terminator.operands)]
                pairs += zip(op.results, carried)
            elif op.name == "scf.while":
                before = [name for name, _ in op.body.args]
                after = [name for name, _ in op.regions[1][0].args]
                passed = op.body.terminator.operands[1:]
                pairs = [*zip(before, op.operands), *zip(before, op.regions[1][0].terminator.operands)]
                pairs += [*zip(after, passed), *zip(op.results, passed)]
            for a, b in pairs:
                if self._local(a) and self._local(b):
                    self._join(a, b)
        for op in self.function.inside.get(id(self.function.op), ()):
            for value in writes_of(op, self.vector):
                if self._local(value):
                    self._writers.setdefault(self._find(value), []).append(op)

    def _buffer(self, value: str) -> None:
        """Execute everything that writes the buffer a value is a part of."""
        buffer = self._find(value)
        if buffer in self._live:
            return
        self._live.add(buffer)
        for op in self._writers.get(buffer, ()):
            if id(op) in self.executed:
                continue
            self.executed.add(id(op))
            if op.name == "memref.store":
                for facet in [(op.operands[0], "v"), *element_address(self.function, op.operands[1], op.operands[2:])]:
                    self._need(facet)
                continue
            written = set(writes_of(op, self.vector))
            for operand in op.operands:
                memref = self.function.memref(operand)
                if memref is None:
                    self._need((operand, "v"))
                    continue
                for facet in memref_facets(operand, len(memref.shape)):
                    self._need(facet)
                if self._local(operand) and operand not in written:
                    self._buffer(operand)

    def arguments(self) -> list[tuple[int, str]]:
        """Needed facets of the function's arguments."""
        numbers = {name: i for i, (name, _) in enumerate(self.function.args)}
        return sorted((numbers[v], kind) for v, kind in self.needed if v in numbers and self._parameter((v, kind)))

    def _parameter(self, facet: Facet) -> bool:
        return self.rules.rule(facet).merge == "argument"

    def _varies(self, loop: Op) -> bool:
        induction, *carried = (name for name, _ in loop.body.args)
        if (induction, "v") in self.needed:
            return True
        if any(value == name for value, _ in self.needed for name in carried):
            return True
        return any(id(op) in self.executed for op in self.function.inside[id(loop)])
