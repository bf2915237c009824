"""`indexer_topk` against its reference: the indices must agree exactly, ties and order included."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dsv4_triton.device import HOST
from dsv4_triton.kernels import indexer_topk as module
from dsv4_triton.kernels.indexer_topk import indexer_topk
from dsv4_triton.reference.indexer_topk import indexer_topk as reference
from tests.kernels.paging import ints
from tests.numeric import assert_equal, poisoned

NAN, INF = float("nan"), float("inf")


def compare(scores: torch.Tensor, n_vis: list[int], k: int) -> torch.Tensor:
    """Checks the kernel; entries from n_vis on are poisoned with the largest score first."""
    for row, count in enumerate(n_vis):
        scores[row, count:] = INF if row % 2 else NAN
    out = poisoned((len(n_vis), k), torch.int32)
    assert indexer_topk(scores, ints(*n_vis), k, out=out) is out
    assert_equal(out, reference(scores, ints(*n_vis), k))
    return out


@pytest.fixture(params=["host", "scan", "sort"])
def compaction(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to compact a tile, a prefix sum and the sort that the NPU families use, in tiles that their memory
    holds; and the host's larger tiles."""
    if request.param != "host":
        family = dataclasses.replace(HOST, vector_sort=request.param == "sort", any_tile=False)
        monkeypatch.setattr(module, "family_of", lambda device: family)


@pytest.mark.parametrize("k", [1, 31])
def test_counts_around_k(k: int, compaction) -> None:
    n_vis = sorted({0, 1, k - 1, k, k + 1, 299, 300})
    compare(torch.randn(len(n_vis), 300), n_vis, k)


@pytest.mark.parametrize("entries", [512, 513, 8191, 8192, 8193, 16384, 16385])
def test_candidate_counts(entries: int, compaction) -> None:
    """Around tiles of 4,096 and 16,384, with distinct scores and with scores of which most are equal."""
    scores = torch.randn(3, entries)
    scores[1] = scores[1].round()
    scores[2] = torch.relu(scores[2] - 3)
    compare(scores, [entries, entries, entries], 512)


def test_long_rows(compaction) -> None:
    scores = torch.randn(3, 32768)
    scores[1] = 0.0
    scores[2] = scores[2].round()
    scores[2, ::3] = NAN
    compare(scores, [32768, 32768, 20001], 512)


def test_longest_rows(compaction) -> None:
    scores = torch.randn(2, 262144)
    scores[1] = (scores[1] * 8).round()
    compare(scores, [262144, 262143], 512)


def test_largest_k(compaction) -> None:
    compare(torch.randn(2, 10000), [10000, 2049], 2048)


@pytest.mark.parametrize("value", [0.0, -1.5, INF, -INF, 1e-44, -1e-44])
def test_all_scores_equal(value: float, compaction) -> None:
    out = compare(torch.full((2, 300), value), [300, 40], 32)
    assert out[0].tolist() == list(range(32))


def test_zeros_of_both_signs_are_equal(compaction) -> None:
    """Many zeros, as relu leaves them: the cut goes through them by index, whatever their sign."""
    scores = torch.zeros(4, 300)
    scores[:, ::3] = -0.0
    scores[1, 250:260] = 1.0
    scores[2, ::2] = -1.0
    scores[3, :290] = -1e-45
    out = compare(scores, [300, 300, 300, 300], 32)
    assert out[1].tolist() == [*range(22), *range(250, 260)]


def test_nan_is_never_selected(compaction) -> None:
    scores = torch.randn(4, 300)
    scores[0, ::2] = NAN
    scores[1] = NAN
    scores[2, 5:] = NAN
    scores[3] = torch.tensor([0x7FC00000, -0x400000], dtype=torch.int32).view(torch.float32).repeat(150)
    out = compare(scores, [300, 300, 300, 300], 32)
    assert out[1].tolist() == out[3].tolist() == [-1] * 32
    assert out[2].tolist() == [0, 1, 2, 3, 4] + [-1] * 27


