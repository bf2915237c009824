"""Memrefs of a HIVM function: where they come from, which numbers describe them."""

from __future__ import annotations

from dsv4_triton.compiler.hivm import DYNAMIC, Function
from dsv4_triton.compiler.mlir import Op

Facet = tuple[str, str]
"""One number of a value: `(value, "v")` of a scalar; of a memref its base address in bytes ("b", vector memory and
stack only), its offset in elements ("a"), its extents ("s0", "s1" ...) and its strides ("d0", ...).
"""


def mixed(op: Op, name: str, segment: int | None = None) -> list[int | str]:
    """Static entries as numbers, dynamic ones as the operands that give them."""
    values = op.ints(f"static_{name}")
    if segment is None:
        segment = {"offsets": 1, "sizes": 2, "strides": 3}[name]
        operands = iter(op.segments()[segment])
    else:
        operands = iter(op.operands[segment:])
    return [next(operands) if value == DYNAMIC else value for value in values]


def element_address(function: Function, value: str, indices: list[str]) -> list[Facet]:
    """Facets of an element's address: base, offset, then index and stride of each axis."""
    facets: list[Facet] = [(value, "b"), (value, "a")]
    for axis, index in enumerate(indices):
        facets += [(index, "v"), (value, f"d{axis}")]
    return facets


def root_of(function: Function, value: str) -> tuple[Op | None, int]:
    """Where a memref comes from: (None, number) of the function's argument, or the operation that made it.

    A value that control flow chooses has the root of its first candidate if all agree, else `(None, -1)`.
    """
    seen: set[str] = set()

    def search(name: str) -> set[tuple[int, int]]:
        if name in seen:
            return set()
        seen.add(name)
        if name in function.block_args:
            op, region, position = function.block_args[name]
            if op is function.op:
                return {(0, position)}
            if op.name == "scf.for":
                return search(op.operands[2 + position]) | search(op.body.terminator.operands[position - 1])
            return search(op.operands[position]) if region == 0 else search(op.body.terminator.operands[1 + position])
        op, position = function.defined[name]
        if op.name in ("scf.if", "scf.for", "scf.while"):
            if op.name == "scf.if":
                return set().union(*(search(region[0].terminator.operands[position]) for region in op.regions))
            return search(op.operands[(3 if op.name == "scf.for" else 0) + position])
        if op.name == "arith.select":
            return search(op.operands[1]) | search(op.operands[2])
        if op.name.startswith("memref.") and op.name not in ("memref.alloca", "memref.alloc"):
            return search(op.operands[0])
        made[id(op)] = op
        return {(id(op), 0)}

    made: dict[int, Op] = {}
    found = search(value)
    if len(found) != 1:
        return None, -1
    key, position = next(iter(found))
    return made.get(key), position


def memref_facets(value: str, rank: int) -> list[Facet]:
    """All facets of a memref."""
    return [(value, "b"), (value, "a"), *((value, f"{kind}{axis}") for kind in "sd" for axis in range(rank))]
