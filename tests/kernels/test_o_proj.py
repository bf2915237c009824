"""o_proj: inverse rotation at the query's position and the grouped product."""

from __future__ import annotations

import pytest
import torch

from dsv4_triton.kernels.o_proj import o_proj
from dsv4_triton.kernels.rope import rope
from dsv4_triton.reference.o_proj import o_proj as reference_o_proj
from tests.kernels.rotary import LAST_POSITION, table
from tests.numeric import assert_close, assert_equal, poisoned

# fp32: a sum of up to 4096 products of size 1/64 in another order. bf16: the same, and then one rounding (2^-8).
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 5e-6}, torch.bfloat16: {"rtol": 2**-7, "atol": 1e-4}}


def problem(tokens: int, heads: int, groups: int, rank: int, dtype: torch.dtype):
    """o as rows of a poisoned buffer, wo_a with rows of norm 1, positions, table."""
    o = poisoned((tokens + 1, heads, 512), dtype)[:tokens]
    o.copy_(torch.randn(tokens, heads, 512))
    width = heads // groups * 512
    wo_a = poisoned((groups + 1, rank, width), dtype)[:groups]
    wo_a.copy_(torch.randn(groups, rank, width) * width**-0.5)
    positions = torch.randint(0, 2000, (tokens,), dtype=torch.int32)
    return o, wo_a, positions, table(positions)


@pytest.mark.parametrize(
    "tokens, heads, groups, rank, dtype",
    [
        (1, 6, 2, 64, torch.float32),
        (17, 6, 2, 64, torch.float32),
        (130, 6, 2, 64, torch.float32),
        (5, 6, 1, 40, torch.bfloat16),
        (65, 16, 2, 64, torch.bfloat16),
    ],
)
def test_equals_reference(tokens, heads, groups, rank, dtype):
    o, wo_a, positions, cos_sin = problem(tokens, heads, groups, rank, dtype)
    if tokens > 2:
        positions[1] = -1
        o[1] = float("nan")
    expected = reference_o_proj(o, wo_a, positions, cos_sin)
    out = poisoned((tokens + 1, groups * rank), dtype)
    o_proj(o.clone(), wo_a, positions, cos_sin, out=out[:tokens])
    assert_close(out[:tokens], expected, **TOLERANCE[dtype])
    assert_equal(out[tokens:], poisoned((1, groups * rank), dtype), "the row after the output")
    if tokens > 2:
        assert (out[1] == 0).all()


def test_the_rotation_is_the_conjugate_at_the_query_position():
    """Output features that were rotated forward at the query's position come out as they were before."""
    o, wo_a, positions, cos_sin = problem(5, 6, 2, 64, torch.float32)
    turned = rope(o, positions, cos_sin)
    plain = torch.einsum("tgk,grk->tgr", o.reshape(5, 2, -1), wo_a).reshape(5, -1)
    assert_close(o_proj(turned, wo_a, positions, cos_sin), plain, rtol=1e-5, atol=5e-6)


def test_each_group_reads_its_own_heads_and_weights():
    o, wo_a, positions, cos_sin = problem(3, 6, 2, 64, torch.float32)
    clean = o_proj(o.clone(), wo_a, positions, cos_sin)
    o[1, 4] = float("nan")
    broken = o_proj(o.clone(), wo_a, positions, cos_sin)
    assert torch.isnan(broken[1, 64:]).all()
    clean[1, 64:] = broken[1, 64:]
    assert_equal(broken, clean)


def test_decode_and_prefill_tiles_agree():
    o, wo_a, positions, cos_sin = problem(130, 6, 2, 64, torch.float32)
    together = o_proj(o.clone(), wo_a, positions, cos_sin)
    alone = torch.cat([o_proj(o[t : t + 1].clone(), wo_a, positions[t : t + 1], cos_sin) for t in (0, 64, 129)])
    assert_close(together[[0, 64, 129]], alone, rtol=1e-5, atol=5e-6)


def test_far_position():
    o, wo_a, positions, _ = problem(2, 6, 2, 64, torch.float32)
    positions[0] = LAST_POSITION
    cos_sin = table(positions, size=LAST_POSITION + 1, base=160000.0)
    expected = reference_o_proj(o, wo_a, positions, cos_sin)
    assert_close(o_proj(o, wo_a, positions, cos_sin), expected, rtol=1e-5, atol=5e-6)


def test_no_tokens_and_bad_arguments():
    o, wo_a, positions, cos_sin = problem(2, 6, 2, 64, torch.float32)
    assert o_proj(o[:0], wo_a, positions[:0], cos_sin).shape == (0, 128)
    with pytest.raises(ValueError, match="wo_a has shape"):
        o_proj(o, wo_a[:, :, :1024].contiguous(), positions, cos_sin)
    with pytest.raises(TypeError, match="wo_a has dtype"):
        o_proj(o, wo_a.bfloat16(), positions, cos_sin)
    with pytest.raises(ValueError, match="positions has shape"):
        o_proj(o, wo_a, positions[:1], cos_sin)
