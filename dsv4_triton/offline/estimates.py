"""What `dsv4-triton bench --estimate` prints: exact facts and an estimate for every launch of a case, no measurement.

The facts are counts of the planned HIVM, the estimate is the model of docs/cost_model.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

from dsv4_triton.bench.registry import Case, Minimum
from dsv4_triton.bench.results import count
from dsv4_triton.compiler.cost.estimate import minimum_seconds
from dsv4_triton.device import Family
from dsv4_triton.offline import Compiled, compile_cases
from dsv4_triton.offline.counting import counted, problems_of

BINDING = {
    "cube": "cube", "cube_feed": "cube", "vector": "vector", "scalar": "scalar", "transfer_in": "memory in",
    "transfer_out": "memory out",
}  # fmt: skip
"""Kinds of the cost model's resources; the others are transfers in both directions."""
LAUNCH = "launch"


@dataclass(frozen=True)
class LaunchEstimate:
    """One launch. Seconds are estimates without the launch's start.

    resource: what it waits for, in the cost model's words. resources: seconds of each. bytes_in, bytes_out: from and
    to global memory, re-reads and workspace included. macs, vector, scalar: operations of all cores. problem: why it
    could not be counted, or what the count had to assume.
    """

    kernel: str
    programs: int
    core: str = ""
    ub_percent: int = 0
    seconds: float = 0.0
    resource: str = ""
    resources: dict[str, float] = field(default_factory=dict)
    bytes_in: int = 0
    bytes_out: int = 0
    macs: int = 0
    vector: int = 0
    scalar: int = 0
    problem: str = ""

    @property
    def binding(self) -> str:
        """cube, vector, scalar, memory in or memory out: of transfers in both directions the one that moves more."""
        if not self.resource:
            return ""
        return BINDING.get(self.resource, "memory in" if self.bytes_in >= self.bytes_out else "memory out")


@dataclass(frozen=True)
class CaseEstimate:
    """A case on a family. `limit_seconds` is the roofline: of the least bytes at the memory's rate, or of the least
    products at the cubes'. `launch_seconds` are the starts of all launches; they stand beside the estimate."""

    family: str
    op: str
    case: str
    bytes: int
    macs: int
    limit_seconds: float
    launch_seconds: float
    launches: tuple[LaunchEstimate, ...]

    @property
    def seconds(self) -> float:
        return sum(launch.seconds for launch in self.launches)

    @property
    def problem(self) -> str:
        return "; ".join(dict.fromkeys(launch.problem for launch in self.launches if launch.problem))

    @property
    def binding(self) -> str:
        """What the case waits for: the start of its launches, or what its longest launch does."""
        if self.launch_seconds > self.seconds:
            return LAUNCH
        return max(self.launches, key=lambda launch: launch.seconds).binding

    def as_dict(self) -> dict[str, Any]:
        return {
            "op": self.op, "case": self.case, "bytes": self.bytes, "macs": self.macs, "seconds": self.seconds,
            "limit_seconds": self.limit_seconds, "launch_seconds": self.launch_seconds, "binding": self.binding,
            "problem": self.problem, "launches": [{**asdict(one), "binding": one.binding} for one in self.launches],
        }  # fmt: skip


def estimates(
    cases: Sequence[Case], family: Family, *, jobs: int | None = None, progress: Callable[[int, int, str], None]
) -> list[CaseEstimate]:
    """Compile and count the cases that `family` has, in their order."""
    compiled = compile_cases(cases, family, jobs=jobs, progress=progress)
    found = []
    for one in counted(compiled, lambda _, group: _launches(group, family), jobs=jobs, progress=progress):
        if one.problem:
            launches = [LaunchEstimate(part.result.kernel, 0, problem=one.problem) for part in one.launches]
        else:
            launches = [LaunchEstimate(**part) for part in one.found]
        found.append(_case(one.case, launches, family))
    return found


