"""What a tuning run found, as a table, as JSON and as one HTML file with pictures."""

from __future__ import annotations

import base64
import html
import io
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cache
from math import isnan
from statistics import geometric_mean
from typing import Any

import torch

from dsv4_triton.autotune.run import Settings, chip, versions
from dsv4_triton.autotune.search import Found, spaces_of
from dsv4_triton.autotune.trials import difference
from dsv4_triton.bench.measure import Machine, measure_machine
from dsv4_triton.bench.results import recorded
from dsv4_triton.compiler.cost.estimate import minimum_seconds

FATES = {
    "compile": "a compiler refused it",
    "memory": "did not fit the memories",
    "fallback": "compiled with a fallback, scalar loops or an idle vector core",
    "faults": "would be wrong or not link",
    "unknown": "the cost model cannot count it",
    "wrong": "differs from the reference",
    "crash": "crashed",
    "time": "not done in time",
    "no gain": "not faster than the default when timed in turn with it",
    "unused": "the op did not ask for it, or no case could check it",
}
"""Why a try did not count, in words."""


def mean_gain(found: Iterable[Found]) -> float:
    """Geometric mean of the gains of those whose default works; 1 for none."""
    gains = [one.gain for one in found if one.default.ok and one.winner is not None]
    return geometric_mean(gains) if gains else 1.0


def rejections(found: Iterable[Found]) -> Counter[str]:
    """How many tries each gate stopped, and how many configurations were dropped by arithmetic."""
    counted: Counter[str] = Counter()
    for one in found:
        counted["dropped"] += one.dropped
        counted.update(verdict.fate for verdict in one.verdicts if not verdict.ok)
    return +counted


@cache
def machine() -> Machine:
    """What this machine's processor reaches, measured when first asked for: the roofline of the host."""
    return measure_machine(torch.device("cpu"))


def roofline(one: Found) -> float:
    """Microseconds that the case takes at least by memory and products alone."""
    family = one.target.family
    least = one.target.case.minimum(family)
    return (minimum_seconds(least, family) if family.speed else machine().seconds(least)) * 1e6


def outcome(one: Found) -> str:
    """What is different in the winner, or why there is none."""
    if one.winner is not None:
        return difference(one.winner.config, one.default.config)
    return f"{one.default.fate}: {one.default.message[:200]}" if one.finished else "not finished, nothing was written"


def table(found: Sequence[Found], settings: Settings) -> Any:
    """A rich table, a line for each kernel and size."""
    from rich.table import Table
    from rich.text import Text

    what = "estimated" if settings.kind == "estimate" else "measured"
    title = f"{settings.family.title}: {what} microseconds of the op, default and winner"
    result = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for heading in ("kernel", "case", "tried", "default", "winner", "gain", "limit"):
        result.add_column(heading, justify="left" if heading in ("kernel", "case") else "right", overflow="fold")
    result.add_column("what changed", overflow="fold", ratio=1)
    for one in found:
        winner, default = one.winner, one.default
        result.add_row(
            one.target.space.name, one.target.case.name, str(len(one.verdicts)), _number(default.microseconds),
            _number(winner.microseconds) if winner else "", f"{one.gain:.2f}", _number(roofline(one)),
            Text(outcome(one)),
        )  # fmt: skip
    return result


def _number(value: float) -> str:
    return "" if isnan(value) else f"{value:.4g}"


def summary(found: Sequence[Found], settings: Settings) -> str:
    """Sentences under the table."""
    better = sum(one.gain > 1.0 for one in found)
    unfinished = sum(not one.finished for one in found)
    count = f"{len(found)} kernels and sizes{f', {unfinished} of them not finished' if unfinished else ''}"
    tries = sum(len(one.verdicts) for one in found)
    gone = rejections(found)
    reasons = "; ".join(f"{n} {FATES.get(fate, 'dropped, as they cannot fit')}" for fate, n in gone.most_common())
    kind = (
        "by measurement"
        if settings.kind == "measured"
        else "by the estimate of docs/cost_model.md; nothing ran on a device"
    )
    return (
        f"{count}, {tries} tries, {better} with a better configuration than the default; "
        f"geometric mean of the gains {mean_gain(found):.3f} {kind}.\nNot counted: {reasons or 'none'}."
    )


