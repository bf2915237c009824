"""The static report: what compiles for each family, in what memory, and what it is estimated to cost.

`dsv4-triton compile --report FILE` writes it as Markdown, one line a case of the registry; `--against FILE` compares it
with an earlier one. All of it follows from the source and the pinned toolchain, so two runs give the same file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import groupby
from math import isnan

from dsv4_triton.bench.registry import Case
from dsv4_triton.compiler.cost.estimate import minimum_seconds
from dsv4_triton.device import FAMILIES, Family
from dsv4_triton.offline import Compiled, Progress
from dsv4_triton.offline.counting import counted, problems_of
from dsv4_triton.offline.peers import peer_of

ALLOWANCE = 1.05
"""A ratio may grow by this factor before it counts as a regression."""


class ReportError(RuntimeError):
    """A report cannot be read."""


@dataclass(frozen=True)
class Line:
    """One case on one family, as the report prints it.

    status: `ok`, or what failed. launches: kernels that the op starts. ub, l1, l0c: the largest share of each memory
    that one of them uses, in percent. estimate: microseconds of all launches without their start, nan where a count
    depends on contents that are not there. minimum: microseconds of the least traffic and products of the job. limit:
    what the longest launch waits for.
    peer: the best public kernel.
    """

    family: str
    op: str
    case: str
    status: str
    launches: int
    ub: int
    l1: int
    l0c: int
    estimate: float
    minimum: float
    ratio: float
    limit: str
    peer: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.family, self.op, self.case


_HEADINGS = (
    "op", "case", "status", "launches", "UB %", "L1 %", "L0C %", "estimate us", "minimum us", "ratio", "waits for",
    "best public kernel us",
)  # fmt: skip


def lines(
    compiled: Sequence[Compiled], family: Family, *, jobs: int | None = None, progress: Progress | None = None
) -> list[Line]:
    """The lines of compiled cases, in their order; `progress(done, total, what)` while they are counted."""
    found = []
    for one in counted(compiled, lambda case, group: astuple(_line(case, group, family)), jobs=jobs, progress=progress):
        if one.problem:
            name, number = one.case.name, len(one.launches)
            found.append(Line(family.name, one.case.op, name, one.problem, number, 0, 0, 0, 0.0, 0.0, 0.0, "", ""))
        else:
            found.append(Line(*one.found))
    return found


def _line(case: Case, group: Sequence[Compiled], family: Family) -> Line:
    status, total, slowest, limit = "ok", 0.0, -1.0, ""
    shares = {"UB": 0, "L1": 0, "L0C": 0}
    limits = {"UB": family.ub_bytes, "L1": family.l1_bytes, "L0C": family.l0c_bytes}
    for one in group:
        if problems := problems_of(one):
            status = problems[0].replace("|", "/")
        if one.launch is None or not one.result.ok:
            continue
        if one.result.facts is not None:
            for memory, size in limits.items():
                shares[memory] = max(shares[memory], round(100 * one.result.facts.used(memory) / size))
        cost = one.cost(family)
        total += cost.seconds
        if cost.estimate.seconds > slowest:
            slowest, limit = cost.estimate.seconds, cost.estimate.resource
    least = minimum_seconds(case.minimum(family), family)
    peer = peer_of(case.op, case.name, family.name)
    public = f"{peer.microseconds:.4g} {peer.name}" + (f", without {peer.less}" if peer.less else "") if peer else ""
    return Line(
        family.name, case.op, case.name, status, len(group), shares["UB"], shares["L1"], shares["L0C"],
        rounded(total * 1e6), rounded(least * 1e6), rounded(total / least if least else 0.0), limit, public,
    )  # fmt: skip


def rounded(number: float) -> float:
    """Four digits, as files keep numbers."""
    return float(f"{number:.4g}")


def _cells(line: Line) -> str:
    return "| " + " | ".join(str(value) for value in astuple(line)[1:]) + " |"


def _read(text: str, family: str) -> Line:
    cells = [cell.strip() for cell in text.strip().strip("|").split("|")]
    kinds = {"int": int, "float": float, "str": str}
    values = [kinds[str(field.type)](cell) for field, cell in zip(fields(Line)[1:], cells, strict=True)]
    return Line(family, *values)


def launch_table(families: Iterable[str]) -> str:
    """Launches of a decode step of 16 tokens in a layer of each kind and router of Flash, as a Markdown table.

    Needs vLLM, whose layers the model is made of.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from dsv4_triton.bench.launches import PARTS, layer_launches

    heads = ["family", "layer", "router", *PARTS, "all"]
    rows = [
        [family, layer.kind, layer.router, *(str(layer.of(part)) for part in PARTS), str(layer.total)]
        for family in families
        for layer in layer_launches(family=family)
    ]
    table = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in table)


