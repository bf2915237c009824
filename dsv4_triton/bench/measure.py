"""Times: of calls that take turns, and what this machine can do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from dsv4_triton.bench.registry import Minimum

MIN_RUNS = 3
MAX_RUNS = 2000
COPY_BYTES = {"cpu": 1 << 28, "device": 1 << 30}
"""Size of the tensor that is copied: several times the caches."""
PRODUCT = {"cpu": 1024, "device": 8192}
"""Rows, columns and depth of the matrix product."""
_FLUSH_BYTES = 1 << 28
"""What is written between two runs on a device, so that every run finds its data in memory: more than its L2."""

Call = Callable[[], Any]
Clock = Callable[[Call], float]
"""Seconds that one call takes."""


def host_clock(call: Call) -> float:
    """Seconds by the wall."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def device_clock(device: torch.device) -> Clock:
    """Seconds between two events around the call, with L2 overwritten before it."""
    module = getattr(torch, device.type)
    waste = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)

    def clock(call: Call) -> float:
        waste.zero_()
        begin, end = (module.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return clock


def clock_of(device: torch.device) -> Clock:
    """The clock for work on a device."""
    return host_clock if device.type == "cpu" else device_clock(device)


@dataclass(frozen=True)
class Times:
    """Seconds of one implementation: median, 20th and 80th percentile of `runs` runs."""

    median: float
    p20: float
    p80: float
    runs: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        ordered = sorted(seconds)
        at = [ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.8)]
        return cls(statistics.median(ordered), at[0], at[1], len(ordered))


def alternate(calls: Mapping[str, Call], seconds: float, clock: Clock = host_clock) -> dict[str, Times]:
    """Times of calls that take turns for about `seconds`, after one call of each that does not count.

    Each round starts with another one, so that none always runs on the caches that the same other one left.
    """
    names = list(calls)
    for name in names:
        clock(calls[name])
    taken: dict[str, list[float]] = {name: [] for name in names}
    deadline = time.perf_counter() + seconds
    for turn in range(MAX_RUNS):
        if turn >= MIN_RUNS and time.perf_counter() > deadline:
            break
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            taken[name].append(clock(calls[name]))
    return {name: Times.of(found) for name, found in taken.items()}


@dataclass(frozen=True)
class Machine:
    """What this machine did at best: bytes per second of a copy, read and written bytes together, and
    multiply-accumulates per second of a product, by dtype."""

    copy_bytes_per_second: float
    macs_per_second: dict[str, float] = field(default_factory=dict)

    def seconds(self, least: Minimum) -> float:
        """The time that a job needs at least here: that of its bytes or of its products, whichever is longer.

        fp32 products count at their own rate, others at the best one: where narrow products are slower than fp32
        ones, as on CPUs without instructions for them, fp32 is the way to compute them.
        """
        exact = least.operands is torch.float32
        rate = self.macs_per_second["float32"] if exact else max(self.macs_per_second.values())
        return max(least.bytes / self.copy_bytes_per_second, least.macs / rate)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_machine(device: torch.device) -> Machine:
    """The best of a few copies and products on `device`; about a second."""
    clock, kind = clock_of(device), "cpu" if device.type == "cpu" else "device"
    source = torch.ones(COPY_BYTES[kind] // 4, device=device)
    target = torch.empty_like(source)
    copy = _best(clock, lambda: target.copy_(source))
    n, rates = PRODUCT[kind], {}
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(n, n, device=device).to(dtype)
        out = torch.empty_like(x)
        rates[str(dtype).removeprefix("torch.")] = n**3 / _best(clock, partial(torch.mm, x, x, out=out))
    return Machine(2 * source.numel() * 4 / copy, rates)


def _best(clock: Clock, call: Call, runs: int = 5, seconds: float = 1.0) -> float:
    """The best of `runs` after a first one; of fewer where they take longer than `seconds`."""
    times = [clock(call)]
    while len(times) <= runs and sum(times) < seconds:
        times.append(clock(call))
    return min(times[1:] or times)
