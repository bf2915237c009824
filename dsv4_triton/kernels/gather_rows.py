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

Grid: persistent over (token, block of columns), vector cores only; one row DMA per plain row, three per record. UB: 32
bf16 rows in at most four buffers, 166 KB. Source: gather and fused row kernel of the project's design study.
"""

import torch
import triton
import triton.language as tl

from dsv4_triton.device import family_of
from dsv4_triton.kernels._checks import FLOATS, check_filled, check_tensor, output
from dsv4_triton.kernels._rows import (
    HEAD_DIM,
    TAIL_AT,
    VALUES_AT,
    check_rows,
    dequantise_rows,
    is_record,
    record_views,
)

OP = "gather_rows"
BLOCK = 32
"""Columns are counted in blocks of this size."""
_RECORD_BLOCK = 16
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
def _run_pages(table_ptr, first, last, j, ALIGNED: tl.constexpr, PAGE: tl.constexpr, COLS: tl.constexpr):
    """Pages of COLS rows from `first` on, up to `last`; ALIGNED: `first` is a multiple of COLS."""
    last = tl.minimum(last, first + COLS - 1)
    if PAGE >= COLS:
        page = tl.load(table_ptr + first // PAGE)
        following = tl.load(table_ptr + last // PAGE)
        return page + (following - page) * tl.minimum(tl.maximum(first % PAGE + j - (PAGE - 1), 0), 1)
    elif ALIGNED and COLS % PAGE == 0:
        entry = tl.arange(0, COLS // PAGE)
        page = tl.load(table_ptr + first // PAGE + entry, mask=entry <= last // PAGE - first // PAGE, other=0)
        return tl.reshape(tl.broadcast_to(page[:, None], (COLS // PAGE, PAGE)), (COLS,))
    else:
        return tl.load(table_ptr + tl.minimum(first + j, last) // PAGE)


@triton.jit
def _places(page, page_stride, at, PAGE: tl.constexpr, WIDTH: tl.constexpr):
    """Where the rows `at` begin, and that a row in its page may have any length."""
    return (tl.maximum(page, 0).to(tl.int64) * page_stride + (at % PAGE) * WIDTH)[:, None]


@triton.jit
def _copy_plain(cache_ptr, place, valid, whole, rows_ptr, COLS: tl.constexpr):
    """Copy COLS rows; only a block with holes pays for the mask."""
    dim = tl.arange(0, 512)[None, :]
    target = rows_ptr + tl.arange(0, COLS)[:, None] * 512 + dim
    if whole:
        tl.store(target, tl.load(cache_ptr + place + dim))
    else:
        tl.store(target, tl.load(cache_ptr + place + dim, mask=valid[:, None], other=0.0))


@triton.jit
def _copy_records(bf16_ptr, byte_ptr, bf16_place, place, valid, rows_ptr, COLS: tl.constexpr):
    """Decode COLS records: all but the rotary part at once, then the rotary part."""
    dtype = rows_ptr.dtype.element_ty
    dim = tl.arange(0, 512)[None, :]
    target = tl.arange(0, COLS)[:, None] * 512
    lane = tl.arange(0, 64)[None, :]
    tail = tl.load(byte_ptr + place + TAIL_AT + lane)
    rows = dequantise_rows(tl.load(byte_ptr + place + VALUES_AT + dim), tail, COLS)
    tl.store(rows_ptr + target + dim, tl.where(valid[:, None], rows, 0.0).to(dtype), mask=dim < 448)
    rope = tl.load(bf16_ptr + bf16_place + lane)
    tl.store(rows_ptr + target + 448 + lane, tl.where(valid[:, None], rope.to(tl.float32), 0.0).to(dtype))


@triton.jit
def _copy(
    cache_ptr, byte_ptr, page, page_stride, at, valid, whole, rows_ptr,
    RECORD: tl.constexpr, PAGE: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Copy the rows `at`, which lie in the pages `page`."""
    if RECORD:
        bf16_place = _places(page, page_stride // 2, at, PAGE, 320)
        _copy_records(cache_ptr, byte_ptr, bf16_place, _places(page, page_stride, at, PAGE, 640), valid, rows_ptr, COLS)
    else:
        _copy_plain(cache_ptr, _places(page, page_stride, at, PAGE, 512), valid, whole, rows_ptr, COLS)


@triton.jit
def _copy_from_one_page(
    cache_ptr, byte_ptr, page, page_stride, row, valid, whole, rows_ptr, RECORD: tl.constexpr, COLS: tl.constexpr
):
    """Copy COLS rows of one page from row `row` of it on: they lie together."""
    j = tl.arange(0, COLS)[:, None]
    page = tl.cast(tl.maximum(page, 0), tl.int64)
    if RECORD:
        _copy_records(
            cache_ptr + page * (page_stride // 2) + row * 320, byte_ptr + page * page_stride + row * 640, j * 320,
            j * 640, valid, rows_ptr, COLS,
        )  # fmt: skip
    else:
        _copy_plain(cache_ptr + page * page_stride + row * 512, j * 512, valid, whole, rows_ptr, COLS)


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
    blocks = columns // COLS
    j = tl.arange(0, COLS)
    for item in range(tl.program_id(0), tokens * blocks, tl.num_programs(0)):
        t = item // blocks
        column = item % blocks * COLS
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
            table = window_table_ptr + req * table_stride
            _copy(
                window_ptr, window_byte_ptr, _run_pages(table, first, last, j, False, PAGE, COLS), page_stride,
                tl.minimum(first + j, last), j < count, count >= COLS, rows, RECORD, PAGE, COLS,
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
                    _copy(cmp_ptr, cmp_byte_ptr, page, cmp_page_stride, at, valid, whole, rows, RECORD, CMP_PAGE, COLS)
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
                    if CMP_PAGE % COLS == 0:
                        _copy_from_one_page(
                            cmp_ptr, cmp_byte_ptr, tl.load(table + first // CMP_PAGE), cmp_page_stride,
                            first % CMP_PAGE, j < count, count >= COLS, rows, RECORD, COLS,
                        )  # fmt: skip
                    else:
                        _copy(
                            cmp_ptr, cmp_byte_ptr, _run_pages(table, first, last, j, True, CMP_PAGE, COLS),
                            cmp_page_stride, tl.minimum(first + j, last), j < count, count >= COLS, rows, RECORD,
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
    block = _RECORD_BLOCK if record else BLOCK
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
