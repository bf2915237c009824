"""`compressor_fold` against its reference and against the worked example of the model's specification."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from dsv4_triton.kernels.compressor_fold import compressor_fold
from dsv4_triton.kernels.compressor_state_insert import compressor_state_insert
from dsv4_triton.reference.compressor_fold import compressor_fold as reference
from dsv4_triton.reference.rows import RECORD_BYTES, unpack
from dsv4_triton.reference.token_slots import token_slots
from tests.kernels import rotary
from tests.kernels.paging import clone, far_pages, ints, pages, shuffled_table, whole
from tests.numeric import assert_close, assert_equal, poisoned

EPS = 1e-6
KINDS = [(4, 512), (4, 128), (128, 512)]
"""(ratio, features): main c4, indexer c4, main c128."""

TOLERANCE: dict[torch.dtype, Any] = {
    # A sum of 8 or 128 positive shares of fp32 products, in another order: a few ulps of the largest row.
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    # At most two of the three bf16 roundings (fold, norm, rotation) fall on the other side of a tie: 2 * 2^-8.
    torch.bfloat16: {"rtol": 8e-3, "atol": 8e-3},
}


class Request:
    """One request's raw rows, its state pages, and what the kernels need to fold it."""

    def __init__(self, ratio: int, dim: int, tokens: int, rows: int, *, requests: int = 1) -> None:
        self.ratio, self.dim, self.rows, self.tokens = ratio, dim, rows, tokens
        self.width = dim * (2 if ratio == 4 else 1)
        columns = -(-tokens // rows)
        self.table = shuffled_table(requests, columns)
        self.state = pages(requests * columns + 1, rows, 2 * self.width, torch.float32)
        self.weight = torch.randn(dim)
        self.cos_sin = rotary.table(torch.arange(tokens))
        self.ape = torch.randn(ratio, self.width)

    def insert(self, proj: torch.Tensor, positions: torch.Tensor, req: torch.Tensor) -> None:
        slots = token_slots(positions, req, self.table, rows_per_block=self.rows)
        compressor_state_insert(proj, self.ape, positions, self.state, slots)

    def closing(self, positions: torch.Tensor, req: torch.Tensor, table: torch.Tensor, rows: int) -> torch.Tensor:
        return token_slots(positions, req, table, rows_per_block=rows, ratio=self.ratio)

    def fold(self, op, positions: torch.Tensor, req: torch.Tensor, slots: torch.Tensor, **result) -> None:
        op(
            self.state, self.table, req, positions, slots, self.weight, self.cos_sin,
            ratio=self.ratio, eps=EPS, **result,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("ratio", "dim", "dtype", "fake_quant"),
    [
        *((ratio, dim, torch.float32, False) for ratio, dim in KINDS),
        *((ratio, dim, torch.bfloat16, dim == 512) for ratio, dim in KINDS),
    ],
)
def test_mixed_requests_into_the_cache(ratio: int, dim: int, dtype: torch.dtype, fake_quant: bool) -> None:
    """Three requests interleaved, one of them just started, padding between; pages and gaps are poisoned."""
    tokens = 2 * ratio + 3
    request = Request(ratio, dim, tokens, rows=8, requests=3)
    positions = torch.arange(tokens, dtype=torch.int32).repeat(3)
    req = torch.arange(3, dtype=torch.int32).repeat_interleave(tokens)
    request.insert(torch.randn(3 * tokens, 2 * request.width), positions, req)
    keep = torch.randperm(3 * tokens)
    positions, req = positions[keep].clone(), req[keep].clone()
    positions[::7], req[::7] = -1, -1
    table = shuffled_table(3, 2)
    slots = request.closing(positions, req, table, rows=2)
    assert (slots >= 0).sum() > 2
    cache = pages(7, 2, dim, dtype)
    expected = clone(cache)
    request.fold(compressor_fold, positions, req, slots, cache=cache, fake_quant=fake_quant)
    request.fold(reference, positions, req, slots, cache=expected, fake_quant=fake_quant)
    tolerance = dict(TOLERANCE[dtype])
    if fake_quant:
        # A value on the border of two e4m3 steps may fall to either side: one step, 2^-3 of the value.
        changed = (whole(cache).nan_to_num().float() - whole(expected).nan_to_num().float()).abs() > 8e-3 * 4
        assert changed.float().mean() < 2e-3
        tolerance["rtol"] = 0.13
    assert_close(whole(cache), whole(expected), **tolerance, what="cache memory")


@pytest.mark.parametrize(("ratio", "rows"), [(4, 2), (128, 1)])
def test_records_hold_what_the_fp8_simulation_leaves(ratio: int, rows: int) -> None:
    """A record unpacks to the bf16 row of the plain cache; its last bytes are zero; memory around it stays."""
    tokens = 2 * ratio
    request = Request(ratio, 512, tokens, rows=8)
    positions, req = torch.arange(tokens, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int32)
    request.insert(torch.randn(tokens, 2 * request.width), positions, req)
    table = shuffled_table(1, -(-2 // rows))
    slots = request.closing(positions, req, table, rows)
    records, plain = pages(4, rows, RECORD_BYTES, torch.uint8), pages(4, rows, 512, torch.bfloat16)
    before = whole(records).clone()
    request.fold(compressor_fold, positions, req, slots, cache=records)
    request.fold(compressor_fold, positions, req, slots, cache=plain, fake_quant=True)
    entry = slots[slots >= 0].long()
    block, row = entry // rows, entry % rows
    assert_equal(unpack(records[block, row]).bfloat16(), plain[block, row])
    assert not records[block, row, 583:].any()
    records[block, row] = before[0]
    assert_equal(whole(records), before, "memory around the records")


@pytest.mark.parametrize("op", [compressor_fold, reference])
def test_worked_example(op) -> None:
    """Features alternate between the example's rows and a constant 1, which the norm turns into a ratio to read."""
    tokens, dim = 9, 512
    request = Request(4, dim, tokens, rows=8)
    u = torch.ones(tokens, 2 * dim)
    number = torch.arange(1.0, tokens + 1)[:, None]
    u[:, 0:dim:2], u[:, dim::2] = number, 10 * number
    g = torch.zeros(tokens, 2 * dim)
    g[5, dim::2] = math.log(3.0)
    request.ape.zero_()
    request.ape[3, 0:dim:2] = math.log(2.0)
    request.weight.fill_(1.0)
    positions, req = torch.arange(tokens, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int32)
    request.insert(torch.cat((u, g), 1), positions, req)
    out = poisoned((tokens, dim), torch.float32)
    slots = request.closing(positions, req, ints(1, 2, 3)[None], rows=1)
    request.fold(op, positions, req, slots, out=out)
    assert torch.isnan(out[[0, 1, 2, 4, 5, 6, 8]]).all(), "only closing tokens write"
    ratio = out[:, 0] / out[:, 1]
    assert_close(ratio[3], torch.tensor(25.0), rtol=1e-6, atol=0)
    assert_close(ratio[7], torch.tensor(394 / 11), rtol=1e-6, atol=0)


@pytest.mark.parametrize("op", [compressor_fold, reference])
@pytest.mark.parametrize(("ratio", "position"), [(4, 3), (4, 7), (128, 127), (128, 255)])
def test_entry_is_rotated_for_the_first_token_of_its_window(op, ratio: int, position: int) -> None:
    """Constant rows fold to a constant, so the pair of a frequency is (1, 1) rotated by the angle of p + 1 - ratio."""
    request = Request(ratio, 512, position + 1, rows=8)
    request.state.fill_(1.0)
    request.weight.fill_(1.0)
    out = poisoned((1, 512), torch.float32)
    request.fold(op, ints(position), ints(0), ints(0), out=out)
    cos, sin = request.cos_sin[position + 1 - ratio].split(32)
    assert_close(out[0, :448], torch.ones(448), rtol=0, atol=1e-6)
    assert_close(out[0, 448:480], cos - sin, rtol=0, atol=1e-6)
    assert_close(out[0, 480:], cos + sin, rtol=0, atol=1e-6)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -1e30, 1e30])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_first_entry_ignores_what_a_reused_page_holds(garbage: float, rows: int) -> None:
    """The first entry of c4 has four rows, not eight; block 0 and whatever stands before row 0 are garbage."""
    request = Request(4, 128, 4, rows=rows)
    proj = torch.randn(4, 512)
    request.state.fill_(garbage)
    request.insert(proj, ints(0, 1, 2, 3), torch.zeros(4, dtype=torch.int32))
    out = poisoned((1, 128), torch.float32)
    request.weight.fill_(1.0)
    request.fold(compressor_fold, ints(3), ints(0), ints(0), out=out)
    own = torch.softmax((proj + torch.cat((torch.zeros_like(request.ape), request.ape), 1))[:, 384:], 0)
    fold = (own * proj[:, 128:256]).sum(0)
    assert_close(out[0, :64], (fold * torch.rsqrt(fold.square().mean() + EPS))[:64], rtol=1e-5, atol=1e-6)


def test_previous_window_uses_the_first_half_of_the_features() -> None:
    """Poison in the halves that must not be read (own half of the old window, overlap half of the new one)."""
    dim = 128
    request = Request(4, dim, 8, rows=8)
    request.insert(torch.randn(8, 4 * dim), torch.arange(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32))
    page = request.state[int(request.table[0, 0])].reshape(8, 2, 2, dim)
    page[:4, :, 1] = float("nan")
    page[4:, :, 0] = float("nan")
    out, expected = poisoned((1, dim), torch.float32), poisoned((1, dim), torch.float32)
    request.fold(compressor_fold, ints(7), ints(0), ints(0), out=out)
    request.fold(reference, ints(7), ints(0), ints(0), out=expected)
    assert torch.isfinite(expected).all()
    assert_close(out, expected, **TOLERANCE[torch.float32])


@pytest.mark.parametrize(("ratio", "dim", "rows", "tokens"), [(4, 512, 8, 27), (4, 128, 2, 27), (128, 512, 16, 260)])
def test_any_chunking_gives_the_one_shot_entries(ratio: int, dim: int, rows: int, tokens: int) -> None:
    """Boundaries are not multiples of the ratio; the last chunks are single tokens, as in decode."""
    proj = torch.randn(tokens, 2 * dim * (2 if ratio == 4 else 1))
    positions, req = torch.arange(tokens, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int32)
    request = Request(ratio, dim, tokens, rows)
    entries = -(-tokens // ratio)
    table = shuffled_table(1, -(-entries // 2))

    def run(bounds: list[int]) -> torch.Tensor:
        request.state.fill_(float("nan"))
        cache = pages(table.numel() + 1, 2, dim, torch.bfloat16)
        for start, end in itertools.pairwise(bounds):
            part = slice(start, end)
            request.insert(proj[part], positions[part], req[part])
            slots = request.closing(positions[part], req[part], table, rows=2)
            request.fold(compressor_fold, positions[part], req[part], slots, cache=cache, fake_quant=dim == 512)
        return whole(cache)

    once = run([0, tokens])
    assert not torch.isnan(once).all()
    assert_equal(run([0, 1, 2, 9, 15, *range(tokens - 5, tokens + 1)]), once)
    assert_equal(run([0, ratio - 1, ratio + 1, tokens]), once)


def test_rejected_draft_rows_are_overwritten() -> None:
    """Four draft tokens, some of them accepted, then the true tokens: the entries are as if nothing was drafted."""
    request = Request(4, 128, 16, rows=8)
    truth, draft = torch.randn(16, 512), torch.randn(16, 512)
    req = torch.zeros(4, dtype=torch.int32)
    for accepted in range(5):
        request.state.fill_(float("nan"))
        positions = torch.arange(16, dtype=torch.int32)
        request.insert(truth[:6], positions[:6], req[:1].expand(6).contiguous())
        drafted = torch.cat((truth[6 : 6 + accepted], draft[6 + accepted : 10]))
        request.insert(drafted, positions[6:10], req)
        request.insert(truth[6 + accepted :], positions[6 + accepted :], req[:1].expand(10 - accepted).contiguous())
        out = poisoned((4, 128), torch.float32)
        request.fold(compressor_fold, ints(3, 7, 11, 15), req, ints(0, 1, 2, 3), out=out)
        if accepted == 0:
            first = out
        assert_equal(out, first, f"entries with {accepted} accepted")


def test_extreme_logits() -> None:
    """Gates of +-1e4 make the softmax a choice of one row; nothing overflows."""
    request = Request(128, 512, 128, rows=8)
    proj = torch.randn(128, 1024)
    proj[:, 512:] *= 1e4
    request.insert(proj, torch.arange(128, dtype=torch.int32), torch.zeros(128, dtype=torch.int32))
    out, expected = poisoned((1, 512), torch.float32), poisoned((1, 512), torch.float32)
    request.fold(compressor_fold, ints(127), ints(0), ints(0), out=out)
    request.fold(reference, ints(127), ints(0), ints(0), out=expected)
    assert torch.isfinite(expected).all()
    assert_close(out, expected, **TOLERANCE[torch.float32])


def test_block_offsets_beyond_int32() -> None:
    """State and cache blocks that start more than 2^31 elements in."""
    request = Request(4, 512, 4, rows=8)
    near, expected = pages(3, 2, 512, torch.float32), far_pages(2, 512, torch.float32)
    request.insert(torch.randn(4, 2048), ints(0, 1, 2, 3), torch.zeros(4, dtype=torch.int32))
    request.fold(compressor_fold, ints(3), ints(0), ints(5), cache=near)
    far = far_pages(8, 2048, torch.float32)
    far[2] = request.state[int(request.table)]
    request.state, request.table = far, ints(2)[None]
    request.fold(compressor_fold, ints(3), ints(0), ints(5), cache=expected)
    assert_equal(near[2, 1], expected[2, 1])


def test_no_tokens_and_no_closing_token() -> None:
    request = Request(4, 512, 8, rows=8)
    cache = pages(2, 4, 512, torch.bfloat16)
    request.fold(compressor_fold, ints(), ints(), ints(), cache=cache)
    request.fold(compressor_fold, ints(5, -1), ints(0, -1), ints(-1, -1), cache=cache)
    assert torch.isnan(whole(cache)).all()


def test_errors_name_the_argument() -> None:
    request = Request(4, 512, 8, rows=8)
    out, cache = torch.zeros(1, 512), torch.zeros(2, 4, 512)
    args = (ints(3), ints(0), ints(0))
    with pytest.raises(ValueError, match="exactly one of cache and out"):
        request.fold(compressor_fold, *args)
    with pytest.raises(ValueError, match="exactly one of cache and out"):
        request.fold(compressor_fold, *args, cache=cache, out=out)
    with pytest.raises(ValueError, match="out has 256 features"):
        request.fold(compressor_fold, *args, out=torch.zeros(1, 256))
    with pytest.raises(TypeError, match="out has dtype"):
        request.fold(compressor_fold, *args, out=out.half())
    request.ratio = 16
    with pytest.raises(ValueError, match="ratio must be one of"):
        request.fold(compressor_fold, *args, out=out)