def as_json(found: Sequence[Found], settings: Settings) -> str:
    """Everything, one entry for each kernel and size."""
    entries = [
        {
            "kernel": one.target.space.name, "key": one.target.bucketed, "case": str(one.target.case),
            "default": one.default.config, "winner": one.winner.config if one.winner else None, "gain": one.gain,
            "finished": one.finished, "note": one.note, "roofline_microseconds": roofline(one),
            "configurations": one.space if one.finished else None, "dropped": one.dropped if one.finished else None,
            "tries": [{k: v for k, v in _clean(asdict(verdict)).items() if k != "parts"} for verdict in one.verdicts],
        }
        for one in found
    ]  # fmt: skip
    content = {
        "family": settings.family.name, "kind": settings.kind, "chip": chip(settings.family, settings.timed),
        "versions": versions(), "mean_gain": mean_gain(found), "rejected": dict(rejections(found)), "results": entries,
    }  # fmt: skip
    return json.dumps(recorded(content), indent=1) + "\n"


def _clean(values: dict[str, Any]) -> dict[str, Any]:
    """Without the numbers that JSON has no form for."""
    return {name: None if isinstance(v, float) and not v < float("inf") else v for name, v in values.items()}


def as_html(found: Sequence[Found], settings: Settings) -> str:
    """One self-contained page: for each kernel its tries as points over their sizes, the default, the winner and the
    roofline limit, and how many tries each gate stopped."""
    head = html.escape(f"Tuning of {settings.family.title}, {chip(settings.family, settings.timed)}")
    parts = [f"<h1>{head}</h1>", f"<p>{html.escape(summary(found, settings))}</p>"]
    parts.append(f"<p>{html.escape(', '.join(f'{n} {v}' for n, v in versions().items()))}</p>")
    for space, group in spaces_of(found).items():
        parts.append(f"<h2>{html.escape(space.name)}: mean gain {mean_gain(group):.3f}</h2>")
        parts.append(f'<img src="data:image/png;base64,{_picture(group, settings)}">')
        parts.append(_rows(group))
    style = "body{font:14px sans-serif;margin:2em}table{border-collapse:collapse}td,th{padding:2px 8px;text-align:left}"
    return f'<!doctype html><meta charset="utf-8"><title>{head}</title><style>{style}</style>' + "\n".join(parts) + "\n"


def _rows(group: Sequence[Found]) -> str:
    heads = ("case", "default us", "winner us", "gain", "what changed", "not counted")
    rows = ["".join(f"<th>{head}</th>" for head in heads)]
    for one in group:
        reasons = ", ".join(f"{n} {fate}" for fate, n in rejections([one]).most_common())
        best = one.winner.microseconds if one.winner else float("nan")
        cells = (one.target.case.name, _number(one.default.microseconds), _number(best), f"{one.gain:.3f}",
                 outcome(one), reasons)  # fmt: skip
        rows.append("".join(f"<td>{html.escape(cell)}</td>" for cell in cells))
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def _picture(group: Sequence[Found], settings: Settings) -> str:
    """A PNG in base64: a column of points for each size, on a logarithmic scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(5.0, 1.1 * len(group) + 2), 3.6), layout="constrained")
    axes = figure.add_subplot()
    for column, one in enumerate(group):
        times = [verdict.microseconds for verdict in one.verdicts if verdict.ok]
        first = column == 0
        axes.plot([column] * len(times), times, ".", color="0.6", label="tries" if first else None)
        if one.default.ok:
            axes.plot(column, one.default.microseconds, "s", mfc="none", mec="tab:orange", ms=9,
                      label="default" if first else None)  # fmt: skip
        if one.winner is not None:
            axes.plot(column, one.winner.microseconds, "*", color="tab:green", ms=9, label="winner" if first else None)
        axes.hlines(roofline(one), column - 0.35, column + 0.35, color="tab:red", label="roofline" if first else "")
    axes.set_yscale("log")
    axes.set_ylabel(f"{settings.kind}, us")
    axes.set_xticks(range(len(group)), [one.target.case.name for one in group], rotation=30, ha="right", fontsize=7)
    axes.legend(fontsize=7)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return base64.b64encode(buffer.getvalue()).decode()
