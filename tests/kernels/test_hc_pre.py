"""hc_pre against its reference and against fp64: shapes with tails, the fused norm, the traps of the mHC formula."""

import pytest
import torch

from dsv4_triton.compiler.launches import recording
from dsv4_triton.device import A2, A5, HOST, acting_as
from dsv4_triton.kernels.hc_pre import hc_pre, hc_pre_workspace, split_fn
from dsv4_triton.reference import hc_pre as reference
from tests.numeric import Guarded, assert_close, assert_equal

EPS = {"norm_eps": 1e-6, "hc_eps": 1e-6}
BF16, FP32 = torch.bfloat16, torch.float32
# One token, odd and prime T around the groups of 16 lanes and the 128-token tile, D with odd multiples of 16.
CASES = [
    *((T, 48, FP32, True) for T in (1, 3, 17, 33, 127, 129, 300)),
    *((T, 48, BF16, True) for T in (1, 2, 15, 16, 257)),
    (5, 272, BF16, False),
    (2, 4096, BF16, True),
    (7, 16, FP32, False),
]


def make(T, D, dtype, *, gain=0.3):
    x = torch.randn(T, 4, D).to(dtype)
    fn = torch.randn(24, 4 * D) * gain * D**-0.5
    return x, fn, torch.rand(3) + 0.5, torch.randn(24)


def tolerance(dtype):
    # fp32: sums of up to 16384 products in another order, and streams that cancel. bf16: may round to the neighbour.
    return {"rtol": 3e-6, "atol": 5e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-6}


@pytest.mark.parametrize(("T", "D", "dtype", "normed"), CASES)
def test_equals_reference_and_keeps_to_its_memory(T, D, dtype, normed):
    x, fn, scale, base = make(T, D, dtype)
    parts = split_fn(fn, dtype)
    options = EPS | {"norm_weight": torch.randn(D).to(dtype) if normed else None}
    outs = [Guarded((T, D), dtype), Guarded((T, 4), FP32), Guarded((T, 4, 4), FP32)]
    memory = dict(zip(("y", "post", "comb"), (o.out for o in outs)))
    wide = Guarded((T, D), FP32)
    result = hc_pre(x, parts, scale, base, **options, **memory, wide=wide.out)
    expected = reference.hc_pre(x, parts, scale, base, **options)
    for got, want, out, name in zip(result, expected, outs, memory):
        assert got.data_ptr() == out.out.data_ptr()
        # post and comb are fp32 for both dtypes; their logits carry the rounding of the product only
        assert_close(got, want, **(tolerance(dtype) if name == "y" else {"rtol": 3e-6, "atol": 3e-6}), what=name)
        out.assert_margins(name)
    assert_equal(wide.out, result[0].float(), "wide")
    wide.assert_margins("wide")


@pytest.mark.parametrize(("T", "family"), [(1, A2), (13, A5), (61, A5), (70, A2)])
def test_equals_reference_as_other_families_would_launch_it(T, family):
    x, fn, scale, base = make(T, 64, FP32)
    options = EPS | {"norm_weight": torch.randn(64)}
    with acting_as(family):
        result = hc_pre(x, fn[None], scale, base, **options)
    for got, want, name in zip(result, reference.hc_pre(x, fn[None], scale, base, **options), ("y", "post", "comb")):
        assert_close(got, want, **tolerance(FP32), what=name)


@pytest.mark.parametrize("family", [HOST, A2, A5])
def test_the_workspace_suffices_for_any_number_of_tokens(family):
    workspace = torch.empty(hc_pre_workspace(3000, BF16, family), dtype=torch.uint8)
    for T in (1, 16, 17, 383, 385, 1000, 1536, 1537, 3000):
        x = torch.empty(1, 4, 16).bfloat16().expand(T, 4, 16).contiguous()
        with acting_as(family), recording():
            hc_pre(x, split_fn(torch.zeros(24, 64), BF16), torch.ones(3), torch.zeros(24), **EPS, workspace=workspace)


def test_a_workspace_that_is_too_small_says_what_is_needed():
    x, fn, scale, base = make(2, 32, FP32)
    with pytest.raises(ValueError, match=r"hc_pre: workspace has 100 bytes, this call needs \d+"):
        hc_pre(x, split_fn(fn, FP32), scale, base, **EPS, workspace=torch.empty(100, dtype=torch.uint8))


def test_no_tokens():
    _, fn, scale, base = make(1, 32, torch.bfloat16)
    y, post, comb = hc_pre(torch.empty(0, 4, 32).bfloat16(), split_fn(fn, torch.bfloat16), scale, base, **EPS)
    assert (y.shape, post.shape, comb.shape) == ((0, 32), (0, 4), (0, 4, 4))


def test_bf16_parts_of_fn_are_as_good_as_fp32():
    """Values to 8, so that logits are large: post and comb within 2e-5 of fp64 arithmetic with the unsplit matrix."""
    x, fn, scale, base = make(40, 48, torch.bfloat16, gain=1.0)
    x = (x * 2).clamp(-8, 8)
    _, post, comb = hc_pre(x, split_fn(fn, torch.bfloat16), scale, base, **EPS)
    wide = x.double().flatten(1)
    m = wide @ fn.double().T * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    expected_post = 2 * torch.sigmoid(m[:, 4:8] * scale[1].double() + base[4:8].double())
    c = torch.softmax((m[:, 8:] * scale[2].double() + base[8:].double()).view(-1, 4, 4), -1) + 1e-6
    c = c / (c.sum(1, keepdim=True) + 1e-6)
    for _ in range(19):
        c = c / (c.sum(2, keepdim=True) + 1e-6)
        c = c / (c.sum(1, keepdim=True) + 1e-6)
    assert_close(post, expected_post.float(), rtol=0, atol=2e-5, what="post")
    assert_close(comb, c.float(), rtol=0, atol=2e-5, what="comb")


