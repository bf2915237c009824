"""kv_norm_rope_insert: values, slots, pages, and nothing else written."""

from __future__ import annotations

import pytest
import torch

from dsv4_triton.device import family_of
from dsv4_triton.kernels.kv_norm_rope_insert import RUN, kv_norm_rope_insert
from dsv4_triton.reference.kv_norm_rope_insert import kv_norm_rope_insert as reference_insert
from tests.kernels.paging import clone, ints, pages, whole
from tests.kernels.rotary import LAST_POSITION, table
from tests.numeric import assert_close, assert_equal

# fp32: two summation orders of 512 squares. bf16: those may move a value across two roundings (norm, rotation).
TOLERANCE = {torch.float32: {"rtol": 2e-6, "atol": 1e-6}, torch.bfloat16: {"rtol": 2**-6, "atol": 2**-9}}
MANY = RUN * family_of("cpu").vector_cores
"""From this many tokens on, consecutive rows are stored as tiles."""


def exact_rows(tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows whose mean square is a power of four: with eps 0 the norm has one result, so that bits can be compared."""
    signs = torch.where(torch.rand(tokens, 512) < 0.5, -1.0, 1.0)
    return (signs * 2.0 ** torch.randint(-6, 6, (tokens, 1))).to(dtype)


def run(kv, weight, positions, slots, cache, *, eps=1e-6, fake_quant=False, cos_sin=None):
    """The kernel's cache, the reference's cache."""
    cos_sin = table(positions) if cos_sin is None else cos_sin
    expected = clone(cache)
    kv_norm_rope_insert(kv, weight, positions, cos_sin, cache, slots, eps=eps, fake_quant=fake_quant)
    reference_insert(kv, weight, positions, cos_sin, expected, slots, eps=eps, fake_quant=fake_quant)
    return whole(cache), whole(expected)


def mixed_batch(tokens: int):
    """A prefill run across pages, then scattered rows, with skipped tokens of both kinds."""
    positions = torch.arange(tokens, dtype=torch.int32) + 5
    slots = torch.arange(tokens, dtype=torch.int32) + 16 + 3
    order = torch.randperm(tokens - tokens // 2)
    positions[tokens // 2 :] = positions[tokens // 2 :][order]
    slots[tokens // 2 :] = slots[tokens // 2 :][order]
    if tokens > 4:
        slots[2], positions[tokens - 2] = -1, -1
    return positions, slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 2 * MANY + 3])
def test_equals_reference(tokens, dtype):
    positions, slots = mixed_batch(tokens)
    kv, weight = torch.randn(tokens, 512).to(dtype), torch.randn(512).to(dtype)
    got, expected = run(kv, weight, positions, slots, pages(tokens // 16 + 4, 16, 512, dtype))
    assert_close(got, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [5, 2 * MANY + 3])
def test_fp8_simulation_is_bit_exact(tokens, dtype):
    positions, slots = mixed_batch(tokens)
    weight = (torch.randn(512) * torch.logspace(-4, 4, 512)).to(dtype)
    cache = pages(tokens // 16 + 4, 16, 512, dtype)
    got, expected = run(exact_rows(tokens, dtype), weight, positions, slots, cache, eps=0.0, fake_quant=True)
    assert_equal(got + 0.0, expected + 0.0)


def test_only_the_448_plain_features_are_simulated():
    positions, slots = ints(9, 100), ints(17, 18)
    kv, weight = torch.randn(2, 512), torch.randn(512)
    caches = [pages(3, 16, 512, torch.float32) for _ in range(2)]
    for cache, fake_quant in zip(caches, (False, True), strict=True):
        run(kv, weight, positions, slots, cache, fake_quant=fake_quant)
    plain, simulated = (cache[1, 1:3] for cache in caches)
    assert_equal(plain[:, 448:].contiguous(), simulated[:, 448:].contiguous())
    error = ((plain - simulated).abs() / plain.abs().amax(1, keepdim=True))[:, :448]
    assert 0 < error.max() <= 2**-4 and (error > 0).float().mean() > 0.5


def test_two_roundings_like_the_reference_model():
    """The norm is rounded to bf16 before the rotation reads it."""
    kv, weight = exact_rows(3, torch.bfloat16), torch.randn(512).to(torch.bfloat16)
    positions, slots = ints(70, 71, 2000), ints(17, 30, 19)
    got, expected = run(kv, weight, positions, slots, pages(3, 16, 512, torch.bfloat16), eps=0.0)
    assert_equal(got, expected)


@pytest.mark.parametrize("tokens", [4, MANY])
def test_skipped_tokens_leave_the_cache_untouched(tokens):
    """Slot -1 and padding tokens, whatever their kv rows hold; the null block and the gaps between pages stay too."""
    cache = pages(4, 16, 512, torch.float32)
    before = whole(cache).clone()
    kv = torch.full((tokens, 512), float("nan"))
    slots = torch.full((tokens,), -1, dtype=torch.int32)
    positions = torch.arange(tokens, dtype=torch.int32)
    kv_norm_rope_insert(kv, torch.ones(512), positions, table(positions), cache, slots, eps=1e-6)
    kv_norm_rope_insert(kv, torch.ones(512), slots, table(positions), cache, positions, eps=1e-6)
    assert_equal(whole(cache), before)


def test_runs_break_at_pages_and_where_slots_or_positions_jump():
    """Tiles of rows only where page and positions continue: every row must still be its own token's."""
    tokens = 4 * MANY
    kv, weight = torch.randn(tokens, 512), torch.randn(512)
    positions = torch.arange(tokens, dtype=torch.int32)
    positions[RUN + 3] = 900
    page_order = torch.randperm(tokens // 8 + 1)[: tokens // 8 + 1].to(torch.int32) + 1
    shifted = torch.arange(tokens, dtype=torch.int32) + 3
    slots = page_order[(shifted // 8).long()] * 8 + shifted % 8
    got, expected = run(kv, weight, positions, slots, pages(tokens // 8 + 3, 8, 512, torch.float32))
    assert_close(got, expected, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("what", ["slot", "position"])
def test_tiles_that_are_almost_runs(what):
    """A jump by one within a tile, after its first token or before its last, and a run that begins at -1."""
    tokens = 4 * MANY
    values = torch.arange(tokens, dtype=torch.int32)
    for jump in (values + (values >= RUN - 1).int() + (values >= 2 * RUN).int(), values - 1):
        slots, positions = (jump, values) if what == "slot" else (values, jump)
        cache = pages(2 * tokens // RUN + 2, RUN, 512, torch.float32)
        got, expected = run(torch.randn(tokens, 512), torch.randn(512), positions, slots, cache)
        assert_close(got, expected, **TOLERANCE[torch.float32])


def test_offsets_beyond_two_to_the_31():
    """Three pages 2^30 values apart in memory that is never touched in between."""
    stride = 2**30
    cache = torch.empty(2 * stride + 4 * 512, dtype=torch.bfloat16).as_strided((3, 4, 512), (stride, 512, 1))
    kv, weight = torch.randn(2, 512).bfloat16(), torch.randn(512).bfloat16()
    positions, slots = ints(3, 8), ints(2 * 4 + 1, 2 * 4 + 3)
    small = pages(3, 4, 512, torch.bfloat16)
    kv_norm_rope_insert(kv, weight, positions, table(positions), cache, slots, eps=1e-6)
    kv_norm_rope_insert(kv, weight, positions, table(positions), small, slots, eps=1e-6)
    assert_equal(cache[2, [1, 3]], small[2, [1, 3]])


def test_far_position():
    positions, slots = ints(LAST_POSITION), ints(17)
    cos_sin = table(positions, size=LAST_POSITION + 1, base=160000.0)
    cache = pages(2, 16, 512, torch.float32)
    got, expected = run(torch.randn(1, 512), torch.randn(512), positions, slots, cache, cos_sin=cos_sin)
    assert_close(got, expected, **TOLERANCE[torch.float32])


def test_no_tokens_and_bad_arguments():
    cache, weight, cos_sin = pages(2, 16, 512, torch.float32), torch.ones(512), torch.zeros(1, 64)
    kv, none, one = torch.zeros(1, 512), ints(), ints(0)
    kv_norm_rope_insert(kv[:0], weight, none, cos_sin, cache, none, eps=1e-6)
    assert torch.isnan(whole(cache)).all()
    with pytest.raises(TypeError, match="cache has dtype"):
        kv_norm_rope_insert(kv, weight, one, cos_sin, cache.bfloat16(), one, eps=1e-6)
    with pytest.raises(ValueError, match="cache has strides"):
        kv_norm_rope_insert(kv, weight, one, cos_sin, cache.transpose(0, 1), one, eps=1e-6)
    with pytest.raises(ValueError, match="slots has shape"):
        kv_norm_rope_insert(kv, weight, one, cos_sin, cache, ints(0, 1), eps=1e-6)
