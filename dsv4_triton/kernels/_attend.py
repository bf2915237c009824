"""The kernel of `sparse_attention` that does both products in one launch.

An item is one token and HEADS heads. It attends up to five tiles of rows in one softmax: WINDOWS tiles of the window,
then TILES tiles of the compressed rows, which come from SOURCE:

* DENSE: entries 0..n_vis - 1 through the block table;
* PICKED: entries that an index list names, each looked up by itself (BY_ROW only);
* GATHERED: rows that `gather_rows` copied, with their bias, or with the index list that says which exist (int32);
* COPIED: entries 0..n_vis - 1, which `gather_rows` copied;
* SHARED: the same, which `_dense_rows` copied for all tokens of a request.

A tile is a page, or where BY_ROW says that a product's operand may be loaded row by row, any number of rows. P is
normalised before the second product, so that a finished output leaves the matrix unit without a further vector pass;
the sink enters the denominator of the only chunk (FINAL) or of the merge. Window tiles are multiplied over all features
at once, the others in slices of DK; PAIRED: the last two tiles share each slice of q. The first slice is peeled from
its loop, and both loops are run-time loops: unrolled ones overflow L1 on A2.

Masks are additive (-1e30) and absent rows are loaded as zero, so that nothing that no one wrote reaches a product.

On-chip bytes per item (A2, both vector cores together): scores HEADS * rows of all tiles * 4, P the same in the cache's
dtype.
"""

import triton
import triton.language as tl

ALL = tl.constexpr(tl.PropagateNan.ALL)

DENSE: tl.constexpr = 0
PICKED: tl.constexpr = 1
GATHERED: tl.constexpr = 2
COPIED: tl.constexpr = 3
SHARED: tl.constexpr = 4


