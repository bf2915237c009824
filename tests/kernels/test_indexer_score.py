"""`indexer_score` against its reference and against scores worked out by hand."""

from __future__ import annotations

import pytest
import torch

from dsv4_triton.kernels._index_quant import SCALE_DTYPES
from dsv4_triton.kernels.indexer_score import indexer_score
from dsv4_triton.reference.index_quant import quantise_rows
from dsv4_triton.reference.indexer_score import indexer_score as reference
from tests.kernels.paging import far_pages, ints, pages, shuffled_table
from tests.numeric import assert_close, assert_equal, poisoned

FORMATS = [torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float32]


class Case:
    """Random queries and keys of some requests; every row of the caches beyond a request's entries is poisoned."""

    def __init__(
        self, dtype: torch.dtype, entries: list[int], *, heads: int = 8, rows: int = 16, columns: int = 4
    ) -> None:
        self.table = shuffled_table(len(entries), columns)
        blocks = len(entries) * columns + 1
        self.keys = pages(blocks, rows, 128, dtype)
        scale = SCALE_DTYPES.get(dtype)
        self.scales = None if scale is None else pages(blocks, rows, 1, scale, gap=8).squeeze(-1)
        for req, count in enumerate(entries):
            entry = torch.arange(count)
            values, scales = quantise_rows(torch.randn(count, 128), dtype)
            block, row = self.table[req, entry // rows].long(), entry % rows
            self.keys[block, row] = values
            if self.scales is not None and scales is not None:
                self.scales[block, row] = scales
        self.dtype, self.heads, self.capacity = dtype, heads, columns * rows

    def tokens(self, req: list[int], n_vis: list[int]):
        q, q_scale = quantise_rows(torch.randn(len(req), self.heads, 128), self.dtype)
        weights = torch.randn(len(req), self.heads)
        return q, q_scale, weights, ints(*req), ints(*n_vis)

    def run(self, op, tokens, max_entries: int, **out) -> torch.Tensor:
        q, q_scale, weights, req, n_vis = tokens
        return op(
            q, q_scale, weights, self.keys, self.scales, self.table, req, n_vis, max_entries=max_entries, **out
        )  # fmt: skip

    def compare(self, tokens, max_entries: int) -> None:
        out = poisoned((len(tokens[3]), max_entries), torch.float32)
        assert self.run(indexer_score, tokens, max_entries, out=out) is out
        expected = self.run(reference, tokens, max_entries)
        # Terms of both signs cancel: the error is that of the sum of their sizes (|weights| * |q . k| over the heads).
        assert_close(out, expected, rtol=1e-5, atol=1e-5 * self.heads * 16)


@pytest.mark.parametrize(
    ("dtype", "heads", "rows"), [*((dtype, 8, 16) for dtype in FORMATS), (torch.int8, 64, 64), (torch.bfloat16, 64, 64)]
)
def test_ragged_requests(dtype: torch.dtype, heads: int, rows: int) -> None:
    """Counts at 0, 1 and the page edges; padding tokens have request -1; what is not visible is NaN or garbage."""
    counts = [0, 1, rows - 1, rows, rows + 1, 2 * rows, 3 * rows + 5]
    case = Case(dtype, counts, heads=heads, rows=rows)
    case.compare(case.tokens([*range(len(counts)), -1], [*counts, 0]), 4 * rows)


@pytest.mark.parametrize("max_entries", [1, 15, 16, 33, 64])
def test_width_cuts_pages_and_counts(max_entries: int) -> None:
    """A width below n_vis bounds the work; one that is not a multiple of the page must not write past the row."""
    case = Case(torch.int8, [64, 40])
    case.compare(case.tokens([0, 1, 0], [64, 40, 7]), max_entries)


@pytest.mark.parametrize("dtype", FORMATS)
def test_many_pages_per_token(dtype: torch.dtype) -> None:
    """More pages than a group of tiles, and tokens of one request that see different numbers of entries."""
    case = Case(dtype, [700], rows=16, columns=44)
    case.compare(case.tokens([0] * 5, [700, 699, 129, 128, 16]), 704)


def test_pages_larger_than_a_tile() -> None:
    case = Case(torch.int8, [300, 513], rows=256, columns=3)
    case.compare(case.tokens([0, 1, 1], [300, 513, 127]), 768)


def test_without_hiding_what_is_visible_is_the_same() -> None:
    """What stands beyond the visible entries is nobody's business then, but whole tiles of it are not computed."""
    case = Case(torch.int8, [37, 0, 64])
    tokens = case.tokens([0, 1, 2, 0], [37, 0, 64, 3])
    out = poisoned((4, 64), torch.float32)
    case.run(indexer_score, tokens, 64, hide=False, out=out)
    expected = case.run(indexer_score, tokens, 64)
    for row, (visible, computed) in enumerate(((37, 48), (0, 0), (64, 64), (3, 16))):
        assert_equal(out[row, :visible], expected[row, :visible])
        assert_equal(out[row, computed:], poisoned((64 - computed,), torch.float32))


def test_weights_may_be_a_slice_of_wider_rows() -> None:
    case = Case(torch.bfloat16, [20, 33])
    q, q_scale, weights, req, n_vis = case.tokens([0, 1, 1], [20, 33, 7])
    wide = poisoned((3, 24), torch.float32)
    wide[:, 8:16] = weights
    got = case.run(indexer_score, (q, q_scale, wide[:, 8:16], req, n_vis), 64)
    assert_equal(got, case.run(indexer_score, (q, q_scale, weights, req, n_vis), 64))


def test_invisible_pages_are_not_read() -> None:
    """Table columns beyond the visible pages name blocks that do not exist; reading one would leave the cache."""
    case = Case(torch.float32, [20], columns=4)
    case.table[0, 2:] = 2**30
    case.compare(case.tokens([0], [20]), 64)


def test_one_head_by_hand() -> None:
    """relu stands inside the sum, before the weight: a negative product counts nothing even with a negative weight."""
    q = torch.zeros(1, 2, 128, dtype=torch.int8)
    q[0, 0, 0], q[0, 1, 1] = 127, 100
    keys, scales = torch.zeros(2, 4, 128, dtype=torch.int8), torch.ones(2, 4, dtype=torch.float16)
    keys[1, 0, :2] = torch.tensor([127, -5], dtype=torch.int8)
    keys[1, 1, :2] = torch.tensor([-1, 3], dtype=torch.int8)
    scales[1, 1] = 0.5
    q_scale = torch.tensor([[2.0, 0.25]], dtype=torch.float16)
    weights = torch.tensor([[1.5, -1.0]])
    out = indexer_score(q, q_scale, weights, keys, scales, ints(1)[None], ints(0), ints(3), max_entries=4)
    assert out.tolist() == [[1.5 * 2 * 127 * 127, -0.25 * 300 * 0.5, 0.0, float("-inf")]]


def test_integer_scores_are_exact_at_the_extremes() -> None:
    """-127 and 127 in all 128 features: dot products of 2 million, summed over heads within 2^24 of fp32."""
    q = torch.full((1, 8, 128), 127, dtype=torch.int8)
    keys, scales = torch.full((2, 2, 128), 127, dtype=torch.int8), torch.ones(2, 2, dtype=torch.float16)
    keys[1, 1] = -127
    args = (q, torch.ones(1, 8, dtype=torch.float16), torch.ones(1, 8), keys, scales, ints(1)[None], ints(0), ints(2))
    assert indexer_score(*args, max_entries=2).tolist() == [[8.0 * 127 * 127 * 128, 0.0]]


def test_block_offset_beyond_int32() -> None:
    case = Case(torch.int8, [16], columns=1)
    tokens = case.tokens([0], [16])
    expected = case.run(reference, tokens, 16)
    block, far = int(case.table), far_pages(16, 128, torch.int8)
    assert case.scales is not None
    scales = torch.zeros(3, 16, dtype=torch.float16)
    far[2], scales[2] = case.keys[block], case.scales[block]
    case.keys, case.scales, case.table = far, scales, ints(2)[None]
    assert_close(case.run(indexer_score, tokens, 16), expected, rtol=1e-5, atol=1e-5 * 8 * 16)


def test_no_tokens_and_no_entries() -> None:
    case = Case(torch.int8, [4])
    assert case.run(indexer_score, case.tokens([], []), 64).shape == (0, 64)
    assert case.run(indexer_score, case.tokens([0], [0]), 0).shape == (1, 0)
    hidden = case.run(indexer_score, case.tokens([-1, 0], [0, 0]), 40)
    assert_equal(hidden, torch.full((2, 40), float("-inf")))


def test_errors_name_the_argument() -> None:
    case = Case(torch.int8, [4])
    q, q_scale, weights, req, n_vis = case.tokens([0], [4])
    with pytest.raises(ValueError, match="max_entries is 65, the block table holds at most 64"):
        case.run(indexer_score, (q, q_scale, weights, req, n_vis), 65)
    with pytest.raises(ValueError, match="q_scale is missing"):
        case.run(indexer_score, (q, None, weights, req, n_vis), 64)
    with pytest.raises(TypeError, match="key_cache has dtype"):
        case.run(indexer_score, (q.float(), None, weights, req, n_vis), 64)
    with pytest.raises(ValueError, match="24 rows in a block"):
        odd = torch.zeros(2, 24, 128)
        indexer_score(q.float(), None, weights, odd, None, case.table, req, n_vis, max_entries=4)
