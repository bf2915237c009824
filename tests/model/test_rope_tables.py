"""RoPE tables up to the last position of a million: fp32 angles, and YaRN where layers compress only."""

from __future__ import annotations

import pytest
import torch

from dsv4_triton.config import Yarn
from dsv4_triton.model.rope import RopeTables, frequencies

FLASH = Yarn(factor=16.0, beta_fast=32.0, beta_slow=1.0, original_positions=65_536)
FAR = torch.tensor([0, 1, 65_535, 65_536, 100_000, 524_288, 1_048_575])


def exact(base: float) -> torch.Tensor:
    return base ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)


@pytest.mark.parametrize("base", [10_000.0, 160_000.0])
def test_frequencies(base: float) -> None:
    """Two roundings of fp32; with YaRN those that turn more than 32 times in the original context stay, those that turn
    less than once are a sixteenth, and what lies between goes down with them."""
    plain, scaled = frequencies(base, None).double(), frequencies(base, FLASH).double()
    torch.testing.assert_close(plain, exact(base), rtol=3e-7, atol=0)
    turns = exact(base) * FLASH.original_positions / (2 * torch.pi)
    share = scaled / plain
    torch.testing.assert_close(share[turns > 32 * 1.5], torch.ones(int((turns > 48).sum())).double(), rtol=3e-7, atol=0)
    torch.testing.assert_close(share[turns < 1 / 1.5], torch.full((int((turns < 1 / 1.5).sum()),), 1 / 16).double())
    assert (share.diff() <= 1e-6).all() and len(share.unique()) > 4


@pytest.mark.parametrize(("base", "yarn"), [(10_000.0, None), (160_000.0, FLASH)])
def test_angles_are_products_in_fp32(base: float, yarn: Yarn | None) -> None:
    """Of such an angle the cosine is right to one unit in the last place; one of bf16 angles or values is off by 1e-3
    at least somewhere."""
    tables = RopeTables(1_048_576)
    rows = tables.table(base, yarn)
    assert rows.dtype == torch.float32 and rows is tables.table(base, yarn)
    angles = (FAR.float()[:, None] * frequencies(base, yarn)).double()
    torch.testing.assert_close(rows[FAR].double(), torch.cat((angles.cos(), angles.sin()), 1), rtol=0, atol=1.2e-7)


def test_layers_without_compression_have_a_table_of_their_own() -> None:
    tables = RopeTables(256)
    assert not torch.equal(tables.table(10_000.0, None), tables.table(10_000.0, FLASH))
