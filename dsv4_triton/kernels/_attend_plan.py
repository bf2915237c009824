"""How `sparse_attention` does a call: which launches, with which tiles. Pure functions of shapes and device family."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from dsv4_triton.device import Family
from dsv4_triton.kernels import _attend
from dsv4_triton.kernels._tiling import next_power_of_2
from dsv4_triton.kernels.gather_rows import BLOCK, window_columns

MAX_TILES = 4
"""Tiles that one chunk has names for."""
HEAD_DIM = 512


@dataclass(frozen=True)
class Limits:
    """What fits a family: scores in flight (heads x rows), rows that are gathered per tile and per chunk, columns of a
    product's right operand, and bytes of scratch (gathered rows and partial results should stay in the last cache)."""

    scores: int = 40960
    gathered_rows: int = 320
    chunk_rows: int = 640
    key_width: int = 128
    value_width: int = 64
    scratch_bytes: int = 64 << 20


LIMITS = {
    "host": Limits(
        scores=1 << 18, gathered_rows=1024, chunk_rows=512, key_width=512, value_width=512, scratch_bytes=8 << 20
    )
}


def limits(family: Family) -> Limits:
    """The limits of a family."""
    return LIMITS.get(family.name, Limits())


@dataclass(frozen=True)
class Call:
    """The shapes of a call. `picked` and `dense` are the compressed rows a token may attend: named by an index list, or
    the first n_vis; not both. `record`: rows are encoded, so that they have to be gathered before use."""

    heads: int
    window: int
    window_page: int
    cmp_page: int = 1
    picked: int = 0
    dense: int = 0
    record: bool = False


@dataclass(frozen=True)
class Tiling:
    """Constants of one attend launch."""

    SOURCE: int
    BY_ROW: bool
    WINDOWS: int
    WINDOW_PAGE: int
    WINDOW_ROWS: int
    TILES: int
    PAGE: int
    ROWS: int
    HEADS: int
    DK: int
    DV: int

    @property
    def columns(self) -> int:
        """Rows in one softmax."""
        return self.WINDOWS * self.WINDOW_ROWS + self.TILES * self.ROWS


@dataclass(frozen=True)
class Split:
    """Constants of the three launches that do one step each, on gathered rows."""

    CHUNK: int
    ROWS: int
    SCORE_HEADS: int
    SOFTMAX_HEADS: int
    VALUE_HEADS: int
    DV: int


@dataclass(frozen=True)
class Plan:
    """The launches of a call.

    `gathered` columns are copied first, if any; they begin with `base` columns of the window, or with none where
    attend launches read the window in place. Then come `launches`, or the three of `split`. They finish the result, or
    where there are `slots` give that many partial results a token, of `chunk` rows each, which a last launch merges.
    """

    launches: tuple[Tiling, ...] = ()
    split: Split | None = None
    gathered: int = 0
    base: int = 0
    slots: int = 0
    chunk: int = 0

    def scratch(self, heads: int, dtype: torch.dtype) -> int:
        """Bytes of scratch a token takes."""
        rows = self.gathered * (HEAD_DIM * dtype.itemsize + 4)
        scores = heads * self.gathered * (4 + dtype.itemsize) if self.split else 0
        return rows + scores + self.slots * heads * (HEAD_DIM + 1) * 4


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _bucket(dense: int, block: int) -> int:
    """Columns for up to `dense` rows: few different sizes, so that few kernels are compiled while contexts grow."""
    return _up(dense, 512) if dense > 512 else max(block, next_power_of_2(dense))


def _is_tile(page: int) -> bool:
    """Whether a page of this many rows can be one tile."""
    return page % 16 == 0 and page <= 128


