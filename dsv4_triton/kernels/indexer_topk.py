"""Indexer top-k: which visible entries a query attends to.

The k best of the first n_vis[t] scores of each row: higher score first, equal scores (-0.0 equals 0.0) by lower
index. NaN is never selected; -inf is the lowest score. The result is the set in ascending order of index, then -1.

scores [T, N] fp32 -> [T, k] int32. A level of the tree selects the k best of every tile of TILE entries; its results
are the entries of the next level, equal scores in the order of their indices, until one tile is left. That is exact:
an entry among the k best of the row is among the k best of its tile.

In a tile the k-th largest value is read from the sorted tile. The entries above it, and after them those equal to it,
are then brought to the front by sorting their positions. That keeps equal scores in order; only the last level sorts
the k indices. Where sorting is not one instruction, the k-th value is found by bisection over fp32 values in the order
of their bits, at most 32 counts and stopping as soon as a count equals k; if it has equals beyond k, a bisection over
the position finds where to cut them; the selected entries are stored at their rank. All comparisons are of fp32 values:
integer comparisons are scalar code on A2 and A3. Sorted indices are fp32 values as well, hence MAX_ENTRIES.

Grid: one program per vector core at most, persistent over (row, tile). UB bytes: about 6 * 4 * TILE. Families: all.
Source: docs/model.md, section 6 (tie rule).
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton.autotune.space import Choices, Key, Space, buffering
from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels._checks import check_tensor, output
from dsv4_triton.kernels._lang import extract_slice, get_element
from dsv4_triton.kernels._tiling import next_power_of_2
from dsv4_triton.kernels._workspace import Part, carve, workspace_bytes

OP = "indexer_topk"
MAX_K = 2048
MAX_ENTRIES = 1 << 24
MAX_TILE = 4096
MIN_TILE = 2048
SMALL_SCRATCH = 32 << 20
"""Bytes of scratch that tiles of any size may take."""


@triton.jit
def _value_of_key(key):
    """The fp32 value at place `key` (int32) in the order of all fp32 values, -NaN to NaN."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _count(selected):
    """How many lanes are set, as fp32 (exact up to 2^24)."""
    return tl.sum(tl.where(selected, 1.0, 0.0), axis=0)