def markdown(found: Iterable[Line], launches: str) -> str:
    """The report. `launches` is the table of launches of a decode step, as Markdown."""
    step = "## Launches of one decode step of Flash, 16 requests at 32,768 tokens, by kind of layer"
    parts = [_INTRODUCTION.strip(), step, launches.strip()]
    for family, group in groupby(found, lambda line: line.family):
        rows = list(group)
        good = sum(line.status == "ok" for line in rows)
        parts.append(f"## {FAMILIES[family].title}, compiled for {FAMILIES[family].target}")
        parts.append(f"{good} of {len(rows)} cases are ok.")
        head = "| " + " | ".join(_HEADINGS) + " |\n|" + " --- |" * len(_HEADINGS)
        parts.append("\n".join([head, *(_cells(line) for line in rows)]))
    return "\n\n".join(parts) + "\n"


def parse(text: str) -> dict[tuple[str, str, str], Line]:
    """The lines of a report that `markdown` wrote; `ReportError` for anything else."""
    titles = {family.title: family.name for family in FAMILIES.values()}
    found: dict[tuple[str, str, str], Line] = {}
    family = ""
    for row in text.splitlines():
        if heading := re.match(r"## (.+), compiled for ", row):
            family = titles.get(heading[1], "")
        elif family and row.startswith("| ") and not row.startswith(("| op ", "| ---")):
            try:
                line = _read(row, family)
            except (KeyError, ValueError) as error:
                raise ReportError(f"not a line of a static report: {row!r}") from error
            found[line.key] = line
    if not found:
        raise ReportError("no table of a static report is in it")
    return found


def regressions(found: Iterable[Line], earlier: dict[tuple[str, str, str], Line]) -> list[str]:
    """What became worse than in an earlier report: a status, a ratio by more than `ALLOWANCE`, a case that is gone."""
    seen = {line.key: line for line in found}
    families = {family for family, _, _ in seen}
    problems = [
        f"{family} {op} {case}: no longer in the report"
        for family, op, case in earlier
        if family in families and (family, op, case) not in seen
    ]
    for key, line in seen.items():
        before = earlier.get(key)
        name = " ".join(key)
        if before is None:
            problems.append(f"{name}: not in the earlier report, which needs to be written again")
        elif line.status != "ok" and before.status == "ok":
            problems.append(f"{name}: {line.status}")
        elif line.ratio > before.ratio * ALLOWANCE or (isnan(line.ratio) and not isnan(before.ratio)):
            problems.append(f"{name}: estimate / minimum is {line.ratio}, was {before.ratio}")
        elif line.launches > before.launches:
            problems.append(f"{name}: {line.launches} launches, were {before.launches}")
    return problems


_INTRODUCTION = """
# Static report

Written by `dsv4-triton compile --report FILE`; with `--against EARLIER` it fails when a case is worse than there.
Every public op at the shapes of DeepSeek-V4-Flash and -Pro goes through triton-ascend and the HIVM compiler with
its memory planned and its library calls looked up. Nothing ran on a device: `hivmc`, which makes the binary, is part of
CANN, and every time is an estimate from exact counts by the model of [cost_model.md](cost_model.md).

A case is `ok` when all its kernels compile without a fallback, read nothing that nothing wrote, call only functions of
the shipped device library and run no inner loop over single elements; on A2 and A3 they also use both vector cores
where those share work. On A5 the compiler gives mixed kernels one vector core: the estimate has it, the status not.
Memories are the largest share that a kernel of the case uses. The minimum is the time of the least traffic and the
least multiply-accumulates of the job; it takes no account of latency, so ratios of small steps are large. What later
launches of an op read of a plan that its first ones make is really made, on the host. The best public kernel is that of
`dsv4_triton/offline/peers.py`, estimated in the same way.
"""