def _page_tiles(window: int, page: int) -> int:
    """Pages that a window can touch."""
    return -(-(window - 1) // page) + 1


def _head_block(heads: int, columns: int, scores: int) -> int:
    """Heads of an item so that the scores in flight fit."""
    block = next_power_of_2(heads)
    while block > 16 and (block > 64 or block * columns > scores):
        block //= 2
    return block


@lru_cache(maxsize=1024)
def plan(family: Family, call: Call) -> Plan:
    """The launches of a call, the same for every step of these shapes."""
    limit = limits(family)
    by_row = family.row_operands and not call.record
    in_place = by_row or (family.mixed_kernels and not call.record and _is_tile(call.window_page))
    windows, window_rows = 0, call.window_page
    if by_row:
        windows, window_rows = 1, _up(call.window, 16)
    elif in_place:
        windows = _page_tiles(call.window, call.window_page)
        in_place = windows <= MAX_TILES

    def tiling(source: int, windows: int, tiles: int, rows: int) -> Tiling:
        heads = _head_block(call.heads, windows * window_rows + tiles * rows, limit.scores)
        return Tiling(
            SOURCE=source, BY_ROW=by_row and source != _attend.GATHERED, WINDOWS=windows, WINDOW_PAGE=call.window_page,
            WINDOW_ROWS=window_rows, TILES=tiles, PAGE=call.cmp_page, ROWS=rows, HEADS=heads, DK=limit.key_width,
            DV=limit.value_width,
        )  # fmt: skip

    if not call.picked and not call.dense and in_place:
        return Plan((tiling(_attend.DENSE, windows, 0, 16),))
    if by_row and call.picked:
        return Plan((tiling(_attend.PICKED, windows, 1, _up(call.picked, 16)),))
    if in_place and call.dense and (by_row or _is_tile(call.cmp_page)):
        chunk = min(_bucket(call.dense, 16), limit.chunk_rows) if by_row else call.cmp_page
        tiles = 1 if by_row else next_power_of_2(-(-call.dense // chunk))
        whole = tiling(_attend.DENSE, windows, tiles, chunk)
        if windows + tiles <= MAX_TILES and call.dense <= tiles * chunk:
            return Plan((whole,))
        rest = tiling(_attend.DENSE, 0, 1 if by_row else min(tiles, MAX_TILES), chunk)
        chunk *= rest.TILES
        return Plan((tiling(_attend.DENSE, windows, 0, 16), rest), slots=1 + -(-call.dense // chunk), chunk=chunk)
    base = window_columns(call.window)
    columns = base + (_bucket(call.dense, BLOCK) if call.dense else _up(call.picked, BLOCK))
    chunk = columns if call.picked or columns <= limit.chunk_rows else limit.chunk_rows
    slots = 0 if chunk == columns else -(-columns // chunk)
    columns = slots * chunk or columns
    tiles = min(MAX_TILES, -(-chunk // limit.gathered_rows))
    whole = tiling(_attend.GATHERED, 0, tiles, _up(chunk, 16 * tiles) // tiles)
    if family.mixed_kernels and min(64, call.heads) <= whole.HEADS:
        return Plan((whole,), None, columns, base, slots, chunk)
    return Plan((), _split(family, call.heads, chunk), columns, base, slots, chunk)


def _split(family: Family, heads: int, chunk: int) -> Split:
    """Tiles of the split chain, for bf16 rows: operands of both products twice in L1, one being loaded while the other
    is used; scores of the softmax in UB with what is made of them."""
    heads = max(16, next_power_of_2(heads))
    dot_heads = min(128, heads)
    row_bytes = HEAD_DIM * 2
    fit = family.l1_bytes // (2 * row_bytes) - dot_heads
    value_heads = min(64, heads)
    width = 64
    while width > 16 and 2 * (value_heads + width) * chunk * 2 > family.l1_bytes:
        width //= 2
    softmax_rows = family.ub_bytes // (16 * chunk)
    return Split(
        CHUNK=chunk, ROWS=max(rows for rows in range(16, fit + 1, 16) if chunk % rows == 0), SCORE_HEADS=dot_heads,
        SOFTMAX_HEADS=min(heads, 1 << (softmax_rows.bit_length() - 1)), VALUE_HEADS=value_heads, DV=width,
    )  # fmt: skip
