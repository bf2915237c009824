"""Config files as a whole: what is there, whether it still holds, and carrying it from one machine to another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from dsv4_triton.autotune import store
from dsv4_triton.autotune.run import versions
from dsv4_triton.autotune.search import asked, check_cases, spaces
from dsv4_triton.autotune.space import Asked, Space
from dsv4_triton.autotune.store import ConfigFileError, Entry
from dsv4_triton.autotune.trials import Mode, Target, Verdict, check_on_host, difference, try_all
from dsv4_triton.bench.registry import cases as all_cases
from dsv4_triton.device import FAMILIES, HOST, Family

_DECIDE = ("triton-ascend", "ascendnpu-ir")
"""Packages whose version decides what a configuration is worth."""
ALL = "all listed"
"""The name of what the listed kernels gave together."""


@dataclass(frozen=True)
class Line:
    """One entry of a file, and where it is.

    hidden: the user's folder has one of the same key.
    old: what has changed since it was found, "" when nothing has: packages with another version now, the computed
        default, or a kernel that is gone.
    """

    folder: Path
    family: str
    kernel: str
    entry: Entry
    hidden: bool = False
    old: str = ""


def _changed(entry: Entry, family: Family, space: Space | None, now: Mapping[str, str]) -> str:
    """`Line.old` of an entry, with the space of its kernel, and packages `now`."""
    if space is None:
        return "there is no such kernel any more"
    then = entry.found.versions
    changed = [f"{name} {then.get(name, 'none')} -> {now.get(name, 'none')}" for name in _DECIDE
               if then.get(name) != now.get(name)]  # fmt: skip
    try:
        changed.append(changed_default(entry, space.computed(family, key_of(entry))))
    except Exception:  # a default counts on what its launcher asks, and a file may hold any key
        changed.append("no launch asks for its key")
    return ", ".join(filter(None, changed))


def key_of(entry: Entry) -> dict[str, Any]:
    """The key of a launch that an entry is for: what in its key names a dtype, is that dtype."""
    named = {name: getattr(torch, value, None) for name, value in entry.key.items() if isinstance(value, str)}
    return entry.key | {name: dtype for name, dtype in named.items() if isinstance(dtype, torch.dtype)}


def changed_default(entry: Entry, now: Mapping[str, Any]) -> str:
    """ "" or what the default is `now` that was another when the entry was found. Then an entry that stands for the
    default means what nobody tried, and a winner may be worse than it. What either does not name is None."""
    changed = difference(dict.fromkeys(entry.default) | dict(now), entry.default)
    return "" if changed == "default" else f"its default is now {changed}"


def lines(families: Iterable[str], kernels: Sequence[str] = ()) -> tuple[list[Line], list[str]]:
    """All entries of both folders, and what is wrong with files that cannot be used."""
    found: dict[tuple[Any, ...], Line] = {}
    hidden: list[Line] = []
    problems = []
    there, now = spaces(), versions()
    for family in families:
        for folder in store.folders():
            try:
                files = store.files(folder, family)
            except ConfigFileError as error:
                problems.append(str(error))
                continue
            for file in files:
                if kernels and file.stem not in kernels:
                    continue
                try:
                    entries = store.read(file, family, file.stem)
                except ConfigFileError as error:
                    problems.append(str(error))
                    continue
                for entry in entries:
                    at = family, file.stem, entry.at
                    old = _changed(entry, FAMILIES[family], there.get(file.stem), now)
                    line = Line(folder, family, file.stem, entry, hidden=at in found, old=old)
                    if line.hidden:
                        hidden.append(line)
                    else:
                        found[at] = line
    return [*found.values(), *hidden], problems


@dataclass(frozen=True)
class Gain:
    """What the entries of a kernel on a family gave that were found in one way: how many there are, how many of them
    have a better configuration than the default, the sums of both times of the op, and the geometric mean of the gains.
    Kernels of one op have its whole time each, so over several there are no sums."""

    family: str
    kernel: str
    kind: str
    entries: int
    winners: int
    default_microseconds: float | None
    microseconds: float | None
    gain: float


def gains(found: Iterable[Line]) -> list[Gain]:
    """The gains by family, kernel and kind, and after those of a family and kind the one of all of them (`ALL`).
    Entries that the user's folder hides do not count."""
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for line in found:
        if not line.hidden:
            for kernel in line.kernel, ALL:
                groups.setdefault((line.family, line.entry.found.kind, kernel), []).append(line.entry)
    rows = []
    for at in sorted(groups, key=lambda at: (at[0], at[1], at[2] == ALL, at[2])):
        (family, kind, kernel), entries = at, groups[at]
        results = [entry.found for entry in entries]
        sums = sum(one.default_microseconds for one in results), sum(one.microseconds for one in results)
        default, best = (None, None) if kernel == ALL else sums
        winners = sum(entry.config is not None for entry in entries)
        mean = geometric_mean(one.gain for one in results)
        rows.append(Gain(family, kernel, kind, len(entries), winners, default, best, mean))
    return rows


