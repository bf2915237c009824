"""Kernels of `sparse_attention` that do one step each: scores, softmax, values.

For families whose vector cores do not share the work of a mixed kernel, and for sets of rows whose scores do not fit
one. All work on the rows that `gather_rows` copied; the scores and P go through memory:

    s[t, h, j] = <q[t, h], rows[t, j]>                                  cube, fp32
    p[t, h, j] = exp(scale * s + bias[t, j] - M) / Z                    vector, q's dtype
    o[t, h]    = sum_j p[t, h, j] * rows[t, j]                          cube

A chunk is CHUNK columns with a softmax of its own: the only one (FINAL), whose Z has the sink, or one of several, whose
o is partial and has its log of the denominator beside it, for `_attend.merge_kernel`. Rows are loaded without a mask,
which would bring vector cores in on A5: every row of a chunk that is attended at all must have been written. Scores
from the last attended column on are not read.

UB of the softmax: HEADS * CHUNK * 4 bytes for the scores, twice where they are loaded ahead, and P.
"""

import triton
import triton.language as tl

ALL = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _count(pos_ptr, n_vis_ptr, t, base, limit, COUNTED: tl.constexpr):
    """Columns that token t attends: `base`, or min(base + n_vis, limit) if COUNTED; none for padding."""
    count = base
    if COUNTED:
        count = tl.minimum(base + tl.load(n_vis_ptr + t), limit)
    if tl.load(pos_ptr + t) < 0:
        count = 0
    return count


@triton.jit(do_not_specialize=["tokens", "heads", "columns", "base", "limit", "splits"])
def scores_kernel(
    q_ptr, rows_ptr, pos_ptr, n_vis_ptr, s_ptr, tokens, heads, columns, base, limit, splits,
    COUNTED: tl.constexpr, RAGGED: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
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
            s = tl.dot(q, tl.trans(tl.load(rows_ptr + (t64 * columns + i * ROWS) * D + row * D + dim)))
            s_place = s_ptr + place * columns + i * ROWS + head * columns + tl.arange(0, ROWS)[None, :]
            if RAGGED:
                tl.store(s_place, s, mask=head < heads - h)
            else:
                tl.store(s_place, s)


@triton.jit(do_not_specialize=["tokens", "heads", "columns", "base", "limit", "slots"])
def softmax_kernel(
    s_ptr, bias_ptr, sink_ptr, pos_ptr, n_vis_ptr, p_ptr, lse_ptr, tokens, heads, columns, base, limit, slots, scale,
    COUNTED: tl.constexpr, FINAL: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One item: a token, a chunk and HEADS heads. Chunks from `count` on are left as they are, but for a FINAL one."""
    head_blocks = (heads + HEADS - 1) // HEADS
    head = tl.arange(0, HEADS)
    column = tl.arange(0, CHUNK)
    for item in range(tl.program_id(0), tokens * slots * head_blocks, tl.num_programs(0)):
        h = item % head_blocks * HEADS
        slot = (item // head_blocks) % slots
        t = item // head_blocks // slots
        t64 = tl.cast(t, tl.int64)
        count = _count(pos_ptr, n_vis_ptr, t, base, limit, COUNTED) - slot * CHUNK
        there = (head < heads - h)[:, None]
        if FINAL or count > 0:
            known = column < count
            place = (t64 * heads + h) * columns + slot * CHUNK + head[:, None] * columns + column[None, :]
            bias = tl.load(bias_ptr + t64 * columns + slot * CHUNK + column, mask=known, other=-1e30)
            s = tl.load(s_ptr + place, mask=there & known[None, :], other=0.0) * scale + bias[None, :]
            m = tl.maximum(tl.max(s, axis=1), -1e29, propagate_nan=ALL)
            if FINAL:
                sink = tl.load(sink_ptr + h + head, mask=head < heads - h, other=0.0)
                m = tl.maximum(m, sink, propagate_nan=ALL)
            s = tl.exp(s - m[:, None])
            z = tl.sum(s, axis=1)
            if FINAL:
                z += tl.exp(sink - m)
            z = tl.maximum(z, 1e-37, propagate_nan=ALL)
            if not FINAL:
                lse = lse_ptr + (t64 * slots + slot) * heads + h
                tl.store(lse + head, m + tl.log(z), mask=head < heads - h)
            tl.store(p_ptr + place, (s * (1.0 / z)[:, None]).to(p_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["tokens", "heads", "columns", "base", "limit", "slots"])
def values_kernel(
    p_ptr, rows_ptr, pos_ptr, n_vis_ptr, out_ptr, tokens, heads, columns, base, limit, slots,
    COUNTED: tl.constexpr, FINAL: tl.constexpr, RAGGED: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """One item: a token, HEADS heads, a slice of DV features, and every chunk the token has."""
    head_blocks = (heads + HEADS - 1) // HEADS
    slices: tl.constexpr = D // DV
    head = tl.arange(0, HEADS)[:, None]
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
            p = p_ptr + (t64 * heads + h) * columns + c * CHUNK + head * columns + row[None, :]
            v = rows_ptr + (t64 * columns + c * CHUNK) * D + d + row[:, None] * D + dim
            out = out_ptr + ((t64 * slots + c) * heads + h) * D + d + head * D + dim
            there = head < heads - h
            if RAGGED:
                o = tl.dot(tl.load(p, mask=there, other=0.0), tl.load(v))
            else:
                o = tl.dot(tl.load(p), tl.load(v))
            for i in range(ROWS, CHUNK, ROWS):
                if RAGGED:
                    o = tl.dot(tl.load(p + i, mask=there, other=0.0), tl.load(v + i * D), o)
                else:
                    o = tl.dot(tl.load(p + i), tl.load(v + i * D), o)
            if RAGGED:
                tl.store(out, o.to(out_ptr.dtype.element_ty), mask=there)
            else:
                tl.store(out, o.to(out_ptr.dtype.element_ty))
