"""Copies of rows of a paged cache into contiguous rows, for the kernels that gather.

Rows are 512 values or records (`_rows`), which are decoded. A tile of COLS rows is a transfer where it lies in a page,
a transfer per page where pages are smaller, and a transfer per row where rows are listed; two where rows are records.
Rows that do not exist are stored as zeros.
"""

import triton
import triton.language as tl

from dsv4_triton.kernels._rows import VALUES_AT, dequantise_rows


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
def copy_listed(
    cache_ptr, byte_ptr, page, page_stride, at, valid, whole, rows_ptr,
    RECORD: tl.constexpr, PAGE: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Copy the rows `at`, each of its page in `page`; only where there may be holes the mask is paid for."""
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
def _copy_pages(cache_ptr, page, page_stride, rows_ptr, PAGE: tl.constexpr):
    """Copy all rows of these pages, a transfer each."""
    lane = tl.arange(0, PAGE * 512)[None, :]
    source = cache_ptr + (tl.maximum(page, 0).to(tl.int64) * page_stride)[:, None] + lane
    tl.store(rows_ptr + (tl.arange(0, page.shape[0]) * (PAGE * 512))[:, None] + lane, tl.load(source))


@triton.jit
def _copy_single(
    cache_ptr, byte_ptr, table_ptr, page_stride, first, last, count, rows_ptr,
    ALIGNED: tl.constexpr, RECORD: tl.constexpr, PAGE: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """`copy_run` a row at a time."""
    j = tl.arange(0, COLS)
    page = _pages_of_run(table_ptr, first, last, j, ALIGNED, PAGE, COLS)
    copy_listed(
        cache_ptr, byte_ptr, page, page_stride, tl.minimum(first + j, last), j < count, count >= COLS, rows_ptr,
        RECORD, PAGE, COLS,
    )  # fmt: skip


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
    elif (ALIGNED and COLS % PAGE == 0) and not RECORD:
        if count >= COLS:
            _copy_pages(
                cache_ptr, tl.load(table_ptr + first // PAGE + tl.arange(0, COLS // PAGE)), page_stride, rows_ptr, PAGE
            )
        else:
            _copy_single(
                cache_ptr, byte_ptr, table_ptr, page_stride, first, last, count, rows_ptr, ALIGNED, RECORD, PAGE, COLS
            )
    else:
        _copy_single(
            cache_ptr, byte_ptr, table_ptr, page_stride, first, last, count, rows_ptr, ALIGNED, RECORD, PAGE, COLS
        )
