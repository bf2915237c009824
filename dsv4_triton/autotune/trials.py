"""One configuration tried: does it pass the gates, and how long does it take.

Every try runs in a process of its own, so that a crash, a hang or a lack of memory costs this try alone. Offline a try
is compiled for the family and counted by the cost model; on the host and on an NPU it is run and timed. All of them are
held to the reference: offline those that are about to win, where it is run the very inputs that are timed.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import inf, nan, sqrt
from typing import Any, Literal

import torch

from dsv4_triton import offline
from dsv4_triton.autotune.space import Space, Trial, active, trial
from dsv4_triton.bench.registry import Case, MismatchError
from dsv4_triton.bench.run import bounded_memory, is_lack_of_memory
from dsv4_triton.compiler import host
from dsv4_triton.compiler.ascend import compile_all
from dsv4_triton.compiler.ascend.jobs import Outcome, run_all
from dsv4_triton.compiler.ascend.result import CompileResult
from dsv4_triton.device import HOST, Family, acting_as
from dsv4_triton.offline import Compiled

Mode = Literal["offline", "device"]
SAMPLES = 25
"""Timed runs of a try where it is run; the median counts."""
TIMED_SECONDS = 1.5
"""No further run starts after so long."""
TURNS = 200
"""The same where a configuration and the default take turns."""
DEVICE_SAMPLES = 4
"""Both on a device, where each time is a mean of many runs already."""
MIN_SAMPLES = 4
GAIN = 1.01
"""A configuration wins that is faster than the default by more than this factor."""


@dataclass(frozen=True)
class Target:
    """One kernel at one key: what is tuned. `case` is the one whose time decides, `key` as the launcher gave it."""

    space: Space
    family: Family
    key: dict[str, Any]
    case: Case

    @property
    def bucketed(self) -> dict[str, Any]:
        return self.space.bucketed(self.key)

    @property
    def default(self) -> dict[str, Any]:
        return self.space.computed(self.family, self.key)

    @property
    def name(self) -> str:
        """Readable and unique on a family."""
        return f"{self.space.name} {json.dumps(self.bucketed, sort_keys=True)}"

    def __str__(self) -> str:
        return f"{self.space.name} {self.case.name}"


@dataclass(frozen=True)
class Verdict:
    """What became of a try.

    fate: ok, or the gate that it did not pass: compile, memory, fallback, faults, unknown (the cost model cannot count
        it), wrong (it differs from the reference), crash, time, unused (the op never asked for these parameters),
        no gain (timed in turn with the default it was not faster).
    microseconds: the whole op, nan unless ok. against: the default's, where both were timed in turn.
    effort: breaks ties, microseconds of all resources together. limit: what the longest launch waits for.
    launches: how many there are, where they are estimated. parts: seconds of each launch by its fingerprint.
    """

    config: dict[str, Any]
    fate: str
    message: str = ""
    microseconds: float = nan
    against: float = nan
    effort: float = inf
    limit: str = ""
    launches: int = 0
    parts: dict[str, tuple[float, float, str]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.fate == "ok"

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Verdict:
        """The verdict whose `asdict` went through JSON; KeyError or TypeError for anything else."""
        return cls(**{**content, "parts": {name: tuple(part) for name, part in content["parts"].items()}})


def difference(config: Mapping[str, Any], default: Mapping[str, Any]) -> str:
    """What of `config` is not the default's."""
    changed = [f"{name}={value}" for name, value in config.items() if default.get(name) != value]
    return " ".join(changed) or "default"


def try_all(
    tries: Sequence[tuple[Target, Mapping[str, Any]]],
    mode: Mode,
    *,
    jobs: int,
    seconds: float,
    known: Mapping[str, tuple[float, float, str]],
    done: Callable[[int, Verdict], None],
) -> None:
    """Try configurations, at most `jobs` at once and each within `seconds`; `done(index, verdict)` as they end.

    `known` are parts that earlier verdicts counted already. Where tries are timed they run one at a time.
    """
    run = _estimated if mode == "offline" else _timed
    work = [partial(_encoded, run, target, dict(config), known) for target, config in tries]

    def finish(index: int, outcome: Outcome) -> None:
        config = dict(tries[index][1])
        if outcome.fate == "done":
            done(index, Verdict.from_dict(json.loads(outcome.body)))
        else:
            done(index, Verdict(config, outcome.fate, outcome.message or outcome.fate))

    run_all(work, jobs if mode == "offline" else 1, seconds, finish, nullcontext())


def sizes(case: Case, family: Family) -> tuple[int, int]:
    """Bytes of a case's arguments that are written, and of those that stay addresses: experts that nobody chose."""
    limits = case.entry.touched(case.job(family))
    whole = {name: t.numel() * t.itemsize for name, t in case.build(family, fill=False).tensors.items()}
    written = sum(min(size, limits.get(name, size)) for name, size in whole.items())
    return written, sum(whole.values()) - written


