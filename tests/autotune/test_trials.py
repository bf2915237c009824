"""Real tries of a small kernel: what each gate says, and that a try takes nothing with it but itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsv4_triton.autotune import trials
from dsv4_triton.autotune.search import asked, check_cases
from dsv4_triton.autotune.trials import Mode, Target, Verdict, check_on_host, sizes, time_in_turn, try_all
from dsv4_triton.bench import run as bench_run
from dsv4_triton.bench.registry import select
from dsv4_triton.device import A2, HOST, Family
from dsv4_triton.kernels import muls_add

BLOCK = {"BLOCK": 1024, "multibuffer": None}


def target(family: Family, name: str = "flash/decode/b16") -> Target:
    case = select(kernel="muls_add", case=name)[0]
    space, _, key = asked(case, family)[0]
    return Target(space, family, key, case)


def verdicts(one: Target, configs: list[dict[str, Any]], mode: Mode, seconds: float = 60.0) -> list[Verdict]:
    found: dict[int, Verdict] = {}
    try_all([(one, config) for config in configs], mode, jobs=2, seconds=seconds, known={}, done=found.__setitem__)
    return [found[i] for i in range(len(configs))]


def test_offline_tries_are_compiled_and_counted() -> None:
    fits, overflows, fallback = verdicts(
        target(A2), [BLOCK, BLOCK | {"BLOCK": 1 << 17}, BLOCK | {"BLOCK": 16384}], "offline"
    )
    assert fits.ok and 0 < fits.microseconds < 10 and fits.limit and len(fits.parts) == 1
    assert overflows.fate in ("memory", "compile") and overflows.message
    assert fallback.fate == "fallback"


def test_tries_on_a_device_pass_the_gates_of_the_compile_first() -> None:
    """No device is needed to find out that it would run with a fallback."""
    overflows, fallback = verdicts(target(A2), [BLOCK | {"BLOCK": 1 << 17}, BLOCK | {"BLOCK": 16384}], "device")
    assert overflows.fate in ("memory", "compile") and fallback.fate == "fallback"


def test_a_try_takes_no_more_memory_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def large(*_: Any, **__: Any) -> torch.Tensor:
        return torch.empty(3 << 30, dtype=torch.uint8)

    one = target(HOST, "demo/decode/b5")
    monkeypatch.setattr(muls_add, "muls_add", large)
    monkeypatch.setattr(bench_run, "free_bytes", lambda device: 2 << 30)
    verdict = verdicts(one, [BLOCK], "device")[0]
    assert verdict.fate == "memory" and "allocate" in verdict.message


def test_what_is_never_written_needs_no_memory() -> None:
    """Of experts that nobody chose there are addresses alone, far more than a machine has."""
    case = select(kernel="moe_experts", case="pro/decode/b1")[0]
    written, addresses = sizes(case, A2)
    tensors = case.build(A2, fill=False).tensors.values()
    assert addresses > 20 * written and written + addresses == sum(t.numel() * t.itemsize for t in tensors)


def test_what_is_known_is_not_counted_again() -> None:
    one = target(A2)
    first = verdicts(one, [BLOCK], "offline")[0]
    known = dict.fromkeys(first.parts, (1.0, 1.0, "told"))
    found: list[Verdict] = []
    try_all([(one, BLOCK)], "offline", jobs=1, seconds=60.0, known=known, done=lambda _, v: found.append(v))
    assert found[0].microseconds == 1e6 and found[0].limit == "told"


def test_on_the_host_tries_are_held_to_the_reference_and_timed() -> None:
    small, large = verdicts(target(HOST, "demo/decode/b5"), [BLOCK, BLOCK | {"BLOCK": 64}], "device")
    assert small.ok and large.ok and small.microseconds > 0


def test_in_turn_with_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "TIMED_SECONDS", 0.5)
    one, slow = target(HOST), BLOCK | {"BLOCK": 2}
    assert time_in_turn(one, slow, 60.0).fate == "no gain"
    monkeypatch.setattr(Target, "default", slow)
    verdict = time_in_turn(one, BLOCK, 60.0)
    assert verdict.ok and verdict.microseconds < verdict.against


def test_in_turn_the_medians_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faster in 61 of 100 turns, by a tenth in the median of them, but slower in the medians, which files have."""
    turns = [(1.0, 1.1)] * 40 + [(5.0, 5.5)] * 21 + [(9.0, 1.0)] * 39
    monkeypatch.setattr(trials, "_times", lambda *_: [list(times) for times in zip(*turns, strict=True)])
    verdict = time_in_turn(target(HOST), BLOCK, 60.0)
    assert verdict.fate == "no gain" and "in 61 of 100 turns, 0.220 times as fast" in verdict.message


def _wrong(*args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
    return torch.zeros_like(args[1] if len(args) > 1 else kwargs["y"])


def _killed(*_: Any, **__: Any) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _crashed(*_: Any, **__: Any) -> torch.Tensor:
    os._exit(3)


def _hung(*_: Any, **__: Any) -> torch.Tensor:
    time.sleep(600)
    raise AssertionError


def _failed(*_: Any, **__: Any) -> torch.Tensor:
    raise RuntimeError("no such block")


@pytest.mark.parametrize(
    ("does", "fate", "says"),
    [(_wrong, "wrong", "result 0"), (_killed, "memory", "SIGKILL"), (_crashed, "crash", "exit status 3"),
     (_hung, "time", "not done in 1 s"), (_failed, "crash", "no such block")],
)  # fmt: skip
def test_a_try_that_goes_wrong(does: Callable[..., Any], fate: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = target(HOST, "demo/decode/b5")
    monkeypatch.setattr(muls_add, "muls_add", does)
    verdict = verdicts(one, [BLOCK], "device", seconds=1.0 if does is _hung else 60.0)[0]
    assert verdict.fate == fate and says in verdict.message


def test_a_winner_is_run_as_its_family_against_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    one = target(A2)
    cases = list(check_cases(one))
    assert cases[0].model == "flash" and cases[0].step.tokens == 16
    assert check_on_host(one, BLOCK, cases[:1], 60.0).ok
    monkeypatch.setattr(muls_add, "muls_add", _wrong)
    assert check_on_host(one, BLOCK, cases[:1], 60.0).fate in ("wrong", "unused")


def test_a_case_between_the_reported_ones_is_held_to_the_reference_too() -> None:
    """Steps of 16 and 64 requests launch hc_mix in another op, and one of 4,096 tokens does not take its tiles."""
    case = select(kernel="hc_post_pre", case="flash/decode/b128")[0]
    space, key = next((one.space, one.key) for one in asked(case, A2) if one.space.name == "hc_mix")
    one = Target(space, A2, key, case)
    assert case in check_cases(one) and check_on_host(one, one.default, list(check_cases(one)), 120.0).ok


def test_a_configuration_that_no_case_uses_cannot_win() -> None:
    assert check_on_host(target(A2), BLOCK, [], 60.0).fate == "unused"
