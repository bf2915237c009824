"""swiglu against its reference: tails, clamps and where they apply, row weights."""

import pytest
import torch

from dsv4_triton.kernels.swiglu import swiglu
from dsv4_triton.reference import swiglu as reference
from tests.numeric import Guarded, assert_close, assert_equal

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("M", "I", "x_dtype", "out_dtype", "limit", "weighted"),
    [
        *((M, 48, FP32, BF16, 10.0, True) for M in (1, 2, 33, 130)),
        *((M, 128, BF16, BF16, 10.0, False) for M in (1, 8, 65)),
        (17, 344, FP32, FP32, 10.0, True),
        (3, 128, BF16, BF16, None, True),
        (3, 128, BF16, BF16, 0, True),
        (2, 3072, BF16, BF16, 10.0, True),
        (7, 1, FP32, FP32, None, False),
        (2, 10, BF16, FP32, 2.5, False),
    ],
)
def test_equals_reference_and_keeps_to_its_memory(M, I, x_dtype, out_dtype, limit, weighted):  # noqa: E741
    x = (torch.randn(M, 2 * I) * 20).to(x_dtype)
    weights = torch.rand(M) if weighted else None
    guarded = Guarded((M, I), out_dtype)
    swiglu(x, limit=limit, row_weights=weights, out=guarded.out)
    want = reference.swiglu(x, limit=limit, row_weights=weights, out=torch.empty(M, I, dtype=out_dtype))
    # exp and division within a few ulp of fp32; bf16: may round to the neighbour
    assert_close(guarded.out, want, rtol=2e-6 if out_dtype == FP32 else 2**-7, atol=1e-30)
    guarded.assert_margins()


def test_the_gate_has_no_lower_bound_and_is_clamped_before_silu():
    limit = 10.0
    gate = torch.tensor([50.0, -50.0, -20.0, 9.0, 10.0])
    up = torch.ones(5)
    got = swiglu(torch.stack((gate, up), 1), limit=limit)[:, 0]
    silu = torch.nn.functional.silu
    # clamping after silu would give 10 for 50; a lower bound would give silu(-10) = -4.5e-4 for -20 and -50
    assert_close(got, silu(gate.clamp(max=limit)), rtol=1e-6, atol=0)
    assert got[0] < limit and abs(got[2]) < 1e-6


def test_up_is_clamped_on_both_sides():
    x = torch.tensor([[1.0, 50.0], [1.0, -50.0], [1.0, 3.0]])
    one = torch.nn.functional.silu(torch.tensor(1.0))
    assert_close(swiglu(x, limit=10.0)[:, 0], one * torch.tensor([10.0, -10.0, 3.0]), rtol=1e-6, atol=0)
    assert_close(swiglu(x, limit=None)[:, 0], one * torch.tensor([50.0, -50.0, 3.0]), rtol=1e-6, atol=0)


def test_few_rows_are_treated_like_many():
    """The same rows alone and within a batch, as in decode and prefill."""
    x = (torch.randn(64, 256) * 50).bfloat16()
    together = swiglu(x, limit=10.0)
    for M in (1, 2, 3, 8):
        assert_equal(swiglu(x[:M], limit=10.0), together[:M])


def test_extremes_and_nan():
    x = torch.tensor([[-1e4, 1.0], [-200.0, 2.0], [3e38, 1.0], [float("nan"), 1.0], [1.0, float("nan")]])
    for limit in (None, 10.0):
        got = swiglu(x, limit=limit)
        assert_close(got, reference.swiglu(x, limit=limit), rtol=1e-6, atol=1e-30)
        assert torch.isnan(got[3:]).all()


def test_no_rows_and_wrong_arguments():
    assert swiglu(torch.empty(0, 8), limit=10.0).shape == (0, 4)
    assert swiglu(torch.empty(3, 0), limit=10.0).shape == (3, 0)
    with pytest.raises(ValueError, match="9 columns"):
        swiglu(torch.empty(2, 9), limit=10.0)
    with pytest.raises(ValueError, match="limit is -1"):
        swiglu(torch.empty(2, 8), limit=-1)
    with pytest.raises(ValueError, match="row_weights has shape"):
        swiglu(torch.empty(2, 8), limit=None, row_weights=torch.ones(3))
    with pytest.raises(TypeError, match="float16"):
        swiglu(torch.empty(2, 8).half(), limit=None)
