"""moe_router against its reference: any number of experts, ties, the role of the bias, hash tables, extreme logits."""

import dataclasses

import pytest
import torch

from dsv4_triton.device import HOST
from dsv4_triton.kernels import moe_router as module
from dsv4_triton.kernels.moe_router import moe_router
from dsv4_triton.reference import moe_router as reference
from tests.numeric import Guarded, assert_close, assert_equal

FACTOR = 1.5


@pytest.fixture(params=[False, True], ids=["rounds", "sort"])
def selection(request, monkeypatch):
    """Both ways to find the best: rounds of maxima, and the sort that the NPU families use."""
    family = dataclasses.replace(HOST, vector_sort=request.param)
    monkeypatch.setattr(module, "family_of", lambda device: family)


def spread_logits(T, E):
    """Logits whose scores differ by far more than rounding, in a random order per token."""
    grid = torch.linspace(-6, 6, E)
    return torch.stack([grid[torch.randperm(E)] for _ in range(T)]) if T else torch.empty(0, E)


def check(logits, k=6, **options):
    T, columns = len(logits), k + options.get("shared_expert", False)
    weights, ids = Guarded((T, columns), torch.float32), Guarded((T, columns), torch.int32)
    moe_router(logits, k, routed_scaling_factor=FACTOR, weights=weights.out, ids=ids.out, **options)
    want_weights, want_ids = reference.moe_router(logits, k, routed_scaling_factor=FACTOR, **options)
    assert_equal(ids.out, want_ids, "ids")
    # log, exp, square root and division within a few ulp of fp32 each
    assert_close(weights.out, want_weights, rtol=2e-6, atol=1e-30, what="weights")
    weights.assert_margins("weights")
    ids.assert_margins("ids")
    return weights.out, ids.out


@pytest.mark.parametrize(
    ("T", "E", "k", "biased"),
    [(1, 16, 6, False), (17, 16, 6, True), (130, 16, 6, False), (3, 384, 6, False), (33, 256, 6, True)],
)
def test_equals_reference(T, E, k, biased, selection):
    weights, ids = check(spread_logits(T, E), k, bias=torch.randn(E) if biased else None)
    assert_close(weights.sum(1), torch.full((T,), FACTOR), rtol=1e-6, atol=0, what="sum of weights")
    assert all(len(set(row)) == k for row in ids.tolist())


@pytest.mark.parametrize(("E", "k"), [(10, 6), (6, 6), (7, 3), (1, 1), (72, 8)])
def test_odd_numbers_of_experts(E, k):
    check(spread_logits(5, E), k, bias=torch.linspace(-1, 1, E))


def test_the_bias_chooses_and_never_weighs():
    logits = spread_logits(4, 16)
    bias = torch.zeros(16)
    bias[[2, 3, 5, 7, 11, 13]] = 100.0
    weights, ids = moe_router(logits, 6, routed_scaling_factor=FACTOR, bias=bias)
    assert_equal(ids.sort(1).values, torch.tensor([[2, 3, 5, 7, 11, 13]], dtype=torch.int32).expand(4, 6).contiguous())
    score = torch.nn.functional.softplus(logits).sqrt().gather(1, ids.long())
    assert_close(weights, score / score.sum(1, keepdim=True) * FACTOR, rtol=2e-6, atol=0)


def test_ties_go_to_the_lower_expert(selection):
    _, ids = check(torch.zeros(3, 16))
    assert_equal(ids, torch.arange(6, dtype=torch.int32).expand(3, 6).contiguous())
    logits = torch.zeros(2, 16)
    logits[:, [4, 9, 12]] = 1.0
    _, ids = check(logits, bias=torch.zeros(16))
    assert ids.tolist() == [[0, 1, 2, 4, 9, 12]] * 2


@pytest.mark.parametrize("value", [-1e4, -200.0, -90.0, -17.0, -1e-3, 0.0, 20.0, 89.0, 1e4])
def test_softplus_is_stable(value):
    """log(1 + e^z) overflows beyond 88 and flushes to zero below -17; neither may show in weights or order."""
    logits = torch.full((2, 16), value) + torch.linspace(0, 1, 16) * max(1.0, abs(value) * 1e-2)
    weights, _ = check(logits)
    assert torch.isfinite(weights).all()


def test_broken_scores_rank_last_and_stay_in_their_row(selection):
    logits = spread_logits(3, 16)
    clean_weights, clean_ids = moe_router(logits, 6, routed_scaling_factor=FACTOR)
    logits[1, 3] = float("nan")
    weights, ids = check(logits)
    assert_equal(ids[[0, 2]], clean_ids[[0, 2]])
    assert_equal(weights[[0, 2]], clean_weights[[0, 2]])
    assert 3 not in ids[1].tolist()
    _, ids = check(torch.full((2, 16), float("nan")))
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    # an expert switched off by an infinite bias is chosen only where nothing else is left
    bias = torch.zeros(16)
    bias[:12] = float("-inf")
    _, ids = check(spread_logits(2, 16), bias=bias)
    assert ids.tolist() == [[0, 1, 12, 13, 14, 15]] * 2