def limit(least: Minimum, family: Family) -> tuple[float, str]:
    """Seconds of the roofline of a job on a family, and what binds it."""
    memory = minimum_seconds(Minimum(least.bytes), family)
    seconds = minimum_seconds(least, family)
    return seconds, "cube" if seconds > memory else "memory in"


def _case(case: Case, launches: Sequence[LaunchEstimate], family: Family) -> CaseEstimate:
    assert family.speed is not None
    least = case.minimum(family)
    return CaseEstimate(
        family.name, case.op, case.name, least.bytes, least.macs, minimum_seconds(least, family),
        family.speed.launch_seconds * len(launches), tuple(launches),
    )  # fmt: skip


def _launches(group: Sequence[Compiled], family: Family) -> list[dict[str, Any]]:
    return [asdict(_launch(one, family)) for one in group]


def _launch(one: Compiled, family: Family) -> LaunchEstimate:
    problems = problems_of(one)
    if one.launch is None or not one.result.ok:
        return LaunchEstimate(one.result.kernel, 0, problem="; ".join(problems))
    facts, cost = one.cost(family)
    total = facts.launch()
    moved = total.by("bytes")
    if facts.assumed or facts.unsupported:
        problems.append(f"the count assumes {', '.join([*facts.assumed, *facts.unsupported])}")
    core, ub = "", 0
    if one.result.facts is not None:
        core, ub = one.result.facts.core, round(100 * one.result.facts.used("UB") / family.ub_bytes)
    return LaunchEstimate(
        one.result.kernel, facts.programs, core, ub, cost.seconds, cost.resource,
        {name: seconds for name, seconds in cost.resources.items() if seconds},
        sum(n for path, n in moved.items() if path.startswith(("gm_", "ws_"))),
        sum(n for path, n in moved.items() if path.endswith(("_gm", "_ws"))),
        total.total("mac"), total.total("velem") + total.total("ave"), total.total("scalar"), "; ".join(problems),
    )  # fmt: skip


def table(found: Sequence[CaseEstimate], family: Family) -> Table:
    """A line for each case, and one below it for each launch where there are several."""
    title = f"ESTIMATE for {family.title}, compiled for {family.target}; nothing ran on a device"
    result = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for heading in ("op", "case or kernel"):
        result.add_column(heading, overflow="fold")
    for heading in ("programs", "UB %", "bytes in", "out", "MACs", "estimate us", "limit us", "ratio", "starts us"):
        result.add_column(heading, justify="right", no_wrap=True)
    result.add_column("waits for")
    result.add_column("remarks", overflow="fold", ratio=1)
    for case in found:
        few = len(case.launches) == 1
        only = case.launches[0]
        result.add_row(
            case.op, case.case, f"{only.programs}" if few else "", f"{only.ub_percent}" if few else "",
            count(sum(one.bytes_in for one in case.launches)), count(sum(one.bytes_out for one in case.launches)),
            count(sum(one.macs for one in case.launches)), _microseconds(case.seconds),
            _microseconds(case.limit_seconds), f"{case.seconds / case.limit_seconds:.3g}" if case.limit_seconds else "",
            f"{case.launch_seconds * 1e6:.0f}", case.binding, Text(case.problem, "yellow"),
        )  # fmt: skip
        for one in case.launches if not few else ():
            result.add_row(
                "", f"  {one.kernel.strip('_').removesuffix('_kernel')}", f"{one.programs}", f"{one.ub_percent}",
                count(one.bytes_in), count(one.bytes_out), count(one.macs), _microseconds(one.seconds), "", "", "",
                one.binding, "", style="dim",
            )  # fmt: skip
    return result


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.4g}"


def as_dict(found: Sequence[CaseEstimate], family: Family) -> dict[str, Any]:
    """Everything that is known."""
    return {
        "schema": 1, "kind": "estimate", "family": family.name, "target": family.target,
        "model": "docs/cost_model.md", "cases": [case.as_dict() for case in found],
    }  # fmt: skip
