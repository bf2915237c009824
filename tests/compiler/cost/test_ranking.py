"""The estimate puts pairs of a known good and a known bad formulation of one job into the right order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dsv4_triton.compiler.cost import Estimate
from dsv4_triton.device import A2, A5, Family
from tests.compiler.cost import kernels as kernels
from tests.compiler.cost.launch import estimate_of

Run = Callable[[Family], Estimate]
f32, bf16 = torch.float32, torch.bfloat16


def empty(*shape: int, dtype: torch.dtype = f32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def clamp(propagate: bool) -> Run:
    x = empty(48 * 2048)
    return lambda family: estimate_of(family, kernels.clamp, (48,), x, x, B=2048, PROPAGATE=propagate)


def relu(integer: bool) -> Run:
    x, out = empty(48 * 2048, dtype=torch.int32), empty(48 * 2048)
    return lambda family: estimate_of(family, kernels.relu_of_ints, (48,), x, out, B=2048, INTEGER=integer)


def mask(additive: bool) -> Run:
    x, count = empty(16, 128), torch.tensor([100], dtype=torch.int32)
    return lambda family: estimate_of(family, kernels.masked_scores, (1,), x, count, x, R=16, C=128, ADDITIVE=additive)


def rope(half: bool) -> Run:
    x, cos = empty(480, 16, 64), empty(480, 64)
    return lambda family: estimate_of(family, kernels.rope, (48,), x, cos, x, 480, H=16, HALF=half)


def gather(rows: bool) -> Run:
    x = empty(4096, 512)
    index = torch.randperm(4096)[:16].to(torch.int32)
    elements = (index[:, None] * 512 + torch.arange(512)[None, :]).to(torch.int32)
    return lambda family: estimate_of(
        family, kernels.gather, (1,), x, index if rows else elements, empty(16, 512), R=16, D=512, ROWS=rows
    )


def insert(tile: bool) -> Run:
    x, cache = empty(512, 512), empty(4096, 512)
    slots = torch.randperm(4096)[:512].to(torch.int32)
    return lambda family: estimate_of(family, kernels.insert, (32,), x, slots, cache, 512, R=8, D=512, TILE=tile)


def product(form: str, m: int = 512, n: int = 512, bm: int = 64, bn: int = 64, bk: int = 64) -> Run:
    a, b, c = empty(m, 1024, dtype=bf16), empty(n, 1024, dtype=bf16), empty(m, n)
    return lambda family: estimate_of(
        family, kernels.product, (m // bm, -(-n // bn)), a, b, c, m, K=1024, N=n, BM=bm, BN=bn, BK=bk, FORM=form
    )


def norm(cores: str) -> Run:
    x = empty(480, 1024, dtype=bf16)
    return lambda family: estimate_of(family, kernels.rmsnorm, (getattr(family, cores),), x, x[0], x, 480, D=1024)


def copy(stride: int) -> Run:
    x, out = empty(480, 1024 * stride), empty(480, 1024)
    return lambda family: estimate_of(family, kernels.copy, (48,), x, out, 480, stride, D=1024)


def tiles(whole: bool) -> Run:
    x, out = empty(48 * 32, 512), empty(48 * 32, 256)
    return lambda family: estimate_of(family, kernels.tiles, (48,), x, out, R=32, D=256, WHOLE=whole)


def scores(**options: object) -> Run:
    k, q = empty(960 * 128, 128, dtype=torch.int8), empty(64, 128, dtype=torch.int8)
    return lambda family: estimate_of(
        family, kernels.scores, (24,), k, q, empty(64), empty(960 * 128), 960, KEYS=128, HEADS=64, D=128, **options
    )


def split(**options: object) -> Run:
    return scores(tile_mix_vector_loop=1, **options)


def balance(tile: bool) -> Run:
    x = empty(4, 4, 64)
    return lambda family: estimate_of(family, kernels.balance, (1,), x, x, LANES=64, STEPS=20, TILE=tile)


def wave(width: int) -> Run:
    """16 rows by 8,448 columns in tiles of a width."""
    return product("good", 16, 8448, 16, width, 256)


BOTH = (A2, A5)
PAIRS: list[tuple[str, tuple[Family, ...], Run, Run]] = [
    ("clamps that propagate NaN are one instruction", BOTH, clamp(True), clamp(False)),
    ("relu before the cast is an integer maximum", (A2,), relu(True), relu(False)),
    ("an additive mask needs no comparison of integers", (A2,), mask(True), mask(False)),
    ("halves of a row rotate without interleaving", (A2,), rope(True), rope(False)),
    ("rows are gathered by transfers, elements by scalar code", BOTH, gather(True), gather(False)),
    ("a row per slot, not a scattered tile", BOTH, insert(False), insert(True)),
    ("rows modulo M are fetched one by one", BOTH, product("good"), product("modulo")),
    ("[N, K] read as stored and transposed by the cube", (A2,), product("good"), product("columns")),
    ("the first step of a product is peeled", (A5,), product("good"), product("unpeeled")),
    ("24 tiles are one wave, 33 are two", (A2,), wave(352), wave(256)),
    ("vector work wants all vector cores", (A2,), norm("vector_cores"), norm("cube_cores")),
    ("the last axis is contiguous", BOTH, copy(1), copy(4)),
    ("one strided transfer, not one per row", (A2,), tiles(True), tiles(False)),
    ("both vector cores share the work", (A2,), split(), scores()),
    ("cube and vector cores overlap", (A2,), split(), split(multibuffer=False)),
    ("16 vectors are bad for A2", (A2,), balance(True), balance(False)),
    ("16 vectors are good for A5", (A5,), balance(False), balance(True)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "good", "bad"),
    [
        pytest.param(family, good, bad, id=f"{family.name}-{what.replace(' ', '_')}")
        for what, families, good, bad in PAIRS
        for family in families
    ],
)
def test_pair(family: Family, good: Run, bad: Run) -> None:
    better, worse = good(family), bad(family)
    assert better.rank < worse.rank
    assert better.seconds <= worse.seconds
