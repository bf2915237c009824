"""moe_plan against its reference, exactly: spreads of rows over experts, padding, foreign ids, chunk and tile edges."""

import pytest
import torch

from dsv4_triton.kernels import moe_plan as kernel
from dsv4_triton.reference import moe_plan as reference
from tests.numeric import assert_equal, poisoned


def check(ids, num_experts, block_rows):
    got = kernel.moe_plan(ids, num_experts, block_rows=block_rows)
    want = reference.moe_plan(ids, num_experts, block_rows=block_rows)
    for a, b, name in zip(got, want, ("positions", "tiles", "num_tiles")):
        assert_equal(a, b, name)
    return got


def distinct(T, E, k):
    return torch.stack([torch.randperm(E)[:k] for _ in range(T)]).int()


# 42 tokens of 6 choices are 252 pairs, one chunk; 43 are 258, several.
@pytest.mark.parametrize("T", [1, 2, 3, 42, 43, 97, 300])
def test_equals_reference(T):
    check(distinct(T, 16, 6), 16, 16)


@pytest.mark.parametrize(
    ("T", "E", "k", "block_rows"),
    [(50, 384, 6, 16), (7, 256, 6, 16), (20, 10, 3, 32), (33, 7, 1, 128), (129, 1, 1, 64)],
)
def test_numbers_of_experts(T, E, k, block_rows):
    check(distinct(T, E, k), E, block_rows)


@pytest.mark.parametrize("T", [1, 15, 16, 17, 128, 129, 400])
def test_all_to_one_expert(T):
    positions, tiles, count = check(torch.full((T, 1), 5, dtype=torch.int32), 16, 16)
    assert positions[:, 0].tolist() == list(range(T)), "the order of a group is the order of the tokens"
    assert int(count) == -(-T // 16) and int(tiles[2].sum()) == T


def test_padding_and_foreign_ids_have_no_row():
    ids = distinct(60, 16, 6)
    ids[3] = -1
    ids[10, 2], ids[11, 0], ids[59, 5] = 16, 1 << 30, -(1 << 31)
    positions, tiles, count = check(ids, 16, 16)
    dropped = (ids < 0) | (ids >= 16)
    assert_equal(positions == -1, dropped)
    assert positions[~dropped].sort().values.tolist() == list(range(int((~dropped).sum())))
    assert int(tiles[2].sum()) == int((~dropped).sum())
    _, tiles, count = check(torch.full((4, 6), -1, dtype=torch.int32), 16, 16)
    assert int(count) == 0 and not tiles.any()


def test_capacity_is_enough_and_reached():
    """The worst spread: every expert has one row, and one has all the others, one row beyond full tiles."""
    ids = torch.cat((torch.arange(16), torch.zeros(32 * 4))).int()[:, None]
    _, tiles, count = check(ids.contiguous(), 16, 32)
    assert int(count) == tiles.shape[1] == kernel.tile_capacity(len(ids), 16, 32) == 20
    assert kernel.tile_capacity(len(ids), 16, 32) == reference.tile_capacity(len(ids), 16, 32)


@pytest.mark.parametrize("T", [1, 42, 43, 300])
def test_given_memory_and_workspace(T):
    ids = distinct(T, 16, 6)
    want = reference.moe_plan(ids, 16, block_rows=16)
    memory = {name: poisoned(t.shape, t.dtype) for name, t in zip(("positions", "tiles", "num_tiles"), want)}
    workspace = poisoned((kernel.moe_plan_workspace(300 * 6, 16),), torch.uint8)
    got = kernel.moe_plan(ids, 16, block_rows=16, **memory, workspace=workspace)
    for a, b, (name, given) in zip(got, want, memory.items()):
        assert a.data_ptr() == given.data_ptr()
        assert_equal(a, b, name)


def test_no_tokens_and_wrong_arguments():
    positions, tiles, count = check(torch.empty(0, 6, dtype=torch.int32), 16, 16)
    assert positions.shape == (0, 6) and tiles.shape == (3, 0) and int(count) == 0
    with pytest.raises(ValueError, match="block_rows is 24"):
        kernel.moe_plan(torch.zeros(2, 6, dtype=torch.int32), 16, block_rows=24)
    with pytest.raises(ValueError, match=r"moe_plan: workspace has 64 bytes, this call needs \d+"):
        kernel.moe_plan(distinct(50, 16, 6), 16, block_rows=16, workspace=torch.empty(64, dtype=torch.uint8))
    with pytest.raises(TypeError, match="ids has dtype"):
        kernel.moe_plan(torch.zeros(2, 6, dtype=torch.int64), 16, block_rows=16)
