"""muls_add against its reference: tails, mixed dtypes, in place."""

import pytest
import torch

from dsv4_triton.kernels.muls_add import muls_add
from dsv4_triton.reference import muls_add as reference
from tests.numeric import Guarded, assert_close, assert_equal


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=["x32", "x16"])
@pytest.mark.parametrize("y_dtype", [torch.float32, torch.bfloat16], ids=["y32", "y16"])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (8191,), (8193,), (7, 4096), (2, 3, 17)])
def test_equals_reference_and_keeps_to_its_memory(shape, x_dtype, y_dtype):
    x, y = torch.randn(shape).to(x_dtype), torch.randn(shape).to(y_dtype)
    guarded = Guarded(shape, y_dtype)
    muls_add(x, y, 1.5, out=guarded.out)
    # a product and a sum, fused or not: one ulp of the larger term; bf16: may round to the neighbour
    assert_close(
        guarded.out, reference.muls_add(x, y, 1.5), rtol=2**-7 if y_dtype == torch.bfloat16 else 1e-6, atol=1e-6
    )
    guarded.assert_margins()


def test_in_place_and_scales():
    x, y = torch.randn(100), torch.randn(100).bfloat16()
    for scale in (0, 1, -2.5, 1e-3):
        want = reference.muls_add(x, y, scale)
        target = y.clone()
        assert muls_add(x, target, scale, out=target) is target
        assert_close(target, want, rtol=2**-7, atol=1e-6)


def test_empty_and_wrong_arguments():
    assert muls_add(torch.empty(0, 4), torch.empty(0, 4), 2.0).shape == (0, 4)
    with pytest.raises(ValueError, match=r"y has shape \(4,\)"):
        muls_add(torch.empty(3), torch.empty(4), 1.0)
    with pytest.raises(ValueError, match="strides"):
        muls_add(torch.empty(4, 4).T, torch.empty(4, 4), 1.0)
    with pytest.raises(TypeError, match="out has dtype"):
        muls_add(torch.empty(4), torch.empty(4).bfloat16(), 1.0, out=torch.empty(4))


def test_rounds_once():
    """257 * 1 - 256 is 1; rounding the product to bf16 first would give 0."""
    assert_equal(muls_add(torch.tensor([257.0]), torch.tensor([-256.0]).bfloat16(), 1.0), torch.ones(1).bfloat16())
