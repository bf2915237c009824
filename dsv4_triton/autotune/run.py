"""A tuning run: every target searched, winners checked and written, and all of it kept so that it can be resumed."""

from __future__ import annotations

import fcntl
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import cache
from importlib import metadata
from math import isfinite
from pathlib import Path
from typing import Any

import dsv4_triton
from dsv4_triton.autotune import store
from dsv4_triton.autotune.search import Found, OutOfTimeError, check_cases, search
from dsv4_triton.autotune.space import UNCOUNTED
from dsv4_triton.autotune.trials import Mode, Target, Verdict, check_on_host, difference, time_in_turn, try_all
from dsv4_triton.bench.results import cpu_name
from dsv4_triton.bench.run import DeviceLostError, DeviceMissingError, device_named, problem_of
from dsv4_triton.compiler.ascend.jobs import Outcome, run_all
from dsv4_triton.compiler.cache import directory
from dsv4_triton.device import FAMILIES, HOST, Family
from dsv4_triton.offline.report import rounded

PACKAGES = ("dsv4-triton", "triton-ascend", "ascendnpu-ir", "llvmlite", "torch", "torch_npu")
_FAILURES = 3
"""So many winners of a target may fail the check before its default stays."""
_LOST = ("crash", "time")
"""Fates that a device without an answer has, too."""
_PROBE_SECONDS = 120.0
_NEAREST = 2
"""Parameters of other sizes that are tried before the space."""


class BusyError(RuntimeError):
    """Another process tunes the same family."""


@dataclass(frozen=True)
class Settings:
    """How to tune. minutes: for the whole run, None for no end. tries: for one key of a kernel, None for all that the
    search asks for. seconds: for one try. folder: where results go."""

    family: Family
    mode: Mode
    folder: Path
    jobs: int
    minutes: float | None = None
    tries: int | None = None
    seconds: float = 300.0
    resume: bool = False

    @property
    def timed(self) -> Mode:
        """The host has no offline compile: there tries are always run."""
        return "device" if self.family is HOST else self.mode

    @property
    def on_device(self) -> bool:
        """Whether tries run on a device, which can go away; this machine's own processor does not."""
        return self.mode == "device" and self.family is not HOST

    @property
    def fixed(self) -> frozenset[str]:
        """Parameters that are not searched: those of whose values an estimate ranks none before another."""
        return UNCOUNTED if self.timed == "offline" else frozenset()

    @property
    def kind(self) -> str:
        return "measured" if self.timed == "device" else "estimate"


def versions() -> dict[str, str]:
    """Versions of what decides how a kernel is compiled and run, of the packages that are there."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def chip(family: Family, mode: Mode) -> str:
    """What the results are for: the chip of the offline compile, the device, or this machine's processor."""
    if family is HOST:
        return cpu_name()
    return family.target if mode == "offline" else npu_name()


@cache
def npu_name() -> str:
    """The name of the first NPU, RuntimeError where there is none. A process of its own asks: torch_npu works in no
    fork of a process that has used the device, and every try is one."""
    found: list[Outcome] = []
    run_all([_npu_name], 1, 120.0, lambda _, outcome: found.append(outcome), nullcontext())
    if found[0].fate != "done" or not found[0].body:
        raise RuntimeError(f"torch_npu does not say which NPU this machine has: {found[0].message or 'no answer'}")
    return found[0].body.decode()


def _npu_name() -> bytes:
    import torch_npu

    return str(torch_npu.npu.get_device_name(0)).encode()


class Journal:
    """Verdicts on disk, a line each, so that an interrupted run can go on. They are those of a target in its case,
    whose time they are. What is of other sources, versions or another chip is left out when the journal is opened.
    `BusyError` while another process has it."""

    def __init__(self, settings: Settings):
        self.file = directory() / "tune" / f"{settings.family.name}-{settings.timed}.jsonl"
        self.stamp = _stamp(chip(settings.family, settings.timed))
        self.known: dict[str, dict[str, Verdict]] = {}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.lock = self.file.with_suffix(".lock").open("a")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.lock.close()
            raise BusyError(f"another process tunes {settings.family.name} here: {self.file} is in use") from None
        self._load()
        kept = [self._line(at, verdict) for at, group in self.known.items() for verdict in group.values()]
        store.replace_file(self.file, "".join(kept))
        self.stream = self.file.open("a")

    def close(self) -> None:
        self.stream.close()
        self.lock.close()

    def _load(self) -> None:
        for line in self.file.read_text().splitlines() if self.file.exists() else ():
            try:
                one = json.loads(line)
                if one["stamp"] != self.stamp:
                    continue
                if one["verdict"] is None:
                    self.known.pop(one["target"], None)
                    continue
                verdict = Verdict.from_dict(one["verdict"])
                self.known.setdefault(one["target"], {})[_name(verdict.config)] = verdict
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # a line that was cut off when the run was interrupted

    def _line(self, at: str, verdict: Verdict | None) -> str:
        content = {"stamp": self.stamp, "target": at, "verdict": None if verdict is None else asdict(verdict)}
        return json.dumps(content) + "\n"

    def _write(self, at: str, verdict: Verdict | None) -> None:
        self.stream.write(self._line(at, verdict))
        self.stream.flush()

    def add(self, target: Target, verdict: Verdict) -> None:
        self.known.setdefault(_at(target), {})[_name(verdict.config)] = verdict
        self._write(_at(target), verdict)

    def drop(self, target: Target) -> None:
        """Forget a target's verdicts: a line without one ends those before it."""
        if self.known.pop(_at(target), None):
            self._write(_at(target), None)

    def get(self, target: Target, config: Mapping[str, Any]) -> Verdict | None:
        return self.known.get(_at(target), {}).get(_name(config))

    def all_of(self, target: Target) -> list[Verdict]:
        return list(self.known.get(_at(target), {}).values())


