"""Figures as a table, as JSON that a later run is compared with, and as one HTML file."""

from __future__ import annotations

import html
import json
import os
import platform
import subprocess
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

import dsv4_triton
from dsv4_triton.bench.baselines import INTERPRETER
from dsv4_triton.bench.measure import Machine, Times
from dsv4_triton.bench.registry.case import EAGER
from dsv4_triton.bench.run import OURS, Figure
from dsv4_triton.device import family_of

SCHEMA = 1
_PACKAGES = ("torch", "torch-npu", "triton", "triton-ascend", "vllm")
_SCALE = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


class ResultsError(RuntimeError):
    """A file is not what a run of `bench --json` wrote."""


def environment(device: torch.device) -> dict[str, Any]:
    """What figures depend on besides the code: the chip, versions, threads, and the git commit of the code."""
    versions = {"dsv4_triton": dsv4_triton.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if device.type == "cpu":
        chip = cpu_name()
    else:
        chip = str(getattr(torch, device.type).get_device_name(0))
    return {
        "device": device.type, "family": family_of(device.type).name, "chip": chip,
        "threads": torch.get_num_threads(), "cpus": len(os.sched_getaffinity(0)), "versions": versions,
        "commit": _commit(),
    }  # fmt: skip


def recorded(content: Mapping[str, Any], device_type: str = "cpu") -> dict[str, Any]:
    """`content` of a file with the environment of this process, which is also where estimates are made."""
    return {"environment": environment(torch.device(device_type)), **content}


def cpu_name() -> str:
    """What this machine's processor is called."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """The commit of the code, with a plus sign where the tree differs from it; "" outside of a repository."""
    folder = Path(__file__).parent
    try:
        commit, changes = (
            subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True, timeout=10, check=True)
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no", "."])
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return commit.stdout.strip() + ("+" if changes.stdout.strip() else "")


@dataclass
class Results:
    """A run: where it took place, what the machine reached, and the figures that there are. `ended` says why it has
    fewer than were asked for."""

    environment: dict[str, Any]
    machine: Machine
    figures: list[Figure] = field(default_factory=list)
    ended: str = ""

    @property
    def ok(self) -> bool:
        return not any(figure.status == "failed" for figure in self.figures)

    def as_json(self) -> str:
        content = {
            "schema": SCHEMA, "kind": "measured", **self.environment, "machine": self.machine.as_dict(),
            "ended": self.ended, "figures": [figure.as_dict() for figure in self.figures],
        }  # fmt: skip
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def read(cls, file: Path) -> Results:
        """The results of an earlier run; `ResultsError` for another file, OSError for none."""
        figures: list[Figure] = []
        at = ""
        try:
            content = json.loads(file.read_text())
            if (content["schema"], content["kind"]) != (SCHEMA, "measured"):
                raise KeyError("schema")
            for number, figure in enumerate(content["figures"]):
                at = f"figures[{number}]: "
                figures.append(Figure.from_dict(figure))
            at = ""
            where = {name: content[name] for name in ("device", "family", "chip", "threads", "versions", "commit")}
            found = cls(where, Machine(**content["machine"]), figures, content["ended"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ResultsError(f"{file} is not a file of `bench --json`: {at}{type(error).__name__}: {error}") from None
        for number, figure in enumerate(figures):
            if wrong := _wrong(figure):
                raise ResultsError(f"{file} is not a file of `bench --json`: figures[{number}].{wrong}")
        return found


def _wrong(figure: Figure) -> str:
    """The field of a figure that no comparison can be made with, and why; "" where there is none."""
    for name in ("op", "case"):
        if not isinstance(value := getattr(figure, name), str):
            return f"{name} is {value!r} and no name"
    if figure.times and OURS not in figure.times:
        return f"times has no {OURS!r}"
    for name, times in figure.times.items():
        if isinstance(times.median, bool) or not isinstance(times.median, (int, float)) or not 0 < times.median < inf:
            return f"times[{name!r}].median is {times.median!r} and no positive number of seconds"
    return ""


@dataclass(frozen=True)
class Change:
    """One pair of an earlier run and this one: medians of this project in seconds.

    drift: how many times as long eager PyTorch took in the same case, which runs in turn with the kernel: a machine
    that has become slower or busier shows there, too. worse: past the threshold by the wall, and beyond that drift.
    """

    op: str
    case: str
    before: float
    now: float
    drift: float
    worse: bool

    @property
    def factor(self) -> float:
        return self.now / self.before

    def __str__(self) -> str:
        times = f"{readable(self.before)} -> {readable(self.now)}, {self.factor:.2f} times as long"
        return f"{self.op} {self.case}: {times}; eager PyTorch {self.drift:.2f} times"


def changes(earlier: Results, now: Results, threshold: float) -> list[Change]:
    """The pairs that both runs have times of. Worse is a median that grew by more than the share `threshold`, and by
    more than it of what eager PyTorch's grew by."""
    before = {figure.key: figure.times for figure in earlier.figures if figure.times}
    return [
        _change(figure, before[figure.key], threshold)
        for figure in now.figures
        if figure.key in before and figure.times
    ]


def _change(now: Figure, before: Mapping[str, Times], threshold: float) -> Change:
    drift = 1.0
    if EAGER in now.times and EAGER in before:
        drift = now.times[EAGER].median / before[EAGER].median
    first, second = before[OURS].median, now.times[OURS].median
    worse = second > first * max(1.0, drift) * (1 + threshold)
    return Change(*now.key, first, second, drift, worse)


def unmatched(earlier: Results, now: Results, existing: Container[tuple[str, str]]) -> list[str]:
    """The cases that only the earlier run has times of, because they are not `existing` any more (op and name), or have
    no times now. Those that were not asked for, or not reached, are no finding."""
    there = {figure.key: figure for figure in now.figures}
    found = []
    for before in earlier.figures:
        figure = there.get(before.key)
        if before.times and before.key not in existing:
            found.append(f"{before.op} {before.case}: there is no such case any more")
        elif before.times and figure is not None and not figure.times:
            found.append(f"{before.op} {before.case}: {figure.status} now: {figure.message}")
    return found


def unlike(earlier: Results, now: Results) -> list[str]:
    """What of the machine differs between two runs, so that their times cannot be compared."""
    return [
        f"{name}: {earlier.environment[name]} then, {now.environment[name]} now"
        for name in ("device", "chip", "threads")
        if earlier.environment[name] != now.environment[name]
    ]


def readable(seconds: float) -> str:
    """Three digits and a unit."""
    scale, unit = next((step for step in _SCALE if seconds >= step[0]), _SCALE[-1])
    return f"{seconds / scale:.3g} {unit}"


def count(number: int) -> str:
    """Three digits and a prefix; "" for none."""
    for scale, prefix in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= scale:
            return f"{number / scale:.3g} {prefix}"
    return str(number or "")


def headline(results: Results) -> str:
    """Where the figures come from, on one line."""
    machine, where = results.machine, results.environment
    rates = ", ".join(f"{dtype} {2 * rate / 1e12:.3g} TFLOP/s" for dtype, rate in machine.macs_per_second.items())
    copy = f"copy {machine.copy_bytes_per_second / 1e9:.3g} GB/s"
    return f"{where['chip']} ({where['family']}), {where['threads']} threads; {copy}, {rates}"


def table(results: Results) -> Table:
    """A line for each case; the ratios say how many times as long a baseline takes."""
    result = Table(box=None, pad_edge=False, title=headline(results), title_justify="left")
    for heading in ("op", "case"):
        result.add_column(heading, no_wrap=True)
    for heading in ("median", "p20", "p80", "bytes", "MACs", "roofline"):
        result.add_column(heading, justify="right", no_wrap=True)
    for heading in (f"{EAGER} x", f"{INTERPRETER} x"):
        result.add_column(heading, justify="right", no_wrap=True)
    result.add_column("other baselines x", overflow="fold", ratio=1)
    for figure in results.figures:
        if figure.status != "ok":
            style = "bold red" if figure.status == "failed" else "yellow"
            result.add_row(figure.op, figure.case, *[""] * 8, Text(f"{figure.status}: {figure.message}", style))
            continue
        ours = figure.times[OURS]
        result.add_row(
            figure.op, figure.case, *(readable(seconds) for seconds in (ours.median, ours.p20, ours.p80)),
            count(figure.bytes), count(figure.macs), f"{100 * figure.share:.0f} %",
            *(f"{figure.ratio(name):.3g}" if name in figure.times else "" for name in (EAGER, INTERPRETER)),
            Text(", ".join(_others(figure))),
        )  # fmt: skip
    return result


def _others(figure: Figure) -> list[str]:
    """The baselines without a column. Why one was not timed is in the files, a wrong result is here, too."""
    found = [f"{name} {figure.ratio(name):.3g}" for name in figure.times if name not in (OURS, EAGER, INTERPRETER)]
    return found + [f"{name} {why}" for name, why in figure.missing.items() if why.startswith("differs")]


def summary(results: Results) -> str:
    """How many of which kind, and by how much the eager baseline is slower, as a geometric mean."""
    counted = {status: sum(f.status == status for f in results.figures) for status in ("ok", "failed", "skipped")}
    said = ", ".join(f"{number} {status}" for status, number in counted.items() if number)
    ratios = [f.ratio(EAGER) for f in results.figures if EAGER in f.times]
    if ratios:
        mean = float(torch.tensor(ratios, dtype=torch.float64).log().mean().exp())
        said += f"; eager PyTorch takes {mean:.2f} times as long (geometric mean of {len(ratios)})"
    legend = "x: how many times as long a baseline takes; roofline: this machine's own copy and product."
    return f"{said or 'nothing was measured'}. {legend}"


_WIDTH = 320
"""Pixels of the longest bar."""
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 76em; color: #1a2330; }
table { border-collapse: collapse; width: 100%; margin: 1em 0 2em; }
th, td { text-align: left; padding: 3px 8px; border-bottom: 1px solid #e3e7ee; vertical-align: top; }
td.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.bar { display: flex; align-items: center; gap: 6px; white-space: nowrap; }
.bar span { display: inline-block; height: 10px; background: #b8c4d6; }
.bar.ours span { background: #2463c5; }
.bar .spread { font-size: 12px; color: #5c6b80; }
.limit { color: #b3261e; } .skipped { color: #8a6d00; } .failed { color: #b3261e; font-weight: bold; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; } dt { color: #5c6b80; } dd { margin: 0; }
"""


def as_html(results: Results, compared: Sequence[Change] = ()) -> str:
    """One file without references: a table an op, and bars of the implementations' medians with the roofline."""
    where = results.environment
    facts = {
        "machine": headline(results), "commit": where["commit"] or "none",
        "versions": ", ".join(f"{name} {version}" for name, version in where["versions"].items()),
        "summary": summary(results),
    }  # fmt: skip
    if results.ended:
        facts["ended early"] = results.ended
    parts = ["<h1>dsv4-triton bench</h1>", _definitions(facts)]
    for op, group in groupby(sorted(results.figures, key=lambda f: f.op), key=lambda f: f.op):
        rows = "".join(_row(figure, results.machine) for figure in group)
        head = "".join(f"<th>{name}</th>" for name in ("case", "median, with p20 and p80", "of roofline", "work"))
        parts.append(f"<h2>{html.escape(op)}</h2><table><tr>{head}</tr>{rows}</table>")
    if compared:
        rows = "".join(
            f'<tr><td class="{"failed" if c.worse else ""}">{html.escape(str(c))}</td></tr>' for c in compared
        )
        parts.append(f"<h2>Against the earlier run</h2><table>{rows}</table>")
    head = f'<meta charset="utf-8"><title>dsv4-triton bench</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en">{head}{"".join(parts)}</html>\n'


def _definitions(facts: Mapping[str, str]) -> str:
    return "<dl>" + "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in facts.items()) + "</dl>"


def _row(figure: Figure, machine: Machine) -> str:
    name = f"<td>{html.escape(figure.case)}</td>"
    if figure.status != "ok":
        says = html.escape(f"{figure.status}: {figure.message}")
        return f'<tr>{name}<td class="{figure.status}" colspan="3">{says}</td></tr>'
    longest = max(times.median for label, times in figure.times.items() if label != INTERPRETER)
    bars = "".join(_bar(label, figure, longest) for label in figure.times)
    least = figure.share * figure.times[OURS].median
    bars += f'<div class="limit">roofline {readable(least)}</div>' if least else ""
    bars += "".join(f"<div>{html.escape(label)}: {html.escape(why)}</div>" for label, why in figure.missing.items())
    work = f"{count(figure.bytes)} bytes" + (f", {count(figure.macs)} MACs" if figure.macs else "")
    return f'<tr>{name}<td>{bars}</td><td class="number">{100 * figure.share:.0f} %</td><td>{work}</td></tr>'


def _bar(label: str, figure: Figure, longest: float) -> str:
    times = figure.times[label]
    width = min(max(1.0, _WIDTH * times.median / longest), _WIDTH + 20)  # the interpreter ends where the scale does
    ours = label == OURS
    ratio = "" if ours else f", {figure.ratio(label):.2f} times as long"
    text = html.escape(f"{label}: {readable(times.median)} ({readable(times.p20)} to {readable(times.p80)}){ratio}")
    return f'<div class="bar{" ours" if ours else ""}"><span style="width:{width:.0f}px"></span>{text}</div>'


def regressions(found: Iterable[Change]) -> list[Change]:
    """The pairs that became worse, the worst first."""
    return sorted((change for change in found if change.worse), key=lambda change: -change.factor)
