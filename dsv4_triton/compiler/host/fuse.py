"""Fusion of elementwise operations on tensors, before bufferization.

The adapter emits one linalg operation per Triton operation, each a pass over memory. Here a `linalg.generic` absorbs
the operations that produce its inputs: constants become scalars, broadcasts become index maps, elementwise producers
are inlined when nothing is computed twice (or when computing it twice is cheaper than a pass over memory).
"""

from __future__ import annotations

import re

from dsv4_triton.compiler.mlir import Block, Module, Op, Shaped, clone

PARALLEL = "#linalg.iterator_type<parallel>"
REDUCTION = "#linalg.iterator_type<reduction>"
_CHEAP = {
    "arith.extf", "arith.sitofp", "arith.uitofp", "arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast",
    "arith.addi", "arith.subi", "arith.muli", "arith.andi", "arith.ori", "arith.xori", "arith.cmpi", "arith.cmpf",
    "arith.select", "arith.addf", "arith.subf", "arith.mulf", "arith.negf", "arith.bitcast", "arith.constant",
    "linalg.index", "arith.shli", "arith.shrsi", "arith.shrui",
}  # fmt: skip
_CHEAP_OPS = 3
_MAX_BODY = 80
_MAX_INPUTS = 12
Map = tuple[int, ...]


def map_text(rank: int, dims: Map) -> str:
    """`affine_map<(d0, d1) -> (d1)>` for rank 2 and dims (1,)."""
    return f"affine_map<({', '.join(f'd{i}' for i in range(rank))}) -> ({', '.join(f'd{i}' for i in dims)})>"


def _maps(op: Op) -> list[Map] | None:
    """The indexing maps of a generic as tuples of dimensions; None when one is not a plain selection of dimensions."""
    result = []
    for text in re.findall(r"affine_map<\([^)]*\) -> \(([^)]*)\)>", op.props.get("indexing_maps") or ""):
        dims = [d.strip() for d in text.split(",") if d.strip()]
        if not all(re.fullmatch(r"d\d+", d) for d in dims):
            return None
        result.append(tuple(int(d[1:]) for d in dims))
    return result


def generic(
    inputs: list[tuple[str, str]], outputs: list[tuple[str, str]], maps: list[Map], iterators: list[str], body: Block,
    results: list[str],
) -> Op:  # fmt: skip
    """A `linalg.generic` on `(value, type)` pairs."""
    rank = len(iterators)
    pairs = [*inputs, *outputs]
    return Op(
        "linalg.generic", [v for v, _ in pairs], [t for _, t in pairs], results,
        [t for _, t in outputs] if results else [],
        {
            "indexing_maps": "[" + ", ".join(map_text(rank, m) for m in maps) + "]",
            "iterator_types": "[" + ", ".join(iterators) + "]",
            "operandSegmentSizes": f"array<i32: {len(inputs)}, {len(outputs)}>",
        },
        regions=[[body]],
    )  # fmt: skip


class _Generic:
    """A `linalg.generic` on tensors taken apart; `rebuild` puts it together again, in place."""

    def __init__(self, op: Op, maps: list[Map]):
        self.op = op
        count = op.ints("operandSegmentSizes")[0]
        args = op.body.args
        self.inputs = list(zip(op.operands[:count], op.types[:count], maps[:count], args[:count], strict=True))
        self.outputs = list(zip(op.operands[count:], op.types[count:], maps[count:], args[count:], strict=True))
        self.iterators = [i.strip() for i in (op.props["iterator_types"] or "")[1:-1].split(",") if i.strip()]

    @classmethod
    def of(cls, op: Op) -> _Generic | None:
        if op.name != "linalg.generic" or not op.results or "GenericAtomicRMW" in op.attrs:
            return None
        if not all(kind.startswith("tensor<") for kind in op.types):
            return None
        maps = _maps(op)
        return None if maps is None else cls(op, maps)

    @property
    def elementwise(self) -> bool:
        """All loops parallel, one result, indexed by all loops in order."""
        return (
            len(self.outputs) == 1
            and all(i == PARALLEL for i in self.iterators)
            and self.outputs[0][2] == tuple(range(len(self.iterators)))
            and not self.uses_output(0)
            and not any(op.regions for op in self.op.body.ops)
        )

    def uses_output(self, index: int) -> bool:
        name = self.outputs[index][3][0]
        return any(name in op.operands for nested in self.op.body.ops for op in nested.walk())

    @property
    def cheap(self) -> bool:
        body = self.op.body.ops[:-1]
        return len(body) <= _CHEAP_OPS and len(self.inputs) <= 2 and all(op.name in _CHEAP for op in body)

    def rebuild(self) -> None:
        rank = len(self.iterators)
        both = [*self.inputs, *self.outputs]
        self.op.operands = [v for v, _, _, _ in both]
        self.op.types = [t for _, t, _, _ in both]
        self.op.body.args = [a for _, _, _, a in both]
        self.op.props["indexing_maps"] = "[" + ", ".join(map_text(rank, m) for _, _, m, _ in both) + "]"
        self.op.props["operandSegmentSizes"] = f"array<i32: {len(self.inputs)}, {len(self.outputs)}>"