def _at(target: Target) -> str:
    return f"{target.name} in {target.case}"


def _name(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


def _stamp(chip: str) -> str:
    """Digest of what verdicts depend on. Any source of the package may count: shapes, limits, options, counts."""
    digest = hashlib.sha256(json.dumps([chip, versions()]).encode())
    for file in sorted(Path(dsv4_triton.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def run(
    targets: Sequence[Target], settings: Settings, progress: Callable[[int, str, Found | None], None]
) -> list[Found]:
    """Tune `targets` in turn. After each its result is written to `settings.folder`; `progress(done, what, found)` is
    called with what is being tried, and with the result of a target when it is there.

    The end of the time leaves what was found; so does KeyboardInterrupt, which is raised again, and `DeviceLostError`
    when the device is gone. Then `progress` is given the tries of the target that was being tuned, of which nothing is
    written or returned. `BusyError` when another process tunes the family, `ConfigFileError` for a file of
    `settings.folder` that cannot be merged into.
    """
    journal = Journal(settings)
    end = None if settings.minutes is None else time.monotonic() + settings.minutes * 60
    known: dict[str, tuple[float, float, str]] = {}
    done: list[Found] = []
    try:
        for number, target in enumerate(targets):
            if not settings.resume:
                journal.drop(target)
            evaluate = _Evaluate(target, settings, journal, known, end, lambda what: progress(number, what, None))  # noqa: B023
            try:
                own = _own(target, settings)
                found = search(target, _seeds(target), evaluate, settings.tries, own=own, fixed=settings.fixed)
                _choose(found, settings, journal)
                _write(found, settings)
            except BaseException as error:
                if tried := journal.all_of(target):
                    progress(number, str(target), Found(target, tried, finished=False))
                if isinstance(error, OutOfTimeError):
                    break
                raise
            done.append(found)
            progress(number + 1, str(target), found)
    finally:
        journal.close()
    return done


def refuse_broken_files(targets: Sequence[Target], settings: Settings) -> None:
    """`ConfigFileError` for a file that results of `targets` could not be merged into, before minutes of work."""
    family = settings.family.name
    for name in sorted({target.space.name for target in targets}):
        store.read(store.path(settings.folder, family, name), family, name)


class _Evaluate:
    """Verdicts of configurations of one target, from the journal or by trying."""

    def __init__(
        self, target: Target, settings: Settings, journal: Journal, known: dict[str, tuple[float, float, str]],
        end: float | None, say: Callable[[str], None],
    ):  # fmt: skip
        self.target, self.settings, self.journal, self.known = target, settings, journal, known
        self.end, self.say = end, say
        self.best = float("inf")

    def __call__(self, configs: Sequence[dict[str, Any]]) -> list[Verdict]:
        if self.late:
            raise OutOfTimeError
        verdicts = {i: v for i, config in enumerate(configs) if (v := self.journal.get(self.target, config))}
        waiting = [i for i in range(len(configs)) if i not in verdicts]
        left = len(waiting)

        def say() -> None:
            if left:  # they start in this order, so many at once
                last = min(len(waiting) - left + self.at_once, len(waiting)) - 1
                self.say(self.words(configs[waiting[last]], left))

        def done(index: int, verdict: Verdict) -> None:
            nonlocal left
            left -= 1
            _refuse_a_lost_device(self.target, verdict, self.settings)
            verdicts[waiting[index]] = verdict
            self.journal.add(self.target, verdict)
            self.note(verdict)
            say()
            if left and self.late:
                raise OutOfTimeError

        for verdict in verdicts.values():
            self.note(verdict)
        say()
        try_all(
            [(self.target, configs[i]) for i in waiting], self.settings.timed, jobs=self.settings.jobs,
            seconds=self.settings.seconds, known=self.known, done=done,
        )  # fmt: skip
        return [verdicts[i] for i in range(len(configs))]

    @property
    def at_once(self) -> int:
        return self.settings.jobs if self.settings.timed == "offline" else 1

    def words(self, config: Mapping[str, Any], left: int) -> str:
        """What is being tried, and what was the best so far."""
        tried = f"{self.target}: {difference(config, self.target.default)}, {left} of this round left"
        return f"{tried}, best {self.best:.4g} us" if isfinite(self.best) else tried

    @property
    def late(self) -> bool:
        return self.end is not None and time.monotonic() > self.end

    def note(self, verdict: Verdict) -> None:
        if verdict.ok:
            self.best = min(self.best, verdict.microseconds)
        self.known.update(verdict.parts)


def _refuse_a_lost_device(target: Target, verdict: Verdict, settings: Settings) -> None:
    """`DeviceLostError` where a try ended as on a device that is gone, and the device does not answer in a process of
    its own either. Otherwise the verdict is about the configuration."""
    if not settings.on_device or verdict.fate not in _LOST:
        return
    found: list[Outcome] = []
    run_all([_answers], 1, _PROBE_SECONDS, lambda _, outcome: found.append(outcome), nullcontext())
    if found[0].fate != "done" or found[0].body:
        problem = found[0].body.decode() or found[0].message or "no answer"
        raise DeviceLostError(
            f"the NPU no longer answers: {problem}; {target} was tried with "
            f"{difference(verdict.config, target.default)}: {verdict.message}"
        )


def _answers() -> bytes:
    """Nothing, or why the NPU does not answer."""
    try:
        return problem_of(device_named("npu")).encode()
    except DeviceMissingError as error:
        return str(error).encode()


def _own(target: Target, settings: Settings) -> list[dict[str, Any]]:
    """What is on file for this key and family, in every folder whose entry the result replaces or hides."""
    family, kernel, key = target.family.name, target.space.name, target.bucketed
    entries = [store.entry_in(folder, family, kernel, key) for folder in (settings.folder, *store.folders())]
    return [entry.config for entry in entries if entry and entry.config]


def _seeds(target: Target) -> list[dict[str, Any]]:
    """Good places to begin: what is on file for this key, for any family, and for the nearest sizes of this one."""
    kernel, key = target.space.name, target.bucketed
    here = (store.lookup(family.name, kernel, key) for family in FAMILIES.values())
    near = store.nearby(target.family.name, kernel, key, target.space.buckets)
    return [config for config in here if config] + near[:_NEAREST]


def _choose(found: Found, settings: Settings, journal: Journal) -> None:
    """The best that passes the last gate. Offline that is the reference, which timed tries have passed already; where
    tries are timed it is the clock once more, in turn with the default."""
    for verdict in found.ranked()[:_FAILURES]:
        if settings.timed == "offline":
            last = check_on_host(found.target, verdict.config, list(check_cases(found.target)), settings.seconds)
        else:
            last = time_in_turn(found.target, verdict.config, settings.seconds)
            _refuse_a_lost_device(found.target, last, settings)
        if not last.ok:
            found.reject(last)
            journal.add(found.target, last)
            continue
        if settings.timed == "device":
            found.reject(replace(found.default, microseconds=last.against))
            found.reject(last)
            verdict = last
        found.winner = verdict
        return
    found.winner = found.default if found.default.ok else None


def _write(found: Found, settings: Settings) -> None:
    """Keep what won in the config file; nothing where not even the default works, or where an estimate would replace
    or hide what was measured."""
    target, winner = found.target, found.winner
    if winner is None:
        return
    if settings.kind == "estimate":
        for folder in store.folders() if settings.folder == store.folders()[0] else (settings.folder,):
            present = store.entry_in(folder, target.family.name, target.space.name, target.bucketed)
            if present and present.found.kind == "measured":
                file = store.path(folder, target.family.name, target.space.name)
                found.note = f"{target}: the estimate was not written, {file} has it measured"
                return
    entry = store.Entry(
        key=target.bucketed,
        config=None if winner is found.default else winner.config,
        default=target.default,
        found=store.Found(
            kind=settings.kind, microseconds=rounded(winner.microseconds),
            default_microseconds=rounded(found.default.microseconds if found.default.ok else winner.microseconds),
            case=str(target.case), chip=chip(target.family, settings.timed), date=date.today().isoformat(),
            versions=versions(),
        ),
    )  # fmt: skip
    found.file = store.write(settings.folder, target.family.name, target.space.name, [entry])
