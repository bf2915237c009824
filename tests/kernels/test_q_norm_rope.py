"""q_norm_rope: weightless per-head norm and rotation with one rounding."""

from __future__ import annotations

import pytest
import torch

from dsv4_triton.kernels.q_norm_rope import q_norm_rope
from dsv4_triton.kernels.rope import rope
from dsv4_triton.reference.q_norm_rope import q_norm_rope as reference_q_norm_rope
from tests.kernels.rotary import LAST_POSITION, table
from tests.numeric import assert_close, assert_equal, poisoned

# fp32: two different summation orders of 512 squares. bf16: those may move a value across one rounding (2^-8 relative).
TOLERANCE = {torch.float32: {"rtol": 2e-6, "atol": 1e-6}, torch.bfloat16: {"rtol": 2**-7, "atol": 1e-6}}


@pytest.mark.parametrize(
    "tokens, heads, dtype",
    [
        (1, 6, torch.bfloat16),
        (7, 6, torch.bfloat16),
        (7, 6, torch.float32),
        (3, 64, torch.float32),
        (2, 1, torch.float32),
    ],
)
def test_equals_reference(tokens, heads, dtype):
    q = (torch.randn(tokens, heads, 512) * torch.logspace(-3, 3, heads)[:, None]).to(dtype)
    positions = torch.randint(0, 3000, (tokens,), dtype=torch.int32)
    if tokens > 2:
        positions[1] = -1
    cos_sin = table(positions)
    expected = reference_q_norm_rope(q, positions, cos_sin, eps=1e-6)
    out = poisoned((tokens + 1, heads, 512), dtype)
    q_norm_rope(q, positions, cos_sin, eps=1e-6, out=out[:-1])
    assert_close(out[:-1], expected, **TOLERANCE[dtype])
    assert_equal(out[-1:], poisoned((1, heads, 512), dtype), "the row after the output")
    assert q_norm_rope(q, positions, cos_sin, eps=1e-6, out=q) is q
    assert_equal(q, out[:-1], "in place")


@pytest.mark.parametrize("tokens, index_heads, dtype", [(1, 64, torch.bfloat16), (7, 6, torch.float32)])
def test_index_queries_are_rotated_in_place(tokens, index_heads, dtype):
    """As `rope` does it, and the queries beside them are those of a call without."""
    q, index_q = torch.randn(tokens, 6, 512).to(dtype), torch.randn(tokens, index_heads, 128).to(dtype)
    positions = torch.randint(0, 3000, (tokens,), dtype=torch.int32)
    if tokens > 2:
        positions[1] = -1
        q[1] = index_q[1] = float("nan")
    cos_sin = table(positions)
    alone, turned = q_norm_rope(q, positions, cos_sin, eps=1e-6), rope(index_q, positions, cos_sin)
    assert_equal(q_norm_rope(q, positions, cos_sin, eps=1e-6, index_q=index_q), alone)
    assert_equal(index_q, turned)
    with pytest.raises(ValueError, match="index_q has shape"):
        q_norm_rope(q, positions, cos_sin, eps=1e-6, index_q=index_q[..., :64].contiguous())


def test_heads_do_not_see_each_other():
    q, positions = torch.randn(3, 6, 512), torch.tensor([0, 5, 9], dtype=torch.int32)
    cos_sin = table(positions)
    clean = q_norm_rope(q, positions, cos_sin, eps=1e-6)
    q[1, 3] = float("nan")
    broken = q_norm_rope(q, positions, cos_sin, eps=1e-6)
    assert torch.isnan(broken[1, 3]).all()
    clean[1, 3] = broken[1, 3]
    assert_equal(broken, clean)


def test_one_rounding_at_the_end():
    """bf16 results are the fp32 results rounded once, rotation included."""
    q = torch.randn(5, 6, 512).to(torch.bfloat16)
    positions = torch.randint(1, 3000, (5,), dtype=torch.int32)
    cos_sin = table(positions)
    exact = q_norm_rope(q.float(), positions, cos_sin, eps=1e-6)
    assert_equal(q_norm_rope(q, positions, cos_sin, eps=1e-6), exact.to(torch.bfloat16))


@pytest.mark.parametrize("eps", [1e-6, 1e-20])
def test_zero_and_tiny_heads_stay_finite(eps):
    q, positions = torch.zeros(1, 6, 512), torch.tensor([4], dtype=torch.int32)
    q[0, 1], q[0, 2] = 1e-12, 1e-18
    got = q_norm_rope(q, positions, table(positions), eps=eps)
    assert_close(got, reference_q_norm_rope(q, positions, table(positions), eps=eps), rtol=2e-6, atol=1e-30)
    assert torch.isfinite(got).all() and (got[0, 0] == 0).all()


def test_far_position_and_padding():
    q, positions = torch.randn(3, 6, 512), torch.tensor([LAST_POSITION, -1, 0], dtype=torch.int32)
    q[1] = float("nan")
    cos_sin = table(positions, size=LAST_POSITION + 1, base=160000.0)
    got = q_norm_rope(q, positions, cos_sin, eps=1e-6)
    assert_close(got, reference_q_norm_rope(q, positions, cos_sin, eps=1e-6), **TOLERANCE[torch.float32])
    assert (got[1] == 0).all()


def test_no_tokens_and_bad_arguments():
    positions, cos_sin = torch.zeros(2, dtype=torch.int32), torch.zeros(1, 64)
    assert q_norm_rope(torch.empty(0, 6, 512), positions[:0], cos_sin, eps=1e-6).shape == (0, 6, 512)
    with pytest.raises(ValueError, match="expected \\(any, any, 512\\)"):
        q_norm_rope(torch.zeros(2, 6, 256), positions, cos_sin, eps=1e-6)
    with pytest.raises(TypeError, match="float16"):
        q_norm_rope(torch.zeros(2, 6, 512, dtype=torch.float16), positions, cos_sin, eps=1e-6)
    with pytest.raises(ValueError, match="positions has shape"):
        q_norm_rope(torch.zeros(3, 6, 512), positions, cos_sin, eps=1e-6)
