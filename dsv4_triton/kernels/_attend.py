"""Kernels of `sparse_attention`: attention over up to four tiles of consecutive rows, and the merge of partial results.

A tile is ROWS consecutive rows: a page of a cache, or a slice of the rows that `gather_rows` copied. All tiles of one
chunk share one softmax. P is normalised before the second product, so that a finished output leaves the matrix unit
without a further vector pass; the sink enters the denominator of the only chunk (FINAL) or of the merge. The first
product is peeled from its loop over the head dimension, and both loops are run-time loops: unrolled ones overflow L1
on A2.

Masks are additive (-1e30) and absent rows are loaded as zero, so that nothing that no one wrote reaches a product.

On-chip bytes per program (A2, both vector cores together): scores HEADS * TILES * ROWS * 4, P the same in the cache's
dtype.
"""

import triton
import triton.language as tl

ALL = tl.constexpr(tl.PropagateNan.ALL)

GATHERED: tl.constexpr = 0
"""Rows copied by gather_rows: `bias` says which are valid."""
WINDOW: tl.constexpr = 1
"""Pages of the window cache: positions max(0, p - window + 1)..p."""
PAGES: tl.constexpr = 2
"""Pages of a compressed cache: entries 0..n_vis - 1."""


@triton.jit
def _tile(
    rows_ptr, table_ptr, bias_ptr, page_stride, tile, lo, hi, SOURCE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr
):
    """Address, number of rows and bias of tile `tile` of the logical rows lo..hi-1. Tile i starts at row i * ROWS."""
    first = tl.maximum(lo, tile * ROWS)
    count = tl.maximum(tl.minimum(hi, (tile + 1) * ROWS) - first, 0)
    row = tl.arange(0, ROWS)
    if SOURCE == GATHERED:
        address = rows_ptr + tl.cast(tile, tl.int64) * (ROWS * D)
        bias = tl.load(bias_ptr + tile * ROWS + row, mask=row < count, other=-1e30)
    else:
        page = tl.load(table_ptr + tl.minimum(tile, tl.maximum(hi - 1, 0) // ROWS))
        address = rows_ptr + tl.cast(tl.maximum(page, 0), tl.int64) * page_stride + (first - tile * ROWS) * D
        beyond = (row - count).to(tl.float32)
        bias = tl.minimum(-0.5 - beyond, 0.0, propagate_nan=ALL) * 2e30
    return address, count, bias


@triton.jit
def _scores(
    q_ptr,
    heads,
    rows_ptr,
    count,
    bias,
    scale,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DK: tl.constexpr,
):
    """scale * q k^T + bias, [HEADS, ROWS] fp32."""
    head = tl.arange(0, HEADS)[:, None]
    row = tl.arange(0, ROWS)[:, None]
    dim = tl.arange(0, DK)[None, :]
    q = tl.load(q_ptr + head * D + dim, mask=head < heads, other=0.0)
    k = tl.load(rows_ptr + row * D + dim, mask=row < count, other=0.0)
    s = tl.dot(q, tl.trans(k))
    for d in range(DK, D, DK):
        q = tl.load(q_ptr + d + head * D + dim, mask=head < heads, other=0.0)
        k = tl.load(rows_ptr + d + row * D + dim, mask=row < count, other=0.0)
        s = tl.dot(q, tl.trans(k), s)
    return s * scale + bias[None, :]


@triton.jit
def _values(rows_ptr, count, ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr):
    row = tl.arange(0, ROWS)[:, None]
    return tl.load(rows_ptr + row * D + tl.arange(0, DV)[None, :], mask=row < count, other=0.0)


@triton.jit
def _chunk(
    q_ptr, heads, queries, rows_ptr, table_ptr, bias_ptr, sink_ptr, out_ptr, lse_ptr, page_stride, tile, lo, hi, scale,
    SOURCE: tl.constexpr, FINAL: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Attention of one token's HEADS heads over TILES tiles from `tile`; with the sink if FINAL, else with its lse.

    `queries` is `heads`, or 0 for a padding token, whose row of q may hold anything.
    """
    head = tl.arange(0, HEADS)
    k0, n0, bias = _tile(rows_ptr, table_ptr, bias_ptr, page_stride, tile, lo, hi, SOURCE, ROWS, D)
    s0 = _scores(q_ptr, queries, k0, n0, bias, scale, HEADS, ROWS, D, DK)
    m = tl.maximum(tl.max(s0, axis=1), -1e29, propagate_nan=ALL)
    if TILES > 1:
        k1, n1, bias = _tile(rows_ptr, table_ptr, bias_ptr, page_stride, tile + 1, lo, hi, SOURCE, ROWS, D)
        s1 = _scores(q_ptr, queries, k1, n1, bias, scale, HEADS, ROWS, D, DK)
        m = tl.maximum(m, tl.max(s1, axis=1), propagate_nan=ALL)
    if TILES > 2:
        k2, n2, bias = _tile(rows_ptr, table_ptr, bias_ptr, page_stride, tile + 2, lo, hi, SOURCE, ROWS, D)
        s2 = _scores(q_ptr, queries, k2, n2, bias, scale, HEADS, ROWS, D, DK)
        m = tl.maximum(m, tl.max(s2, axis=1), propagate_nan=ALL)
    if TILES > 3:
        k3, n3, bias = _tile(rows_ptr, table_ptr, bias_ptr, page_stride, tile + 3, lo, hi, SOURCE, ROWS, D)
        s3 = _scores(q_ptr, queries, k3, n3, bias, scale, HEADS, ROWS, D, DK)
        m = tl.maximum(m, tl.max(s3, axis=1), propagate_nan=ALL)
    if FINAL:
        sink = tl.load(sink_ptr + head, mask=head < heads, other=0.0)
        m = tl.maximum(m, sink, propagate_nan=ALL)
    s0 = tl.exp(s0 - m[:, None])
    z = tl.sum(s0, axis=1)
    if TILES > 1:
        s1 = tl.exp(s1 - m[:, None])
        z += tl.sum(s1, axis=1)
    if TILES > 2:
        s2 = tl.exp(s2 - m[:, None])
        z += tl.sum(s2, axis=1)
    if TILES > 3:
        s3 = tl.exp(s3 - m[:, None])
        z += tl.sum(s3, axis=1)
    if FINAL:
        z += tl.exp(sink - m)
    z = tl.maximum(z, 1e-37, propagate_nan=ALL)
    if not FINAL:
        tl.store(lse_ptr + head, m + tl.log(z), mask=head < heads)
    inverse = (1.0 / z)[:, None]
    p0 = (s0 * inverse).to(rows_ptr.dtype.element_ty)
    if TILES > 1:
        p1 = (s1 * inverse).to(rows_ptr.dtype.element_ty)
    if TILES > 2:
        p2 = (s2 * inverse).to(rows_ptr.dtype.element_ty)
    if TILES > 3:
        p3 = (s3 * inverse).to(rows_ptr.dtype.element_ty)
    place = head[:, None] * D + tl.arange(0, DV)[None, :]
    for d in range(0, D, DV):
        o = tl.dot(p0, _values(k0 + d, n0, ROWS, D, DV))
        if TILES > 1:
            o = tl.dot(p1, _values(k1 + d, n1, ROWS, D, DV), o)
        if TILES > 2:
            o = tl.dot(p2, _values(k2 + d, n2, ROWS, D, DV), o)
        if TILES > 3:
            o = tl.dot(p3, _values(k3 + d, n3, ROWS, D, DV), o)
        tl.store(out_ptr + d + place, o.to(out_ptr.dtype.element_ty), mask=head[:, None] < heads)


@triton.jit(do_not_specialize=[
    "tokens", "heads", "table_stride", "page_stride", "columns", "base", "limit", "window", "splits", "slots", "slot0",
])  # fmt: skip
def attend_kernel(
    q_ptr, rows_ptr, table_ptr, bias_ptr, sink_ptr, req_ptr, pos_ptr, n_vis_ptr, out_ptr, lse_ptr,
    tokens, heads, table_stride, page_stride, columns, base, limit, window, splits, slots, slot0, scale,
    SOURCE: tl.constexpr, COUNTED: tl.constexpr, FINAL: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """One item: a token, HEADS heads and every `splits`-th chunk. Not FINAL: chunk c goes to slot slot0 + c.

    Attended are `base` rows, or min(base + n_vis, limit) if COUNTED; the window has its own rule. GATHERED: rows are
    [tokens, columns, D].
    """
    head_blocks = (heads + HEADS - 1) // HEADS
    items = tokens * head_blocks * splits
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        split = item % splits
        h = (item // splits) % head_blocks * HEADS
        t = item // splits // head_blocks
        t64 = tl.cast(t, tl.int64)
        position = tl.load(pos_ptr + t)
        req = tl.maximum(tl.load(req_ptr + t), 0)
        lo = 0
        queries = heads - h
        if position < 0:
            queries = 0
        if SOURCE == WINDOW:
            lo = tl.maximum(position + 1 - window, 0)
            hi = position + 1
        else:
            hi = base
            if COUNTED:
                hi = tl.minimum(hi + tl.load(n_vis_ptr + t), limit)
            if position < 0:
                hi = 0
        q = q_ptr + (t64 * heads + h) * D
        table = table_ptr + tl.cast(req, tl.int64) * table_stride
        rows = rows_ptr
        bias = bias_ptr
        if SOURCE == GATHERED:
            rows += t64 * columns * D
            bias += t64 * columns
        if FINAL:
            _chunk(
                q, heads - h, queries, rows, table, bias, sink_ptr + h, out_ptr + (t64 * heads + h) * D, lse_ptr,
                page_stride, lo // ROWS, lo, hi, scale, SOURCE, FINAL, TILES, ROWS, HEADS, D, DK, DV,
            )  # fmt: skip
        else:
            if SOURCE == WINDOW:
                chunks = 1
            else:
                chunks = (hi + TILES * ROWS - 1) // (TILES * ROWS)
            for c in range(split, chunks, splits):
                place = (t64 * slots + slot0 + c) * heads + h
                _chunk(
                    q, heads - h, queries, rows, table, bias, sink_ptr + h, out_ptr + place * D, lse_ptr + place,
                    page_stride, lo // ROWS + c * TILES, lo, hi, scale, SOURCE, FINAL, TILES, ROWS, HEADS, D, DK, DV,
                )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "heads", "slots", "base", "limit", "chunk"])
def merge_kernel(
    part_ptr, lse_ptr, sink_ptr, pos_ptr, n_vis_ptr, out_ptr, tokens, heads, slots, base, limit, chunk,
    HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Merge the first ceil(min(base + n_vis, limit) / chunk) partial results of each token, in order, with the sink."""
    head_blocks = (heads + HEADS - 1) // HEADS
    for item in range(tl.program_id(0), tokens * head_blocks, tl.num_programs(0)):
        t = item // head_blocks
        h = item % head_blocks * HEADS
        head = tl.arange(0, HEADS)
        dim = tl.arange(0, D)[None, :]
        there = head < heads - h
        live = (tl.minimum(base + tl.load(n_vis_ptr + t), limit) + chunk - 1) // chunk
        if tl.load(pos_ptr + t) < 0:
            live = 0
        sink = tl.load(sink_ptr + h + head, mask=there, other=0.0)
        m = tl.maximum(sink, -1e30, propagate_nan=ALL)
        z = tl.exp(sink - m)
        acc = tl.zeros((HEADS, D), tl.float32)
        for c in range(0, live):
            place = (tl.cast(t, tl.int64) * slots + c) * heads + h
            lse = tl.load(lse_ptr + place + head, mask=there, other=0.0)
            part = tl.load(part_ptr + place * D + head[:, None] * D + dim, mask=there[:, None], other=0.0)
            top = tl.maximum(m, lse, propagate_nan=ALL)
            old = tl.exp(m - top)
            new = tl.exp(lse - top)
            acc = acc * old[:, None] + part * new[:, None]
            z = z * old + new
            m = top
        o = acc / tl.maximum(z, 1e-37, propagate_nan=ALL)[:, None]
        out = out_ptr + (tl.cast(t, tl.int64) * heads + h) * D + head[:, None] * D + dim
        tl.store(out, o.to(out_ptr.dtype.element_ty), mask=there[:, None])
