"""moe_experts against its reference and against a loop over tokens: padding, clamps, the place of the weight."""

import pytest
import torch

from dsv4_triton.autotune.space import trial
from dsv4_triton.compiler.launches import recording
from dsv4_triton.device import A2, HOST, acting_as
from dsv4_triton.kernels import moe_experts as kernel
from dsv4_triton.kernels.grouped_matmul import BLOCK_ROWS
from dsv4_triton.kernels.moe_experts import moe_experts, moe_experts_workspace
from dsv4_triton.reference import moe_experts as reference
from dsv4_triton.reference.grouped_matmul_swiglu import gate_up
from tests.numeric import Guarded, assert_close, assert_equal, poisoned

BF16, FP32 = torch.bfloat16, torch.float32
LIMIT = 10.0


def make(T, dtype, *, E=16, D=64, inner=48, k=6, gain=1.0):
    x = (torch.randn(T, D) * gain).to(dtype)
    w13 = (torch.randn(E, 2 * inner, D) * D**-0.5).to(dtype)
    w2 = (torch.randn(E, D, inner) * inner**-0.5).to(dtype)
    ids = torch.stack([torch.randperm(E)[:k] for _ in range(T)]).int()
    return x, w13, w2, torch.rand(T, k), ids


def tolerance(dtype):
    # fp32: sums of 64 and 48 terms in another order. bf16: a few of the 48 terms of h may round to their neighbour.
    return {"rtol": 3e-6, "atol": 1e-5} if dtype == FP32 else {"rtol": 2**-8, "atol": 2e-2}


@pytest.mark.parametrize(("T", "dtype"), [(1, FP32), (7, FP32), (43, FP32), (130, FP32), (2, BF16), (45, BF16)])
def test_equals_reference_and_keeps_to_its_memory(T, dtype):
    args = make(T, dtype)
    guarded = Guarded((T, 64), FP32)
    got = moe_experts(*args, swiglu_limit=LIMIT, out=guarded.out)
    assert_close(got, reference.moe_experts(*args, swiglu_limit=LIMIT), **tolerance(dtype))
    guarded.assert_margins()


def test_equals_a_loop_over_tokens_in_fp64():
    x, w13, w2, weights, ids = make(5, FP32, gain=20.0)
    expected = torch.zeros(5, 64, dtype=torch.float64)
    for t in range(5):
        for weight, expert in zip(weights[t].double(), ids[t].tolist()):
            a, b = (w.double() @ x[t].double() for w in gate_up(w13[expert]))
            h = torch.nn.functional.silu(a.clamp(max=LIMIT)) * b.clamp(-LIMIT, LIMIT)
            expected[t] += w2[expert].double() @ (weight * h)
    assert_close(moe_experts(x, w13, w2, weights, ids, swiglu_limit=LIMIT), expected.float(), rtol=1e-5, atol=1e-4)


def test_the_limit_reaches_the_experts_for_few_tokens_and_many():
    """Activations of +-50: without the clamp the result is several times larger."""
    args = make(43, FP32, gain=50.0)
    clamped = moe_experts(*args, swiglu_limit=LIMIT)
    free = moe_experts(*args, swiglu_limit=None)
    assert free.abs().mean() > 3 * clamped.abs().mean()
    assert_equal(moe_experts(*args, swiglu_limit=0), free)
    x, w13, w2, weights, ids = args
    for T in (1, 3, 8):
        few = moe_experts(x[:T], w13, w2, weights[:T], ids[:T], swiglu_limit=LIMIT)
        assert_close(few, clamped[:T], rtol=3e-6, atol=1e-4)


def test_padding_rows_contribute_nothing():
    x, w13, w2, weights, ids = make(10, BF16)
    clean = moe_experts(x, w13, w2, weights, ids, swiglu_limit=LIMIT)
    padding = [0, 7, 9]
    ids[padding] = -1
    x[padding] = float("nan")
    weights[padding] = float("nan")
    got = moe_experts(x, w13, w2, weights, ids, swiglu_limit=LIMIT)
    others = [t for t in range(10) if t not in padding]
    assert_equal(got[others], clean[others])
    assert_equal(got[padding], torch.zeros(3, 64))
    assert_equal(moe_experts(x, w13, w2, weights, torch.full_like(ids, -1), swiglu_limit=LIMIT), torch.zeros(10, 64))


def test_an_id_outside_is_skipped():
    x, w13, w2, weights, ids = make(3, FP32)
    ids[1, 2] = 16
    want = reference.moe_experts(x, w13, w2, weights, ids, swiglu_limit=LIMIT)
    assert_close(moe_experts(x, w13, w2, weights, ids, swiglu_limit=LIMIT), want, **tolerance(FP32))


