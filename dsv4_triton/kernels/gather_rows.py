"""Copy the rows that a token attends into one contiguous run per token, with an additive mask.

    rows[t, j]           = window row of position max(0, p - window + 1) + j            j < W
    rows[t, W + j]       = compressed row indices[t, j], or row j without indices       j < K
    bias[t, column]      = 0 where that row exists (position <= p; index >= 0; j < n_vis[t]), about -1e30 elsewhere

with W = `window` rounded up to whole blocks of 32 columns. Rows that do not exist are stored as zeros and their sources
are never used. Without indices, blocks of columns beyond n_vis[t] are left as they are; so is everything of a padding
token but the window block. With `fill`, rows that do not exist are stored up to the next multiple of so many columns,
and for at least that many: products may then read whole tiles.

Caches hold plain rows (512 values of the output's dtype) or records of 640 bytes (`_rows`), which are decoded: exactly,
since a product of e4m3 value and power of two fits bf16.

Grid: persistent over (token, block of columns), vector cores only; transfers as `_row_copies` says. UB: 32 bf16 rows in
at most four buffers, an index list and a block table, 166 KB. Source: gather and fused row kernel of the project's
design study.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton.autotune.space import Choices, Key, Space, buffering
from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels._checks import FLOATS, check_filled, check_tensor, output
from dsv4_triton.kernels._row_copies import copy_listed, copy_run
from dsv4_triton.kernels._rows import HEAD_DIM, check_rows, is_record, record_views

OP = "gather_rows"
BLOCK = 32
"""Columns are counted in blocks of this size."""
RECORD_BLOCK = 16
"""Columns of one work item where rows are records: decoding needs more buffers per row."""
TABLE_ENTRIES = 4096
"""Entries of a block table that fit UB beside the rows."""

ALL = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _pages_of(table_ptr, picks, entries, SHIFT: tl.constexpr, TABLE: tl.constexpr):
    """Pages of the listed rows, of 2^SHIFT rows each, as fp32 bits: looked up in UB, where TABLE entries fit, since
    lookups in global memory are scalar code, and A5 has no division of integer vectors. Else anything."""
    if TABLE > 0:
        entry = tl.arange(0, TABLE)
        table = tl.load(table_ptr + entry, mask=entry < entries, other=0).to(tl.float32, bitcast=True)
        return tl.gather(table, tl.maximum(picks, 0) >> SHIFT, 0)
    else:
        return picks.to(tl.float32, bitcast=True)


@triton.jit
def _prefix_bias(j, count):
    return tl.minimum(-0.5 - (j - count).to(tl.float32), 0.0, propagate_nan=ALL) * 2e30


@triton.jit
def _copy_window(
    cache_ptr, byte_ptr, table_ptr, page_stride, position, column, window, rows_ptr, bias_ptr,
    RECORD: tl.constexpr, PAGE: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Window columns `column`.. of one token."""
    last = tl.maximum(position, 0)
    first = tl.maximum(position + 1 - window, 0) + column
    count = position + 1 - first
    tl.store(bias_ptr + tl.arange(0, COLS), _prefix_bias(tl.arange(0, COLS), count))
    copy_run(
        cache_ptr, byte_ptr, table_ptr, page_stride, tl.minimum(first, last), last, count, rows_ptr, False, RECORD,
        PAGE, COLS,
    )  # fmt: skip


