"""Offline compile of the registry's cases: what `dsv4-triton compile` does and prints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from math import nan
from typing import Any, NamedTuple

import torch

from dsv4_triton import __version__
from dsv4_triton.bench.registry import MODELS, Case, select
from dsv4_triton.bench.results import recorded
from dsv4_triton.compiler import host
from dsv4_triton.compiler.ascend import compile_all
from dsv4_triton.compiler.ascend.result import CompileResult
from dsv4_triton.compiler.ascend.tools import tools_for
from dsv4_triton.compiler.cost import arguments_of, count, estimate, scratch_of
from dsv4_triton.compiler.cost.estimate import Estimate
from dsv4_triton.compiler.cost.facts import Facts
from dsv4_triton.compiler.launches import Launch, recording
from dsv4_triton.device import FAMILIES, Family, acting_as

Progress = Callable[[int, int, str], None]


class Cost(NamedTuple):
    """What one launch does and its estimate."""

    facts: Facts
    estimate: Estimate

    @property
    def known(self) -> bool:
        """False where a count depends on contents that are not there."""
        return not self.facts.assumed and not self.facts.unsupported

    @property
    def seconds(self) -> float:
        """Without the launch's start; nan where it is not known."""
        return self.estimate.seconds if self.known else nan


@dataclass(frozen=True)
class Compiled:
    """One launch of one case, compiled; `launch` is None where the op itself refused the case (`result` says why).

    `scratch` are the launch's arguments that live between the launches of the op: neither its arguments nor results.
    `unwritten` are those of them whose contents are not there to be read. `touched`: bytes of an argument that the
    step can touch, where that is not all.
    """

    case: Case
    launch: Launch | None
    result: CompileResult
    scratch: frozenset[str] = frozenset()
    unwritten: frozenset[str] = frozenset()
    touched: Mapping[str, int] = field(default_factory=dict)

    def cost(self, family: Family) -> Cost:
        """What the launch is estimated to take on the family that it was compiled for."""
        assert self.launch is not None and self.result.ok
        facts = count(self.result.hivm, family, self.launch.grid, arguments_of(self.launch), unwritten=self.unwritten)
        return Cost(facts, estimate(facts, family, resident=self.scratch, touched=self.touched))


def families() -> list[Family]:
    """The families with an offline compile."""
    return [family for family in FAMILIES.values() if family.arch]


def family_named(name: str) -> Family:
    """A family with an offline compile; `ValueError` listing them for any other name."""
    there = {family.name: family for family in families()}
    if name not in there:
        raise ValueError(f"unknown family {name!r}. There are: {', '.join(there)}")
    return there[name]


def choose(kernels: Sequence[str], models: Sequence[str], cases: Sequence[str], *, between: bool = False) -> list[Case]:
    """The registry's cases of these kernels, models and names; without a model and a name, of all but the demo
    checkpoint. `between` is that of `select`.

    `RegistryError` for what does not exist, listing what does.
    """
    default = None if cases else [model.name for model in MODELS.values() if not model.demo]
    return select(list(kernels) or None, list(models) or default, list(cases) or None, between)


class Recorded(NamedTuple):
    """A launch with what `Compiled` says of its scratch."""

    launch: Launch
    scratch: frozenset[str]
    unwritten: frozenset[str]
    touched: dict[str, int]

    def compiled(self, case: Case, result: CompileResult) -> Compiled:
        return Compiled(case, self.launch, result, self.scratch, self.unwritten, self.touched)


def record(case: Case, family: Family) -> list[Recorded]:
    """The launches of a case as `family` would make them. Only the op's planners run, on the host."""
    inputs = case.build(family, fill=False)
    with acting_as(family), recording() as launches:
        returned = case.launcher(**inputs.arguments)
    results = returned if isinstance(returned, tuple) else (returned,)
    kept = [value for value in (*inputs.tensors.values(), *results) if isinstance(value, torch.Tensor)]
    planned: set[int] = set()
    for launch in launches:
        if launch.kernel.__name__ in case.entry.planners:
            with host.installed():
                launch.kernel[launch.grid](**{**launch.signature.constants, **launch.arguments})
            planned |= {v.data_ptr() for v in launch.arguments.values() if isinstance(v, torch.Tensor)}
    sizes = case.entry.touched(case.job(family))
    limits = {_memory(inputs.tensors[name]): size for name, size in sizes.items() if name in inputs.tensors}
    found = []
    for launch in launches:
        scratch = scratch_of(launch, kept)
        unwritten = {name for name in scratch if launch.arguments[name].data_ptr() not in planned}
        tensors = {name: value for name, value in launch.arguments.items() if isinstance(value, torch.Tensor)}
        touched = {name: limits[_memory(value)] for name, value in tensors.items() if _memory(value) in limits}
        found.append(Recorded(launch, frozenset(scratch), frozenset(unwritten), touched))
    return found


def _memory(tensor: torch.Tensor) -> int:
    """What views of one block of memory have in common."""
    return tensor.untyped_storage().data_ptr()


