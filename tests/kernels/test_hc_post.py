"""hc_post against its reference: shapes with tails, and the transposed use of comb."""

import pytest
import torch

from dsv4_triton.device import A2, A5, HOST, acting_as
from dsv4_triton.kernels.hc_post import hc_post
from dsv4_triton.reference import hc_post as reference
from tests.numeric import Guarded, assert_close, assert_equal


def make(T, D, dtype):
    return torch.randn(T, D).to(dtype), torch.randn(T, 4, D).to(dtype), torch.rand(T, 4) * 2, torch.rand(T, 4, 4)


@pytest.mark.parametrize(
    ("T", "D", "dtype", "family"),
    [
        *((T, 32, torch.float32, HOST) for T in (1, 3, 17, 127, 129)),
        *((T, 272, torch.bfloat16, HOST) for T in (1, 5, 33)),
        (2, 7168, torch.bfloat16, A2),
        (3, 16, torch.bfloat16, HOST),
        (5, 48, torch.float32, A5),
        (1, 4096, torch.bfloat16, A5),
    ],
)
def test_equals_reference_and_keeps_to_its_memory(T, D, dtype, family):
    args = make(T, D, dtype)
    guarded = Guarded((T, 4, D), dtype)
    with acting_as(family):
        got = hc_post(*args, out=guarded.out)
    # fp32: five products in another order; bf16: the same sum may round to the neighbour, and sums may cancel
    tolerance = {"rtol": 1e-6, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-5}
    assert_close(got, reference.hc_post(*args), **tolerance)
    guarded.assert_margins()


def test_comb_is_transposed():
    """comb[0, 3] = 1 alone carries old stream 0 into new stream 3, not the other way round."""
    y, x, post, _ = make(2, 32, torch.float32)
    comb = torch.zeros(2, 4, 4)
    comb[:, 0, 3] = 1
    got = hc_post(y, x, torch.zeros_like(post), comb)
    assert_equal(got[:, 3], x[:, 0].contiguous())
    assert (got[:, :3] == 0).all()


def test_rounds_once():
    """Five terms that cancel in fp32 would be lost if any partial sum were rounded to bf16."""
    y = torch.full((1, 16), 256.0).bfloat16()
    x = torch.stack([torch.full((16,), v) for v in (1.0, -256.0, 0.0, 0.0)])[None].bfloat16()
    comb = torch.zeros(1, 4, 4)
    comb[0, :2] = 1
    assert_equal(hc_post(y, x, torch.ones(1, 4), comb), torch.ones(1, 4, 16).bfloat16())


def test_no_tokens_and_wrong_arguments():
    y, x, post, comb = make(2, 32, torch.bfloat16)
    assert hc_post(y[:0], x[:0], post[:0], comb[:0]).shape == (0, 4, 32)
    with pytest.raises(ValueError, match="out must not be x"):
        hc_post(y, x, post, comb, out=x)
    with pytest.raises(TypeError, match="y has dtype"):
        hc_post(y.float(), x, post, comb)
    with pytest.raises(TypeError, match="comb has dtype"):
        hc_post(y, x, post, comb.bfloat16())
    with pytest.raises(ValueError, match="D is 24"):
        hc_post(y[:, :24].contiguous(), x[..., :24].contiguous(), post, comb)
    with pytest.raises(ValueError, match="strides"):
        hc_post(y, x, post, comb.transpose(1, 2))
