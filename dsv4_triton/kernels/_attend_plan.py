"""How `sparse_attention` does a call: which launches, with which tiles. Pure functions of shapes and device family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from dsv4_triton.device import Family
from dsv4_triton.kernels import _attend
from dsv4_triton.kernels._tiling import next_power_of_2
from dsv4_triton.kernels.gather_rows import BLOCK, window_columns

MAX_TILES = 5
"""Tiles that one chunk has names for."""
HEAD_DIM = 512


class Limits(NamedTuple):
    """What is chosen for a family and a kind of call.

    PATH: the way that the launches take, one of `PATHS`, or None for the first possible one. HEADS: most heads of an
    item. SCORES: heads x rows of one softmax. CHUNK_ROWS: rows that one softmax of copied rows may have; more are cut
    into several of SLOT_ROWS, fewer where a mixed kernel then has room for whole rows. TILE_ROWS: rows of a gathered
    tile. WHOLE_ROWS, WHOLE_COLUMNS: up to so many rows a tile and in one softmax, operands of the first product span
    all features; beyond, slices of SLICE. VALUE_WIDTH: columns of a slice of the second product. ONCE: whether rows are
    loaded once for both products, None where a core has few items and so little to overlap. PAIRED: whether two tiles
    may share a slice of the queries. CORE_ITEMS: items a core, as far as chunks can be divided for that.
    """

    PATH: str | None = None
    HEADS: int = 64
    SCORES: int = 768 * 64
    CHUNK_ROWS: int = 640
    SLOT_ROWS: int = 384
    TILE_ROWS: int = 320
    WHOLE_ROWS: int = 192
    WHOLE_COLUMNS: int = 512
    SLICE: int = 128
    VALUE_WIDTH: int = 256
    ONCE: bool | None = None
    PAIRED: bool = True
    CORE_ITEMS: int = 4


_ANY = 1 << 20
_ANY_TILE = Limits(
    SCORES=1 << 18, CHUNK_ROWS=512, TILE_ROWS=_ANY, WHOLE_ROWS=_ANY, WHOLE_COLUMNS=_ANY, VALUE_WIDTH=512
)  # fmt: skip
_ONCE_COLUMNS = 256
"""Up to so many rows of a softmax are loaded once for both products where items are few."""


def default_limits(family: Family) -> Limits:
    """The limits of a family."""
    return _ANY_TILE if family.any_tile else Limits()


@dataclass(frozen=True)
class Call:
    """The shapes of a call. `picked` and `dense` are the compressed rows a token may attend: named by an index list, or
    the first n_vis; not both. `record`: rows are encoded, so that they have to be gathered before use. `shared`:
    requests have several tokens, which may share a copy of dense rows."""

    heads: int
    window: int
    window_page: int
    cmp_page: int = 1
    picked: int = 0
    dense: int = 0
    record: bool = False
    shared: bool = False


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
    PAIRED: bool
    DK: int
    DV: int

    @property
    def columns(self) -> int:
        """Rows in one softmax."""
        return self.WINDOWS * self.WINDOW_ROWS + self.TILES * self.ROWS


@dataclass(frozen=True)
class Plan:
    """The launches of a call.

    `gathered` columns are copied first, if any; they begin with `base` columns of the window, or with none where
    attend launches read the window in place. If `shared` those after the window's are copied once per request, else
    once per token; with a `bias` where the launches do not see by themselves which rows exist. Then come `launches`, or
    three of one step each if there are none (`_attend_split.py`). They finish the result, or where there are `slots`
    give that many partial results a token, of `chunk` rows each, which a last launch merges.
    """

    launches: tuple[Tiling, ...] = ()
    gathered: int = 0
    base: int = 0
    slots: int = 0
    chunk: int = 0
    shared: bool = False
    bias: bool = False

    @property
    def own(self) -> int:
        """Columns copied for a token alone."""
        return self.base if self.shared else self.gathered

    def scratch(self, heads: int, itemsize: int) -> int:
        """Bytes of scratch a token takes."""
        rows = self.own * (HEAD_DIM * itemsize + (4 if self.bias else 0))
        scores = 0 if self.launches else heads * self.gathered * (4 + itemsize)
        return rows + scores + self.slots * heads * (HEAD_DIM + 1) * 4


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def rounded(dense: int, block: int = BLOCK) -> int:
    """Columns for up to `dense` rows: few different sizes, so that few kernels are compiled while contexts grow."""
    return _up(dense, 512) if dense > 512 else max(block, next_power_of_2(dense)) if dense else 0


def sizes(dense: int) -> list[int]:
    """All columns that up to `dense` rows can have."""
    return sorted(
        {rounded(n) for n in (*(1 << k for k in range(10)), *range(512, dense, 512)) if n <= dense} | {rounded(dense)}
    )


def _is_tile(page: int) -> bool:
    """Whether a page of this many rows can be one tile."""
    return page % 16 == 0 and page <= 128


def _page_tiles(window: int, page: int) -> int:
    """Pages that a window can touch."""
    return -(-(window - 1) // page) + 1


def _head_block(heads: int, columns: int, limit: Limits) -> int:
    """Heads of an item so that the scores in flight fit."""
    block = next_power_of_2(heads)
    while block > 16 and (block > limit.HEADS or block * columns > limit.SCORES):
        block //= 2
    return block


def _together(call: Call, tiling: Tiling, limit: Limits) -> bool:
    """Whether an item has as many heads as it may: else its rows are too many for one softmax."""
    return min(limit.HEADS, call.heads) <= tiling.HEADS


def _tiling(
    family: Family, call: Call, limit: Limits, source: int, windows: int, window_rows: int, tiles: int, rows: int,
    *, by_row: bool,
) -> Tiling:  # fmt: skip
    """A launch over `windows` tiles of the window and `tiles` of `rows` compressed or gathered rows."""
    columns = windows * window_rows + tiles * rows
    whole = max(rows, window_rows if windows else 0) <= limit.WHOLE_ROWS and columns <= limit.WHOLE_COLUMNS
    heads = _head_block(call.heads, columns, limit)
    paired = limit.PAIRED and (windows, tiles) == (3, 2) and not whole and 8 * heads * rows <= family.l0c_bytes
    return Tiling(
        SOURCE=source, BY_ROW=by_row, WINDOWS=windows, WINDOW_PAGE=call.window_page, WINDOW_ROWS=window_rows,
        TILES=tiles, PAGE=call.cmp_page, ROWS=rows, HEADS=heads, PAIRED=paired,
        DK=HEAD_DIM if whole else limit.SLICE, DV=limit.VALUE_WIDTH,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def plan(family: Family, call: Call, limit: Limits) -> Plan:
    """The launches of a call, the same for every step of these shapes: those of the limits' path, or of the first
    possible one where that is not."""
    named = PATHS.get(limit.PATH or "")
    chosen = None if named is None else named(family, call, limit)
    return chosen or next(one for path in PATHS.values() if (one := path(family, call, limit)) is not None)


def _windows(family: Family, call: Call) -> int:
    """Pages that are tiles of the window where it lies, 0 where they cannot be."""
    windows = _page_tiles(call.window, call.window_page)
    fit = family.mixed_kernels and not call.record and _is_tile(call.window_page) and windows <= MAX_TILES
    return windows if fit else 0


def _by_row(family: Family, call: Call, limit: Limits) -> Plan | None:
    """One tile of the window and one of the compressed rows, each row looked up."""
    if not family.row_operands or call.record:
        return None
    window = _up(call.window, 16)
    if call.picked:
        return Plan((_tiling(family, call, limit, _attend.PICKED, 1, window, 1, _up(call.picked, 16), by_row=True),))
    if call.dense <= limit.CHUNK_ROWS:
        tiles, rows = (1, rounded(call.dense, 16)) if call.dense else (0, 16)
        return Plan((_tiling(family, call, limit, _attend.DENSE, 1, window, tiles, rows, by_row=True),))
    first = _tiling(family, call, limit, _attend.DENSE, 1, window, 0, 16, by_row=True)
    rest = _tiling(family, call, limit, _attend.DENSE, 0, window, 1, limit.CHUNK_ROWS, by_row=True)
    return Plan((first, rest), slots=1 + -(-call.dense // limit.CHUNK_ROWS), chunk=limit.CHUNK_ROWS)


def _by_page(family: Family, call: Call, limit: Limits) -> Plan | None:
    """Pages as tiles: all in one softmax, or the window's and then chunks of the compressed ones."""
    windows = _windows(family, call)
    if not windows or call.picked or (call.dense and not _is_tile(call.cmp_page)):
        return None
    tiles = -(-call.dense // call.cmp_page)
    whole = _tiling(family, call, limit, _attend.DENSE, windows, call.window_page, tiles, call.cmp_page, by_row=False)
    if windows + tiles <= MAX_TILES and _together(call, whole, limit):
        return Plan((whole,))
    first = _tiling(family, call, limit, _attend.DENSE, windows, call.window_page, 0, 16, by_row=False)
    tiles = min(tiles, MAX_TILES, max(1, limit.WHOLE_COLUMNS // call.cmp_page))
    rest = _tiling(family, call, limit, _attend.DENSE, 0, call.window_page, tiles, call.cmp_page, by_row=False)
    chunk = tiles * call.cmp_page
    return Plan((first, rest), slots=1 + -(-call.dense // chunk), chunk=chunk)


def _own(call: Call) -> int:
    """Columns of copied compressed rows."""
    return rounded(call.dense) if call.dense else _up(call.picked, BLOCK)


def _copied(family: Family, call: Call, limit: Limits, windows: int, columns: int, source: int) -> Tiling | None:
    """A launch over `windows` tiles where they lie and `columns` copied rows, if that is possible."""
    width = limit.WHOLE_ROWS if windows * call.window_page + columns <= limit.WHOLE_COLUMNS else limit.TILE_ROWS
    tiles = min(MAX_TILES - windows, -(-columns // width))
    if not tiles or not family.mixed_kernels:
        return None
    rows = _up(columns, 16 * tiles) // tiles
    tiling = _tiling(family, call, limit, source, windows, call.window_page, tiles, rows, by_row=False)
    return tiling if _together(call, tiling, limit) else None


def _beside(family: Family, call: Call, limit: Limits) -> Plan | None:
    """Compressed rows are copied first, the window's are tiles where they lie; one softmax."""
    windows, own, shared = _windows(family, call), _own(call), call.shared and call.dense > 0
    if not windows or own > limit.CHUNK_ROWS:
        return None
    source = _attend.SHARED if shared else _attend.COPIED if call.dense else _attend.GATHERED
    tiling = _copied(family, call, limit, windows, own, source)
    return None if tiling is None else Plan((tiling,), own, shared=shared, bias=call.picked % BLOCK != 0)


def _in_parts(family: Family, call: Call, limit: Limits) -> Plan | None:
    """As `_beside`, with a softmax for the window and for every slot of rows that requests share."""
    windows, own = _windows(family, call), _own(call)
    if not windows or not call.shared or not call.dense:
        return None
    rest = _copied(family, call, limit, 0, limit.SLOT_ROWS, _attend.SHARED)
    if rest is None:
        return None
    first = _tiling(family, call, limit, _attend.DENSE, windows, call.window_page, 0, 16, by_row=False)
    slots = -(-own // rest.columns)
    return Plan((first, rest), slots * rest.columns, 0, 1 + slots, rest.columns, shared=True)


def _chunks(family: Family, call: Call, limit: Limits) -> tuple[int, int, int, int]:
    """Columns of the window and of all where all are copied; chunks, or 0 where one softmax has all, and their rows."""
    base = window_columns(call.window)
    columns = base + _own(call)
    if call.picked or columns <= limit.CHUNK_ROWS:
        return base, columns, 0, columns
    chunk = limit.SLOT_ROWS if family.mixed_kernels else limit.CHUNK_ROWS
    slots = -(-columns // chunk)
    return base, slots * chunk, slots, chunk


def _all_copied(family: Family, call: Call, limit: Limits) -> Plan | None:
    """All rows are copied, each token's for itself, and one launch attends them."""
    base, columns, slots, chunk = _chunks(family, call, limit)
    alone = _copied(family, call, limit, 0, chunk, _attend.GATHERED)
    return None if alone is None else Plan((alone,), columns, base, slots, chunk, bias=True)


def _in_steps(family: Family, call: Call, limit: Limits) -> Plan | None:
    """All rows are copied, dense ones once per request, and scores, softmax and values are launches of their own."""
    shared = call.shared and call.dense > 0 and not family.mixed_kernels
    base, columns, slots, chunk = _chunks(family, call, limit)
    return Plan((), columns, base, slots, chunk, shared, bias=True)


PATHS: dict[str, Callable[[Family, Call, Limits], Plan | None]] = {
    "rows": _by_row, "pages": _by_page, "beside": _beside, "parts": _in_parts, "copies": _all_copied,
    "steps": _in_steps,
}  # fmt: skip
"""Ways to do a call, by preference; each gives None where it is not possible."""


def once(family: Family, tiling: Tiling, limit: Limits, items: int, heads: int) -> bool:
    """Whether rows are loaded once for both products.

    All features at once are the operand of the first product again, which the compiler then loads once; but it needs
    all accumulators, and gives up the overlap of one item with the next and so the buffers for that. The compiler lets
    four items overlap: little is lost where a core has not more, if each has rows of its own that memory delivers.
    """
    if tiling.DK < HEAD_DIM or limit.ONCE is not None:
        return tiling.DK == HEAD_DIM and bool(limit.ONCE)
    few = family.cube_cores * (4 if heads <= tiling.HEADS else 1)
    return tiling.columns <= _ONCE_COLUMNS and items <= few
