"""Sparse attention: window rows, compressed rows and a sink in one softmax, for prefill and decode alike.

For token t at position p and head h, with K the window rows max(0, p - window + 1)..p and the compressed rows:

    a_s = scale * <q[t, h], k_s>;   M = max_s a_s;   Z = sum_s exp(a_s - M) + exp(sink[h] - M)
    out[t, h] = sum_s round(exp(a_s - M) / Z) * k_s

fp32 throughout; `round` is the cast to the cache's dtype (P is bf16 for bf16 rows, while Z sums unrounded terms); one
cast of the result. A row is key and value at once. Terms are added in the order of the token's own rows, whatever else
the batch holds; only the split of more than 512 dense rows into chunks follows `max_n_vis`.

Two routes, by the shape of the caches:
* pages: tiles are pages, read in place. Window alone in one launch; with dense compressed rows the window, and chunks
  of four pages, give partial results that a third launch merges with the sink.
* rows: `gather_rows` copies what a token attends, then one launch attends it with a single softmax; dense sets longer
  than a chunk give partial results that are merged. Used for selected rows, for records (uint8, decoded on the way)
  and for pages that are too small or too large for a tile.

Cube and vector cores; grids are persistent. On-chip sizes: `_attend.py`, `gather_rows.py`. Formula: official
inference code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch

from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels import _attend
from dsv4_triton.kernels._checks import FLOATS, check_filled, check_tensor, output
from dsv4_triton.kernels._rows import HEAD_DIM, check_rows, is_record
from dsv4_triton.kernels._tiling import next_power_of_2
from dsv4_triton.kernels.gather_rows import BLOCK, gather_rows, window_columns

OP = "sparse_attention"
MAX_TILES = 4
MERGE_HEADS = 16


@dataclass(frozen=True)
class Limits:
    """Limits of a family: scores in flight (heads x rows), gathered tiles per chunk, widths of the products, rows per
    chunk, and bytes of gathered rows or partial results per launch (they should stay in the last cache)."""

    scores: int = 40960
    gathered_tiles: int = 2
    key_width: int = 128
    value_width: int = 64
    chunk_rows: int = 640
    scratch_bytes: int = 64 << 20


LIMITS = {"host": Limits(scores=1 << 18, gathered_tiles=1, key_width=512, value_width=512, scratch_bytes=8 << 20)}


@dataclass(frozen=True)
class Tiling:
    """Constants of one attend launch."""

    TILES: int
    ROWS: int
    HEADS: int
    DK: int
    DV: int


def tiling(limits: Limits, heads: int, tiles: int, rows: int) -> Tiling:
    """Heads per item so that the scores in flight fit, and the widths of both products."""
    block = next_power_of_2(heads)
    while block > 16 and (block > 64 or block * tiles * rows > limits.scores):
        block //= 2
    return Tiling(TILES=tiles, ROWS=rows, HEADS=block, DK=limits.key_width, DV=limits.value_width)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _bucket(dense: int) -> int:
    """Columns for up to `dense` rows: few different sizes, so that few kernels are compiled while contexts grow."""
    if dense > 512:
        return _up(dense, 512)
    return max(BLOCK, next_power_of_2(dense)) if dense else 0


def _is_tile(page: int) -> bool:
    """Whether a page of this many rows can be one tile."""
    return page % 16 == 0 and page <= 128


def _page_tiles(window: int, page: int) -> int:
    """Pages that a window can touch."""
    return -(-(window - 1) // page) + 1


@dataclass
class _Tokens:
    """What belongs to a run of tokens, and what all of them share."""

    q: torch.Tensor
    token_req: torch.Tensor
    positions: torch.Tensor
    n_vis: torch.Tensor | None
    indices: torch.Tensor | None
    out: torch.Tensor
    sink: torch.Tensor
    scale: float
    window: int

    def runs(self, length: int) -> Iterator[_Tokens]:
        """The tokens in runs of `length`, rounded so that each run stays aligned."""
        length = max(16, length // 16 * 16)
        for start in range(0, len(self.q), length):
            run = slice(start, start + length)
            yield replace(
                self, q=self.q[run], token_req=self.token_req[run], positions=self.positions[run], out=self.out[run],
                n_vis=None if self.n_vis is None else self.n_vis[run],
                indices=None if self.indices is None else self.indices[run],
            )  # fmt: skip

    def attend(
        self,
        source: int,
        tiling: Tiling,
        cores: int,
        rows: torch.Tensor,
        *,
        table: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        base: int = 0,
        limit: int | None = None,
        partial: Partial | None = None,
        slot0: int = 0,
    ) -> None:
        """One launch into `out`, with the sink, or into `partial` from slot `slot0`; `limit`: n_vis rows count too."""
        tokens, heads = self.q.shape[:2]
        items = tokens * -(-heads // tiling.HEADS)
        splits = 1
        if partial is not None and source != _attend.WINDOW:
            splits = max(1, min(partial.slots - slot0, 4 * cores // items))
        _attend.attend_kernel[(min(items * splits, cores),)](
            self.q, rows, self.positions if table is None else table, self.sink if bias is None else bias, self.sink,
            self.token_req, self.positions, self.positions if limit is None else self.n_vis,
            self.out if partial is None else partial.values, self.sink if partial is None else partial.lse,
            tokens, heads, 0 if table is None else table.stride(0), rows.stride(0), rows.shape[1], base, limit or 0,
            self.window, splits, 1 if partial is None else partial.slots, slot0, self.scale,
            SOURCE=source, COUNTED=limit is not None, FINAL=partial is None, D=HEAD_DIM, **asdict(tiling),
        )  # fmt: skip

    def merge(self, partial: Partial, base: int, limit: int, chunk: int, cores: int) -> None:
        """The first ceil(min(base + n_vis, limit) / chunk) partial results and the sink into `out`."""
        tokens, heads = self.q.shape[:2]
        block = min(MERGE_HEADS, next_power_of_2(heads))
        _attend.merge_kernel[(min(tokens * -(-heads // block), cores),)](
            partial.values, partial.lse, self.sink, self.positions, self.n_vis, self.out,
            tokens, heads, partial.slots, base, limit, chunk, HEADS=block, D=HEAD_DIM,
        )  # fmt: skip


class Partial:
    """Normalised partial results [T, slots, H, 512] and the log of their denominators [T, slots, H], fp32."""

    def __init__(self, tokens: _Tokens, slots: int) -> None:
        count, heads, dim = tokens.q.shape
        self.slots = slots
        self.values = torch.empty((count, slots, heads, dim), dtype=torch.float32, device=tokens.q.device)
        self.lse = torch.empty((count, slots, heads), dtype=torch.float32, device=tokens.q.device)


def _by_pages(
    tokens: _Tokens,
    window_cache: torch.Tensor,
    window_table: torch.Tensor,
    cmp_cache: torch.Tensor | None,
    cmp_table: torch.Tensor | None,
    dense: int,
    family: Family,
) -> None:
    heads, page = tokens.q.shape[1], window_cache.shape[1]
    limits = LIMITS.get(family.name, Limits())
    shape = tiling(limits, heads, _page_tiles(tokens.window, page), page)
    if cmp_cache is None:
        tokens.attend(_attend.WINDOW, shape, family.cube_cores, window_cache, table=window_table)
        return
    cmp_tiles = min(MAX_TILES, next_power_of_2(-(-dense // cmp_cache.shape[1])))
    cmp_shape = tiling(limits, heads, cmp_tiles, cmp_cache.shape[1])
    chunk = cmp_shape.TILES * cmp_shape.ROWS
    slots = 1 + -(-dense // chunk)
    for run in tokens.runs(limits.scratch_bytes // (slots * heads * HEAD_DIM * 4)):
        partial = Partial(run, slots)
        run.attend(_attend.WINDOW, shape, family.cube_cores, window_cache, table=window_table, partial=partial)
        run.attend(
            _attend.PAGES, cmp_shape, family.cube_cores, cmp_cache, table=cmp_table, limit=dense,
            partial=partial, slot0=1,
        )  # fmt: skip
        run.merge(partial, chunk, chunk + dense, chunk, family.vector_cores)


def _by_rows(
    tokens: _Tokens,
    window_cache: torch.Tensor,
    window_table: torch.Tensor,
    cmp_cache: torch.Tensor | None,
    cmp_table: torch.Tensor | None,
    dense: int,
    family: Family,
) -> None:
    heads = tokens.q.shape[1]
    limits = LIMITS.get(family.name, Limits())
    base = window_columns(tokens.window)
    counted = tokens.n_vis is not None
    columns = base + _bucket(dense)
    if tokens.indices is not None:
        base = columns = base + _up(tokens.indices.shape[1], BLOCK)
    tiles = limits.gathered_tiles
    one = tiling(limits, heads, tiles, _up(columns, 16 * tiles) // tiles)
    final = not counted or columns <= limits.chunk_rows
    shape = one if final else tiling(limits, heads, tiles, limits.chunk_rows // tiles)
    chunk = shape.TILES * shape.ROWS
    for run in tokens.runs(limits.scratch_bytes // (columns * HEAD_DIM * tokens.q.element_size())):
        rows, bias = gather_rows(
            window_cache, window_table, run.token_req, run.positions, window=run.window, columns=columns,
            cmp_cache=cmp_cache, cmp_table=cmp_table, n_vis=run.n_vis, indices=run.indices, dtype=run.q.dtype,
        )  # fmt: skip
        partial = None if final else Partial(run, -(-columns // chunk))
        run.attend(
            _attend.GATHERED, shape, family.cube_cores, rows, bias=bias, base=base,
            limit=base + dense if counted else None, partial=partial,
        )  # fmt: skip
        if partial is not None:
            run.merge(partial, base, base + dense, chunk, family.vector_cores)


def sparse_attention(
    q: torch.Tensor,
    window_cache: torch.Tensor,
    window_table: torch.Tensor,
    sink: torch.Tensor,
    token_req: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    window: int = 128,
    cmp_cache: torch.Tensor | None = None,
    cmp_table: torch.Tensor | None = None,
    n_vis: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    max_n_vis: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention output [T, H, 512] in q's dtype.

    q [T, H, 512] bf16 or fp32, 1 to 128 heads. Caches [blocks, rows per block, 512] in q's dtype, pages at any
    stride. `window_table` [B, M] int32 maps position // rows per block, `cmp_table` entry // rows per block. `sink`
    [H] fp32 is a logit that is not scaled. `token_req`, `positions` [T] int32; position -1 is padding and gives a
    zero row.

    With `cmp_cache`: `indices` [T, K] int32 selects compressed rows (-1 is no row), or else rows 0..n_vis[t]-1
    (`n_vis` [T] int32) are all attended. At most `max_n_vis` of them are: pass the largest n_vis where the
    host knows it, since scratch and loops follow this bound (default: what `cmp_table` can hold). Raises ValueError or
    TypeError for arguments that do not fit together.
    """
    check_tensor(OP, "q", q, (None, None, HEAD_DIM), FLOATS)
    count, heads, _ = q.shape
    device = q.device
    if not 1 <= heads <= 128:
        raise ValueError(f"{OP}: q has {heads} heads, expected 1 to 128")
    if not 1 <= window <= 128:
        raise ValueError(f"{OP}: window is {window}, expected 1 to 128")
    check_rows(OP, "window_cache", window_cache, q.dtype, device)
    check_tensor(OP, "window_table", window_table, (None, None), torch.int32, device=device, layout="rows")
    check_tensor(OP, "sink", sink, (heads,), torch.float32, device=device)
    check_tensor(OP, "token_req", token_req, (count,), torch.int32, device=device)
    check_tensor(OP, "positions", positions, (count,), torch.int32, device=device)
    dense = 0
    if cmp_cache is None:
        if not (cmp_table is n_vis is indices is None):
            raise ValueError(f"{OP}: cmp_table, n_vis and indices need cmp_cache")
    else:
        check_rows(OP, "cmp_cache", cmp_cache, q.dtype, device)
        if is_record(cmp_cache) != is_record(window_cache):
            raise TypeError(f"{OP}: cmp_cache is {cmp_cache.dtype} but window_cache is {window_cache.dtype}")
        if cmp_table is None or (indices is None) == (n_vis is None):
            raise ValueError(f"{OP}: cmp_cache needs cmp_table and exactly one of n_vis and indices")
        check_tensor(OP, "cmp_table", cmp_table, (None, None), torch.int32, device=device, layout="rows")
        if indices is not None:
            check_tensor(OP, "indices", indices, (count, None), torch.int32, device=device)
        if n_vis is not None:
            check_tensor(OP, "n_vis", n_vis, (count,), torch.int32, device=device)
            dense = cmp_table.shape[1] * cmp_cache.shape[1]
            if max_n_vis is not None:
                dense = min(dense, max_n_vis)
    out = output(OP, "out", out, q.shape, q.dtype, device)
    if count == 0:
        return out
    check_filled(OP, window_cache=window_cache, window_table=window_table)
    if indices is None and dense == 0:
        cmp_cache = cmp_table = n_vis = None
    check_filled(OP, cmp_cache=cmp_cache, cmp_table=cmp_table)
    tokens = _Tokens(q, token_req, positions, n_vis, indices, out, sink, scale, window)
    page = window_cache.shape[1]
    by_pages = _is_tile(page) and _page_tiles(window, page) <= MAX_TILES and indices is None
    by_pages &= not is_record(window_cache)
    if cmp_cache is not None:
        by_pages &= _is_tile(cmp_cache.shape[1])
    route = _by_pages if by_pages else _by_rows
    route(tokens, window_cache, window_table, cmp_cache, cmp_table, dense, family_of(device.type))
    return out