def targets_of(found: Iterable[Line]) -> tuple[list[tuple[Target, Line]], list[tuple[Line, str]]]:
    """The target of each entry by the case it was found with; and the entries that nothing asks for any more, or that
    a launch leaves out."""
    targets, lost = [], []
    asking: dict[tuple[str, str], list[Asked]] = {}
    cases = {str(case): case for case in all_cases()}
    for line in found:
        family, case = FAMILIES[line.family], cases.get(line.entry.found.case)
        if case is None or not case.runs_on(family):
            lost.append((line, f"there is no case {line.entry.found.case!r} for {line.family}"))
            continue
        at = line.family, str(case)
        if at not in asking:
            asking[at] = asked(case, family)
        matching = [
            Target(space, family, key, case)
            for space, _, key in asking[at]
            if space.name == line.kernel and space.bucketed(key) == line.entry.key
        ]
        if not matching:
            lost.append((line, f"{case} does not ask {line.kernel} for this key"))
            continue
        target = matching[0]
        problem = target.space.unlike(family, target.key, _config(target, line))
        if problem:
            lost.append((line, f"it {problem}"))
        else:
            targets.append((target, line))
    return targets, lost


def _config(target: Target, line: Line) -> dict[str, Any]:
    """The parameters that an entry stands for."""
    config = line.entry.config
    return target.space.completed(target.family, target.key, config) if config else target.default


def verify(
    checked: Sequence[tuple[Target, Line]], *, jobs: int, seconds: float, progress: Callable[[int, int, str], None]
) -> Iterator[tuple[Line, Verdict]]:
    """Every entry through all gates with the installed toolchain: it compiles, fits and links for its family and equals
    the reference on the host; entries that say that the default is best, too. What several sizes of a model share is
    held to the reference once. On the host family every entry is run in its own case."""
    held: dict[tuple[Any, ...], Verdict] = {}
    for number, (target, line) in enumerate(checked):
        progress(number, len(checked), f"{line.family} {target}")
        config = _config(target, line)
        verdicts: list[Verdict] = []
        mode: Mode = "device" if target.family is HOST else "offline"
        try_all([(target, config)], mode, jobs=jobs, seconds=seconds, known={},
                done=lambda _, verdict: verdicts.append(verdict))  # noqa: B023  # fmt: skip
        verdict, case = verdicts[0], target.case
        if verdict.ok and mode == "offline":
            at = line.family, line.kernel, case.op, case.model, case.variant, json.dumps(config)
            if at not in held:
                held[at] = check_on_host(target, config, list(check_cases(target)), seconds)
            verdict = held[at]
        yield line, verdict


def exported(folder: Path, families: Sequence[str]) -> list[dict[str, Any]]:
    """All entries of a folder as one file has them. `ConfigFileError` for a file that cannot be read: an export is
    whole or not made."""
    return [
        {"family": family, "kernel": source.stem, **asdict(entry)}
        for family in families
        for source in store.files(folder, family)
        for entry in store.read(source, family, source.stem)
    ]


def import_from(file: Path, folder: Path) -> dict[tuple[str, str], tuple[int, int]]:
    """Merge what `exported` gave into the config files of `folder`: by (family, kernel) how many entries, and how many
    estimates were left out because what is there was measured. Nothing is written unless all of it can be used."""
    content = store.content_of(file)
    entries = store.entries_of(content, str(file), {"schema": store.SCHEMA})
    groups: dict[tuple[str, str], list[Entry]] = {}
    for i, (entry, raw) in enumerate(zip(entries, content["entries"])):
        family, kernel = _known(raw, "family", FAMILIES, file, i), _known(raw, "kernel", spaces(), file, i)
        groups.setdefault((family, kernel), []).append(entry)
    merged: dict[tuple[str, str], list[Entry]] = {}
    for (family, kernel), group in groups.items():
        present = store.read(store.path(folder, family, kernel), family, kernel)
        measured = {entry.at for entry in present if entry.found.kind == "measured"}
        merged[family, kernel] = [e for e in group if e.found.kind == "measured" or e.at not in measured]
    for (family, kernel), group in merged.items():
        if group:
            store.write(folder, family, kernel, group)
    return {at: (len(merged[at]), len(group) - len(merged[at])) for at, group in groups.items()}


def _known(raw: Mapping[str, Any], name: str, there: Mapping[str, Any], file: Path, i: int) -> str:
    value = store.field_of(raw, name, str(file), f"entries[{i}].")
    if not isinstance(value, str) or value not in there:
        raise ConfigFileError(f"{file}: entries[{i}].{name} is {value!r}, expected one of {', '.join(sorted(there))}")
    return str(value)
