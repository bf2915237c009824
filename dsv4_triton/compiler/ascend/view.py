"""One core's function of a compiled kernel: its buffers, what its values stand for, what its operations touch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from math import prod

from dsv4_triton.compiler.hivm import CostError, Function, Memref
from dsv4_triton.compiler.mlir import Op

_VIEWS = {
    "memref.cast", "memref.collapse_shape", "memref.expand_shape", "memref.subview", "memref.reinterpret_cast",
    "memref.view", "memref.memory_space_cast", "memref.transpose", "hivm.hir.bitcast",
}  # fmt: skip
DMA = {"hivm.hir.load", "hivm.hir.store", "hivm.hir.copy", "hivm.hir.nd2nz", "hivm.hir.fixpipe"}
_ADMINISTRATION = re.compile(r"hivm\.hir\.(set_|wait_|get_|sync_|pipe_|pointer_cast|bitcast|create_sync|debug|print)")


@dataclass(frozen=True)
class Buffer:
    """Local memory as one `pointer_cast` names it."""

    space: str
    address: int
    bytes: int

    def overlaps(self, other: Buffer) -> bool:
        apart = self.address + self.bytes <= other.address or other.address + other.bytes <= self.address
        return self.space == other.space and not apart


class View:
    """The entry function of one kind of core; `ops` are all its operations, nested ones included."""

    def __init__(self, core: str, function: Function):
        self.core = core
        self.function = function
        self.ops: list[Op] = function.inside.get(id(function.op), [])
        self._roots: dict[str, frozenset[str]] = {}

    def has(self, name: str) -> bool:
        return any(op.name == name for op in self.ops)

    @property
    def works(self) -> bool:
        """Whether it moves anything. A5's compiler leaves code behind that only fills buffers nobody reads."""
        stored = (self.space(op.operands[1]) for op in self.ops if op.name == "memref.store")
        return any(op.name in DMA for op in self.ops) or any(space != "stack" for space in stored)

    @property
    def stores_of_first_core(self) -> int:
        inside = (self.function.inside.get(id(op), []) for op in self.ops if "limit_sub_block_id0" in op.attrs)
        return sum(op.name in ("hivm.hir.store", "memref.store") for ops in inside for op in ops)

    def transfers(self, operand: int) -> int:
        """DMAs whose operand (0: source, 1: target) is global memory."""
        return sum(
            op.name in DMA and len(op.operands) > operand and self.space(op.operands[operand]) == "gm"
            for op in self.ops
        )  # fmt: skip

    def space(self, value: str) -> str:
        """The address space of a memref (gm, ub, cbuf, cc or stack), "" for other values."""
        memref = self.function.memref(value)
        return memref.space if memref else ""

    @cached_property
    def buffers(self) -> dict[str, list[Buffer]]:
        """The buffers that each `pointer_cast` names, by its result."""
        constants = {
            op.result: int(value[1])
            for op in self.ops
            if op.name == "arith.constant" and (value := re.match(r"(-?\d+) :", op.props.get("value") or ""))
        }
        found = {}
        for op in self.ops:
            memref = self.function.memref(op.result) if op.name == "hivm.hir.pointer_cast" else None
            if memref is None:
                continue
            segments = op.segments() or [op.operands, []]
            size = _bytes(memref, [constants.get(extent) for extent in segments[1]])
            if any(address not in constants for address in segments[0]):
                raise CostError(f"a buffer without a planned address: {op.result}")
            found[op.result] = [Buffer(memref.space, constants[address], size) for address in segments[0]]
        return found

    def used(self, space: str) -> int:
        """The end of the last buffer in a memory."""
        ends = [b.address + b.bytes for buffers in self.buffers.values() for b in buffers if b.space == space]
        return max(ends, default=0)

    def roots(self, value: str) -> frozenset[str]:
        """The `pointer_cast` results that a memref may stand for, through views, selects, loops and branches."""
        if value not in self._roots:
            found, seen, todo = set(), {value}, [value]
            while todo:
                at = todo.pop()
                if at in self.buffers:
                    found.add(at)
                    continue
                for source in self._sources(at):
                    if source not in seen:
                        seen.add(source)
                        todo.append(source)
            self._roots[value] = frozenset(found)
        return self._roots[value]

    def _sources(self, value: str) -> list[str]:
        """The values that a memref value is one of, or a view of."""
        if value in self.function.defined:
            op, position = self.function.defined[value]
            if op.name in _VIEWS:
                return op.operands[:1]
            if op.name == "arith.select":
                return op.operands[1:3]
            if op.name == "scf.for":
                return [op.operands[3 + position], op.body.terminator.operands[position]]
            if op.name == "scf.if":
                return [block.terminator.operands[position] for region in op.regions for block in region[-1:]]
            if op.name == "scf.while":
                return [op.body.terminator.operands[1 + position]]
            return []
        if value not in self.function.block_args:
            return []
        op, region, position = self.function.block_args[value]
        if op.name == "scf.for" and position > 0:
            return [op.operands[2 + position], op.body.terminator.operands[position - 1]]
        if op.name == "scf.while":
            if region == 1:
                return [op.body.terminator.operands[1 + position]]
            return [op.operands[position], op.regions[1][0].terminator.operands[position]]
        return []

    def trips(self, loop: Op) -> int | None:
        """Iterations of a loop with constant bounds."""
        if loop.name != "scf.for":
            return None
        bounds = []
        for value in loop.operands[:3]:
            op, _ = self.function.defined.get(value, (None, 0))
            number = re.match(r"(-?\d+) :", op.props.get("value") or "") if op and op.name == "arith.constant" else None
            if number is None:
                return None
            bounds.append(int(number[1]))
        low, high, step = bounds
        return max(0, -(-(high - low) // step)) if step > 0 else None

    def is_tile_work(self, op: Op) -> bool:
        """Whether an operation computes, or moves from or to global memory, more than one element at once."""
        if op.name == "func.call" or op.name.startswith("ave.hir."):
            return True
        if not op.name.startswith("hivm.hir.") or _ADMINISTRATION.match(op.name):
            return False
        if op.name == "hivm.hir.copy" and all(self.space(value) == "ub" for value in op.operands):
            return False
        return self.elements(op) > 1

    def elements(self, op: Op) -> int:
        """Elements of the largest memref that an operation takes; a dynamic extent counts as 2."""
        memrefs = [memref for value in op.operands if (memref := self.function.memref(value)) is not None]
        return max((prod(extent or 2 for extent in memref.shape) for memref in memrefs), default=0)


def _bytes(memref: Memref, extents: list[int | None]) -> int:
    """Size of a buffer; `extents` are the values of its dynamic axes."""
    given = iter(extents)
    shape = [extent if extent is not None else next(given, None) for extent in memref.shape]
    if None in shape:
        raise CostError("a local buffer whose size is known at run time only")
    return (prod(extent or 0 for extent in shape) * memref.bits + 7) // 8


def accesses(op: Op) -> tuple[list[str], list[str]]:
    """The values that an operation reads and writes. What is not known counts as written: no false alarm."""
    if op.name == "memref.load":
        return op.operands[:1], []
    if op.name == "memref.store":
        return [], op.operands[1:2]
    if op.name in _VIEWS or op.name.startswith(("arith.", "scf.", "affine.", "func.return")):
        return [], []
    if op.name == "hivm.hir.varange":  # the target comes first
        return [], op.operands
    if op.name == "hivm.hir.mmadL1":
        parts = op.segments()
        return parts[0] + parts[1], [value for part in parts[2:] for value in part]
    if op.name.startswith("hivm.hir.") and not _ADMINISTRATION.match(op.name):
        parts = op.segments()
        if parts:
            return parts[0], [value for part in parts[1:] for value in part]
        return op.operands[:1], op.operands[1:]
    return [], op.operands
