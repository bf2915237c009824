"""`compressor_state_insert` against its reference: bitwise, because one fp32 addition has one result."""

from __future__ import annotations

import pytest
import torch

from dsv4_triton.kernels.compressor_state_insert import compressor_state_insert
from dsv4_triton.reference.compressor_state_insert import compressor_state_insert as reference
from dsv4_triton.reference.token_slots import token_slots
from tests.kernels.paging import clone, far_pages, ints, pages, shuffled_table, whole
from tests.numeric import assert_equal, poisoned


def compare(proj, ape, positions, state, slots) -> None:
    """The whole memory must agree, so a store outside the rows of the step is a failure."""
    expected = clone(state)
    reference(proj, ape, positions, expected, slots)
    compressor_state_insert(proj, ape, positions, state, slots)
    assert_equal(whole(state), whole(expected), "state memory")


@pytest.mark.parametrize("tokens", [1, 2, 7, 31])
@pytest.mark.parametrize(("ratio", "width", "rows"), [(4, 256, 8), (4, 1024, 2), (128, 512, 32)])
def test_rows_at_scattered_slots(tokens: int, ratio: int, width: int, rows: int) -> None:
    proj, ape = torch.randn(tokens, 2 * width), torch.randn(ratio, width)
    state = pages(tokens + 2, rows, 2 * width, torch.float32)
    slots = (torch.randperm((tokens + 1) * rows)[:tokens] + rows).to(torch.int32)
    positions = torch.randint(0, 1_000_000, (tokens,), dtype=torch.int32)
    compare(proj, ape, positions, state, slots)


def test_ape_follows_the_absolute_position_in_a_later_chunk() -> None:
    """A chunk that starts at position 6 begins with row 2 of ape, not row 0."""
    width, proj = 256, torch.zeros(3, 512)
    ape = torch.arange(4.0)[:, None].expand(4, width).contiguous()
    state = pages(3, 8, 2 * width, torch.float32)
    compressor_state_insert(proj, ape, ints(6, 7, 8), state, ints(8, 9, 10))
    assert state[1, :3, width].tolist() == [2.0, 3.0, 0.0]
    assert state[1, :3, 0].tolist() == [0.0, 0.0, 0.0]


def test_padding_and_null_block_write_nothing() -> None:
    """Padding tokens carry poisoned projections; a request without a state block has the null block 0 in its table."""
    width, rows = 256, 8
    positions, token_req = ints(0, 1, 2, 3, -1, -1), ints(0, 0, 1, 1, -1, -1)
    table = torch.tensor([[2], [0]], dtype=torch.int32)
    slots = token_slots(positions, token_req, table, rows_per_block=rows)
    proj = torch.randn(6, 2 * width)
    proj[2:] = float("nan")
    state = pages(4, rows, 2 * width, torch.float32)
    compare(proj, torch.randn(4, width), positions, state, slots)
    assert not torch.isnan(state[2, :2]).any()
    assert torch.isnan(state[[0, 1, 3]]).all()


def test_projection_may_be_a_slice_of_a_wider_tensor() -> None:
    width = 256
    wide = poisoned((5, 4 * width), torch.float32)
    proj = wide[:, width : 3 * width]
    proj.copy_(torch.randn(5, 2 * width))
    compare(
        proj, torch.randn(4, width), ints(3, 4, 5, 6, 7), pages(3, 8, 2 * width, torch.float32), ints(4, 5, 6, 7, 8)
    )


def test_chunks_give_the_one_shot_state() -> None:
    width, rows, tokens = 256, 8, 41
    proj, ape = torch.randn(tokens, 2 * width), torch.randn(4, width)
    positions, token_req = torch.arange(tokens, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int32)
    slots = token_slots(positions, token_req, shuffled_table(1, 6), rows_per_block=rows)
    once, chunked = (pages(7, rows, 2 * width, torch.float32) for _ in range(2))
    compressor_state_insert(proj, ape, positions, once, slots)
    for start, end in ((0, 1), (1, 6), (6, 7), (7, 40), (40, 41)):
        compressor_state_insert(proj[start:end], ape, positions[start:end], chunked, slots[start:end])
    assert_equal(whole(chunked), whole(once))


def test_block_offset_beyond_int32() -> None:
    width = 256
    state = far_pages(8, 2 * width, torch.float32)
    proj, ape = torch.randn(1, 2 * width), torch.randn(4, width)
    compressor_state_insert(proj, ape, ints(5), state, ints(2 * 8 + 1))
    assert_equal(state[2, 1, :width], proj[0, :width])
    assert_equal(state[2, 1, width:], proj[0, width:] + ape[1])


def test_no_tokens() -> None:
    state = pages(2, 4, 512, torch.float32)
    compressor_state_insert(torch.empty(0, 512), torch.randn(4, 256), ints(), state, ints())
    assert torch.isnan(state).all()


def test_errors_name_the_argument() -> None:
    good = {
        "proj": torch.randn(1, 512),
        "ape": torch.randn(4, 256),
        "positions": ints(0),
        "state": torch.zeros(2, 4, 512),
        "slots": ints(4),
    }
    for name, bad, error in (
        ("proj", torch.randn(1, 512).bfloat16(), TypeError),
        ("proj", torch.randn(1, 500), ValueError),
        ("proj", None, TypeError),
        ("state", torch.zeros(0, 4, 512), ValueError),
        ("state", torch.zeros(2, 4, 512, dtype=torch.bfloat16), TypeError),
        ("slots", torch.tensor([4]), TypeError),
        ("positions", ints(0, 1), ValueError),
    ):
        with pytest.raises(error, match=name):
            compressor_state_insert(**{**good, name: bad})
