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
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from math import inf, nan
from typing import Any, Literal

import torch

from dsv4_triton import offline
from dsv4_triton.autotune.space import Space, trial
from dsv4_triton.bench.registry import Case, MismatchError
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
        it), wrong (it differs from the reference), crash, time, unused (the op never asked for these parameters).
    microseconds: the whole op, nan unless ok. effort: breaks ties, microseconds of all resources together.
    limit: what the longest launch waits for. launches: how many there are, where they are estimated. parts: seconds of
        each launch by its fingerprint.
    """

    config: dict[str, Any]
    fate: str
    message: str = ""
    microseconds: float = nan
    effort: float = inf
    limit: str = ""
    launches: int = 0
    parts: dict[str, tuple[float, float, str]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.fate == "ok"


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
            verdict = json.loads(outcome.body)
            verdict["parts"] = {name: tuple(part) for name, part in verdict["parts"].items()}
            done(index, Verdict(**verdict))
        else:
            done(index, Verdict(config, outcome.fate, outcome.message or outcome.fate))

    run_all(work, jobs if mode == "offline" else 1, seconds, finish, nullcontext())


def _encoded(run: Callable[..., Verdict], target: Target, config: dict[str, Any], known: Any) -> bytes:
    torch.set_num_threads(1)  # torch's own threads have stayed behind in the parent
    try:
        verdict = run(target, config, known)
    except MismatchError as error:
        verdict = Verdict(config, "wrong", str(error))
    except Exception as error:
        # Whatever a launcher or the host compiler says of these parameters is a finding about them.
        verdict = Verdict(config, "crash", f"{type(error).__name__}: {error}"[:400])
    return json.dumps(asdict(verdict)).encode()


def _estimated(target: Target, config: dict[str, Any], known: Mapping[str, tuple[float, float, str]]) -> Verdict:
    family = target.family
    with trial({target.space.name: config}, target.bucketed) as tried:
        recorded = offline.record(target.case, family)
    if target.space.name not in tried.used:
        return Verdict(config, "unused", f"{target.case} does not ask for these parameters")
    results = compile_all([one.launch for one in recorded], family, jobs=1)
    parts: dict[str, tuple[float, float, str]] = {}
    total, effort, slowest, limit = 0.0, 0.0, -1.0, ""
    for number, (one, result) in enumerate(zip(recorded, results)):
        if gate := _gate(result, family):
            return Verdict(config, *gate)
        compiled = one.compiled(target.case, result)
        name = _fingerprint(target.case, number, compiled)
        part = known.get(name) or parts.get(name)
        if part is None:
            cost = compiled.cost(family)
            if not cost.known:
                return Verdict(config, "unknown", f"{result.kernel}: a count depends on data")
            part = cost.seconds, sum(cost.estimate.resources.values()), cost.estimate.resource
        parts[name] = part
        total, effort = total + part[0], effort + part[1]
        if part[0] > slowest:
            slowest, limit = part[0], part[2]
    return Verdict(config, "ok", "", total * 1e6, effort * 1e6, limit, len(results), parts)


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
    """Run on the family's device, or on this machine for `host`: first against the reference, then on the clock."""
    on_host = target.family is HOST
    inputs = target.case.build(target.family, device="cpu" if on_host else "npu")
    with host.installed() if on_host else nullcontext(), trial({target.space.name: config}, target.bucketed) as tried:
        target.case.check(inputs, target.family)
        if target.space.name not in tried.used:
            return Verdict(config, "unused", f"{target.case} does not ask for these parameters")
        call = partial(target.case.launcher, **inputs.copy().arguments)
        microseconds = _host_median(call) if on_host else _npu_median(call)
    return Verdict(config, "ok", "", microseconds, microseconds)


def _host_median(call: Callable[[], Any]) -> float:
    call()
    times: list[float] = []
    end = time.perf_counter() + TIMED_SECONDS
    while len(times) < SAMPLES and (len(times) < 3 or time.perf_counter() < end):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def _npu_median(call: Callable[[], Any]) -> float:
    """Device time by torch_npu's profiler, with L2 cleared before each run (triton-ascend's own benchmark)."""
    from triton.backends.ascend.testing import do_bench_npu

    return statistics.median(float(do_bench_npu(call, clear_l2_cache=True)) for _ in range(3))


def check_on_host(target: Target, config: Mapping[str, Any], cases: Sequence[Case], seconds: float) -> Verdict:
    """Run the op with `config` on the host as the family would, against the reference; `fate` is ok, wrong or another.

    It runs on the smallest of `cases` in which this configuration fits and is used: kernels do not know how long a step
    is, and what depends on widths and heads is the same in all cases of a model.
    """
    verdict = Verdict(dict(config), "unused", "no case small enough for the host uses it")

    def finish(_: int, outcome: Outcome) -> None:
        nonlocal verdict
        verdict = Verdict(**json.loads(outcome.body)) if outcome.fate == "done" else Verdict(
            dict(config), outcome.fate, f"on the host: {outcome.message}")  # fmt: skip

    for case in cases:
        run_all([partial(_encoded, _checked, Target(target.space, target.family, target.key, case), dict(config), {})],
                1, seconds, finish, nullcontext())  # fmt: skip
        if verdict.fate != "unused":
            break
    return verdict


def _checked(target: Target, config: dict[str, Any], known: Mapping[str, Any]) -> Verdict:
    configs = {target.space.name: config}
    with trial(configs) as tried:
        offline.record(target.case, target.family)
    if target.space.name not in tried.used:
        return Verdict(config, "unused", f"{target.case} does not use it")
    inputs = target.case.build(target.family)
    with acting_as(target.family), host.installed(), trial(configs):
        target.case.check(inputs, target.family)
    return Verdict(config, "ok")


def cores() -> int:
    """Processes at once by default."""
    return len(os.sched_getaffinity(0))
