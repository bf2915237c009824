"""Kernels whose static cost is known: three that are counted by hand, and pairs of a good and a bad formulation."""

import triton
import triton.language as tl

ALL = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["sak", "sbn"])
def matmul(a, b, c, K, sam, sak, sbk, sbn, scm, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(a + rm[:, None] * sam + (k + rk)[None, :] * sak)
        y = tl.load(b + (k + rk)[:, None] * sbk + rn[None, :] * sbn)
        acc = tl.dot(x, y, acc)
    tl.store(c + rm[:, None] * scm + rn[None, :], acc.to(tl.bfloat16))


@triton.jit
def flash(q, k, v, o, scale, S, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    base = tl.program_id(1) * S * D
    query = tl.load(q + base + rm[:, None] * D + d[None, :])
    m = tl.full((BM,), -1e30, tl.float32)
    z = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for n in range(0, S, BN):
        rn = n + tl.arange(0, BN)
        key = tl.load(k + base + rn[:, None] * D + d[None, :])
        s = tl.dot(query, tl.trans(key)) * scale
        top = tl.maximum(m, tl.max(s, 1), propagate_nan=ALL)
        p = tl.exp(s - top[:, None])
        old = tl.exp(m - top)
        z = z * old + tl.sum(p, 1)
        value = tl.load(v + base + rn[:, None] * D + d[None, :])
        acc = acc * old[:, None] + tl.dot(p.to(value.dtype), value)
        m = top
    tl.store(o + base + rm[:, None] * D + d[None, :], (acc / z[:, None]).to(tl.bfloat16))


@triton.jit
def rmsnorm(x, w, o, T, D: tl.constexpr):
    c = tl.arange(0, D)
    weight = tl.load(w + c).to(tl.float32)
    for t in range(tl.program_id(0), T, tl.num_programs(0)):
        row = tl.load(x + t * D + c).to(tl.float32)
        r = tl.rsqrt(tl.sum(row * row, 0) / D + 1e-6)
        tl.store(o + t * D + c, (row * r * weight).to(tl.bfloat16))


@triton.jit
def clamp(x, o, B: tl.constexpr, PROPAGATE: tl.constexpr):
    """Two clamps of a tile."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + i)
    for _ in tl.static_range(2):
        if PROPAGATE:
            v = tl.minimum(tl.maximum(v, -7.0, propagate_nan=ALL), 10.0, propagate_nan=ALL) * v
        else:
            v = tl.minimum(tl.maximum(v, -7.0), 10.0) * v
    tl.store(o + i, v)


@triton.jit
def relu_of_ints(x, o, B: tl.constexpr, INTEGER: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + i)
    if INTEGER:
        f = tl.maximum(v, 0).to(tl.float32)
    else:
        f = tl.maximum(v.to(tl.float32), 0.0)
    tl.store(o + i, f)


@triton.jit
def masked_scores(x, n, o, R: tl.constexpr, C: tl.constexpr, ADDITIVE: tl.constexpr):
    c = tl.arange(0, C)
    at = tl.arange(0, R)[:, None] * C + c[None, :]
    count = tl.load(n)
    s = tl.load(x + at)
    if ADDITIVE:
        s += (tl.minimum(-0.5 - (c - count).to(tl.float32), 0.0, propagate_nan=ALL) * 2e30)[None, :]
    else:
        s = tl.where((c < count)[None, :], s, -1e30)
    tl.store(o + at, s)


@triton.jit
def rope(x, cos, o, T, H: tl.constexpr, HALF: tl.constexpr):
    lane = tl.arange(0, 32)
    head = tl.arange(0, H)[:, None] * 64
    pair = tl.arange(0, 64)
    for t in range(tl.program_id(0), T, tl.num_programs(0)):
        c = tl.load(cos + t * 64 + lane)[None, :]
        s = tl.load(cos + t * 64 + 32 + lane)[None, :]
        row = x + t * H * 64 + head
        out = o + t * H * 64 + head
        if HALF:
            a = tl.load(row + lane[None, :])
            b = tl.load(row + 32 + lane[None, :])
            tl.store(out + lane[None, :], a * c - b * s)
            tl.store(out + 32 + lane[None, :], b * c + a * s)
        else:
            a, b = tl.split(tl.load(row + pair[None, :]).reshape(H, 32, 2))
            tl.store(out + pair[None, :], tl.join(a * c - b * s, b * c + a * s).reshape(H, 64))


@triton.jit
def gather(x, index, o, R: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    """R rows of D elements, or R * D single elements that happen to be the same ones."""
    d = tl.arange(0, D)
    if ROWS:
        row = tl.load(index + tl.arange(0, R))
        values = tl.load(x + row[:, None] * D + d[None, :])
        tl.store(o + tl.arange(0, R)[:, None] * D + d[None, :], values)
    else:
        at = tl.arange(0, R * D)
        tl.store(o + at, tl.load(x + tl.load(index + at)))


@triton.jit
def insert(x, slots, cache, T, R: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr):
    d = tl.arange(0, D)
    r = tl.arange(0, R)
    for first in range(tl.program_id(0) * R, T, tl.num_programs(0) * R):
        if TILE:
            slot = tl.load(slots + first + r)
            rows = tl.load(x + (first + r)[:, None] * D + d[None, :])
            tl.store(cache + slot[:, None] * D + d[None, :], rows, mask=(slot >= 0)[:, None])
        else:
            for t in range(first, first + R):
                slot = tl.load(slots + t)
                if slot >= 0:
                    tl.store(cache + slot * D + d, tl.load(x + t * D + d))


@triton.jit
def product(
    a, b, c, M, K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """FORM: "good" a [M, K] and b [N, K] read as stored; "modulo" rows; "columns" b by pointers; "unpeeled" loop."""
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    if FORM == "modulo":
        left = a + (rm % M)[:, None] * K + k[None, :]
    else:
        left = a + rm[:, None] * K + k[None, :]
    if FORM == "columns":
        right = b + rn[None, :] * K + k[:, None]
        acc = tl.dot(tl.load(left), tl.load(right))
    else:
        right = b + rn[:, None] * K + k[None, :]
        if FORM == "unpeeled":
            acc = tl.zeros((BM, BN), tl.float32)
        else:
            acc = tl.dot(tl.load(left), tl.trans(tl.load(right)))
    for step in range(0 if FORM == "unpeeled" else BK, K, BK):
        if FORM == "columns":
            acc = tl.dot(tl.load(left + step), tl.load(right + step), acc)
        else:
            acc = tl.dot(tl.load(left + step), tl.trans(tl.load(right + step)), acc)
    tl.store(c + rm[:, None] * N + rn[None, :], acc)


@triton.jit
def copy(x, o, T, stride, D: tl.constexpr):
    d = tl.arange(0, D)
    for t in range(tl.program_id(0), T, tl.num_programs(0)):
        tl.store(o + t * D + d, tl.load(x + t * D * stride + d * stride))


@triton.jit
def tiles(x, o, R: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr):
    """R rows of D out of rows twice as long, as one tile or row by row."""
    d = tl.arange(0, D)
    first = tl.program_id(0) * R
    if WHOLE:
        r = first + tl.arange(0, R)[:, None]
        tl.store(o + r * D + d[None, :], tl.load(x + r * (2 * D) + d[None, :]))
    else:
        for t in range(first, first + R):
            tl.store(o + t * D + d, tl.load(x + t * (2 * D) + d))


@triton.jit
def chosen_rows(x, index, o, T, R: tl.constexpr, D: tl.constexpr):
    """Control flow from vectors: R rows at once where no index is negative, else those that are not one by one."""
    d = tl.arange(0, D)
    for first in range(tl.program_id(0) * R, T, tl.num_programs(0) * R):
        rows = tl.load(index + first + tl.arange(0, R))
        if tl.min(rows, axis=0) >= 0:
            at = (first + tl.arange(0, R))[:, None] * D + d[None, :]
            tl.store(o + at, tl.load(x + at))
        else:
            for t in range(first, first + R):
                if tl.load(index + t) >= 0:
                    tl.store(o + t * D + d, tl.load(x + t * D + d))


@triton.jit
def ragged(x, lengths, o, D: tl.constexpr):
    """As many rows as a tensor says; the last one is cut short."""
    d = tl.arange(0, D)
    b = tl.program_id(0)
    n = tl.load(lengths + b)
    for t in range(0, n):
        at = b * 1024 * D + t * D + d
        tl.store(o + at, tl.load(x + at, mask=d < D - 16 * (t + 1 == n), other=0.0), mask=d < D - 16 * (t + 1 == n))


@triton.jit
def search(x, o, D: tl.constexpr):
    """A loop that floating-point data ends."""
    d = tl.arange(0, D)
    value = tl.load(x + d)
    while tl.sum(value, axis=0) > 1.0:
        value = value * 0.5
    tl.store(o + d, value)


@triton.jit
def scores(k, q, w, o, items, KEYS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr):
    """Cube, then vector work, item by item: sum over heads of weighted relu(k q^T)."""
    key = tl.arange(0, KEYS)
    head = tl.arange(0, HEADS)
    d = tl.arange(0, D)
    query = tl.load(q + head[:, None] * D + d[None, :])
    weight = tl.load(w + head)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        at = item * KEYS + key
        s = tl.dot(tl.load(k + at[:, None] * D + d[None, :]), tl.trans(query))
        tl.store(o + at, tl.sum(tl.maximum(s, 0).to(tl.float32) * weight[None, :], axis=1))


@triton.jit
def balance(x, o, LANES: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr):
    """Rows and columns of 4 x 4 matrices made to sum to one, in turns; tokens last, as one tile or as 16 vectors."""
    lane = tl.arange(0, LANES)
    if TILE:
        at = tl.arange(0, 4)[:, None, None] * (4 * LANES) + tl.arange(0, 4)[None, :, None] * LANES + lane[None, None, :]
        c = tl.load(x + at)
        for _ in range(STEPS):
            c = c / tl.sum(c, axis=0)[None, :, :]
            c = c / tl.sum(c, axis=1)[:, None, :]
        tl.store(o + at, c)
    else:
        a0, a1, a2, a3 = _four(x, 0, LANES)
        b0, b1, b2, b3 = _four(x, 1, LANES)
        c0, c1, c2, c3 = _four(x, 2, LANES)
        d0, d1, d2, d3 = _four(x, 3, LANES)
        for _ in range(STEPS):
            a0, b0, c0, d0 = _normalised(a0, b0, c0, d0)
            a1, b1, c1, d1 = _normalised(a1, b1, c1, d1)
            a2, b2, c2, d2 = _normalised(a2, b2, c2, d2)
            a3, b3, c3, d3 = _normalised(a3, b3, c3, d3)
            a0, a1, a2, a3 = _normalised(a0, a1, a2, a3)
            b0, b1, b2, b3 = _normalised(b0, b1, b2, b3)
            c0, c1, c2, c3 = _normalised(c0, c1, c2, c3)
            d0, d1, d2, d3 = _normalised(d0, d1, d2, d3)
        _store_four(o, 0, LANES, a0, a1, a2, a3)
        _store_four(o, 1, LANES, b0, b1, b2, b3)
        _store_four(o, 2, LANES, c0, c1, c2, c3)
        _store_four(o, 3, LANES, d0, d1, d2, d3)


@triton.jit
def _four(x, row: tl.constexpr, LANES: tl.constexpr):
    p = x + row * 4 * LANES + tl.arange(0, LANES)
    return tl.load(p), tl.load(p + LANES), tl.load(p + 2 * LANES), tl.load(p + 3 * LANES)


@triton.jit
def _normalised(a, b, c, d):
    total = a + b + c + d
    return a / total, b / total, c / total, d / total


@triton.jit
def _store_four(o, row: tl.constexpr, LANES: tl.constexpr, a, b, c, d):
    p = o + row * 4 * LANES + tl.arange(0, LANES)
    tl.store(p, a)
    tl.store(p + LANES, b)
    tl.store(p + 2 * LANES, c)
    tl.store(p + 3 * LANES, d)