def test_split_fn():
    fn = torch.randn(24, 64) * torch.logspace(-6, 3, 64)
    parts = split_fn(fn, torch.bfloat16)
    assert parts.shape == (2, 24, 64) and parts.dtype == torch.bfloat16
    assert_close(parts.double().sum(0).float(), fn, rtol=2**-17, atol=0)
    assert_equal(split_fn(fn, torch.float32), fn[None])
    assert_equal(parts, reference.split_fn(fn, torch.bfloat16))
    with pytest.raises(TypeError, match="float16"):
        split_fn(fn, torch.float16)


def test_flatten_is_stream_major():
    """fn reads feature 3 of stream 2, at 2 D + 3; a feature-major flatten would read stream 3 of another feature."""
    D = 48
    x = torch.randn(3, 4, D)
    fn = torch.zeros(24, 4 * D)
    fn[4] = torch.nn.functional.one_hot(torch.tensor(2 * D + 3), 4 * D).float()
    _, post, _ = hc_pre(x, split_fn(fn, torch.float32), torch.ones(3), torch.zeros(24), **EPS)
    mix = x[:, 2, 3] * torch.rsqrt(x.flatten(1).square().mean(-1) + 1e-6)
    assert_close(post[:, 0], 2 * torch.sigmoid(mix), rtol=1e-6, atol=1e-6)
    assert_equal(post[:, 1:], torch.ones(3, 3), "post of the other rows")


def test_comb_rows_are_softmaxed_and_columns_normalised_last():
    x, fn, scale, base = make(20, 48, torch.float32, gain=3.0)
    _, _, comb = hc_pre(x, split_fn(fn, torch.float32), scale, base, **EPS, sinkhorn_iters=1)
    m = reference.mixes(x, fn[None], 1e-6)
    c = torch.softmax((m[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4), dim=2) + 1e-6
    assert_close(comb, c / (c.sum(1, keepdim=True) + 1e-6), rtol=2e-5, atol=1e-7, what="one iteration")
    _, _, comb = hc_pre(x, split_fn(fn, torch.float32), scale, base, **EPS)
    # the eps in each denominator keeps a column's sum just below 1; the rows follow as far as 20 iterations go
    assert_close(comb.sum(1), torch.full((20, 4), 1 - 1e-6), rtol=0, atol=1e-6, what="column sums")


@pytest.mark.parametrize("value", [0.0, 1e-20, 1e18], ids=["zero", "tiny", "huge"])
def test_extreme_streams_stay_finite(value):
    x, fn, scale, base = make(3, 48, torch.float32)
    x = torch.where(x > 0, value, -value)
    for got, want in zip(
        hc_pre(x, fn[None].contiguous(), scale, base, **EPS), reference.hc_pre(x, fn[None], scale, base, **EPS)
    ):
        assert torch.isfinite(got).all()
        assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_broken_token_disturbs_no_other():
    x, fn, scale, base = make(35, 48, torch.bfloat16)
    parts = split_fn(fn, torch.bfloat16)
    clean = hc_pre(x, parts, scale, base, **EPS)
    x[7], x[20] = float("nan"), float("inf")
    others = [t for t in range(35) if t not in (7, 20)]
    for got, want in zip(hc_pre(x, parts, scale, base, **EPS), clean):
        assert_equal(got[others], want[others])


def test_a_token_does_not_depend_on_its_batch():
    x, fn, scale, base = make(150, 48, torch.float32)
    parts = split_fn(fn, torch.float32)
    together = hc_pre(x, parts, scale, base, **EPS)
    for t in (0, 77, 149):
        alone = hc_pre(x[t : t + 1], parts, scale, base, **EPS)
        for got, want in zip(alone, together):
            assert_close(got[0], want[t], rtol=2e-6, atol=1e-6)


def test_wrong_arguments_are_named():
    x, fn, scale, base = make(2, 32, torch.bfloat16)
    parts = split_fn(fn, torch.bfloat16)
    with pytest.raises(ValueError, match=r"x has shape \(2, 3, 32\)"):
        hc_pre(x[:, :3].contiguous(), parts, scale, base, **EPS)
    with pytest.raises(TypeError, match=r"fn_parts has dtype torch.float32"):
        hc_pre(x, parts.float(), scale, base, **EPS)
    with pytest.raises(ValueError, match=r"fn_parts has shape"):
        hc_pre(x, parts[:, :4].contiguous(), scale, base, **EPS)
    with pytest.raises(ValueError, match=r"fn_parts has shape \(0, 24, 128\)"):
        hc_pre(x, parts[:0], scale, base, **EPS)
    with pytest.raises(ValueError, match=r"D is 24"):
        hc_pre(x[..., :24].contiguous(), parts[..., :96].contiguous(), scale, base, **EPS)
    with pytest.raises(ValueError, match="sinkhorn_iters is 0"):
        hc_pre(x, parts, scale, base, **EPS, sinkhorn_iters=0)
    with pytest.raises(ValueError, match=r"post has shape"):
        hc_pre(x, parts, scale, base, **EPS, post=torch.empty(2, 5))