def _encoded(run: Callable[..., Verdict], target: Target, config: dict[str, Any], known: Any) -> bytes:
    torch.set_num_threads(1)  # torch's own threads have stayed behind in the parent
    try:
        verdict = run(target, config, known)
    except MismatchError as error:
        verdict = Verdict(config, "wrong", str(error))
    except Exception as error:
        # Whatever a launcher or the host compiler says of these parameters is a finding about them.
        fate = "memory" if is_lack_of_memory(error) else "crash"
        verdict = Verdict(config, fate, f"{type(error).__name__}: {error}"[:400])
    return json.dumps(asdict(verdict)).encode()


def _compiled(target: Target, config: dict[str, Any]) -> list[Compiled] | Verdict:
    """The launches of a try compiled for its family, or the gate that they do not pass."""
    with trial({target.space.name: config}, target.bucketed) as tried:
        recorded = offline.record(target.case, target.family)
    if target.space.name not in tried.used:
        return Verdict(config, "unused", f"{target.case} does not ask for these parameters")
    results = compile_all([one.launch for one in recorded], target.family, jobs=1)
    for result in results:
        if gate := _gate(result, target.family):
            return Verdict(config, *gate)
    return [one.compiled(target.case, result) for one, result in zip(recorded, results)]


def _estimated(target: Target, config: dict[str, Any], known: Mapping[str, tuple[float, float, str]]) -> Verdict:
    family, launches = target.family, _compiled(target, config)
    if isinstance(launches, Verdict):
        return launches
    parts: dict[str, tuple[float, float, str]] = {}
    total, effort, slowest, limit = 0.0, 0.0, -1.0, ""
    for number, compiled in enumerate(launches):
        name = _fingerprint(target.case, number, compiled)
        part = known.get(name) or parts.get(name)
        if part is None:
            cost = compiled.cost(family)
            if not cost.known:
                return Verdict(config, "unknown", f"{compiled.result.kernel}: a count depends on data")
            part = cost.seconds, sum(cost.estimate.resources.values()), cost.estimate.resource
        parts[name] = part
        total, effort = total + part[0], effort + part[1]
        if part[0] > slowest:
            slowest, limit = part[0], part[2]
    return Verdict(config, "ok", "", total * 1e6, nan, effort * 1e6, limit, len(launches), parts)


def _gate(result: CompileResult, family: Family) -> tuple[str, str] | None:
    """Why a compiled kernel cannot win: the gate and the words for it."""
    if not result.ok:
        return ("memory" if result.said.overflows else "compile" if result.status == "failed" else result.status,
                result.message)  # fmt: skip
    assert result.facts is not None
    limits = {"UB": family.ub_bytes, "L1": family.l1_bytes, "L0C": family.l0c_bytes}
    for memory, limit in limits.items():
        if result.facts.used(memory) > limit:
            return "memory", f"{result.kernel}: {result.facts.used(memory)} bytes of {memory}, there are {limit}"
    if result.faults:
        return "faults", f"{result.kernel}: {result.faults[0]}"
    if result.losses:
        return "fallback", f"{result.kernel}: {result.losses[0]}"
    return None


def _fingerprint(case: Case, number: int, one: Compiled) -> str:
    """Equal for launches of a case whose counts are equal: same code, grid, numbers and shapes."""
    launch = one.launch
    assert launch is not None
    values = [
        f"{name}={(tuple(v.shape), v.stride()) if isinstance(v, torch.Tensor) else v}"
        for name, v in launch.arguments.items()
    ]
    text = [case.op, case.name, str(number), launch.kernel.__name__, str(launch.grid), str(launch.signature.types)]
    text += [str(launch.signature.constants), str(launch.options), *values, str(sorted(one.scratch)), one.result.family]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:24]


def _timed(target: Target, config: dict[str, Any], known: Mapping[str, Any]) -> Verdict:
    """Run on the family's device, or on this machine for `host`: first against the reference, then on the clock. For a
    device it is compiled before as it is offline, so that no fallback or full memory is timed."""
    if target.family is not HOST and isinstance(refused := _compiled(target, config), Verdict):
        return refused
    with _kernels(target):
        inputs = target.case.build(target.family, device=_device(target))
        with trial({target.space.name: config}, target.bucketed) as tried:
            target.case.check(inputs, target.family)
        if target.space.name not in tried.used:
            return Verdict(config, "unused", f"{target.case} does not ask for these parameters")
        [times] = _times(target, [config], inputs.copy().arguments, SAMPLES)
    return Verdict(config, "ok", "", statistics.median(times))


