"""How `sparse_attention` does a call: which launches, with which tiles. Pure functions of shapes and device family."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import torch

from dsv4_triton.device import Family
from dsv4_triton.kernels import _attend
from dsv4_triton.kernels._tiling import next_power_of_2
from dsv4_triton.kernels.gather_rows import BLOCK, window_columns

MAX_TILES = 5
"""Tiles that one chunk has names for."""
HEAD_DIM = 512


@dataclass(frozen=True)
class Limits:
    """What fits a family.

    scores: heads x rows of one softmax. chunk_rows: rows that one softmax of copied rows may have; more are cut into
    several of slot_rows, fewer where a mixed kernel then has room for whole rows. tile_rows: rows of a gathered tile.
    whole_rows, whole_columns: up to so many rows a tile and in one softmax, operands of the first product span all
    features; beyond, slices of 128. value_width: columns of a slice of the second product. once_columns: up to so many
    rows are loaded once for both products where a core has few items, and so little to overlap. scratch_bytes: gathered
    rows and partial results should stay in the last cache.
    """

    scores: int = 768 * 64
    chunk_rows: int = 640
    slot_rows: int = 384
    tile_rows: int = 320
    whole_rows: int = 192
    whole_columns: int = 512
    value_width: int = 256
    once_columns: int = 256
    scratch_bytes: int = 72 << 20


_ANY = 1 << 20
LIMITS = {
    "host": Limits(
        scores=1 << 18, chunk_rows=512, tile_rows=_ANY, whole_rows=_ANY, whole_columns=_ANY, value_width=512,
        scratch_bytes=8 << 20,
    )
}  # fmt: skip


def limits(family: Family) -> Limits:
    """The limits of a family."""
    return LIMITS.get(family.name, Limits())


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
class Split:
    """Constants of the three launches that do one step each, on gathered rows."""

    CHUNK: int
    SCORE_ROWS: int
    SCORE_HEADS: int
    SOFTMAX_HEADS: int
    FIRST: int
    VALUE_ROWS: int
    VALUE_HEADS: int
    DV: int


@dataclass(frozen=True)
class Plan:
    """The launches of a call.

    `gathered` columns are copied first, if any; they begin with `base` columns of the window, or with none where
    attend launches read the window in place. If `shared` those after the window's are copied once per request, else
    once per token; with a `bias` where the launches do not see by themselves which rows exist. Then come `launches`, or
    the three of `split`. They finish the result, or where there are `slots` give that many partial results a token, of
    `chunk` rows each, which a last launch merges.
    """

    launches: tuple[Tiling, ...] = ()
    split: Split | None = None
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

    def scratch(self, heads: int, dtype: torch.dtype) -> int:
        """Bytes of scratch a token takes."""
        rows = self.own * (HEAD_DIM * dtype.itemsize + (4 if self.bias else 0))
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


def _tiling(
    family: Family, call: Call, source: int, windows: int, window_rows: int, tiles: int, rows: int, *, by_row: bool
) -> Tiling:
    """A launch over `windows` tiles of the window and `tiles` of `rows` compressed or gathered rows."""
    limit = limits(family)
    columns = windows * window_rows + tiles * rows
    whole = max(rows, window_rows if windows else 0) <= limit.whole_rows and columns <= limit.whole_columns
    heads = _head_block(call.heads, columns, limit.scores)
    paired = (windows, tiles) == (3, 2) and not whole and 8 * heads * rows <= family.l0c_bytes
    return Tiling(
        SOURCE=source, BY_ROW=by_row, WINDOWS=windows, WINDOW_PAGE=call.window_page, WINDOW_ROWS=window_rows,
        TILES=tiles, PAGE=call.cmp_page, ROWS=rows, HEADS=heads, PAIRED=paired,
        DK=HEAD_DIM if whole else 128, DV=limit.value_width,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def plan(family: Family, call: Call) -> Plan:
    """The launches of a call, the same for every step of these shapes."""
    if family.row_operands and not call.record:
        return _plan_by_row(family, call)
    windows = _page_tiles(call.window, call.window_page)
    in_place = family.mixed_kernels and not call.record and _is_tile(call.window_page) and windows <= MAX_TILES
    if in_place and not call.picked and (not call.dense or _is_tile(call.cmp_page)):
        return _plan_by_page(family, call, windows)
    return _plan_gathered(family, call, windows if in_place else 0)


def _plan_by_row(family: Family, call: Call) -> Plan:
    """One tile of the window and one of the compressed rows, each row looked up."""
    limit, window = limits(family), _up(call.window, 16)
    if call.picked:
        return Plan((_tiling(family, call, _attend.PICKED, 1, window, 1, _up(call.picked, 16), by_row=True),))
    if call.dense <= limit.chunk_rows:
        tiles, rows = (1, _bucket(call.dense, 16)) if call.dense else (0, 16)
        return Plan((_tiling(family, call, _attend.DENSE, 1, window, tiles, rows, by_row=True),))
    first = _tiling(family, call, _attend.DENSE, 1, window, 0, 16, by_row=True)
    rest = _tiling(family, call, _attend.DENSE, 0, window, 1, limit.chunk_rows, by_row=True)
    return Plan((first, rest), slots=1 + -(-call.dense // limit.chunk_rows), chunk=limit.chunk_rows)


def _plan_by_page(family: Family, call: Call, windows: int) -> Plan:
    """Pages as tiles: all in one softmax, or the window's and then chunks of the compressed ones."""
    limit, tiles = limits(family), -(-call.dense // call.cmp_page)
    whole = _tiling(family, call, _attend.DENSE, windows, call.window_page, tiles, call.cmp_page, by_row=False)
    if windows + tiles <= MAX_TILES and min(64, call.heads) <= whole.HEADS:
        return Plan((whole,))
    first = _tiling(family, call, _attend.DENSE, windows, call.window_page, 0, 16, by_row=False)
    tiles = min(tiles, MAX_TILES, max(1, limit.whole_columns // call.cmp_page))
    rest = _tiling(family, call, _attend.DENSE, 0, call.window_page, tiles, call.cmp_page, by_row=False)
    chunk = tiles * call.cmp_page
    return Plan((first, rest), slots=1 + -(-call.dense // chunk), chunk=chunk)


def _plan_gathered(family: Family, call: Call, windows: int) -> Plan:
    """Rows that are copied first; without the window's where that fits beside them, in `windows` tiles of its own."""
    limit = limits(family)
    own = _bucket(call.dense, BLOCK) if call.dense else _up(call.picked, BLOCK)
    shared = call.shared and call.dense > 0 and (windows > 0 or not family.mixed_kernels)

    def fused(windows: int, columns: int) -> Tiling | None:
        width = limit.whole_rows if windows * call.window_page + columns <= limit.whole_columns else limit.tile_rows
        tiles = min(MAX_TILES - windows, -(-columns // width))
        if not tiles:
            return None
        rows = _up(columns, 16 * tiles) // tiles
        source = _attend.SHARED if shared else _attend.COPIED if windows and call.dense else _attend.GATHERED
        tiling = _tiling(family, call, source, windows, call.window_page, tiles, rows, by_row=False)
        return tiling if family.mixed_kernels and min(64, call.heads) <= tiling.HEADS else None

    if windows and own <= limit.chunk_rows and (beside := fused(windows, own)) is not None:
        return Plan((beside,), gathered=own, shared=shared, bias=call.picked % BLOCK != 0)
    if shared and windows and (rest := fused(0, limit.slot_rows)) is not None:
        first = _tiling(family, call, _attend.DENSE, windows, call.window_page, 0, 16, by_row=False)
        slots = -(-own // rest.columns)
        return Plan((first, rest), None, slots * rest.columns, 0, 1 + slots, rest.columns, shared=True)
    base = window_columns(call.window)
    columns = base + own
    several = limit.slot_rows if family.mixed_kernels else limit.chunk_rows
    chunk = columns if call.picked or columns <= limit.chunk_rows else several
    slots = 0 if chunk == columns else -(-columns // chunk)
    columns = slots * chunk or columns
    if not shared and (alone := fused(0, chunk)) is not None:
        return Plan((alone,), None, columns, base, slots, chunk, bias=True)
    shared = shared and not family.mixed_kernels
    split = _split(family, call.heads, chunk, base if shared else 0)
    return Plan((), split, columns, base, slots, chunk, shared, bias=True)


def _split(family: Family, heads: int, chunk: int, first: int) -> Split:
    """Tiles of the split chain for bf16 rows; the first `first` columns are copied apart from the others.

    Operands of both products are in L1, twice where the compiler loads one while the other is used. The sums of the
    second product fill the accumulators, or where they leave through vector memory a part of that; there each further
    addition takes the vector cores, too. The softmax has its scores in UB with all that is made of them.
    """
    heads = max(16, next_power_of_2(heads))
    dot_heads = min(128, heads)
    operands = family.l1_bytes // 2 // (2 if family.mixed_kernels else 1)
    sums = family.l0c_bytes // 4 if family.mixed_kernels else min(family.l0c_bytes // 4, family.ub_bytes // 12)
    width = min(HEAD_DIM, _power_of_2_below(sums // dot_heads))
    value_rows = operands // (dot_heads + width)
    together = gcd(chunk, first) if first else chunk
    return Split(
        CHUNK=chunk, SCORE_ROWS=_divisor(together, min(320, operands // HEAD_DIM - dot_heads)), SCORE_HEADS=dot_heads,
        SOFTMAX_HEADS=min(heads, _power_of_2_below(family.ub_bytes // (16 * chunk))),
        FIRST=first or _divisor(chunk, value_rows), VALUE_ROWS=_divisor(chunk - first, value_rows),
        VALUE_HEADS=dot_heads, DV=width,
    )  # fmt: skip


def attend_options(family: Family, tiling: Tiling, items: int, heads: int) -> dict[str, int | bool]:
    """The width of a slice of the second product, and the compiler's options.

    All features at once are the operand of the first product again, which the compiler then loads once; but it needs
    all accumulators, and gives up the overlap of one item with the next and so the buffers for that. The compiler lets
    four items overlap: little is lost where a core has not more, if each has rows of its own that memory delivers.
    """
    few = family.cube_cores * (4 if heads <= tiling.HEADS else 1)
    if tiling.DK == HEAD_DIM and tiling.columns <= limits(family).once_columns and items <= few:
        return {"DV": HEAD_DIM, "multibuffer": False, "tile_mix_vector_loop": 1}
    return {"DV": tiling.DV, "tile_mix_vector_loop": 1}


def score_tiles(split: Split, columns: int, items: int, cores: int) -> tuple[int, int]:
    """Rows of a tile of the scores, few enough that every core has something to do; and in how many parts the tiles of
    an item are divided so that the busiest core has the fewest."""
    rows = split.SCORE_ROWS
    while rows > 64 and rows % 32 == 0 and items * (columns // rows) < cores:
        rows //= 2
    tiles = columns // rows
    return rows, min(range(1, tiles + 1), key=lambda n: -(-items * n // cores) * -(-tiles // n))


def value_width(split: Split, tokens: int, heads: int, cores: int) -> int:
    """Features of a slice of the second product: few enough that `tokens` give every core something to do."""
    width, items = split.DV, tokens * -(-heads // split.VALUE_HEADS)
    while width > 64 and items * (HEAD_DIM // width) < cores:
        width //= 2
    return width


def softmax_heads(split: Split, chunks: int, heads: int, cores: int) -> int:
    """Heads of an item of the softmax: few enough that `chunks` of all tokens give every core something to do."""
    block = split.SOFTMAX_HEADS
    while block > 8 and chunks * -(-heads // block) < cores:
        block //= 2
    return block


def _power_of_2_below(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def _divisor(n: int, limit: int) -> int:
    """The largest multiple of 16 up to `limit` that divides `n`."""
    return max(rows for rows in range(16, limit + 1, 16) if n % rows == 0)
