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

Grid: persistent over (token, block of columns), vector cores only; a transfer per run of rows in a page, or per
row that is listed or lies in smaller pages; two where rows are records. UB: 32 bf16 rows in at most four buffers,
166 KB. Source: gather and fused row kernel of the project's design study.
"""

import torch
import triton
import triton.language as tl

from dsv4_triton.device import family_of
from dsv4_triton.kernels._checks import FLOATS, check_filled, check_tensor, output
from dsv4_triton.kernels._rows import (
    HEAD_DIM,
    VALUES_AT,
    check_rows,
    dequantise_rows,
    is_record,
    record_views,
)

OP = "gather_rows"
BLOCK = 32
"""Columns are counted in blocks of this size."""
RECORD_BLOCK = 16
"""Columns of one work item where rows are records: decoding needs more buffers per row."""
TABLE_ENTRIES = 4096
"""Entries of a block table that fit UB beside the rows."""

ALL = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _listed_pages(table_ptr, at, last, PAGE: tl.constexpr, SHIFT: tl.constexpr, TABLE: tl.constexpr):
    """Pages of the rows `at`, of which `last` is the largest. With TABLE entries in UB, if any, for pages of 2^SHIFT
    rows: lookups in global memory are scalar code, and A5 has no division of integer vectors."""
    if TABLE > 0:
        entry = tl.arange(0, TABLE)
        table = tl.load(table_ptr + entry, mask=entry < last // PAGE + 1, other=0)
        return tl.gather(table.to(tl.float32, bitcast=True), at >> SHIFT, 0).to(tl.int32, bitcast=True)
    else:
        return tl.load(table_ptr + at // PAGE)


@triton.jit
def _pages_of_run(table_ptr, first, last, j, ALIGNED: tl.constexpr, PAGE: tl.constexpr, COLS: tl.constexpr):
    """Pages of COLS rows from `first` on, up to `last`; ALIGNED: `first` is a multiple of COLS."""
    if ALIGNED and COLS % PAGE == 0:
        entry = tl.arange(0, COLS // PAGE)
        there = entry <= tl.minimum(last, first + COLS - 1) // PAGE - first // PAGE
        page = tl.load(table_ptr + first // PAGE + entry, mask=there, other=0)
        return tl.reshape(tl.broadcast_to(page[:, None], (COLS // PAGE, PAGE)), (COLS,))
    else:
        return tl.load(table_ptr + tl.minimum(first + j, last) // PAGE)


@triton.jit
def _load_row(bf16_ptr, byte_ptr, bf16_place, place, COLS: tl.constexpr):
    """COLS records: all but the rotary part, decoded, and the rotary part."""
    data = tl.load(byte_ptr + place + VALUES_AT + tl.arange(0, 512)[None, :])
    return dequantise_rows(data, COLS), tl.load(bf16_ptr + bf16_place + tl.arange(0, 64)[None, :]).to(tl.float32)


@triton.jit
def _store_row(rows_ptr, values, rope, stored, COLS: tl.constexpr):
    """The first `stored` of COLS decoded rows."""
    dtype = rows_ptr.dtype.element_ty
    row = tl.arange(0, COLS)[:, None]
    dim = tl.arange(0, 512)[None, :]
    tl.store(rows_ptr + row * 512 + dim, values.to(dtype), mask=(row < stored) & (dim < 448))
    tl.store(rows_ptr + row * 512 + 448 + tl.arange(0, 64)[None, :], rope.to(dtype), mask=row < stored)


@triton.jit
def _copy_listed(
    cache_ptr, byte_ptr, page, page_stride, at, valid, whole, rows_ptr,
    RECORD: tl.constexpr, PAGE: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Copy the rows `at`, each of its page in `page`; only a block with holes pays for the mask."""
    page = tl.maximum(page, 0).to(tl.int64)
    row = at % PAGE
    if RECORD:
        bf16_place = (page * (page_stride // 2) + row * 320)[:, None]
        values, rope = _load_row(cache_ptr, byte_ptr, bf16_place, (page * page_stride + row * 640)[:, None], COLS)
        if whole:
            _store_row(rows_ptr, values, rope, COLS, COLS)
        else:
            there = valid[:, None]
            _store_row(rows_ptr, tl.where(there, values, 0.0), tl.where(there, rope, 0.0), COLS, COLS)
    else:
        dim = tl.arange(0, 512)[None, :]
        source = cache_ptr + (page * page_stride + row * 512)[:, None] + dim
        target = rows_ptr + tl.arange(0, COLS)[:, None] * 512 + dim
        if whole:
            tl.store(target, tl.load(source))
        else:
            tl.store(target, tl.load(source, mask=valid[:, None], other=0.0))


@triton.jit
def _copy_together(
    cache_ptr, byte_ptr, page, page_stride, first, count, stored, rows_ptr, RECORD: tl.constexpr, COLS: tl.constexpr
):
    """Copy rows first..first+count-1 of a page, and zeros into the others of the first `stored` of COLS."""
    page = tl.cast(tl.maximum(page, 0), tl.int64)
    row = tl.arange(0, COLS)[:, None]
    dim = tl.arange(0, 512)[None, :]
    if RECORD:
        lane = tl.arange(0, 64)[None, :]
        place = byte_ptr + page * page_stride + first * 640 + row * 640
        data = tl.load(place + VALUES_AT + dim, mask=row < count, other=0)
        rope_place = cache_ptr + page * (page_stride // 2) + first * 320 + row * 320
        rope = tl.load(rope_place + lane, mask=row < count, other=0.0)
        _store_row(rows_ptr, dequantise_rows(data, COLS), rope.to(tl.float32), stored, COLS)
    else:
        source = cache_ptr + page * page_stride + first * 512 + row * 512 + dim
        tl.store(rows_ptr + row * 512 + dim, tl.load(source, mask=row < count, other=0.0), mask=row < stored)


@triton.jit
def copy_run(
    cache_ptr, byte_ptr, table_ptr, page_stride, first, last, count, rows_ptr,
    ALIGNED: tl.constexpr, RECORD: tl.constexpr, PAGE: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Copy COLS rows from `first` on, of which `count` exist; `last` is the last that exists at all.

    ALIGNED: `first` is a multiple of COLS.
    """
    if PAGE >= COLS:
        here = PAGE - first % PAGE
        page = tl.load(table_ptr + first // PAGE)
        _copy_together(
            cache_ptr, byte_ptr, page, page_stride, first % PAGE, tl.minimum(count, here), here, rows_ptr, RECORD, COLS
        )
        if not ALIGNED or PAGE % COLS != 0:
            if here < COLS:
                page = tl.load(table_ptr + tl.minimum(last, first + COLS - 1) // PAGE)
                _copy_together(
                    cache_ptr, byte_ptr, page, page_stride, 0, count - here, COLS - here, rows_ptr + here * 512,
                    RECORD, COLS,
                )  # fmt: skip
    else:
        j = tl.arange(0, COLS)
        page = _pages_of_run(table_ptr, first, last, j, ALIGNED, PAGE, COLS)
        _copy_listed(
            cache_ptr, byte_ptr, page, page_stride, tl.minimum(first + j, last), j < count, count >= COLS, rows_ptr,
            RECORD, PAGE, COLS,
        )  # fmt: skip


@triton.jit
def _prefix_bias(j, count):
    return tl.minimum(-0.5 - (j - count).to(tl.float32), 0.0, propagate_nan=ALL) * 2e30


@triton.jit(do_not_specialize=[
    "tokens", "table_stride", "page_stride", "cmp_table_stride", "cmp_page_stride", "window", "width", "columns",
    "fill",
])  # fmt: skip
def _gather_rows_kernel(
    window_ptr, window_byte_ptr, window_table_ptr, cmp_ptr, cmp_byte_ptr, cmp_table_ptr,
    pick_ptr, req_ptr, pos_ptr, rows_ptr, bias_ptr,
    tokens, table_stride, page_stride, cmp_table_stride, cmp_page_stride, window, width, columns, fill,
    SELECTED: tl.constexpr, RECORD: tl.constexpr, PAGE: tl.constexpr, CMP_PAGE: tl.constexpr,
    WINDOW_COLS: tl.constexpr, COLS: tl.constexpr, SHIFT: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """`pick_ptr`: indices [tokens, width] if SELECTED, else n_vis [tokens]. RECORD: caches are bf16 and byte views."""
    j = tl.arange(0, COLS)
    for item in range(tl.program_id(0), tokens * (columns // COLS), tl.num_programs(0)):
        # Tokens first: the blocks of a token differ in cost, and every program gets some of each.
        t = item % tokens
        column = item // tokens * COLS
        place = tl.cast(t, tl.int64) * columns + column
        rows = rows_ptr + place * 512
        bias = bias_ptr + place + j
        position = tl.load(pos_ptr + t)
        req = tl.cast(tl.maximum(tl.load(req_ptr + t), 0), tl.int64)
        if column < WINDOW_COLS:
            last = tl.maximum(position, 0)
            first = tl.maximum(position + 1 - window, 0) + column
            count = position + 1 - first
            first = tl.minimum(first, last)
            tl.store(bias, _prefix_bias(j, count))
            copy_run(
                window_ptr, window_byte_ptr, window_table_ptr + req * table_stride, page_stride, first, last, count,
                rows, False, RECORD, PAGE, COLS,
            )  # fmt: skip
        else:
            column -= WINDOW_COLS
            table = cmp_table_ptr + req * cmp_table_stride
            if SELECTED:
                if position >= 0 or column + WINDOW_COLS < fill:
                    listed = width
                    if position < 0:
                        listed = 0
                    picks = pick_ptr + tl.cast(t, tl.int64) * width + column + j
                    at = tl.load(picks, mask=j < listed - column, other=-1)
                    tl.store(bias, tl.minimum(at.to(tl.float32), 0.0, propagate_nan=ALL) * 1e30)
                    valid = at >= 0
                    whole = tl.min(at, axis=0) >= 0
                    at = tl.maximum(at, 0)
                    page = _listed_pages(table, at, tl.max(at, axis=0), CMP_PAGE, SHIFT, TABLE)
                    _copy_listed(
                        cmp_ptr, cmp_byte_ptr, page, cmp_page_stride, at, valid, whole, rows, RECORD, CMP_PAGE, COLS
                    )
            else:
                count = tl.load(pick_ptr + t)
                if position < 0:
                    count = 0
                live = tl.maximum((WINDOW_COLS + count + fill - 1) // fill * fill - WINDOW_COLS, count)
                if column < live:
                    last = tl.maximum(count - 1, 0)
                    first = tl.minimum(column, last // COLS * COLS)
                    count -= column
                    tl.store(bias, _prefix_bias(j, count))
                    copy_run(
                        cmp_ptr, cmp_byte_ptr, table, cmp_page_stride, first, last, count, rows, True, RECORD,
                        CMP_PAGE, COLS,
                    )  # fmt: skip


def window_columns(window: int) -> int:
    """Columns reserved for the window."""
    return -(-window // BLOCK) * BLOCK


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
    dtype: torch.dtype | None = None,
    fill: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [T, columns, 512] and their mask [T, columns] fp32.

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
    rows = output(OP, "rows", rows, (tokens, columns, HEAD_DIM), dtype, device)
    bias = output(OP, "bias", bias, (tokens, columns), torch.float32, device)
    if tokens == 0:
        return rows, bias
    check_filled(OP, window_cache=window_cache, window_table=window_table, cmp_cache=cmp_cache, cmp_table=cmp_table)
    assert cmp_table is not None
    block = RECORD_BLOCK if record else BLOCK
    family = family_of(device.type)
    grid = (min(tokens * columns // block, family.vector_cores),)
    page, entries = cmp_cache.shape[1], -(-cmp_table.shape[1] // 8) * 8
    in_ub = indices is not None and not family.row_operands and page & (page - 1) == 0 and entries <= TABLE_ENTRIES
    _gather_rows_kernel[grid](
        *record_views(window_cache), window_table, *record_views(cmp_cache), cmp_table,
        pick, token_req, positions, rows, bias,
        tokens, window_table.stride(0), window_cache.stride(0), cmp_table.stride(0), cmp_cache.stride(0),
        window, 0 if indices is None else indices.shape[1], columns, fill or block,
        SELECTED=indices is not None, RECORD=record, PAGE=window_cache.shape[1], CMP_PAGE=cmp_cache.shape[1],
        WINDOW_COLS=window_columns(window), COLS=block,
        SHIFT=page.bit_length() - 1 if in_ub else 0, TABLE=entries if in_ub else 0,
    )  # fmt: skip
    return rows, bias