@pytest.mark.parametrize("token_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("table_dtype", [torch.int32, torch.int64])
def test_hash_table(token_dtype, table_dtype):
    V, E = 37, 16
    table = torch.stack([torch.randperm(E)[:6] for _ in range(V)]).to(table_dtype)
    tokens = torch.tensor([5, 0, 36, -1, 37, -2, 1 << 30, 17], dtype=token_dtype)
    logits = torch.randn(len(tokens), E) * 4
    weights, ids = check(logits, input_ids=tokens, tid2eid=table)
    for row, token in enumerate((5, 0, 36, 0, 0, 0, 0, 17)):
        assert ids[row].tolist() == table[token].tolist()
    score = torch.nn.functional.softplus(logits).sqrt().gather(1, ids.long())
    assert_close(weights, score / score.sum(1, keepdim=True) * FACTOR, rtol=2e-6, atol=0)


def test_hash_table_with_odd_experts_and_one_token():
    check(torch.randn(1, 10), 3, input_ids=torch.tensor([2]), tid2eid=torch.tensor([[0, 1, 2], [3, 4, 5], [9, 8, 7]]))


def test_hash_ids_of_a_bad_table_read_nothing_outside():
    """The loader refuses such tables; here the weights of foreign experts are merely zero."""
    table = torch.tensor([[1 << 30, -5, 3, 2, 16, 1]])
    weights, ids = moe_router(
        torch.zeros(1, 16), 6, routed_scaling_factor=FACTOR, input_ids=torch.tensor([0]), tid2eid=table
    )
    assert ids.tolist() == table.tolist()
    assert_close(weights, torch.tensor([[0.0, 0.0, 0.5, 0.5, 0.0, 0.5]]), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("T", "E", "k"), [(1, 16, 6), (130, 16, 6), (3, 384, 7), (5, 6, 6), (2, 10, 8)])
def test_a_shared_expert_is_the_last_choice(T, E, k):
    """k of 7 and 8 choices: with the shared one a full power of two, and one beyond."""
    logits = spread_logits(T, E)
    bias = torch.randn(E)
    weights, ids = check(logits, k, bias=bias, shared_expert=True)
    assert ids[:, k].tolist() == [E] * T
    assert weights[:, k].tolist() == [1.0] * T
    routed, routed_ids = moe_router(logits, k, routed_scaling_factor=FACTOR, bias=bias)
    assert_equal(weights[:, :k].clone(), routed)
    assert_equal(ids[:, :k].clone(), routed_ids)


def test_a_shared_expert_with_a_hash_table():
    table = torch.stack([torch.randperm(16)[:6] for _ in range(9)])
    tokens = torch.tensor([3, -1, 8])
    weights, ids = check(torch.randn(3, 16), input_ids=tokens, tid2eid=table, shared_expert=True)
    assert ids.tolist() == [[*table[t].tolist(), 16] for t in (3, 0, 8)]
    assert_close(weights.sum(1), torch.full((3,), FACTOR + 1), rtol=1e-6, atol=0)


def test_no_tokens_and_wrong_arguments():
    weights, ids = moe_router(torch.empty(0, 16), 6, routed_scaling_factor=FACTOR)
    assert weights.shape == ids.shape == (0, 6)
    logits = torch.zeros(2, 16)
    table, tokens = torch.zeros(4, 6, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    for error, match, arguments in (
        (TypeError, "logits has dtype", {"logits": logits.bfloat16()}),
        (ValueError, "k is 17 of 16", {"k": 17}),
        (ValueError, "k is 0", {"k": 0}),
        (ValueError, r"bias has shape \(6,\)", {"bias": torch.zeros(6)}),
        (ValueError, "together", {"input_ids": tokens}),
        (ValueError, "together", {"tid2eid": table}),
        (ValueError, "no bias", {"tid2eid": table, "input_ids": tokens, "bias": torch.zeros(16)}),
        (ValueError, r"input_ids has shape \(3,\)", {"tid2eid": table, "input_ids": torch.zeros(3, dtype=torch.int64)}),
        (ValueError, r"tid2eid has shape \(4, 5\)", {"tid2eid": table[:, :5].contiguous(), "input_ids": tokens}),
        (ValueError, "no rows", {"tid2eid": table[:0], "input_ids": tokens}),
    ):
        with pytest.raises(error, match=match):
            moe_router(**({"logits": logits, "k": 6, "routed_scaling_factor": FACTOR} | arguments))
