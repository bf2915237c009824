"""Kernels of `sparse_attention` that do one step each: scores, softmax, values, and the merge of partial results.

For families whose vector cores do not share the work of a mixed kernel, and for sets of rows whose scores do not fit
one. All work on the rows that `gather_rows` copied for a token, or SHARED: on the window's rows that it copied and on
those that `_dense_rows` copied before them in the same memory, for all tokens of a request. The scores and P go through
memory:

    s[t, h, j] = <q[t, h], rows[t, j]>                                  cube, fp32
    p[t, h, j] = exp(scale * s + bias[t, j] - M) / Z                    vector, q's dtype
    o[t, h]    = sum_j p[t, h, j] * rows[t, j]                          cube

A chunk is CHUNK columns with a softmax of its own: the only one (FINAL), whose Z has the sink, or one of several, whose
o is partial and has its log of the denominator beside it, for `merge_kernel`. Rows are loaded without a mask,
which would bring vector cores in on A5: every row of a chunk that is attended at all must have been written. Scores
from the last attended column on are not read.

UB of the softmax: HEADS * CHUNK * 4 bytes for the scores, twice where they are loaded ahead, and P.
"""

import triton
import triton.language as tl

ALL = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=ALL)


@triton.jit
def _row_max(x):
    """`tl.max` looks for NaN, which takes A5 six instructions a vector."""
    return tl.reduce(x, 1, _larger)


@triton.jit
def _count(pos_ptr, n_vis_ptr, t, base, limit, COUNTED: tl.constexpr):
    """Columns that token t attends: `base`, or min(base + n_vis, limit) if COUNTED; none for padding."""
    count = base
    if COUNTED:
        count = tl.minimum(base + tl.load(n_vis_ptr + t), limit)
    if tl.load(pos_ptr + t) < 0:
        count = 0
    return count


@triton.jit
def _first_row(req_ptr, t, column, columns, base, shared_rows, SHARED: tl.constexpr):
    """The row of `column` of token t, counted from the first of all. SHARED: `shared_rows` come before the windows."""
    row = tl.cast(t, tl.int64) * columns + column
    if SHARED:
        row = shared_rows + tl.cast(t, tl.int64) * base + column
        if column >= base:
            row = tl.cast(tl.maximum(tl.load(req_ptr + t), 0), tl.int64) * (columns - base) + column - base
    return row