@triton.jit
def _looked_up(table_ptr, page_stride, at, there, PAGE: tl.constexpr, D: tl.constexpr):
    """Places of the rows `at` of a paged cache, each through the block table; somewhere in block 0 where not `there`,
    since masked rows are read, too."""
    page = tl.load(table_ptr + at // PAGE, mask=there, other=0)
    return tl.maximum(page, 0).to(tl.int64) * page_stride + (at % PAGE) * D


@triton.jit
def _page(cache_ptr, table_ptr, page_stride, tile, lo, hi, ROWS: tl.constexpr, D: tl.constexpr):
    """Address of the first row of page `tile` that is among lo..hi-1, and how many there are."""
    first = tl.maximum(lo, tile * ROWS)
    count = tl.maximum(tl.minimum(hi, (tile + 1) * ROWS) - first, 0)
    page = tl.load(table_ptr + tl.minimum(tile, tl.maximum(hi - 1, 0) // ROWS))
    return cache_ptr + tl.cast(tl.maximum(page, 0), tl.int64) * page_stride + (first - tile * ROWS) * D, count


@triton.jit
def _prefix_bias(row, count):
    """0 in the first `count` rows, at most -1e30 in the others."""
    return tl.minimum(-0.5 - (row - count).to(tl.float32), 0.0, propagate_nan=ALL) * 2e30


@triton.jit
def _window_tile(
    cache_ptr, table_ptr, page_stride, tile, lo, hi,
    BY_ROW: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Tile `tile` of positions lo..hi-1: address, place of each row from there, which rows exist, and the bias."""
    row = tl.arange(0, ROWS)
    if BY_ROW:
        first = lo + tile * ROWS
        count = hi - first
        address = cache_ptr
        place = _looked_up(table_ptr, page_stride, first + row, row < count, PAGE, D)
    else:
        address, count = _page(cache_ptr, table_ptr, page_stride, tile + lo // ROWS, lo, hi, ROWS, D)
        place = row * D
    return address, place, row < count, _prefix_bias(row, count)


@triton.jit
def _compressed_tile(
    rows_ptr, table_ptr, pick_ptr, page_stride, tile, hi,
    SOURCE: tl.constexpr, BY_ROW: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Like `_window_tile`, of the first `hi` compressed rows."""
    row = tl.arange(0, ROWS)
    first = tile * ROWS
    there = row < hi - first
    if SOURCE == PICKED:
        at = tl.load(pick_ptr + first + row, mask=there, other=-1)
        bias = tl.minimum(at.to(tl.float32), 0.0, propagate_nan=ALL) * 1e30
        there = at >= 0
        address = rows_ptr
        place = _looked_up(table_ptr, page_stride, tl.maximum(at, 0), there, PAGE, D)
    elif SOURCE >= GATHERED:
        if SOURCE > GATHERED:
            bias = _prefix_bias(row, hi - first)
        elif pick_ptr.dtype.element_ty == tl.int32:
            at = tl.load(pick_ptr + first + row, mask=there, other=-1)
            bias = tl.minimum(at.to(tl.float32), 0.0, propagate_nan=ALL) * 1e30
        else:
            bias = tl.load(pick_ptr + first + row, mask=there, other=-1e30)
        address = rows_ptr + tl.cast(tile, tl.int64) * (ROWS * D)
        place = row * D
    elif BY_ROW:
        bias = _prefix_bias(row, hi - first)
        address = rows_ptr
        place = _looked_up(table_ptr, page_stride, first + row, there, PAGE, D)
    else:
        address, count = _page(rows_ptr, table_ptr, page_stride, tile, 0, hi, ROWS, D)
        there = row < count
        bias = _prefix_bias(row, count)
        place = row * D
    return address, place, there, bias


@triton.jit
def _tile(
    NUMBER: tl.constexpr, window_ptr, window_table_ptr, window_stride, lo, hi, rows_ptr, table_ptr, pick_ptr,
    page_stride, tile, count, SOURCE: tl.constexpr, BY_ROW: tl.constexpr, WINDOWS: tl.constexpr,
    WINDOW_PAGE: tl.constexpr, WINDOW_ROWS: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Tile NUMBER of an item: the window's come first, then the compressed ones from `tile` on."""
    if NUMBER < WINDOWS:
        return _window_tile(
            window_ptr, window_table_ptr, window_stride, NUMBER, lo, hi, BY_ROW, WINDOW_PAGE, WINDOW_ROWS, D
        )
    else:
        return _compressed_tile(
            rows_ptr, table_ptr, pick_ptr, page_stride, tile + (NUMBER - WINDOWS), count, SOURCE, BY_ROW, PAGE, ROWS, D
        )


@triton.jit
def _load(address, place, there, d, WIDTH: tl.constexpr):
    """Features d..d+WIDTH-1 of the rows; zero where there is none."""
    return tl.load(address + d + place[:, None] + tl.arange(0, WIDTH)[None, :], mask=there[:, None], other=0.0)


@triton.jit
def _scores(q_ptr, q_place, q_there, address, place, there, bias, scale, D: tl.constexpr, DK: tl.constexpr):
    """scale * q k^T + bias, [heads, rows] fp32."""
    s = tl.dot(_load(q_ptr, q_place, q_there, 0, DK), tl.trans(_load(address, place, there, 0, DK)))
    for d in range(DK, D, DK):
        s = tl.dot(_load(q_ptr, q_place, q_there, d, DK), tl.trans(_load(address, place, there, d, DK)), s)
    return s * scale + bias[None, :]


@triton.jit
def _paired_scores(
    q_ptr, q_place, q_there, a0, r0, v0, bias0, a1, r1, v1, bias1, scale, D: tl.constexpr, DK: tl.constexpr
):  # fmt: skip
    """`_scores` of two tiles, each slice of q loaded once for both."""
    q = _load(q_ptr, q_place, q_there, 0, DK)
    s0 = tl.dot(q, tl.trans(_load(a0, r0, v0, 0, DK)))
    s1 = tl.dot(q, tl.trans(_load(a1, r1, v1, 0, DK)))
    for d in range(DK, D, DK):
        q = _load(q_ptr, q_place, q_there, d, DK)
        s0 = tl.dot(q, tl.trans(_load(a0, r0, v0, d, DK)), s0)
        s1 = tl.dot(q, tl.trans(_load(a1, r1, v1, d, DK)), s1)
    return s0 * scale + bias0[None, :], s1 * scale + bias1[None, :]


@triton.jit
def _chunk(
    q_ptr, heads, queries, window_ptr, window_table_ptr, window_stride, lo, hi, rows_ptr, table_ptr, pick_ptr,
    page_stride, tile, count, sink_ptr, out_ptr, lse_ptr, scale,
    SOURCE: tl.constexpr, BY_ROW: tl.constexpr, FINAL: tl.constexpr, WINDOWS: tl.constexpr, WINDOW_PAGE: tl.constexpr,
    WINDOW_ROWS: tl.constexpr, TILES: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
    PAIRED: tl.constexpr, D: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Attention of one token's HEADS heads over all tiles; with the sink if FINAL, else with its lse.

    `queries` is `heads`, or 0 for a padding token, whose row of q may hold anything.
    """
    ALL_TILES: tl.constexpr = WINDOWS + TILES
    head = tl.arange(0, HEADS)
    place = head * D
    asked = head < queries
    a0, r0, v0, bias = _tile(
        0, window_ptr, window_table_ptr, window_stride, lo, hi, rows_ptr, table_ptr, pick_ptr, page_stride, tile, count,
        SOURCE, BY_ROW, WINDOWS, WINDOW_PAGE, WINDOW_ROWS, PAGE, ROWS, D,
    )  # fmt: skip
    s0 = _scores(q_ptr, place, asked, a0, r0, v0, bias, scale, D, D if WINDOWS > 0 else DK)
    m = tl.maximum(tl.max(s0, axis=1), -1e29, propagate_nan=ALL)
    if ALL_TILES > 1:
        a1, r1, v1, bias = _tile(
            1, window_ptr, window_table_ptr, window_stride, lo, hi, rows_ptr, table_ptr, pick_ptr, page_stride, tile,
            count, SOURCE, BY_ROW, WINDOWS, WINDOW_PAGE, WINDOW_ROWS, PAGE, ROWS, D,
        )  # fmt: skip
        s1 = _scores(q_ptr, place, asked, a1, r1, v1, bias, scale, D, D if WINDOWS > 1 else DK)
        m = tl.maximum(m, tl.max(s1, axis=1), propagate_nan=ALL)
    if ALL_TILES > 2:
        a2, r2, v2, bias = _tile(
            2, window_ptr, window_table_ptr, window_stride, lo, hi, rows_ptr, table_ptr, pick_ptr, page_stride, tile,
            count, SOURCE, BY_ROW, WINDOWS, WINDOW_PAGE, WINDOW_ROWS, PAGE, ROWS, D,
        )  # fmt: skip
        s2 = _scores(q_ptr, place, asked, a2, r2, v2, bias, scale, D, D if WINDOWS > 2 else DK)
        m = tl.maximum(m, tl.max(s2, axis=1), propagate_nan=ALL)
    if ALL_TILES > 3:
        a3, r3, v3, bias3 = _tile(
            3, window_ptr, window_table_ptr, window_stride, lo, hi, rows_ptr, table_ptr, pick_ptr, page_stride, tile,
            count, SOURCE, BY_ROW, WINDOWS, WINDOW_PAGE, WINDOW_ROWS, PAGE, ROWS, D,
        )  # fmt: skip
        if not PAIRED:
            s3 = _scores(q_ptr, place, asked, a3, r3, v3, bias3, scale, D, D if WINDOWS > 3 else DK)
            m = tl.maximum(m, tl.max(s3, axis=1), propagate_nan=ALL)
    if ALL_TILES > 4:
        a4, r4, v4, bias = _tile(
            4, window_ptr, window_table_ptr, window_stride, lo, hi, rows_ptr, table_ptr, pick_ptr, page_stride, tile,
            count, SOURCE, BY_ROW, WINDOWS, WINDOW_PAGE, WINDOW_ROWS, PAGE, ROWS, D,
        )  # fmt: skip
        if PAIRED:
            s3, s4 = _paired_scores(q_ptr, place, asked, a3, r3, v3, bias3, a4, r4, v4, bias, scale, D, DK)
            m = tl.maximum(m, tl.max(s3, axis=1), propagate_nan=ALL)
        else:
            s4 = _scores(q_ptr, place, asked, a4, r4, v4, bias, scale, D, D if WINDOWS > 4 else DK)
        m = tl.maximum(m, tl.max(s4, axis=1), propagate_nan=ALL)
    if FINAL:
        sink = tl.load(sink_ptr + head, mask=head < heads, other=0.0)
        m = tl.maximum(m, sink, propagate_nan=ALL)
    s0 = tl.exp(s0 - m[:, None])
    z = tl.sum(s0, axis=1)
    if ALL_TILES > 1:
        s1 = tl.exp(s1 - m[:, None])
        z += tl.sum(s1, axis=1)
    if ALL_TILES > 2:
        s2 = tl.exp(s2 - m[:, None])
        z += tl.sum(s2, axis=1)
    if ALL_TILES > 3:
        s3 = tl.exp(s3 - m[:, None])
        z += tl.sum(s3, axis=1)
    if ALL_TILES > 4:
        s4 = tl.exp(s4 - m[:, None])
        z += tl.sum(s4, axis=1)
    if FINAL:
        z += tl.exp(sink - m)
    z = tl.maximum(z, 1e-37, propagate_nan=ALL)
    inverse = (1.0 / z)[:, None]
    p0 = (s0 * inverse).to(q_ptr.dtype.element_ty)
    if ALL_TILES > 1:
        p1 = (s1 * inverse).to(q_ptr.dtype.element_ty)
    if ALL_TILES > 2:
        p2 = (s2 * inverse).to(q_ptr.dtype.element_ty)
    if ALL_TILES > 3:
        p3 = (s3 * inverse).to(q_ptr.dtype.element_ty)
    if ALL_TILES > 4:
        p4 = (s4 * inverse).to(q_ptr.dtype.element_ty)
    if not FINAL:
        # Not before P: with HEADS == ROWS the compiler then no longer divides the work between the vector cores.
        tl.store(lse_ptr + head, m + tl.log(z), mask=head < heads)
    for d in range(0, D, DV):
        o = tl.dot(p0, _load(a0, r0, v0, d, DV))
        if ALL_TILES > 1:
            o = tl.dot(p1, _load(a1, r1, v1, d, DV), o)
        if ALL_TILES > 2:
            o = tl.dot(p2, _load(a2, r2, v2, d, DV), o)
        if ALL_TILES > 3:
            o = tl.dot(p3, _load(a3, r3, v3, d, DV), o)
        if ALL_TILES > 4:
            o = tl.dot(p4, _load(a4, r4, v4, d, DV), o)
        out = out_ptr + d + place[:, None] + tl.arange(0, DV)[None, :]
        tl.store(out, o.to(out_ptr.dtype.element_ty), mask=(head < heads)[:, None])


@triton.jit(do_not_specialize=[
    "tokens", "heads", "window_table_stride", "window_stride", "table_stride", "page_stride", "columns", "base",
    "limit", "window", "splits", "slots", "slot0",
])  # fmt: skip
def attend_kernel(
    q_ptr, window_ptr, window_table_ptr, rows_ptr, table_ptr, pick_ptr, sink_ptr, req_ptr, pos_ptr, n_vis_ptr,
    out_ptr, lse_ptr, tokens, heads, window_table_stride, window_stride, table_stride, page_stride, columns, base,
    limit, window, splits, slots, slot0, scale,
    SOURCE: tl.constexpr, COUNTED: tl.constexpr, BY_ROW: tl.constexpr, FINAL: tl.constexpr, WINDOWS: tl.constexpr,
    WINDOW_PAGE: tl.constexpr, WINDOW_ROWS: tl.constexpr, TILES: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, PAIRED: tl.constexpr, D: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """One item: a token, HEADS heads and every `splits`-th chunk. Not FINAL: chunk c goes to slot slot0 + c.

    Compressed rows are `base`, or min(base + n_vis, limit) if COUNTED. `columns` is the distance between the index
    lists, or the gathered rows, of two tokens, or the shared rows of two requests.
    """
    head_blocks = (heads + HEADS - 1) // HEADS
    items = tokens * head_blocks * splits
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        split = item % splits
        h = (item // splits) % head_blocks * HEADS
        t = item // splits // head_blocks
        t64 = tl.cast(t, tl.int64)
        position = tl.load(pos_ptr + t)
        req = tl.cast(tl.maximum(tl.load(req_ptr + t), 0), tl.int64)
        lo = tl.maximum(position + 1 - window, 0)
        hi = position + 1
        count = base
        if COUNTED:
            count = tl.minimum(base + tl.load(n_vis_ptr + t), limit)
        queries = heads - h
        if position < 0:
            queries = 0
            count = 0
        q = q_ptr + (t64 * heads + h) * D
        rows = rows_ptr
        pick = pick_ptr
        if SOURCE == PICKED:
            pick += t64 * columns
        if SOURCE == GATHERED:
            pick += t64 * columns
            rows += t64 * columns * D
        if SOURCE == COPIED:
            rows += t64 * columns * D
        if SOURCE == SHARED:
            rows += req * columns * D
        window_table = window_table_ptr + req * window_table_stride
        table = table_ptr + req * table_stride
        if FINAL:
            _chunk(
                q, heads - h, queries, window_ptr, window_table, window_stride, lo, hi, rows, table, pick, page_stride,
                0, count, sink_ptr + h, out_ptr + (t64 * heads + h) * D, lse_ptr, scale, SOURCE, BY_ROW, FINAL, WINDOWS,
                WINDOW_PAGE, WINDOW_ROWS, TILES, PAGE, ROWS, HEADS, PAIRED, D, DK, DV,
            )  # fmt: skip
        else:
            chunks = 1
            if TILES > 0:
                chunks = (count + TILES * ROWS - 1) // (TILES * ROWS)
            for c in range(split, chunks, splits):
                place = (t64 * slots + slot0 + c) * heads + h
                _chunk(
                    q, heads - h, queries, window_ptr, window_table, window_stride, lo, hi, rows, table, pick,
                    page_stride, c * TILES, count, sink_ptr + h, out_ptr + place * D, lse_ptr + place, scale, SOURCE,
                    BY_ROW, FINAL, WINDOWS, WINDOW_PAGE, WINDOW_ROWS, TILES, PAGE, ROWS, HEADS, PAIRED, D, DK, DV,
                )  # fmt: skip
