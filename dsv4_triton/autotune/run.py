"""A tuning run: every target searched, winners checked and written, and all of it kept so that it can be resumed."""

from __future__ import annotations

import fcntl
import hashlib
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import dsv4_triton
from dsv4_triton.autotune import store
from dsv4_triton.autotune.search import Found, OutOfTimeError, check_cases, search
from dsv4_triton.autotune.trials import Mode, Target, Verdict, check_on_host, time_in_turn, try_all
from dsv4_triton.compiler.ascend.jobs import Outcome, run_all
from dsv4_triton.compiler.cache import directory
from dsv4_triton.device import FAMILIES, HOST, Family

PACKAGES = ("dsv4-triton", "triton-ascend", "ascendnpu-ir", "torch", "torch_npu")
_FAILURES = 3
"""So many winners of a target may fail the check before its default stays."""
_LOST = ("crash", "time")
"""Fates that a device without an answer has, too."""
_SOURCES = ("kernels", "compiler", "bench/registry", "autotune")


class DeviceLostError(RuntimeError):
    """Not even the default runs on the device any more."""


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
        return platform.processor() or platform.machine()
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
    """Verdicts on disk, a line each, so that an interrupted run can go on. Those of other sources or versions do not
    count, nor do tries that crashed or hung on a device: it may have been at fault. `BusyError` while another process
    has it."""

    def __init__(self, settings: Settings):
        self.file = directory() / "tune" / f"{settings.family.name}-{settings.timed}.jsonl"
        self.stamp = _stamp()
        self.forgiven = _LOST if settings.on_device else ()
        self.known: dict[tuple[str, str], Verdict] = {}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.stream = self.file.open("a")
        try:
            fcntl.flock(self.stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.stream.close()
            raise BusyError(f"another process tunes {settings.family.name} here: {self.file} is locked") from None
        if settings.resume:
            self._load()
        else:
            self.stream.truncate(0)

    def _load(self) -> None:
        for line in self.file.read_text().splitlines():
            try:
                one = json.loads(line)
                if one["stamp"] == self.stamp and one["verdict"]["fate"] not in self.forgiven:
                    verdict = Verdict(**one["verdict"])
                    parts = {name: tuple(part) for name, part in verdict.parts.items()}
                    self.known[one["target"], _name(verdict.config)] = Verdict(**{**vars(verdict), "parts": parts})
            except (ValueError, KeyError, TypeError):
                continue  # a line that was cut off when the run was interrupted

    def add(self, target: Target, verdict: Verdict) -> None:
        self.known[target.name, _name(verdict.config)] = verdict
        line = {"stamp": self.stamp, "target": target.name, "verdict": asdict(verdict)}
        self.stream.write(json.dumps(line) + "\n")
        self.stream.flush()

    def get(self, target: Target, config: Mapping[str, Any]) -> Verdict | None:
        return self.known.get((target.name, _name(config)))


def _name(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


def _stamp() -> str:
    """Digest of what verdicts depend on."""
    digest = hashlib.sha256(json.dumps(versions()).encode())
    root = Path(dsv4_triton.__file__).parent
    for folder in _SOURCES:
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def run(
    targets: Sequence[Target], settings: Settings, progress: Callable[[int, str, Found | None], None]
) -> list[Found]:
    """Tune `targets` in turn. After each its result is written to `settings.folder`; `progress(done, what, found)` is
    called with what is being tried, and with the result of a target when it is there.

    The end of the time leaves what was found; so does KeyboardInterrupt, which is raised again, and `DeviceLostError`
    when the device is gone. `BusyError` when another process tunes the family.
    """
    journal = Journal(settings)
    end = None if settings.minutes is None else time.monotonic() + settings.minutes * 60
    known: dict[str, tuple[float, float, str]] = {}
    done: list[Found] = []
    try:
        for number, target in enumerate(targets):
            evaluate = _Evaluate(target, settings, journal, known, end, lambda what: progress(number, what, None))  # noqa: B023
            try:
                found = search(target, _seeds(target), evaluate, settings.tries)
            except OutOfTimeError:
                break
            _choose(found, settings, journal)
            done.append(found)
            _write(found, settings)
            progress(number + 1, str(target), found)
    finally:
        journal.stream.close()
    return done


class _Evaluate:
    """Verdicts of configurations of one target, from the journal or by trying."""

    def __init__(
        self, target: Target, settings: Settings, journal: Journal, known: dict[str, tuple[float, float, str]],
        end: float | None, say: Callable[[str], None],
    ):  # fmt: skip
        self.target, self.settings, self.journal, self.known = target, settings, journal, known
        self.end, self.say = end, say
        self.best, self.first = float("inf"), True

    def __call__(self, configs: Sequence[dict[str, Any]]) -> list[Verdict]:
        if self.late:
            raise OutOfTimeError
        verdicts = {i: v for i, config in enumerate(configs) if (v := self.journal.get(self.target, config))}
        waiting = [i for i in range(len(configs)) if i not in verdicts]
        left = len(waiting)

        def done(index: int, verdict: Verdict) -> None:
            nonlocal left
            left -= 1
            verdicts[waiting[index]] = verdict
            self.journal.add(self.target, verdict)
            self.note(verdict)
            self.say(f"{self.target}: {left} of this round left, best {self.best:.4g} us")
            if left and self.late:
                raise OutOfTimeError

        for verdict in verdicts.values():
            self.note(verdict)
        self.say(f"{self.target}: {len(waiting)} to try, best {self.best:.4g} us")
        try_all(
            [(self.target, configs[i]) for i in waiting], self.settings.timed, jobs=self.settings.jobs,
            seconds=self.settings.seconds, known=self.known, done=done,
        )  # fmt: skip
        ordered = [verdicts[i] for i in range(len(configs))]
        if self.first and self.settings.on_device and ordered[0].fate in _LOST:
            raise DeviceLostError(f"{self.target} does not run with its default: {ordered[0].message}")
        self.first = False
        return ordered

    @property
    def late(self) -> bool:
        return self.end is not None and time.monotonic() > self.end

    def note(self, verdict: Verdict) -> None:
        if verdict.ok:
            self.best = min(self.best, verdict.microseconds)
        self.known.update(verdict.parts)


def _seeds(target: Target) -> list[dict[str, Any]]:
    """What is on file for this key, for any family: good places to begin."""
    found = []
    for family in (target.family, *FAMILIES.values()):
        config = store.lookup(family.name, target.space.name, target.bucketed)
        if config:
            found.append(config)
    return found


def _choose(found: Found, settings: Settings, journal: Journal) -> None:
    """The best that passes the last gate. Offline that is the reference, which timed tries have passed already; where
    tries are timed it is the clock once more, in turn with the default."""
    for verdict in found.ranked()[:_FAILURES]:
        if settings.timed == "offline":
            last = check_on_host(found.target, verdict.config, list(check_cases(found.target)), settings.seconds)
        else:
            last = time_in_turn(found.target, verdict.config, settings.seconds)
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
    """Keep what won in the config file; nothing where not even the default works."""
    target, winner = found.target, found.winner
    if winner is None:
        return
    entry = store.Entry(
        key=target.bucketed,
        config=None if winner is found.default else winner.config,
        default=target.default,
        found=store.Found(
            kind=settings.kind, microseconds=_rounded(winner.microseconds),
            default_microseconds=_rounded(found.default.microseconds if found.default.ok else winner.microseconds),
            case=str(target.case), chip=chip(target.family, settings.timed), date=date.today().isoformat(),
            versions=versions(),
        ),
    )  # fmt: skip
    store.write(settings.folder, target.family.name, target.space.name, [entry])


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")