class Fuser:
    """Fuses within one function."""

    def __init__(self, module: Module, function: Op):
        self.module = module
        self.function = function
        self.definition: dict[str, tuple[Op, Block]] = {}
        self.uses: dict[str, int] = {}
        self.generics: dict[Op, _Generic] = {}
        for region in function.regions:
            for block in region:
                self._index(block)

    def _index(self, block: Block) -> None:
        for op in block.ops:
            for result in op.results:
                self.definition[result] = op, block
            parts = _Generic.of(op)
            if parts is not None:
                self.generics[op] = parts
            self._count(op, parts, +1)
            for region in op.regions:
                for nested in region:
                    self._index(nested)

    def _count(self, op: Op, parts: _Generic | None, sign: int) -> None:
        values = op.operands
        if parts is not None:
            values = [v for v, *_ in parts.inputs]
            values += [v for i, (v, *_) in enumerate(parts.outputs) if parts.uses_output(i)]
        for value in values:
            self.uses[value] = self.uses.get(value, 0) + sign

    def run(self) -> None:
        for region in self.function.regions:
            for block in region:
                self._run(block)

    def _run(self, block: Block) -> None:
        for op in list(block.ops):
            parts = self.generics.get(op)
            if parts is not None:
                while self._absorb_one(parts, block):
                    pass
                self._merge_inputs(parts)
                self._choose_output(parts, block)
                parts.rebuild()
            for region in op.regions:
                for nested in region:
                    self._run(nested)

    def _absorb_one(self, consumer: _Generic, block: Block) -> bool:
        for index, (value, _, dims, arg) in enumerate(consumer.inputs):
            if value not in self.definition:
                continue
            producer, home = self.definition[value]
            if producer.name == "linalg.fill" and producer.types[0] == arg[1] and self._sized(consumer, index, []):
                self._replace_input(consumer, index, [], {arg[0]: producer.operands[0]})
                return True
            if producer.name == "linalg.broadcast":
                kept = tuple(d for i, d in enumerate(dims) if i not in producer.ints("dimensions"))
                if self._sized(consumer, index, [kept]):
                    self._replace_input(consumer, index, [(producer.operands[0], producer.types[0], kept, arg)], {})
                    return True
            parts = self.generics.get(producer)
            if parts is not None and self._worthwhile(parts, consumer, dims, value, home is block):
                if not self._sized(consumer, index, [tuple(dims[d] for d in m) for _, _, m, _ in parts.inputs]):
                    continue
                self._inline(parts, consumer, index)
                return True
        return False

    @staticmethod
    def _sized(consumer: _Generic, index: int, maps: list[Map]) -> bool:
        """Whether every loop still has an operand that says how long it is when `maps` replace input `index`."""
        inputs = [m for i, (_, _, m, _) in enumerate(consumer.inputs) if i != index]
        known = {d for m in [*inputs, *maps, *(m for _, _, m, _ in consumer.outputs)] for d in m}
        return len(known) == len(consumer.iterators)

    def _worthwhile(self, producer: _Generic, consumer: _Generic, dims: Map, value: str, same_block: bool) -> bool:
        if not producer.elementwise or len(set(dims)) != len(dims):
            return False
        if len(producer.op.body.ops) + len(consumer.op.body.ops) > _MAX_BODY:
            return False
        if len(producer.inputs) + len(consumer.inputs) > _MAX_INPUTS:
            return False
        if producer.cheap:
            return True
        mine = sum(1 for v, *_ in consumer.inputs if v == value)
        return same_block and self.uses.get(value, 0) == mine == 1 and len(dims) == len(consumer.iterators)

    def _replace_input(
        self,
        consumer: _Generic,
        index: int,
        entries: list[tuple[str, str, Map, tuple[str, str]]],
        mapping: dict[str, str],
    ) -> None:
        self._count(consumer.op, consumer, -1)
        consumer.inputs[index : index + 1] = entries
        if mapping:
            for op in consumer.op.body.ops:
                for nested in op.walk():
                    nested.operands = [mapping.get(v, v) for v in nested.operands]
        self._count(consumer.op, consumer, +1)

    def _inline(self, producer: _Generic, consumer: _Generic, index: int) -> None:
        _, _, dims, arg = consumer.inputs[index]
        entries, mapping = [], {}
        for value, kind, inner, (name, element) in producer.inputs:
            fresh = self.module.fresh()
            mapping[name] = fresh
            entries.append((value, kind, tuple(dims[d] for d in inner), (fresh, element)))
        body = clone(producer.op.body.ops, mapping, self.module.fresh)
        for op in body:
            if op.name == "linalg.index":
                old = int((op.props["dim"] or "0").split(" ")[0])
                op.props["dim"] = f"{dims[old]} : i64"
        result = body.pop().operands[0]
        self._replace_input(consumer, index, entries, {arg[0]: result})
        consumer.op.body.ops[:0] = body

    def _merge_inputs(self, parts: _Generic) -> None:
        """One input per distinct (tensor, map)."""
        seen: dict[tuple[str, Map], str] = {}
        kept, mapping = [], {}
        for entry in parts.inputs:
            key = (entry[0], entry[2])
            if key in seen:
                mapping[entry[3][0]] = seen[key]
            else:
                seen[key] = entry[3][0]
                kept.append(entry)
        if mapping:
            self._count(parts.op, parts, -1)
            parts.inputs = kept
            for op in parts.op.body.ops:
                for nested in op.walk():
                    nested.operands = [mapping.get(v, v) for v in nested.operands]
            self._count(parts.op, parts, +1)

    def _choose_output(self, parts: _Generic, block: Block) -> None:
        """An output that is only written: reuse an input of the same shape in place, else a new tensor."""
        if not parts.elementwise:
            return
        value, kind, dims, arg = parts.outputs[0]
        same = [v for v, t, m, _ in parts.inputs if t == kind and m == dims]
        if value in same or (value in self.definition and self.definition[value][0].name == "tensor.empty"):
            return
        if not same:
            shape = Shaped.parse(kind)
            if shape is None or not shape.static:
                return
            empty = Op("tensor.empty", [], [], [self.module.fresh()], [kind])
            block.ops.insert(block.ops.index(parts.op), empty)
            same = [empty.result]
            self.definition[empty.result] = empty, block
        parts.outputs[0] = same[0], kind, dims, arg
