"""What the compiler made of a kernel, read from its final HIVM: memory plan, cores, and three gates.

* Unwritten reads: local memory that an instruction reads and none of its function writes. AscendNPU IR 1.2.0 makes such
  code for A2 and A3, without a word, of a tile that is loaded once and used by both `tl.dot` in an accumulating loop
  and vector code: the vector core's load is lost. On A5 cube and vector cores write each other's memory, so a function
  alone does not show it; the gate is for A2 and A3.
* Lost loads: the same fault seen from the other side, an argument that vector code reads and no vector core loads
  (`ascend.loads`).
* Scalar loops: innermost loops that move single elements and do nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4_triton.compiler.ascend.loads import read_by_vector_code, read_by_vector_cores
from dsv4_triton.compiler.ascend.view import DMA, View, accesses
from dsv4_triton.compiler.hivm import Kernel
from dsv4_triton.compiler.mlir import Op
from dsv4_triton.device import Family

MEMORIES = {"ub": "UB", "cbuf": "L1", "cc": "L0C"}
"""Address spaces of local memory, and what they are called."""
_LOOPS = ("scf.for", "scf.while")
_SCALAR_LIBRARY = {"c220": {"hivm.hir.vcumsum", "hivm.hir.vcumprod"}}
"""Operations that the device library of an instruction set does element by element."""


@dataclass(frozen=True)
class Plan:
    """The local memory that one core's function takes, in bytes."""

    core: str
    memory: str
    bytes: int
    limit: int


@dataclass(frozen=True)
class UnwrittenRead:
    """An instruction that reads local memory which nothing in its function writes.

    reused: the same addresses are written under another name, so whether it is a fault depends on their order.
    """

    core: str
    operation: str
    memory: str
    address: int
    bytes: int
    reused: bool


@dataclass(frozen=True)
class ScalarLoop:
    """An innermost loop that moves single elements: loads from global and local memory, stores, DMAs of one element.

    depth: loops around it, itself included. trips: iterations, None where they are known at run time only.
    """

    core: str
    depth: int
    trips: int | None
    global_loads: int
    local_loads: int
    stores: int
    element_dmas: int


@dataclass(frozen=True)
class Facts:
    """Facts of one compiled kernel.

    core: vector, cube or mixed. plan: local memory by core and kind.
    both_vector_cores: whether a mixed kernel's vector work is split over both vector cores of a cube core; None where
        there is nothing to split. one_core_stores: stores that only the first of them makes.
    pipelined: items that cube and vector cores of a mixed kernel work on at once; 0 without such a pipeline.
    workspace_bytes: global memory per program for the traffic between cube and vector cores.
    loads, stores: DMAs from and to global memory in the code, by core.
    unwritten, lost_loads (names of arguments), scalar_loops: see the module.
    scalar_library: operations that the device library does by element.
    """

    core: str
    plan: tuple[Plan, ...]
    both_vector_cores: bool | None
    one_core_stores: int
    pipelined: int
    workspace_bytes: int
    loads: dict[str, int]
    stores: dict[str, int]
    unwritten: tuple[UnwrittenRead, ...]
    lost_loads: tuple[str, ...]
    scalar_loops: tuple[ScalarLoop, ...]
    scalar_library: tuple[str, ...]

    def used(self, memory: str) -> int:
        """Bytes of a memory (UB, L1, L0C) that the kernel takes."""
        return max((plan.bytes for plan in self.plan if plan.memory == memory), default=0)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Facts:
        """The reverse of `dataclasses.asdict`, from JSON."""
        kinds = {"plan": Plan, "unwritten": UnwrittenRead, "scalar_loops": ScalarLoop}
        lists: dict[str, Any] = {name: tuple(kind(**item) for item in values[name]) for name, kind in kinds.items()}
        lists |= {name: tuple(values[name]) for name in ("lost_loads", "scalar_library")}
        return cls(**{**values, **lists})