def compile_cases(
    cases: Sequence[Case], family: Family, *, jobs: int | None = None, seconds: float | None = None,
    progress: Progress | None = None,
) -> list[Compiled]:  # fmt: skip
    """Record and compile the cases that `family` has, each launch in order. Equal specialisations are compiled once.

    `progress(done, total, what)` is called while it works, first over the cases, then over the compiles.
    """
    recorded: list[tuple[Case, Recorded | str]] = []
    cases = [case for case in cases if case.runs_on(family)]
    for number, case in enumerate(cases):
        if progress is not None:
            progress(number, len(cases), f"recording {case}")
        try:
            recorded += [(case, found) for found in record(case, family)]
        except Exception as error:
            # A case that its op refuses is a finding about the case, and no reason to leave the others out.
            recorded.append((case, f"{type(error).__name__}: {error}"))
    launches = [found.launch for _, found in recorded if isinstance(found, Recorded)]

    def compiled(done: int, total: int, result: CompileResult) -> None:
        if progress is not None:
            progress(done, total, f"compiled {result.kernel}")

    limit = {} if seconds is None else {"seconds": seconds}
    results = iter(compile_all(launches, family, jobs=jobs, progress=compiled, **limit))
    return [
        found.compiled(case, next(results))
        if isinstance(found, Recorded)
        else Compiled(case, None, _refused(case, family, found))
        for case, found in recorded
    ]


def _refused(case: Case, family: Family, problem: str) -> CompileResult:
    return CompileResult(case.op, family.name, "failed", "launch", f"{case}: {problem}")


def by_code(compiled: Iterable[Compiled]) -> Iterator[tuple[CompileResult, list[Compiled]]]:
    """Compiled launches that share their code, in the order of their first use."""
    groups: dict[int, list[Compiled]] = {}
    for one in compiled:
        groups.setdefault(id(one.result), []).append(one)
    for group in groups.values():
        yield group[0].result, group


def table(compiled: Sequence[Compiled], family: Family) -> Any:
    """A rich table with a line for each compiled specialisation."""
    from rich.table import Table
    from rich.text import Text

    limits = {"UB": family.ub_bytes, "L1": family.l1_bytes, "L0C": family.l0c_bytes}
    title = f"{family.title}, compiled for {family.target}; memories in percent"
    result = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for heading in ("op", "kernel", "case", "", "core"):
        result.add_column(heading, overflow="fold")
    for memory in limits:
        result.add_column(memory, justify="right")
    result.add_column("remarks", overflow="fold", ratio=1)
    for one, group in by_code(compiled):
        first, others = group[0].case, len({c.case for c in group}) - 1
        name = f"{first.name} +{others}" if others else first.name
        good = one.ok and not one.faults
        style = "green" if good and not one.losses else "yellow" if good else "bold red"
        used = {memory: one.facts.used(memory) if one.facts else 0 for memory in limits}
        shares = [f"{100 * used[memory] / limits[memory]:.0f}" if used[memory] else "" for memory in limits]
        remarks = "; ".join([*one.faults, *one.losses] if one.ok else [one.message])
        result.add_row(
            first.op, one.kernel.strip("_").removesuffix("_kernel"), name, Text(one.status, style),
            one.facts.core if one.facts else "", *shares, Text(remarks, "" if good else style),
        )  # fmt: skip
    return result


def summary(compiled: Sequence[Compiled], family: Family) -> str:
    """One sentence on the whole, and one on the last step."""
    groups = [result for result, _ in by_code(compiled)]
    cases, failed = len({one.case for one in compiled}), sum(not result.ok for result in groups)
    parts = [f"{len(groups)} kernels of {cases} cases: {len(groups) - failed} compiled, {failed} failed"]
    for what, number in {
        "with faults": sum(bool(result.faults) for result in groups),
        "slower than they look": sum(bool(result.losses) for result in groups),
        "from the cache": sum(result.cached for result in groups),
    }.items():
        if number:
            parts.append(f"{number} {what}")
    if tools_for(family.arch).hivmc is None:
        last = "hivmc (part of CANN) is not installed, so that no binary was made: the compile ends with planned HIVM."
    else:
        last = "hivmc made the binaries."
    return f"{'; '.join(parts)}. {last} Nothing ran on a device."


def as_json(compiled: Sequence[Compiled], family: Family) -> str:
    """The table with everything that is known, one entry for each compiled specialisation."""
    versions = {}
    for package in ("triton-ascend", "ascendnpu-ir"):
        versions[package] = metadata.version(package)
    entries = [
        {
            "op": group[0].case.op,
            "cases": sorted({one.case.name for one in group}),
            "launches": len(group),
            **_specialisation(group[0].launch),
            "faults": result.faults,
            "losses": result.losses,
            **result.as_dict(),
        }
        for result, group in by_code(compiled)
    ]
    content = {
        "dsv4_triton": __version__, "family": family.name, "target": family.target, "versions": versions,
        "hivmc": tools_for(family.arch).hivmc is not None, "ok": succeeded(compiled), "kernels": entries,
    }  # fmt: skip
    return json.dumps(recorded(content), indent=1) + "\n"


def _specialisation(launch: Launch | None) -> dict[str, Any]:
    if launch is None:
        return {}
    signature = launch.signature
    return {
        "types": signature.types,
        "constants": {name: repr(value) for name, value in signature.constants.items()},
        "options": {name: repr(value) for name, value in launch.options.items()},
    }


def succeeded(compiled: Iterable[Compiled], *, strict: bool = False) -> bool:
    """Whether all compiled and none would be wrong; `strict`: and none lost anything."""
    results = [result for result, _ in by_code(compiled)]
    return all(r.ok and not r.faults and not (strict and r.losses) for r in results)