@triton.jit
def _best_by_sort(x, below, K: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Minus the positions [WIDTH] fp32, modulo TILE, of the K best of `x [TILE]`; -TILE where there are fewer.

    What is above the K-th value comes first, as 1 to TILE, then what equals it, each by position. `below` is minus the
    position.
    """
    ordered = tl.sort(tl.where(x == x, x, float("-inf")), descending=True)
    kth = get_element(ordered, (K - 1,))
    order = tl.where(x > kth, below + TILE, tl.where(x == kth, below, -1.0 * TILE))
    order = extract_slice(tl.sort(order, descending=True), (0,), (WIDTH,), (1,))
    if K < WIDTH:
        order = tl.where(tl.arange(0, WIDTH).to(tl.float32) < K, order, -1.0 * TILE)
    return order


@triton.jit
def _best_by_bisection(x, position, K: tl.constexpr, TILE: tl.constexpr):
    """Which of the values `x [TILE]` are the K best; NaN is never one. `position` is 0..TILE-1 as fp32."""
    NEGATIVE_INF: tl.constexpr = -2139095041
    ABOVE_INF: tl.constexpr = 2139095041
    low = NEGATIVE_INF
    high = ABOVE_INF
    at_low = _count(x == x)
    at_high = 0.0
    middle = 0
    while (at_low > K) & (middle != low):
        at_middle = _count(x >= _value_of_key(middle))
        if at_middle >= K:
            low = middle
            at_low = at_middle
        else:
            high = middle
            at_high = at_middle
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
    selected = x >= _value_of_key(low)
    if at_low > K:
        above = x >= _value_of_key(high)
        before = 0
        cut = TILE
        while cut - before > 1:
            middle = (before + cut) >> 1
            if at_high + _count((x == _value_of_key(low)) & (position < middle.to(tl.float32))) >= K:
                cut = middle
            else:
                before = middle
        selected = above | (selected & (position < cut.to(tl.float32)))
    return selected


@triton.jit(do_not_specialize=["items", "tiles", "entries", "row_stride"])
def _indexer_topk_kernel(
    scores_ptr,
    ids_ptr,
    n_vis_ptr,
    best_scores_ptr,
    best_ids_ptr,
    items,
    tiles,
    entries,
    row_stride,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    BY_SORT: tl.constexpr,
):
    """Item i selects from tile `i % tiles` of row `i // tiles` and writes K results at row i of the outputs.

    FIRST: entries are positions of the row, n_vis of them; otherwise `ids_ptr` names them, and absent ones score NaN.
    LAST: only ids are written, in ascending order. WIDTH is K rounded up to a power of two.
    """
    NO_ID: tl.constexpr = 1 << 24  # MAX_ENTRIES
    position = tl.arange(0, TILE)
    below = -1.0 * position.to(tl.float32)
    rank = tl.arange(0, WIDTH)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = item // tiles
        base = (item % tiles) * TILE
        count = entries
        if FIRST:
            count = tl.minimum(tl.load(n_vis_ptr + row), entries)
        count -= base
        best = tl.cast(item, tl.int64) * K
        if count > 0:
            source = tl.cast(row, tl.int64) * row_stride + base
            x = tl.load(scores_ptr + source + position, mask=position < count, other=float("nan"))
            if BY_SORT:
                order = _best_by_sort(x, below, K, WIDTH, TILE)
                present = order > -TILE
                order = (-order).to(tl.int32) & (TILE - 1)
                chosen = order + base
                if not FIRST:
                    known = tl.load(ids_ptr + source + position, mask=position < count, other=-1)
                    chosen = tl.gather(known.to(tl.float32, bitcast=True), order, 0).to(tl.int32, bitcast=True)
                if LAST:
                    ids = -tl.sort(tl.where(present, -1.0 * chosen.to(tl.float32), -1.0 * NO_ID), descending=True)
                    tl.store(best_ids_ptr + best + rank, tl.where(ids < NO_ID, ids.to(tl.int32), -1), mask=rank < K)
                else:
                    # The next level selects no NaN, so the ids of absent entries do not matter.
                    tl.store(best_ids_ptr + best + rank, chosen, mask=rank < K)
                    kept = tl.where(present, tl.gather(x, order, 0), float("nan"))
                    tl.store(best_scores_ptr + best + rank, kept, mask=rank < K)
            else:
                selected = _best_by_bisection(x, position.to(tl.float32), K, TILE)
                order = tl.cumsum(selected.to(tl.int32), axis=0)
                found = tl.max(order, axis=0)
                chosen = position + base
                if not FIRST:
                    chosen = tl.load(ids_ptr + source + position, mask=position < count, other=-1)
                tl.store(best_ids_ptr + best + order - 1, chosen, mask=selected)
                tl.store(best_ids_ptr + best + rank, tl.full((WIDTH,), -1, tl.int32), mask=(rank >= found) & (rank < K))
                if not LAST:
                    absent = tl.full((WIDTH,), float("nan"), tl.float32)
                    tl.store(best_scores_ptr + best + order - 1, x, mask=selected)
                    tl.store(best_scores_ptr + best + rank, absent, mask=(rank >= found) & (rank < K))
        else:
            tl.store(best_ids_ptr + best + rank, tl.full((WIDTH,), -1, tl.int32), mask=rank < K)
            if not LAST:
                tl.store(best_scores_ptr + best + rank, tl.full((WIDTH,), float("nan"), tl.float32), mask=rank < K)


def _tile(entries: int, width: int, most: int) -> int:
    """Entries of a tile, `most` at most: the row if it fits, at least the width of the result."""
    return max(width, min(most, next_power_of_2(entries)))


def _levels(entries: int, k: int, most: int) -> list[int]:
    """Entries of a row at each level of the tree."""
    width = next_power_of_2(k)
    levels = [entries]
    while (tiles := triton.cdiv(entries, _tile(entries, width, most))) > 1:
        entries = tiles * k
        levels.append(entries)
    return levels


def _scratch(tokens: int, levels: list[int]) -> list[Part]:
    """Ids and scores of each level that reads those of another."""
    return [((tokens, entries), dtype) for entries in levels[1:] for dtype in (torch.int32, torch.float32)]


def indexer_topk_workspace(tokens: int, entries: int, k: int) -> int:
    """Bytes of scratch that `indexer_topk` takes at most for up to `tokens` rows of up to `entries` scores."""
    return max(_bytes(tokens, entries, k, MAX_TILE), min(SMALL_SCRATCH, _bytes(tokens, entries, k, _least_tile(k))))


def _least_tile(k: int) -> int:
    """The smallest tile: a level must leave less to the next one than it had."""
    return max(MIN_TILE, 2 * next_power_of_2(k))


def _bytes(tokens: int, entries: int, k: int, most: int) -> int:
    return workspace_bytes(_scratch(tokens, _levels(entries, k, most)))


def _default(family: Family, key: Key) -> dict[str, Any]:
    """TILE: most entries of a tile; where memory does not bound it, few levels are faster than small tiles."""
    return {"TILE": 4 * MAX_TILE if family.any_tile else MAX_TILE, "multibuffer": None}


def _candidates(family: Family, key: Key) -> Choices:
    wide = (16384, 32768) if family.any_tile else ()
    return {"TILE": (2048, 4096, 8192, *wide), **buffering(family)}


def _fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    """Smaller tiles leave more to the next level: unless it is little, its scratch must not outgrow MAX_TILE's."""
    tile, size = config["TILE"], 40 * config["TILE"]
    if tile & (tile - 1) or tile < _least_tile(key["k"]):
        return f"TILE {tile} is no power of two of at least {_least_tile(key['k'])}"
    if family.arch and size > family.ub_bytes:
        return f"TILE {tile} takes {size} bytes, UB has {family.ub_bytes}"
    need = _bytes(key["tokens"], key["entries"], key["k"], tile)
    most = max(SMALL_SCRATCH, _bytes(key["tokens"], key["entries"], key["k"], MAX_TILE))
    return f"TILE {tile} takes {need} bytes of scratch, more than {most}" if need > most else ""


SPACE = Space(OP, default=_default, candidates=_candidates, fits=_fits, buckets=("tokens", "entries"))


def indexer_topk(
    scores: torch.Tensor,
    n_vis: torch.Tensor,
    k: int,
    *,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Indices [T, k] int32 of the k best of the first `n_vis[t]` entries of scores [T, N] fp32 (rows of any stride).

    Higher score first, equal scores by lower index, NaN never; the indices stand in ascending order, followed by -1.
    k is 1 to 2048, N at most 2^24. Rows longer than a tile take scratch, 8 bytes per k entries of each tile:
    `workspace`, `indexer_topk_workspace` bytes, uint8. TypeError or ValueError names the argument that does not fit.
    """
    check_tensor(OP, "scores", scores, (None, None), torch.float32, layout="rows")
    tokens, entries = scores.shape
    check_tensor(OP, "n_vis", n_vis, (tokens,), torch.int32, device=scores.device)
    if not 1 <= k <= MAX_K:
        raise ValueError(f"{OP}: k must be between 1 and {MAX_K}, got {k}")
    if entries > MAX_ENTRIES:
        raise ValueError(f"{OP}: scores must have at most {MAX_ENTRIES} entries a row, got {entries}")
    out = output(OP, "out", out, (tokens, k), torch.int32, scores.device)
    if tokens == 0:
        return out
    if entries == 0:
        return out.fill_(-1)
    family = family_of(scores.device.type)
    config = SPACE(family, tokens=tokens, entries=entries, k=k)
    width, most = next_power_of_2(k), config["TILE"]
    levels = _levels(entries, k, most)
    results = [*carve(OP, workspace, scores.device, _scratch(tokens, levels)), out, scores]
    ids = out
    for level, entries in enumerate(levels):
        tile = _tile(entries, width, most)
        tiles = triton.cdiv(entries, tile)
        best_ids, best_scores = results[2 * level : 2 * level + 2]
        items = tokens * tiles
        _indexer_topk_kernel[(min(items, family.vector_cores),)](
            scores,
            ids,
            n_vis,
            best_scores,
            best_ids,
            items,
            tiles,
            entries,
            scores.stride(0),
            K=k,
            WIDTH=width,
            TILE=tile,
            FIRST=level == 0,
            LAST=tiles == 1,
            BY_SORT=family.vector_sort,
            **config.options,
        )
        scores, ids = best_scores, best_ids
    return out