def facts_of(hivm: str, family: Family, adapter: str = "", arguments: Sequence[str] = ()) -> Facts:
    """Facts of a kernel from its final HIVM; `ValueError` when the text cannot be read.

    adapter: the ttadapter MLIR of a mixed kernel, in generic form, and arguments: its run-time arguments, without which
    lost loads cannot be seen.
    """
    kernel = Kernel(hivm)
    views = {core: View(core, function) for core, function in kernel.entries.items()}
    limits = {"ub": family.ub_bytes, "cbuf": family.l1_bytes, "cc": family.l0c_bytes}
    plan = [
        Plan(core, name, used, limits[space])
        for core, view in views.items()
        for space, name in MEMORIES.items()
        if (used := view.used(space))
    ]
    limited = sum(view.stores_of_first_core for view in views.values())
    both: bool | None = None
    if kernel.mix and "aiv" in views and views["aiv"].works:
        both = not kernel.one_vector_core and views["aiv"].has("hivm.hir.get_sub_block_idx")
    slow = _SCALAR_LIBRARY.get(family.arch, set())
    lost: set[int] = set()
    if adapter and kernel.mix and "aiv" in views:
        lost = read_by_vector_code(adapter) - read_by_vector_cores(views["aiv"])
    unwritten = [read for view in views.values() for read in unwritten_reads(view)] if family.arch == "c220" else []
    return Facts(
        core="mixed" if kernel.mix else {"aiv": "vector", "aic": "cube"}[next(iter(views))],
        plan=tuple(plan), both_vector_cores=both, one_core_stores=limited, pipelined=kernel.unrolled,
        workspace_bytes=kernel.workspace_bytes,
        loads={core: view.transfers(0) for core, view in views.items()},
        stores={core: view.transfers(1) for core, view in views.items()},
        unwritten=tuple(unwritten), lost_loads=tuple(arguments[index] for index in sorted(lost)),
        scalar_loops=tuple(loop for view in views.values() for loop in scalar_loops(view)),
        scalar_library=tuple(sorted({op.name for view in views.values() for op in view.ops if op.name in slow})),
    )  # fmt: skip


def unwritten_reads(view: View) -> list[UnwrittenRead]:
    """Reads of local memory that nothing in the function writes, each buffer once."""
    written = {root for op in view.ops for value in accesses(op)[1] for root in view.roots(value)}
    reported: set[str] = set()
    reads: list[UnwrittenRead] = []
    for op in view.ops:
        for value in accesses(op)[0]:
            for root in sorted(view.roots(value) - written - reported):
                reported.add(root)
                reads += [
                    UnwrittenRead(
                        view.core, op.name.rpartition(".")[2], MEMORIES.get(buffer.space, buffer.space),
                        buffer.address, buffer.bytes,
                        any(buffer.overlaps(other) for w in written for other in view.buffers[w]),
                    )
                    for buffer in view.buffers[root]
                ]  # fmt: skip
    return reads


def scalar_loops(view: View) -> list[ScalarLoop]:
    """Innermost loops that only move single elements."""
    return list(_scalar_loops(view, view.function.op, 0))


def _scalar_loops(view: View, owner: Op, depth: int) -> Iterator[ScalarLoop]:
    for region in owner.regions:
        for block in region:
            for op in block.ops:
                if op.name not in _LOOPS:
                    yield from _scalar_loops(view, op, depth)
                    continue
                inside = view.function.inside.get(id(op), [])
                if any(inner.name in _LOOPS for inner in inside):
                    yield from _scalar_loops(view, op, depth + 1)
                elif loop := _scalar_loop(view, op, inside, depth + 1):
                    yield loop


def _scalar_loop(view: View, loop: Op, inside: list[Op], depth: int) -> ScalarLoop | None:
    if any(view.is_tile_work(op) for op in inside):
        return None
    # Counters of the compiler live on the stack.
    loads = [s for op in inside if op.name == "memref.load" and (s := view.space(op.operands[0])) != "stack"]
    stores = sum(op.name == "memref.store" and view.space(op.operands[1]) != "stack" for op in inside)
    dmas = sum(op.name in DMA and view.elements(op) == 1 for op in inside)
    if not loads and not stores and not dmas:
        return None
    return ScalarLoop(
        view.core, depth, view.trips(loop), loads.count("gm"), len(loads) - loads.count("gm"), stores, dmas
    )
