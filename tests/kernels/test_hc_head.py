"""hc_head against its reference: shapes with tails, the fused norm, stream-major flatten."""

import pytest
import torch

from dsv4_triton.kernels.hc_head import hc_head
from dsv4_triton.kernels.hc_pre import split_fn
from dsv4_triton.reference import hc_head as reference
from tests.numeric import Guarded, assert_close, assert_equal

EPS = {"norm_eps": 1e-6, "hc_eps": 1e-6}


def make(T, D, dtype):
    x = torch.randn(T, 4, D).to(dtype)
    fn = torch.randn(4, 4 * D) * D**-0.5
    return x, split_fn(fn, dtype), torch.rand(1) + 0.5, torch.randn(4)


@pytest.mark.parametrize(
    ("T", "D", "dtype", "normed"),
    [
        *((T, 48, torch.float32, True) for T in (1, 3, 17, 130)),
        *((T, 48, torch.bfloat16, False) for T in (1, 31, 129)),
        (1, 7168, torch.bfloat16, True),
    ],
)
def test_equals_reference_and_keeps_to_its_memory(T, D, dtype, normed):
    args = make(T, D, dtype)
    options = EPS | {"norm_weight": torch.randn(D).bfloat16() if normed else None}
    guarded = Guarded((T, D), dtype)
    got = hc_head(*args, **options, out=guarded.out)
    # fp32: another order of summation, and streams that cancel; bf16: the same sum may round to the neighbour
    tolerance = {"rtol": 3e-6, "atol": 5e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-5}
    assert_close(got, reference.hc_head(*args, **options), **tolerance)
    guarded.assert_margins()


def test_gates_weigh_their_own_stream():
    """base of +-100 makes the gates 1 and 0: the result is stream 2 alone (plus hc_eps of each)."""
    D = 48
    x = torch.randn(5, 4, D)
    base = torch.tensor([-100.0, -100.0, 100.0, -100.0])
    got = hc_head(x, torch.zeros(1, 4, 4 * D), torch.ones(1), base, norm_eps=1e-6, hc_eps=0.0)
    assert_equal(got, x[:, 2].contiguous())


def test_a_broken_token_disturbs_no_other():
    x, *rest = make(18, 48, torch.bfloat16)
    clean = hc_head(x, *rest, **EPS)
    x[3] = float("nan")
    others = [t for t in range(18) if t != 3]
    assert_equal(hc_head(x, *rest, **EPS)[others], clean[others])


def test_no_tokens_and_wrong_arguments():
    x, parts, scale, base = make(2, 32, torch.bfloat16)
    assert hc_head(x[:0], parts, scale, base, **EPS).shape == (0, 32)
    with pytest.raises(ValueError, match=r"scale has shape \(3,\)"):
        hc_head(x, parts, torch.ones(3), base, **EPS)
    with pytest.raises(TypeError, match="norm_weight has dtype"):
        hc_head(x, parts, scale, base, **EPS, norm_weight=torch.ones(32).half())
