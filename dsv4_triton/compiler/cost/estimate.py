"""A time for a launch from its counts: the busiest resource of the busiest core, or of the whole chip.

The model is docs/cost_model.md; its constants are `Family.speed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from dsv4_triton.compiler.cost.facts import Core, Facts
from dsv4_triton.device import Family, Speed

_IN = {"gm_l1": "gm_l1", "ws_l1": "gm_l1", "gm_ub": "gm_ub", "ws_ub": "gm_ub", "fill_l1": "gm_l1"}
_OUT = {
    "ub_gm": "ub_gm", "ub_ws": "ub_gm", "ub_l1": "ub_l1", "l0c_gm": "l0c_gm", "l0c_ws": "l0c_gm", "l0c_ub": "l0c_ub",
}  # fmt: skip
_CHIP_WIDE = ("gm_", "ws_", "_gm", "_ws")
_SLOW = {
    "vexp": 4, "vln": 4, "vsqrt": 4, "vrsqrt": 4, "vdiv": 4, "vrec": 4, "vexpdif": 4, "vpow": 8, "vmod": 8, "vtanh": 8,
    "vsin": 8, "vcos": 8, "verf": 8, "vtranspose": 2, "vgather": 8, "vinterleave": 16, "vdeinterleave": 16, "vsort": 16,
    "reduction": 2,
}  # fmt: skip
"""Cycles of a 256-byte step where it is not one; assumed."""
_INSTRUCTIONS = {"vreduce": 3}
"""Vector instructions that an operation stands for; assumed."""
_SCALAR_LIBRARY = {"vcumsum": 8, "vcumprod": 8}
"""Cycles per element of operations that A2's and A3's library does element by element; assumed."""
_FREE = {"pge"}
"""Instructions that set a constant mask: they leave loops."""
_ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.int8: "i8"}


class Work(Protocol):
    """The least a job needs: bytes to and from memory, multiply-accumulates, and the dtype of their operands."""

    @property
    def bytes(self) -> int: ...
    @property
    def macs(self) -> int: ...
    @property
    def operands(self) -> torch.dtype | None: ...


@dataclass(frozen=True)
class Estimate:
    """An estimate, never a measurement. Times in seconds.

    seconds: the launch without its start. resource: what it waits for: cube, cube_feed (L1 to the cube's buffers),
    vector, scalar, transfer_in, transfer_out, transfer_issue, hbm or l2. resources: the time of each on its busiest
    core. serial: cube and vector cores of a mixed kernel take turns, so that their times add up.
    launch_seconds: start and end of the kernel. hbm_bytes: memory traffic if re-read data stays in L2.
    minimum_seconds, ratio: of the job that the caller gave.
    """

    seconds: float
    resource: str
    resources: dict[str, float]
    serial: bool
    launch_seconds: float
    hbm_bytes: int
    minimum_seconds: float | None = None
    ratio: float | None = None

    @property
    def rank(self) -> tuple[float, float]:
        """What to order formulations of one job by: the time, then the time of all resources together."""
        return self.seconds, sum(self.resources.values())


def minimum_seconds(work: Work, family: Family) -> float:
    """The time of a job that only the memory or only the cubes limit."""
    speed = _speed(family)
    seconds = work.bytes / speed.hbm_bytes_per_second
    if work.macs:
        rate = speed.macs_per_cycle[_ELEMENTS.get(work.operands, "f8E4M3FN") if work.operands else "bf16"]
        seconds = max(seconds, work.macs / (rate * speed.clock_hz * family.cube_cores))
    return seconds


def estimate(
    facts: Facts,
    family: Family,
    minimum: Work | None = None,
    *,
    resident: Iterable[str] = (),
    touched: Mapping[str, int] | None = None,
) -> Estimate:
    """Time of a launch, and its ratio to the least that the job needs; `ValueError` for a family without rates.

    resident: arguments that stay in L2 between launches, such as scratch that one launch writes and the next one
    reads; they count as memory traffic only where they are together larger than L2.
    touched: bytes that the launch can touch of an argument, where that is less than all of it: of a paged cache, of
    the experts' weights. What it reads of them more often comes from L2.
    """
    speed = _speed(family)
    slots = family.vector_cores if set(facts.cores) == {"aiv"} else family.cube_cores
    spread = {
        core: {resource: _spread(facts, slots, cycles) for resource, cycles in _cycles(part, speed, family).items()}
        for core, part in facts.cores.items()
    }
    serial = facts.mixed and not facts.unrolled
    sides = [[core for core in spread if core == "aic"], [core for core in spread if core != "aic"]]
    busiest = [np.max([values for core in side for values in spread[core].values()], axis=0) for side in sides if side]
    per_slot = np.sum(busiest, axis=0) if serial else np.max(busiest, axis=0)
    resources: dict[str, float] = {}
    for part in spread.values():
        for resource, values in part.items():
            resources[resource] = max(resources.get(resource, 0.0), float(values.max()) / speed.clock_hz)
    total = facts.launch()
    kept = set(resident)
    if sum(facts.argument_bytes.get(name, 0) for name in kept) > speed.l2_bytes:
        kept = set()
    hbm_bytes = sum(
        min(number, facts.argument_bytes.get(name, number), (touched or {}).get(name, number))
        for kind in ("read", "write")
        for name, number in total.by(kind).items()
        if name not in kept
    )
    l2_bytes = sum(n for path, n in total.by("moved").items() if any(part in path for part in _CHIP_WIDE))
    resources["hbm"] = hbm_bytes / speed.hbm_bytes_per_second
    resources["l2"] = l2_bytes / speed.l2_bytes_per_second
    resource = max(resources, key=lambda name: resources[name])
    seconds = max(float(per_slot.max()) / speed.clock_hz, resources[resource])
    least = minimum_seconds(minimum, family) if minimum is not None else None
    return Estimate(
        seconds, resource, resources, serial, speed.launch_seconds, hbm_bytes, least, seconds / least if least else None
    )


def _speed(family: Family) -> Speed:
    if family.speed is None:
        raise ValueError(f"family {family.name} has no rates to estimate with")
    return family.speed


def _spread(facts: Facts, slots: int, cycles: np.ndarray) -> np.ndarray:
    """Cycles of each core: program b runs on core b modulo the cores; a sample stands for the programs around it."""
    if facts.uniform or facts.sampled:
        return cycles * -(-facts.programs // slots)
    result = np.zeros(min(slots, facts.programs))
    np.add.at(result, np.array(facts.blocks) % slots, cycles)
    return result


def _cycles(core: Core, speed: Speed, family: Family) -> dict[str, np.ndarray]:
    """Cycles of each resource of one core, per evaluated program."""
    costs = {
        name: np.zeros(len(core.keys))
        for name in ("cube", "cube_feed", "vector", "scalar", "transfer_in", "transfer_out", "transfer_issue")
    }
    library = _SCALAR_LIBRARY if family.arch == "c220" else {}
    for i, (kind, name) in enumerate(core.keys):
        for resource, cycles in _cost(kind, name, speed, library):
            costs[resource][i] = cycles
    return {resource: core.rows @ weights for resource, weights in costs.items()}


def _cost(kind: str, name: str, speed: Speed, library: dict[str, int]) -> list[tuple[str, float]]:
    """Resource and cycles that one count of (kind, name) takes."""
    if kind == "mac_padded":
        return [("cube", 1 / speed.macs_per_cycle[name])]
    if kind in ("l0a", "l0b"):
        return [("cube_feed", 1 / (speed.l1_l0a if kind == "l0a" else speed.l1_l0b))]
    if kind in ("moved", "bursts"):
        side, rates = ("transfer_in", _IN) if name in _IN else ("transfer_out", _OUT)
        return [(side, 1 / getattr(speed, rates[name]) if kind == "moved" else speed.run_issue)]
    if kind == "dma":
        return [("transfer_issue", speed.transfer_issue)]
    if kind == "vinst":
        return [("vector", speed.vector_issue * _INSTRUCTIONS.get(name, 1))]
    if kind == "vrep":
        return [("vector", 0.0 if name in library else _SLOW.get(name, 1))]
    if kind == "velem" and name in library:
        return [("vector", library[name])]
    if kind == "ave":
        return [("vector", 0.0 if name in _FREE else _SLOW.get(name, 1))]
    if kind == "vf":
        return [("vector", speed.vector_issue)]
    if kind in ("load", "store", "scalar"):
        return [("scalar", speed.scalar_cycles["store" if kind == "store" else name])]
    return []
