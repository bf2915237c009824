"""step_layout: ragged batches, graph padding, empty sequences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_triton.kernels.step_layout import step_layout
from dsv4_triton.reference.step_layout import step_layout as reference_step_layout
from tests.numeric import assert_equal, poisoned

NAMES = ("positions", "token_req", "n_vis4", "n_vis128")


def batch(query_lens: list[int], contexts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    lens = torch.tensor(query_lens, dtype=torch.int32)
    starts = torch.cat((torch.zeros(1, dtype=torch.int32), lens.cumsum(0, dtype=torch.int32)))
    return starts, lens + torch.tensor(contexts, dtype=torch.int32)


def check(starts: torch.Tensor, seq_lens: torch.Tensor, num_tokens: int) -> None:
    guarded = {name: poisoned((num_tokens + 2,), torch.int32) for name in NAMES}
    got = step_layout(starts, seq_lens, num_tokens, **{name: out[:num_tokens] for name, out in guarded.items()})
    for name, result, expected in zip(NAMES, got, reference_step_layout(starts, seq_lens, num_tokens), strict=True):
        assert_equal(result, expected, name)
        assert_equal(guarded[name][num_tokens:], poisoned((2,), torch.int32), f"beyond {name}")


def by_hand(query_lens: list[int], contexts: list[int], num_tokens: int) -> list[list[int]]:
    rows = [(c + i, b) for b, (n, c) in enumerate(zip(query_lens, contexts, strict=True)) for i in range(n)]
    rows += [(-1, -1)] * (num_tokens - len(rows))
    return [
        [p for p, _ in rows],
        [b for _, b in rows],
        [(p + 1) // 4 for p, _ in rows],
        [(p + 1) // 128 for p, _ in rows],
    ]


@pytest.mark.parametrize(
    "query_lens, contexts, padding",
    [
        ([1], [0], 0),
        ([1, 1, 1], [3, 126, 127], 5),
        ([5, 1, 300, 2], [0, 127, 128, 1_048_573], 9),
        ([600], [77], 0),
        ([3, 0, 0, 4, 0], [9, 5, 0, 1, 0], 3),
        ([17] * 9, list(range(9)), 0),
    ],
)
def test_mixed_batches(query_lens, contexts, padding):
    starts, seq_lens = batch(query_lens, contexts)
    num_tokens = sum(query_lens) + padding
    check(starts, seq_lens, num_tokens)
    expected = by_hand(query_lens, contexts, num_tokens)
    assert [x.tolist() for x in step_layout(starts, seq_lens, num_tokens)] == expected


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5000)), max_size=12),
    st.integers(0, 30),
)
def test_any_batch(requests, padding):
    starts, seq_lens = batch([n for n, _ in requests], [c for _, c in requests])
    num_tokens = int(starts[-1]) + padding
    check(starts, seq_lens, num_tokens)


def test_a_full_decode_batch():
    check(*batch([1] * 512, list(range(512))), 512)


def test_a_long_prefill_and_its_padding():
    check(*batch([8000, 1], [100, 70000]), 8192)


def test_visible_counts_include_the_closing_token():
    _, _, n_vis4, n_vis128 = step_layout(*batch([256], [0]), 256)
    assert n_vis4[2:4].tolist() == [0, 1] and n_vis4[255] == 64
    assert n_vis128[126:128].tolist() == [0, 1] and n_vis128[255] == 2


def test_capture_with_empty_sequences_is_all_padding():
    """A capture run passes sequence lengths of zero with tokens in the batch: no token may get a negative position."""
    starts, seq_lens = torch.arange(9, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    positions, token_req, n_vis4, n_vis128 = step_layout(starts, seq_lens, 8)
    assert (positions == -1).all() and (token_req == -1).all() and not n_vis4.any() and not n_vis128.any()


def test_padded_requests_repeat_the_last_start():
    starts, seq_lens = torch.tensor([0, 2, 3, 3, 3], dtype=torch.int32), torch.tensor([10, 4, 0, 0], dtype=torch.int32)
    positions, token_req, _, _ = step_layout(starts, seq_lens, 5)
    assert positions.tolist() == [8, 9, 3, -1, -1]
    assert token_req.tolist() == [0, 0, 1, -1, -1]


def test_more_tokens_than_rows_stay_inside_the_outputs():
    """Requests that end beyond num_tokens are cut there."""
    check(*batch([4, 4], [0, 7]), 6)


def test_no_requests_and_no_tokens():
    empty = torch.empty(0, dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    assert [x.tolist() for x in step_layout(zero, empty, 2)] == [[-1, -1], [-1, -1], [0, 0], [0, 0]]
    assert all(x.shape == (0,) for x in step_layout(zero, empty, 0))


def test_bad_arguments_are_named():
    starts, seq_lens = batch([2], [0])
    with pytest.raises(ValueError, match="query_start_loc has shape"):
        step_layout(starts[:1], seq_lens, 2)
    with pytest.raises(TypeError, match="seq_lens has dtype"):
        step_layout(starts, seq_lens.long(), 2)
    with pytest.raises(ValueError, match="n_vis4 has shape"):
        step_layout(starts, seq_lens, 2, n_vis4=torch.empty(3, dtype=torch.int32))