def test_infinities_are_ordinary_scores(compaction) -> None:
    scores = torch.full((2, 300), -INF)
    scores[0, 100:110], scores[1, 7], scores[1, 290:] = 0.0, INF, torch.randn(10)
    out = compare(scores, [300, 300], 32)
    assert out[0].tolist() == [*range(22), *range(100, 110)]


def test_ties_across_tiles(compaction) -> None:
    """Equal scores in every tile: the lowest indices win across the whole row, not within each tile."""
    scores = torch.zeros(3, 40000)
    scores[0, 39990:] = 1.0
    scores[1, 4000:8200] = 2.0
    scores[2, 16000:33000] = 2.0
    out = compare(scores, [40000, 40000, 40000], 512)
    assert out[0].tolist() == [*range(502), *range(39990, 40000)]
    assert out[1].tolist() == list(range(4000, 4512))
    assert out[2].tolist() == list(range(16000, 16512))


def test_neighbouring_floats() -> None:
    """Scores one ulp apart in every octave, positive and negative, subnormals included."""
    bits = torch.arange(-150, 150, dtype=torch.int32)
    for base in (0x00000100, 0x3F800000, 0x7F7FFF00, 0x00800000):
        positive = (base + bits).view(torch.float32)
        compare(torch.stack((positive, -positive, positive[torch.randperm(300)])), [300, 300, 300], 32)


def test_rows_may_be_strided() -> None:
    wide = poisoned((3, 700), torch.float32)
    scores = wide[:, 100:400]
    scores.copy_(torch.randn(3, 300))
    assert_equal(indexer_topk(scores, ints(300, 299, 0), 32), reference(scores, ints(300, 299, 0), 32))


def test_row_offset_beyond_int32() -> None:
    """Rows 2^31 elements apart; what lies between them takes no space."""
    stride = 1 << 31
    memory = torch.empty(0).set_(torch.UntypedStorage(4 * (stride + 300)))
    scores = memory.as_strided((2, 300), (stride, 1))
    scores.copy_(torch.randn(2, 300))
    assert_equal(indexer_topk(scores, ints(300, 299), 32), reference(scores, ints(300, 299), 32))


@pytest.mark.parametrize("entries", [40, 20000, 600000])
def test_workspace(entries: int) -> None:
    """One, two and three levels: the same result, whatever the workspace holds; too little is an error."""
    scores, n_vis, k = torch.randn(3, entries), ints(entries, entries // 2, 0), 600
    needed = module.indexer_topk_workspace(3, entries, k)
    workspace = poisoned((needed,), torch.uint8)
    assert_equal(indexer_topk(scores, n_vis, k, workspace=workspace), indexer_topk(scores, n_vis, k))
    if needed:
        # Less than any tile up to 16384, the default on the host, needs: that may be an eleventh of the bound.
        few = needed // 16
        with pytest.raises(ValueError, match=rf"indexer_topk: workspace has {few} bytes, this call needs \d+"):
            indexer_topk(scores, n_vis, k, workspace=workspace[:few])
    assert module.indexer_topk_workspace(3, 600000, k) >= module.indexer_topk_workspace(3, entries, k)


def test_count_beyond_the_row_is_the_row() -> None:
    scores = torch.randn(1, 300)
    assert_equal(indexer_topk(scores, ints(1000), 32), reference(scores, ints(300), 32))


def test_empty() -> None:
    assert indexer_topk(torch.empty(0, 300), ints(), 32).shape == (0, 32)
    assert indexer_topk(torch.empty(2, 0), ints(0, 0), 3).tolist() == [[-1] * 3] * 2


def test_errors_name_the_argument() -> None:
    with pytest.raises(TypeError, match="scores has dtype"):
        indexer_topk(torch.zeros(1, 8, dtype=torch.bfloat16), ints(8), 2)
    with pytest.raises(ValueError, match="n_vis has shape"):
        indexer_topk(torch.zeros(1, 8), ints(8, 8), 2)
    for k in (0, 2049):
        with pytest.raises(ValueError, match=f"between 1 and 2048, got {k}"):
            indexer_topk(torch.zeros(1, 8), ints(8), k)
    with pytest.raises(ValueError, match="at most 16777216 entries a row, got 16777217"):
        indexer_topk(torch.empty(1, (1 << 24) + 1), ints(8), 8)
