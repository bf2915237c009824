"""Config files as a whole: what is there, whether it still holds, and carrying it from one machine to another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from dsv4_triton.autotune import store
from dsv4_triton.autotune.run import versions
from dsv4_triton.autotune.search import asked, check_cases, spaces
from dsv4_triton.autotune.space import Asked
from dsv4_triton.autotune.store import ConfigFileError, Entry
from dsv4_triton.autotune.trials import Mode, Target, Verdict, check_on_host, try_all
from dsv4_triton.bench.registry import cases as all_cases
from dsv4_triton.device import FAMILIES, HOST

_DECIDE = ("triton-ascend", "ascendnpu-ir")
"""Packages whose version decides what a configuration is worth."""


@dataclass(frozen=True)
class Line:
    """One entry of a file, and where it is. `hidden`: the user's folder has one of the same key."""

    folder: Path
    family: str
    kernel: str
    entry: Entry
    hidden: bool = False

    @property
    def old(self) -> str:
        """What has changed since it was found: packages with another version now, or a kernel that is gone; "" when
        nothing has."""
        if self.kernel not in spaces():
            return "there is no such kernel any more"
        now, then = versions(), self.entry.found.versions
        changed = [f"{name} {then.get(name, 'none')} -> {now.get(name, 'none')}" for name in _DECIDE
                   if then.get(name) != now.get(name)]  # fmt: skip
        return ", ".join(changed)


def lines(families: Iterable[str], kernels: Sequence[str] = ()) -> tuple[list[Line], list[str]]:
    """All entries of both folders, and what is wrong with files that cannot be used."""
    found: dict[tuple[Any, ...], Line] = {}
    hidden: list[Line] = []
    problems = []
    for family in families:
        for folder in store.folders():
            for file in sorted((folder / family).glob("*.json")):
                if kernels and file.stem not in kernels:
                    continue
                try:
                    entries = store.read(file, family, file.stem)
                except ConfigFileError as error:
                    problems.append(str(error))
                    continue
                for entry in entries:
                    at = family, file.stem, entry.at
                    line = Line(folder, family, file.stem, entry, hidden=at in found)
                    if line.hidden:
                        hidden.append(line)
                    else:
                        found[at] = line
    return [*found.values(), *hidden], problems


@dataclass(frozen=True)
class Gain:
    """What the entries of a kernel on a family gave that were found in one way: how many there are, how many of them
    have a better configuration than the default, the sums of both times, and the geometric mean of the gains."""

    family: str
    kernel: str
    kind: str
    entries: int
    winners: int
    default_microseconds: float
    microseconds: float
    gain: float


def gains(found: Iterable[Line]) -> list[Gain]:
    """The gains by family, kernel and kind, and after those of a family and kind the one of all its kernels (`all`).
    Entries that the user's folder hides do not count."""
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for line in found:
        if not line.hidden:
            for kernel in line.kernel, "all":
                groups.setdefault((line.family, line.entry.found.kind, kernel), []).append(line.entry)
    rows = []
    for at in sorted(groups, key=lambda at: (at[0], at[1], at[2] == "all", at[2])):
        (family, kind, kernel), entries = at, groups[at]
        results = [entry.found for entry in entries]
        rows.append(
            Gain(
                family, kernel, kind, len(entries), sum(entry.config is not None for entry in entries),
                sum(one.default_microseconds for one in results), sum(one.microseconds for one in results),
                geometric_mean(one.gain for one in results),
            )
        )  # fmt: skip
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
        for source in sorted((folder / family).glob("*.json"))
        for entry in store.read(source, family, source.stem)
    ]


def import_from(file: Path, folder: Path) -> dict[tuple[str, str], int]:
    """Merge what `exported` gave into the config files of `folder`: entries by (family, kernel). Nothing is written
    unless all of it can be used."""
    content = store.content_of(file)
    entries = store.entries_of(content, str(file), {"schema": store.SCHEMA})
    groups: dict[tuple[str, str], list[Entry]] = {}
    for i, (entry, raw) in enumerate(zip(entries, content["entries"])):
        family, kernel = _known(raw, "family", FAMILIES, file, i), _known(raw, "kernel", spaces(), file, i)
        groups.setdefault((family, kernel), []).append(entry)
    for family, kernel in groups:
        store.read(store.path(folder, family, kernel), family, kernel)
    for (family, kernel), group in groups.items():
        store.write(folder, family, kernel, group)
    return {at: len(group) for at, group in groups.items()}


def _known(raw: Mapping[str, Any], name: str, there: Mapping[str, Any], file: Path, i: int) -> str:
    value = raw.get(name)
    if not isinstance(value, str) or value not in there:
        raise ConfigFileError(f"{file}: entries[{i}].{name} is {value!r}, expected one of {', '.join(sorted(there))}")
    return str(value)