@triton.jit
def _copy_selected(
    cache_ptr, byte_ptr, table_ptr, pages, picks, whole, page_stride, column, rows_ptr, bias_ptr,
    RECORD: tl.constexpr, PAGE: tl.constexpr, COLS: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """The rows that `picks` name from `column` on, in `pages`, both bits of int32; `whole`: all of them exist."""
    j = tl.arange(0, COLS)
    at = tl.gather(picks, column + j, 0).to(tl.int32, bitcast=True)
    if bias_ptr is not None:
        tl.store(bias_ptr + j, tl.minimum(at.to(tl.float32), 0.0, propagate_nan=ALL) * 1e30)
    valid = at >= 0
    at = tl.maximum(at, 0)
    if TABLE > 0:
        page = tl.gather(pages, column + j, 0).to(tl.int32, bitcast=True)
    else:
        page = tl.load(table_ptr + at // PAGE)
    copy_listed(cache_ptr, byte_ptr, page, page_stride, at, valid, whole, rows_ptr, RECORD, PAGE, COLS)


@triton.jit(do_not_specialize=[
    "tokens", "table_stride", "page_stride", "cmp_table_stride", "cmp_page_stride", "entries", "window", "width",
    "columns", "fill",
])  # fmt: skip
def _gather_rows_kernel(
    window_ptr, window_byte_ptr, window_table_ptr, cmp_ptr, cmp_byte_ptr, cmp_table_ptr,
    pick_ptr, req_ptr, pos_ptr, rows_ptr, bias_ptr,
    tokens, table_stride, page_stride, cmp_table_stride, cmp_page_stride, entries, window, width, columns, fill,
    SELECTED: tl.constexpr, RECORD: tl.constexpr, PAGE: tl.constexpr, CMP_PAGE: tl.constexpr, PICKS: tl.constexpr,
    WINDOW_COLS: tl.constexpr, COLS: tl.constexpr, SHIFT: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """`pick_ptr`: indices [tokens, width] if SELECTED, else n_vis [tokens]. RECORD: caches are bf16 and byte views.
    `bias_ptr` may be None where WINDOW_COLS is 0."""
    programs = tl.num_programs(0)
    pid = tl.program_id(0)
    j = tl.arange(0, COLS)
    if WINDOW_COLS > 0:
        # From the last program on: the first ones begin with the rest of the work.
        for item in range(programs - 1 - pid, tokens * (WINDOW_COLS // COLS), programs):
            t = item % tokens
            column = item // tokens * COLS
            place = tl.cast(t, tl.int64) * columns + column
            req = tl.cast(tl.maximum(tl.load(req_ptr + t), 0), tl.int64)
            _copy_window(
                window_ptr, window_byte_ptr, window_table_ptr + req * table_stride, page_stride, tl.load(pos_ptr + t),
                column, window, rows_ptr + place * 512, bias_ptr + place, RECORD, PAGE, COLS,
            )  # fmt: skip
    blocks = (columns - WINDOW_COLS) // COLS
    if SELECTED:
        # A run of blocks for each program: table and list of a token are loaded once for all of its blocks.
        start = tl.cast(pid, tl.int64) * tokens * blocks // programs
        end = (tl.cast(pid, tl.int64) + 1) * tokens * blocks // programs
        for t64 in range(start // blocks, (end + blocks - 1) // blocks):
            position = tl.load(pos_ptr + t64)
            req = tl.cast(tl.maximum(tl.load(req_ptr + t64), 0), tl.int64)
            table = cmp_table_ptr + req * cmp_table_stride
            listed = width
            if position < 0:
                listed = 0
            pick = tl.arange(0, PICKS)
            picks = tl.load(pick_ptr + t64 * width + pick, mask=pick < listed, other=-1)
            whole = tl.min(picks, axis=0) >= 0
            pages = _pages_of(table, picks, entries, SHIFT, TABLE)
            picks = picks.to(tl.float32, bitcast=True)
            live = columns
            if position < 0:
                live = fill
            done = tl.maximum(start - t64 * blocks, 0)
            for block in range(done, tl.minimum(tl.minimum(end - t64 * blocks, blocks), (live - WINDOW_COLS) // COLS)):
                place = t64 * columns + WINDOW_COLS + block * COLS
                _copy_selected(
                    cmp_ptr, cmp_byte_ptr, table, pages, picks, whole, cmp_page_stride, (block * COLS).to(tl.int32),
                    rows_ptr + place * 512, None if bias_ptr is None else bias_ptr + place, RECORD, CMP_PAGE, COLS,
                    TABLE,
                )  # fmt: skip
    else:
        for item in range(pid, tokens * blocks, programs):
            # Tokens first: the blocks of a token differ in cost, and every program gets some of each.
            t = item % tokens
            column = item // tokens * COLS
            count = tl.load(pick_ptr + t)
            if tl.load(pos_ptr + t) < 0:
                count = 0
            live = tl.maximum((WINDOW_COLS + count + fill - 1) // fill * fill - WINDOW_COLS, count)
            if column < live:
                place = tl.cast(t, tl.int64) * columns + WINDOW_COLS + column
                req = tl.cast(tl.maximum(tl.load(req_ptr + t), 0), tl.int64)
                last = tl.maximum(count - 1, 0)
                first = tl.minimum(column, last // COLS * COLS)
                if bias_ptr is not None:
                    tl.store(bias_ptr + place + j, _prefix_bias(j, count - column))
                copy_run(
                    cmp_ptr, cmp_byte_ptr, cmp_table_ptr + req * cmp_table_stride, cmp_page_stride, first, last,
                    count - column, rows_ptr + place * 512, True, RECORD, CMP_PAGE, COLS,
                )  # fmt: skip


def window_columns(window: int) -> int:
    """Columns reserved for the window."""
    return -(-window // BLOCK) * BLOCK


def copy_columns(record: bool) -> int:
    """Columns of an item when nobody tuned."""
    return RECORD_BLOCK if record else BLOCK


def copy_candidates(family: Family, record: bool) -> Choices:
    """Columns of an item, which change no value: rows are copied."""
    return {"COLS": (8, 16, 32) if record else (16, 32, 64), **buffering(family)}


def _in_ub(family: Family, key: Key) -> bool:
    """Whether pages of listed rows are looked up in vector memory."""
    page = key["cmp_page"]
    fit = not family.row_operands and page & (page - 1) == 0 and key["entries"] <= TABLE_ENTRIES
    return key["selected"] and fit


def _default(family: Family, key: Key) -> dict[str, Any]:
    """COLS: columns of an item. IN_UB: whether pages of listed rows are looked up in vector memory."""
    return {"COLS": copy_columns(key["record"]), "IN_UB": _in_ub(family, key), "multibuffer": None}


def _candidates(family: Family, key: Key) -> Choices:
    lookups = {"IN_UB": (True, False)} if _in_ub(family, key) else {}
    return {**copy_candidates(family, key["record"]), **lookups}


def _fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    columns, size = config["COLS"], 2 * config["COLS"] * HEAD_DIM * key["bytes"]
    if key["columns"] % columns or key["base"] % columns or key["fill"] % columns:
        return f"COLS {columns} does not divide {key['columns']}, {key['base']} and {key['fill']} columns"
    if config["IN_UB"] and not _in_ub(family, key):
        return "pages cannot be looked up in vector memory"
    size += 4 * (key["columns"] - key["base"] + key["entries"]) if config["IN_UB"] else 0
    return f"COLS {columns} takes {size} bytes, UB has {family.ub_bytes}" if size > family.ub_bytes else ""


SPACE = Space(OP, default=_default, candidates=_candidates, fits=_fits, buckets=("tokens", "columns", "entries"))


def gather_rows(
    window_cache: torch.Tensor,
    window_table: torch.Tensor,
    token_req: torch.Tensor,
    positions: torch.Tensor,
    *,
    window: int,
    columns: int,
    cmp_cache: torch.Tensor | None = None,
    cmp_table: torch.Tensor | None = None,
    n_vis: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    no_bias: bool = False,
    dtype: torch.dtype | None = None,
    fill: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows [T, columns, 512] and their mask [T, columns] fp32, or None with `no_bias`, for which `window` is 0.

    `columns` is a multiple of 32 and holds the window's blocks and all `indices [T, K]` (or every n_vis). Caches are
    [blocks, rows per block, 512] bf16 or fp32, or records [blocks, rows per block, 640] uint8, pages at any stride;
    both of one kind. `dtype` of the rows is bf16 or fp32 for records (bf16 if not given) and the
    caches' own for plain rows. Tables and `indices` are int32; holes among the indices are -1. `fill` is 0 or a
    multiple of 32.
    """
    check_tensor(OP, "positions", positions, (None,), torch.int32)
    tokens, device, record = len(positions), positions.device, is_record(window_cache)
    check_rows(OP, "window_cache", window_cache, FLOATS, device)
    if dtype is None:
        dtype = torch.bfloat16 if record else window_cache.dtype
    if dtype not in FLOATS:
        raise TypeError(f"{OP}: dtype is {dtype}, expected torch.bfloat16 or torch.float32")
    if columns % BLOCK or columns < window_columns(window):
        need = window_columns(window)
        raise ValueError(f"{OP}: columns is {columns}, expected a multiple of {BLOCK} of at least {need}")
    if fill < 0 or fill % BLOCK:
        raise ValueError(f"{OP}: fill is {fill}, expected 0 or a multiple of {BLOCK}")
    if not record and window_cache.dtype != dtype:
        raise TypeError(f"{OP}: window_cache has dtype {window_cache.dtype}, expected {dtype}")
    check_tensor(OP, "window_table", window_table, (None, None), torch.int32, device=device, layout="rows")
    check_tensor(OP, "token_req", token_req, (tokens,), torch.int32, device=device)
    pick = positions
    if cmp_cache is None:
        cmp_cache, cmp_table = window_cache, window_table
        columns = window_columns(window)
    else:
        check_rows(OP, "cmp_cache", cmp_cache, dtype, device)
        if cmp_cache.dtype != window_cache.dtype:
            raise TypeError(f"{OP}: cmp_cache is {cmp_cache.dtype} but window_cache is {window_cache.dtype}")
        if cmp_table is None or (indices is None) == (n_vis is None):
            raise ValueError(f"{OP}: cmp_cache needs cmp_table and either n_vis or indices")
        check_tensor(OP, "cmp_table", cmp_table, (None, None), torch.int32, device=device, layout="rows")
        if indices is not None:
            check_tensor(OP, "indices", indices, (tokens, None), torch.int32, device=device)
            pick = indices
        if n_vis is not None:
            check_tensor(OP, "n_vis", n_vis, (tokens,), torch.int32, device=device)
            pick = n_vis
    if no_bias and window:
        raise ValueError(f"{OP}: window is {window}, expected 0 with no_bias")
    rows = output(OP, "rows", rows, (tokens, columns, HEAD_DIM), dtype, device)
    bias = None if no_bias else output(OP, "bias", bias, (tokens, columns), torch.float32, device)
    if tokens == 0:
        return rows, bias
    check_filled(OP, window_cache=window_cache, window_table=window_table, cmp_cache=cmp_cache, cmp_table=cmp_table)
    assert cmp_table is not None
    family = family_of(device.type)
    page, entries = cmp_cache.shape[1], -(-cmp_table.shape[1] // 8) * 8
    config = SPACE(
        family, tokens=tokens, columns=columns, entries=entries, base=window_columns(window), fill=fill,
        selected=indices is not None, page=window_cache.shape[1], cmp_page=page, record=record, bytes=dtype.itemsize,
    )  # fmt: skip
    block, in_ub = config["COLS"], config["IN_UB"]
    _gather_rows_kernel[(min(tokens * columns // block, family.vector_cores),)](
        *record_views(window_cache), window_table, *record_views(cmp_cache), cmp_table,
        pick, token_req, positions, rows, bias,
        tokens, window_table.stride(0), window_cache.stride(0), cmp_table.stride(0), cmp_cache.stride(0),
        cmp_table.shape[1], window, 0 if indices is None else indices.shape[1], columns, fill or block,
        SELECTED=indices is not None, RECORD=record, PAGE=window_cache.shape[1], CMP_PAGE=cmp_cache.shape[1],
        PICKS=0 if indices is None else columns - window_columns(window), WINDOW_COLS=window_columns(window),
        COLS=block, SHIFT=page.bit_length() - 1 if in_ub else 0, TABLE=entries if in_ub else 0,
        **config.options,
    )  # fmt: skip
    return rows, bias