@pytest.mark.parametrize("T", [1, 43])
def test_all_tokens_to_one_expert(T):
    x, w13, w2, weights, _ = make(T, FP32)
    ids = torch.full((T, 1), 9, dtype=torch.int32)
    want = reference.moe_experts(x, w13, w2, weights[:, :1].contiguous(), ids, swiglu_limit=LIMIT)
    got = moe_experts(x, w13, w2, weights[:, :1].contiguous(), ids, swiglu_limit=LIMIT)
    assert_close(got, want, **tolerance(FP32))


def test_a_token_does_not_depend_on_its_batch():
    x, w13, w2, weights, ids = make(130, FP32)
    together = moe_experts(x, w13, w2, weights, ids, swiglu_limit=LIMIT)
    for t in (0, 50, 129):
        alone = moe_experts(x[t : t + 1], w13, w2, weights[t : t + 1], ids[t : t + 1], swiglu_limit=LIMIT)
        assert_close(alone[0], together[t], rtol=1e-6, atol=1e-6)


def test_rounds_once_to_the_dtype_of_out():
    args = make(9, BF16)
    wide = moe_experts(*args, swiglu_limit=LIMIT)
    got = moe_experts(*args, swiglu_limit=LIMIT, out=poisoned((9, 64), BF16))
    assert_equal(got, wide.to(BF16))


def test_a_shared_expert_is_one_more_choice():
    """Weight 1 and the last expert in every row: the sum of the routed experts and of the shared one."""
    x, w13, w2, weights, ids = make(12, FP32)
    every = torch.full((12, 1), 15, dtype=torch.int32)
    ids = torch.stack([torch.randperm(15)[:6] for _ in range(12)]).int()
    both = moe_experts(
        x, w13, w2, torch.cat((weights, torch.ones(12, 1)), 1), torch.cat((ids, every), 1), swiglu_limit=LIMIT
    )
    routed = moe_experts(x, w13, w2, weights, ids, swiglu_limit=LIMIT)
    shared = moe_experts(x, w13, w2, torch.ones(12, 1), every, swiglu_limit=LIMIT)
    assert_close(both, routed + shared, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [rows for rows in BLOCK_ROWS if rows >= HOST.dot_rows])
def test_long_steps_run_in_parts(monkeypatch, rows):
    """Tiles of one height, so that sums of products are in one order on every CPU."""
    args = make(43, FP32)
    with trial({kernel.OP: {"ROWS": rows}}):
        whole = moe_experts(*args, swiglu_limit=LIMIT)
        monkeypatch.setattr(kernel, "RUN_TOKENS", 16)
        workspace = torch.empty(moe_experts_workspace(43, 6, 16, 64, 48, FP32), dtype=torch.uint8)
        assert_equal(moe_experts(*args, swiglu_limit=LIMIT, workspace=workspace), whole)


@pytest.mark.parametrize("family", [HOST, A2])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_workspace_suffices_for_any_number_of_tokens(family, dtype):
    x, w13, w2, weights, ids = make(1000, dtype)
    workspace = poisoned((moe_experts_workspace(1000, 6, 16, 64, 48, dtype),), torch.uint8)
    few = moe_experts(x[:5], w13, w2, weights[:5], ids[:5], swiglu_limit=LIMIT)
    got = moe_experts(x[:5], w13, w2, weights[:5], ids[:5], swiglu_limit=LIMIT, workspace=workspace)
    assert_equal(got, few)
    with acting_as(family), recording():
        for T in (1, 2, 10, 11, 42, 43, 100, 170, 171, 999, 1000):
            moe_experts(x[:T], w13, w2, weights[:T], ids[:T], swiglu_limit=LIMIT, workspace=workspace)
    with pytest.raises(ValueError, match=r"moe_experts: workspace has 4096 bytes, this call needs \d+"):
        moe_experts(x, w13, w2, weights, ids, swiglu_limit=LIMIT, workspace=workspace[:4096])


def test_no_tokens_and_wrong_arguments():
    x, w13, w2, weights, ids = make(2, BF16)
    assert moe_experts(x[:0], w13, w2, weights[:0], ids[:0], swiglu_limit=LIMIT).shape == (0, 64)
    for error, match, arguments in (
        (TypeError, "w13 has dtype", {"w13": w13.float()}),
        (ValueError, "w2 has shape", {"w2": w2[:, :, :32].contiguous()}),
        (ValueError, "w13 has shape", {"w13": w13[:, :95].contiguous()}),
        (ValueError, "ids has shape", {"ids": ids[:, :5].contiguous()}),
        (TypeError, "ids has dtype", {"ids": ids.long()}),
        (TypeError, "out has dtype", {"out": torch.empty_like(x, dtype=torch.float16)}),
        (TypeError, "workspace has dtype", {"workspace": torch.empty(1 << 20, dtype=torch.int8)}),
    ):
        with pytest.raises(error, match=match):
            moe_experts(
                **({"x": x, "w13": w13, "w2": w2, "weights": weights, "ids": ids, "swiglu_limit": LIMIT} | arguments)
            )
