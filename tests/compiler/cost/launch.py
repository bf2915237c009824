"""From a kernel launch to its facts, through the offline compile."""

from __future__ import annotations

from typing import Any

from dsv4_triton.compiler import ascend
from dsv4_triton.compiler.cost import Estimate, Facts, arguments_of, count, estimate
from dsv4_triton.compiler.launches import Launch, recording
from dsv4_triton.device import Family, acting_as


def record(family: Family, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Launch:
    with acting_as(family), recording() as launches:
        kernel[grid](*args, **options)
    return launches[0]


def hivm_of(family: Family, launch: Launch) -> str:
    result = ascend.compile(launch.kernel, launch.signature, family, launch.options)
    assert result.ok, f"{result.kernel} for {family.name}: {result.message}"
    return result.hivm


def facts_of(family: Family, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Facts:
    """Facts of `kernel[grid](*args, **options)` compiled for a family."""
    launch = record(family, kernel, grid, *args, **options)
    facts = count(hivm_of(family, launch), family, launch.grid, arguments_of(launch))
    assert not facts.unsupported
    return facts


def estimate_of(family: Family, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Estimate:
    return estimate(facts_of(family, kernel, grid, *args, **options), family)
