"""hc_post_pre against its reference on both of its routes, and its scratch."""

import pytest
import torch

from dsv4_triton.compiler.launches import recording
from dsv4_triton.device import A2, A5, HOST, acting_as
from dsv4_triton.kernels.hc_post_pre import MATRIX_TOKENS, VECTOR_TOKENS, hc_post_pre, hc_post_pre_workspace
from dsv4_triton.kernels.hc_pre import hc_pre, split_fn
from dsv4_triton.reference import hc_post_pre as reference
from tests.numeric import Guarded, assert_close, assert_equal, poisoned

EPS = {"norm_eps": 1e-6, "hc_eps": 1e-6}
BF16, FP32 = torch.bfloat16, torch.float32


def make(T, D, dtype):
    """Streams, what a sub-layer made of them, and the next collapse."""
    y, x, post, comb = torch.randn(T, D), torch.randn(T, 4, D), torch.rand(T, 4) * 2, torch.rand(T, 4, 4)
    fn = split_fn(torch.randn(24, 4 * D) * 0.3 * D**-0.5, dtype)
    return y.to(dtype), x.to(dtype), post, comb, fn, torch.rand(3) + 0.5, torch.randn(24)


def compare(results, expected, dtype, wide):
    """fp32: sums in another order and streams that cancel. bf16: streams may round to the neighbour, and the collapse
    follows them."""
    names = ("streams", "y", "post", "comb")
    for name, got, want in zip(names, results, expected):
        if dtype == FP32:
            tolerance = {"rtol": 3e-6, "atol": 1e-5}
        else:
            tolerance = {"rtol": 2**-7, "atol": 2e-5} if name == "streams" else {"rtol": 2**-6, "atol": 4e-3}
        assert_close(got, want, **tolerance, what=name)
    assert_equal(wide, results[1].float(), "wide")


@pytest.mark.parametrize(
    ("T", "D", "dtype", "family"),
    [
        *((T, 48, FP32, HOST) for T in (1, 17, MATRIX_TOKENS, MATRIX_TOKENS + 1, 130)),
        *((T, 272, BF16, HOST) for T in (2, 33)),
        # many slices with a short last one (A2), and more cores than slices (A5)
        (5, 4096, BF16, A2),
        (16, 880, FP32, A2),
        (7, 112, FP32, A5),
        (VECTOR_TOKENS + 1, 112, BF16, A5),
    ],
)
def test_equals_reference_and_keeps_to_its_memory(T, D, dtype, family):
    arguments = make(T, D, dtype)
    options = EPS | {"norm_weight": torch.randn(D).to(dtype)}
    out, wide = Guarded((T, 4, D), dtype), Guarded((T, D), FP32)
    with acting_as(family):
        workspace = poisoned((hc_post_pre_workspace(T, D, dtype, family),), torch.uint8)
        results = hc_post_pre(*arguments, **options, out=out.out, wide=wide.out, workspace=workspace)
    assert results[0].data_ptr() == out.out.data_ptr()
    compare(results, reference.hc_post_pre(*arguments, **options), dtype, wide.out)
    out.assert_margins("streams")
    wide.assert_margins("wide")


def test_the_collapse_reads_the_rounded_streams():
    """bf16 streams in: what is collapsed is what was stored, so the two ops in a row give nearly the same numbers; only
    the order of the sums differs, which rounds y to the neighbour at most."""
    y, x, post, comb, *next_half = make(9, 96, BF16)
    streams, got, got_post, got_comb = hc_post_pre(y, x, post, comb, *next_half, **EPS)
    want, want_post, want_comb = hc_pre(streams, *next_half, **EPS)
    assert_close(got, want, rtol=2**-7, atol=1e-6, what="y")
    assert_close(got_post, want_post, rtol=5e-6, atol=5e-6, what="post")
    assert_close(got_comb, want_comb, rtol=5e-6, atol=5e-6, what="comb")


@pytest.mark.parametrize("T", [5, 40])
def test_a_broken_token_disturbs_no_other(T):
    y, x, *rest = make(T, 48, FP32)
    clean = hc_post_pre(y, x, *rest, **EPS)
    y[3, 7], x[4, 2, 40] = float("nan"), float("inf")
    others = [t for t in range(T) if t not in (3, 4)]
    for got, want in zip(hc_post_pre(y, x, *rest, **EPS), clean):
        assert_equal(got[others], want[others])


@pytest.mark.parametrize("family", [HOST, A2, A5])
def test_the_workspace_suffices_for_any_number_of_tokens(family):
    needed = hc_post_pre_workspace(300, 64, BF16, family)
    workspace = torch.empty(needed, dtype=torch.uint8)
    with acting_as(family), recording():
        for T in (1, 2, VECTOR_TOKENS, VECTOR_TOKENS + 1, 63, 64, 65, 200, 300):
            hc_post_pre(*make(T, 64, BF16), **EPS, workspace=workspace)
        with pytest.raises(ValueError, match=r"hc_post_pre: workspace has 100 bytes, this call needs \d+"):
            hc_post_pre(*make(20, 64, BF16), **EPS, workspace=workspace[:100])


def test_no_tokens_and_wrong_arguments():
    y, x, post, comb, *rest = make(2, 32, BF16)
    shapes = [t.shape for t in hc_post_pre(y[:0], x[:0], post[:0], comb[:0], *rest, **EPS)]
    assert shapes == [(0, 4, 32), (0, 32), (0, 4), (0, 4, 4)]
    with pytest.raises(ValueError, match="out must not be x"):
        hc_post_pre(y, x, post, comb, *rest, **EPS, out=x)
    with pytest.raises(TypeError, match="y has dtype"):
        hc_post_pre(y.float(), x, post, comb, *rest, **EPS)
    with pytest.raises(ValueError, match="wide has shape"):
        hc_post_pre(y, x, post, comb, *rest, **EPS, wide=torch.empty(2, 31))
    with pytest.raises(ValueError, match="fn_parts has shape"):
        hc_post_pre(y, x, post, comb, rest[0][:, :4].contiguous(), *rest[1:], **EPS)
