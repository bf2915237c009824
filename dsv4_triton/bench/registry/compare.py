"""Comparison of a kernel's result with its reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch


class MismatchError(AssertionError):
    """A result that differs from its reference by more than its tolerance."""


@dataclass(frozen=True)
class Tolerance:
    """Floating-point values may differ by `atol + rtol * |expected|`; everything else must be equal."""

    rtol: float
    atol: float
    reason: str


EXACT = Tolerance(0.0, 0.0, "integers, copies, or sums that no order changes")
BF16_ROUNDING = Tolerance(2**-7, 1e-5, "fp32 sums in another order, then one rounding to bf16: one step")


def compare(what: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance) -> None:
    """Raise `MismatchError` unless shapes, dtypes and values agree; NaN equals NaN."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise MismatchError(
            f"{what}: {actual.dtype} {tuple(actual.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
        )
    if actual.numel() == 0:
        return
    if not expected.dtype.is_floating_point:
        wrong = actual != expected
    else:
        a, e = actual.float(), expected.float()
        close = (a - e).abs() <= tolerance.atol + tolerance.rtol * e.abs()
        wrong = ~(close | (a == e) | (a.isnan() & e.isnan()))
    count = int(wrong.sum())
    if count:
        place = tuple(int(i) for i in wrong.nonzero()[0])
        raise MismatchError(
            f"{what}: {count} of {wrong.numel()} values differ, first at {place}: got {actual[place].item():g}, "
            f"expected {expected[place].item():g} (rtol {tolerance.rtol:g}, atol {tolerance.atol:g})"
        )