def _device(target: Target) -> str:
    return "cpu" if target.family is HOST else "npu"


@contextmanager
def _kernels(target: Target) -> Iterator[None]:
    """What makes kernels launch where the target is timed, and on the host a bound of its memory."""
    if target.family is not HOST:
        yield
        return
    with _bounded(target), host.installed():
        yield


def _bounded(target: Target) -> AbstractContextManager[None]:
    return bounded_memory(torch.device("cpu"), sizes(target.case, target.family)[1])


def _times(
    target: Target, configs: Sequence[dict[str, Any]], arguments: dict[str, Any], samples: int
) -> list[list[float]]:
    """Microseconds of runs of the op with each of `configs`, which take turns: all see the same disturbances."""
    call = partial(target.case.launcher, **arguments)
    tried = [Trial({target.space.name: config}, target.bucketed) for config in configs]
    measure, samples = (_host_time, samples) if target.family is HOST else (_npu_time, DEVICE_SAMPLES)
    times: list[list[float]] = [[] for _ in configs]

    def turn() -> Iterator[float]:
        for one in tried:
            with active(one):
                yield measure(call)

    list(turn())  # compiles
    end = time.perf_counter() + TIMED_SECONDS * len(configs)
    while len(times[0]) < samples and (len(times[0]) < MIN_SAMPLES or time.perf_counter() < end):
        for mine, microseconds in zip(times, turn(), strict=True):
            mine.append(microseconds)
    return times


def _host_time(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def _npu_time(call: Callable[[], Any]) -> float:
    """Device time by torch_npu's profiler, with L2 cleared before each run (triton-ascend's own benchmark)."""
    from triton.backends.ascend.testing import do_bench_npu

    return float(do_bench_npu(call, clear_l2_cache=True))


def time_in_turn(target: Target, config: Mapping[str, Any], seconds: float) -> Verdict:
    """Time `config` and the default in turn, in one process: tries that ran one after the other may have met another
    load of the machine. It is ok where it is faster by `GAIN`, in the median turn and in the medians, and in so many
    turns that chance, which is faster in half of them, lies two standard deviations below."""
    return _alone(_in_turn, target, config, seconds)


def _in_turn(target: Target, config: dict[str, Any], known: Mapping[str, Any]) -> Verdict:
    with _kernels(target):
        inputs = target.case.build(target.family, device=_device(target))
        mine, others = _times(target, [config, target.default], inputs.arguments, TURNS)
    ratios = [other / one for one, other in zip(mine, others, strict=True)]
    faster, turns = sum(ratio > 1 for ratio in ratios), len(ratios)
    median, against = statistics.median(mine), statistics.median(others)
    gain = min(statistics.median(ratios), against / median)
    if gain > GAIN and faster >= turns / 2 + sqrt(turns):
        return Verdict(config, "ok", "", median, against)
    return Verdict(config, "no gain", f"faster than the default in {faster} of {turns} turns, "
                   f"{gain:.3f} times as fast in the median")  # fmt: skip


def _alone(run: Callable[..., Verdict], target: Target, config: Mapping[str, Any], seconds: float) -> Verdict:
    """What `run` says of a configuration, in a process of its own."""
    found: list[Outcome] = []
    run_all([partial(_encoded, run, target, dict(config), {})], 1, seconds,
            lambda _, outcome: found.append(outcome), nullcontext())  # fmt: skip
    if found[0].fate != "done":
        return Verdict(dict(config), found[0].fate, found[0].message)
    return Verdict.from_dict(json.loads(found[0].body))


def check_on_host(target: Target, config: Mapping[str, Any], cases: Sequence[Case], seconds: float) -> Verdict:
    """Run the op with `config` on the host as the family would, against the reference; `fate` is ok, wrong or another.

    It runs on the smallest of `cases` in which this configuration fits and is used: kernels do not know how long a step
    is, and what depends on widths and heads is the same in all cases of a model.
    """
    verdict = Verdict(dict(config), "unused", "no case small enough for the host uses it")
    for case in cases:
        verdict = _alone(_checked, replace(target, case=case), config, seconds)
        if verdict.fate != "unused":
            break
    return verdict


def _checked(target: Target, config: dict[str, Any], known: Mapping[str, Any]) -> Verdict:
    configs = {target.space.name: config}
    with trial(configs) as tried:
        offline.record(target.case, target.family)
    if target.space.name not in tried.used:
        return Verdict(config, "unused", f"{target.case} does not use it")
    with _bounded(target), acting_as(target.family), host.installed(), trial(configs):
        target.case.check(target.case.build(target.family), target.family)
    return Verdict(config, "ok")


def cores() -> int:
    """Processes at once by default."""
    return len(os.sched_getaffinity(0))