@triton.jit(do_not_specialize=["tokens", "heads", "columns", "base", "limit", "shared_rows", "splits"])
def scores_kernel(
    q_ptr, rows_ptr, req_ptr, pos_ptr, n_vis_ptr, s_ptr,
    tokens, heads, columns, base, limit, shared_rows, splits,
    SHARED: tl.constexpr, COUNTED: tl.constexpr, RAGGED: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """One item: a token, HEADS heads and every `splits`-th tile of ROWS columns. RAGGED: the last heads are fewer."""
    head_blocks = (heads + HEADS - 1) // HEADS
    head = tl.arange(0, HEADS)[:, None]
    row = tl.arange(0, ROWS)[:, None]
    dim = tl.arange(0, D)[None, :]
    for item in range(tl.program_id(0), tokens * head_blocks * splits, tl.num_programs(0)):
        split = item % splits
        h = (item // splits) % head_blocks * HEADS
        t = item // splits // head_blocks
        t64 = tl.cast(t, tl.int64)
        count = _count(pos_ptr, n_vis_ptr, t, base, limit, COUNTED)
        place = t64 * heads + h
        q_place = q_ptr + place * D + head * D + dim
        if RAGGED:
            q = tl.load(q_place, mask=head < heads - h, other=0.0)
        else:
            q = tl.load(q_place)
        for i in range(split, (count + ROWS - 1) // ROWS, splits):
            first = _first_row(req_ptr, t, i * ROWS, columns, base, shared_rows, SHARED)
            s = tl.dot(q, tl.trans(tl.load(rows_ptr + first * D + row * D + dim)))
            s_place = s_ptr + place * columns + i * ROWS + head * columns + tl.arange(0, ROWS)[None, :]
            if RAGGED:
                tl.store(s_place, s, mask=head < heads - h)
            else:
                tl.store(s_place, s)


@triton.jit(do_not_specialize=["tokens", "heads", "columns", "base", "limit", "slots"])
def softmax_kernel(
    s_ptr, bias_ptr, sink_ptr, pos_ptr, n_vis_ptr, p_ptr, lse_ptr, tokens, heads, columns, base, limit, slots, scale,
    SHARED: tl.constexpr, COUNTED: tl.constexpr, FINAL: tl.constexpr, RAGGED: tl.constexpr, CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """One item: a token, a chunk and HEADS heads. Chunks from `count` on are left as they are, but for a FINAL one.

    The bias of a token is `columns` long, or SHARED: `base`, and the other columns below `count` are all attended.
    """
    head_blocks = (heads + HEADS - 1) // HEADS
    head = tl.arange(0, HEADS)
    column = tl.arange(0, CHUNK)
    for item in range(tl.program_id(0), tokens * slots * head_blocks, tl.num_programs(0)):
        h = item % head_blocks * HEADS
        slot = (item // head_blocks) % slots
        t = item // head_blocks // slots
        t64 = tl.cast(t, tl.int64)
        count = _count(pos_ptr, n_vis_ptr, t, base, limit, COUNTED) - slot * CHUNK
        if FINAL or count > 0:
            known = column < count
            there = head < heads - h
            place = (t64 * heads + h) * columns + slot * CHUNK + head[:, None] * columns + column[None, :]
            if SHARED:
                bias = tl.load(
                    bias_ptr + t64 * base + slot * CHUNK + column, mask=column < base - slot * CHUNK, other=0.0
                )
                bias += tl.minimum(-0.5 - (column - count).to(tl.float32), 0.0, propagate_nan=ALL) * 2e30
            else:
                bias = tl.load(bias_ptr + t64 * columns + slot * CHUNK + column, mask=known, other=-1e30)
            if RAGGED:
                s = tl.load(s_ptr + place, mask=there[:, None] & known[None, :], other=0.0)
            else:
                s = tl.load(s_ptr + place, mask=known[None, :], other=0.0)
            s = s * scale + bias[None, :]
            m = tl.maximum(_row_max(s), -1e29, propagate_nan=ALL)
            if FINAL:
                sink = tl.load(sink_ptr + h + head, mask=there, other=0.0)
                m = tl.maximum(m, sink, propagate_nan=ALL)
            s = tl.exp(s - m[:, None])
            z = tl.sum(s, axis=1)
            if FINAL:
                z += tl.exp(sink - m)
            z = tl.maximum(z, 1e-37, propagate_nan=ALL)
            if not FINAL:
                lse = lse_ptr + (t64 * slots + slot) * heads + h
                tl.store(lse + head, m + tl.log(z), mask=there)
            # A reduction of equal values: without it the compiler divides once per score.
            inverse = _row_max(tl.broadcast_to((1.0 / z)[:, None], (HEADS, 8)))
            p = (s * inverse[:, None]).to(p_ptr.dtype.element_ty)
            if RAGGED:
                tl.store(p_ptr + place, p, mask=there[:, None])
            else:
                tl.store(p_ptr + place, p)


@triton.jit(do_not_specialize=["tokens", "heads", "columns", "base", "limit", "shared_rows", "slots"])
def values_kernel(
    p_ptr, rows_ptr, req_ptr, pos_ptr, n_vis_ptr, out_ptr,
    tokens, heads, columns, base, limit, shared_rows, slots,
    SHARED: tl.constexpr, COUNTED: tl.constexpr, FINAL: tl.constexpr, RAGGED: tl.constexpr, CHUNK: tl.constexpr,
    FIRST: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """One item: a token, HEADS heads, a slice of DV features, and every chunk the token has: FIRST rows of it, then
    ROWS at a time."""
    head_blocks = (heads + HEADS - 1) // HEADS
    slices: tl.constexpr = D // DV
    head = tl.arange(0, HEADS)[:, None]
    begin = tl.arange(0, FIRST)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DV)[None, :]
    for item in range(tl.program_id(0), tokens * head_blocks * slices, tl.num_programs(0)):
        d = item % slices * DV
        h = (item // slices) % head_blocks * HEADS
        t = item // slices // head_blocks
        t64 = tl.cast(t, tl.int64)
        chunks = 1
        if not FINAL:
            chunks = (_count(pos_ptr, n_vis_ptr, t, base, limit, COUNTED) + CHUNK - 1) // CHUNK
        for c in range(0, chunks):
            p = p_ptr + (t64 * heads + h) * columns + c * CHUNK + head * columns
            out = out_ptr + ((t64 * slots + c) * heads + h) * D + d + head * D + dim
            v = rows_ptr + d + dim
            there = head < heads - h
            first = _first_row(req_ptr, t, c * CHUNK, columns, base, shared_rows, SHARED)
            start = v + first * D + begin[:, None] * D
            if RAGGED:
                o = tl.dot(tl.load(p + begin[None, :], mask=there, other=0.0), tl.load(start))
            else:
                o = tl.dot(tl.load(p + begin[None, :]), tl.load(start))
            for i in range(FIRST, CHUNK, ROWS):
                first = _first_row(req_ptr, t, c * CHUNK + i, columns, base, shared_rows, SHARED)
                rows = v + first * D + row[:, None] * D
                if RAGGED:
                    o = tl.dot(tl.load(p + i + row[None, :], mask=there, other=0.0), tl.load(rows), o)
                else:
                    o = tl.dot(tl.load(p + i + row[None, :]), tl.load(rows), o)
            if RAGGED:
                tl.store(out, o.to(out_ptr.dtype.element_ty), mask=there)
            else:
                tl.store(out, o.to(out_ptr.dtype.element_ty))


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
        lse = lse_ptr + tl.cast(t, tl.int64) * slots * heads + h + head
        for c in range(0, live):
            one = tl.load(lse + c * heads, mask=there, other=0.0)
            top = tl.maximum(m, one, propagate_nan=ALL)
            z = z * tl.exp(m - top) + tl.exp(one - top)
            m = top
        z = 1.0 / tl.maximum(z, 1e-37, propagate_nan=ALL)
        acc = tl.zeros((HEADS, D), tl.float32)
        for c in range(0, live):
            place = (tl.cast(t, tl.int64) * slots + c) * heads + h
            share = tl.exp(tl.load(lse + c * heads, mask=there, other=0.0) - m) * z
            part = tl.load(part_ptr + place * D + head[:, None] * D + dim, mask=there[:, None], other=0.0)
            acc += part * share[:, None]
        out = out_ptr + (tl.cast(t, tl.int64) * heads + h) * D + head[:, None] * D + dim
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=there[:, None])
