"""Comparison and poisoning helpers of the tests."""

from __future__ import annotations

import torch

POISON = {True: float("nan"), False: -77}


def poisoned(shape, dtype: torch.dtype) -> torch.Tensor:
    """A tensor full of NaN (floating dtypes) or -77 (integers): what a kernel must never leave or read."""
    tensor = torch.empty(shape, dtype=dtype)
    if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return tensor.view(torch.uint8).fill_(0x7F).view(dtype)
    return tensor.fill_(POISON[dtype.is_floating_point])


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, *, rtol: float, atol: float, what: str = "result"
) -> None:
    """Non-finite values must agree in kind and place; the rest within `atol + rtol * |expected|`.

    A failure says where it is worst.
    """
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    if actual.numel() == 0:
        return
    a, e = actual.double(), expected.double()
    for kind, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = (test(a) != test(e)).nonzero()
        assert not len(wrong), f"{what}: {kind} differs at {len(wrong)} places, first {tuple(wrong[0].tolist())}"
    finite = torch.isfinite(e)
    excess = torch.where(finite, (a - e).abs() - (atol + rtol * e.abs()), -1.0)
    worst = int(excess.argmax())
    if excess.reshape(-1)[worst] > 0:
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), a.shape))
        raise AssertionError(
            f"{what}: at {place} got {a.reshape(-1)[worst]:.8g}, expected {e.reshape(-1)[worst]:.8g}; "
            f"{int((excess > 0).sum())} of {a.numel()} outside rtol={rtol:g} atol={atol:g}"
        )


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, what: str = "result") -> None:
    """Bitwise equality, NaN payloads included."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, (
        f"{what}: {actual.dtype} {tuple(actual.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
    )
    as_bytes = (actual.contiguous().reshape(-1).view(torch.uint8), expected.contiguous().reshape(-1).view(torch.uint8))
    wrong = (as_bytes[0] != as_bytes[1]).nonzero()
    if len(wrong):
        first = int(wrong[0]) // actual.element_size()
        raise AssertionError(
            f"{what}: element {first} (flat) is {actual.reshape(-1)[first]}, expected {expected.reshape(-1)[first]}; "
            f"{len(wrong)} bytes differ"
        )


class Guarded:
    """Memory for an output between two poisoned margins: `out` starts as poison.

    `assert_margins` finds writes beside it.
    """

    MARGIN = 64

    def __init__(self, shape, dtype: torch.dtype) -> None:
        size = torch.Size(shape).numel()
        self._memory = poisoned((size + 2 * self.MARGIN,), dtype)
        self.out = self._memory[self.MARGIN : self.MARGIN + size].view(shape)

    def assert_margins(self, what: str = "output") -> None:
        for margin, side in ((self._memory[: self.MARGIN], "before"), (self._memory[-self.MARGIN :], "after")):
            assert_equal(margin, poisoned((self.MARGIN,), margin.dtype), f"memory {side} {what}")
