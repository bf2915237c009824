"""moe_dispatch against its reference, exactly, on both of its routes: spreads of rows, padding, foreign ids, poison."""

import pytest
import torch

from dsv4_triton.device import A2, HOST, acting_as
from dsv4_triton.kernels.moe_dispatch import ALONE_PAIRS, moe_dispatch, moe_dispatch_workspace
from dsv4_triton.kernels.moe_plan import tile_capacity
from dsv4_triton.reference import moe_dispatch as reference
from tests.numeric import Guarded, assert_equal, poisoned

BF16, FP32 = torch.bfloat16, torch.float32
NAMES = ("rows", "row_weights", "positions", "tiles", "num_tiles")


def check(ids, num_experts, dtype=FP32, D=48, block_rows=16, family=HOST):
    T, k = ids.shape
    x, weights = torch.randn(T, D).to(dtype), torch.rand(T, k)
    capacity = tile_capacity(T * k, num_experts, block_rows)
    shapes = (((T * k, D), dtype), ((T * k,), FP32), ((T, k), torch.int32), ((3, capacity), torch.int32))
    guards = [Guarded(*part) for part in (*shapes, ((1,), torch.int32))]
    given = {name: guard.out for name, guard in zip(NAMES, guards)}
    want = {name: guard.out.clone() for name, guard in zip(NAMES, guards)}
    workspace = poisoned((moe_dispatch_workspace(T * k, num_experts),), torch.uint8)
    with acting_as(family):
        got = moe_dispatch(x, weights, ids, num_experts, block_rows=block_rows, **given, workspace=workspace)
    reference.moe_dispatch(x, weights, ids, num_experts, block_rows=block_rows, **want)
    for tensor, guard, (name, expected) in zip(got, guards, want.items()):
        assert tensor.data_ptr() == guard.out.data_ptr()
        assert_equal(tensor, expected, name)
        guard.assert_margins(name)


def distinct(T, E, k):
    return torch.stack([torch.randperm(E)[:k] for _ in range(T)]).int()


# 7 choices: 9 tokens are 63 pairs, 10 are 70; 36 and 37 are around 256, 73 and 74 around 512.
@pytest.mark.parametrize("T", [1, 2, 9, 10, 36, 37, 73, 74, 200])
def test_equals_reference(T):
    check(distinct(T, 17, 7), 17)


@pytest.mark.parametrize(
    ("T", "E", "k", "block_rows", "family"),
    [(50, 384, 6, 16, HOST), (16, 257, 7, 16, A2), (20, 10, 3, 32, HOST), (33, 7, 1, 128, A2), (80, 20, 7, 16, A2)],
)
def test_numbers_of_experts(T, E, k, block_rows, family):
    check(distinct(T, E, k), E, BF16, block_rows=block_rows, family=family)


@pytest.mark.parametrize("T", [1, 17, *ALONE_PAIRS, ALONE_PAIRS[-1] + 1])
def test_all_to_one_expert(T):
    check(torch.full((T, 1), 5, dtype=torch.int32), 16, D=16)


@pytest.mark.parametrize("T", [20, 100])
def test_padding_and_foreign_ids_have_no_row(T):
    ids = distinct(T, 16, 6)
    ids[3] = -1
    ids[10, 2], ids[11, 0], ids[T - 1, 5] = 16, 1 << 30, -(1 << 31)
    check(ids, 16)
    check(torch.full((T, 6), -1, dtype=torch.int32), 16)


def test_no_tokens_and_wrong_arguments():
    x, weights, ids = torch.zeros(3, 32), torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int32)
    rows, row_weights, positions, tiles, count = moe_dispatch(x[:0], weights[:0], ids[:0], 4, block_rows=16)
    assert rows.shape == (0, 32) and row_weights.shape == (0,) and positions.shape == (0, 2)
    assert tiles.shape == (3, 0) and int(count) == 0
    arguments = {"x": x, "weights": weights, "ids": ids, "num_experts": 4, "block_rows": 16}
    for error, match, changes in (
        (ValueError, "block_rows is 24", {"block_rows": 24}),
        (TypeError, "ids has dtype", {"ids": ids.long()}),
        (ValueError, "weights has shape", {"weights": weights[:2]}),
        (ValueError, "D is 24", {"x": x[:, :24].contiguous()}),
        (TypeError, "rows has dtype", {"rows": torch.zeros(6, 32, dtype=BF16)}),
    ):
        with pytest.raises(error, match=match):
            moe_dispatch(**(arguments | changes))
