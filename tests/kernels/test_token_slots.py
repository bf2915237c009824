"""token_slots: page edges, closing tokens, the null block, padding and bad tables."""

from __future__ import annotations

import pytest
import torch

from dsv4_triton.kernels.token_slots import token_slots
from dsv4_triton.reference.token_slots import token_slots as reference_token_slots
from tests.numeric import assert_equal, poisoned


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def permuted_table(requests: int, columns: int) -> torch.Tensor:
    """Every block of every request different, in random order, never the null block."""
    return (torch.randperm(requests * columns, dtype=torch.int32) + 1).reshape(requests, columns)


@pytest.mark.parametrize("rows, ratio", [(64, 1), (64, 4), (2, 128), (8, 1), (1, 4)])
@pytest.mark.parametrize("tokens", [1, 127, 129, 300])
def test_equals_reference(rows, ratio, tokens):
    columns = 8
    table = permuted_table(5, columns)
    table[2, 1] = 0
    table[3, 2] = -1
    positions = torch.randint(0, rows * ratio * columns, (tokens,), dtype=torch.int32)
    positions[::3] = positions[::3] // ratio * ratio + ratio - 1
    token_req = torch.randint(0, 5, (tokens,), dtype=torch.int32)
    positions[tokens // 2 :: 7] = -1
    token_req[tokens // 3 :: 11] = -1
    out = poisoned((tokens + 3,), torch.int32)
    got = token_slots(positions, token_req, table, rows_per_block=rows, ratio=ratio, out=out[:tokens])
    assert_equal(got, reference_token_slots(positions, token_req, table, rows_per_block=rows, ratio=ratio))
    assert_equal(out[tokens:], poisoned((3,), torch.int32), "beyond the output")


def test_page_edges_by_hand():
    table = int32(7, 3, 9).reshape(1, 3)
    positions = int32(0, 63, 64, 127, 128, 191)
    got = token_slots(positions, torch.zeros_like(positions), table, rows_per_block=64)
    assert got.tolist() == [7 * 64, 7 * 64 + 63, 3 * 64, 3 * 64 + 63, 9 * 64, 9 * 64 + 63]


@pytest.mark.parametrize("ratio", [4, 128])
def test_only_the_closing_token_of_a_window_writes(ratio):
    """Row p // ratio, and only where (p + 1) % ratio == 0: position ratio - 2 and ratio write nothing."""
    positions = torch.arange(3 * ratio, dtype=torch.int32)
    table = permuted_table(1, 8)
    got = token_slots(positions, torch.zeros_like(positions), table, rows_per_block=2, ratio=ratio)
    closing = torch.nonzero(got >= 0).flatten().tolist()
    assert closing == [ratio - 1, 2 * ratio - 1, 3 * ratio - 1]
    assert got[closing].tolist() == [table[0, 0] * 2, table[0, 0] * 2 + 1, table[0, 1] * 2]


def test_the_null_block_is_never_addressed():
    table = torch.zeros(3, 4, dtype=torch.int32)
    positions = torch.arange(12, dtype=torch.int32) * 20
    got = token_slots(positions, positions % 3, table, rows_per_block=64)
    assert (got == -1).all()


def test_positions_beyond_the_table_write_nothing():
    table = permuted_table(2, 2)
    got = token_slots(int32(127, 128, 2**30), int32(1, 1, 1), table, rows_per_block=64)
    assert got.tolist() == [int(table[1, 1]) * 64 + 63, -1, -1]


def test_tables_may_be_strided_rows_of_a_larger_buffer():
    buffer = poisoned((9, 40), torch.int32)
    table = buffer[:5, :8]
    table.copy_(permuted_table(5, 8))
    positions, token_req = int32(0, 70, 511, 5), int32(4, 0, 3, -1)
    got = token_slots(positions, token_req, table, rows_per_block=64)
    assert_equal(got, reference_token_slots(positions, token_req, table.contiguous(), rows_per_block=64))


def test_inputs_stay_as_they_are():
    positions, token_req, table = int32(3, -1, 9), int32(0, -1, 1), permuted_table(2, 3)
    before = [x.clone() for x in (positions, token_req, table)]
    first = token_slots(positions, token_req, table, rows_per_block=4)
    assert_equal(token_slots(positions, token_req, table, rows_per_block=4), first)
    for now, then in zip((positions, token_req, table), before, strict=True):
        assert_equal(now, then)


def test_empty_batches_and_tables():
    none = torch.empty(0, dtype=torch.int32)
    assert token_slots(none, none, permuted_table(2, 3), rows_per_block=4).shape == (0,)
    assert token_slots(int32(0, 1), int32(-1, -1), none.reshape(0, 3), rows_per_block=4).tolist() == [-1, -1]
    assert token_slots(int32(0), int32(0), none.reshape(2, 0), rows_per_block=4).tolist() == [-1]


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match="positions has dtype"):
        token_slots(torch.zeros(2, dtype=torch.int64), int32(0, 0), permuted_table(1, 1), rows_per_block=4)
    with pytest.raises(ValueError, match="token_req has shape"):
        token_slots(int32(0, 0), int32(0), permuted_table(1, 1), rows_per_block=4)
    with pytest.raises(ValueError, match="positive, got 0 and 1"):
        token_slots(int32(0), int32(0), permuted_table(1, 1), rows_per_block=0)
