"""The kernels of the host figures: a matrix product, flash attention, RMSNorm, and an addition to measure a launch."""

import triton
import triton.language as tl


@triton.jit
def matmul(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        rk = k + tl.arange(0, BK)
        x = tl.load(a + rm[:, None] * K + rk[None, :], mask=(rm[:, None] < M) & (rk[None, :] < K), other=0.0)
        y = tl.load(b + rk[:, None] * N + rn[None, :], mask=(rk[:, None] < K) & (rn[None, :] < N), other=0.0)
        acc = tl.dot(x, y, acc)
    tl.store(c + rm[:, None] * N + rn[None, :], acc, mask=(rm[:, None] < M) & (rn[None, :] < N))


@triton.jit
def flash(q, k, v, o, S, scale, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rd = tl.arange(0, D)
    base = tl.program_id(1) * S * D
    queries = tl.load(q + base + rm[:, None] * D + rd[None, :], mask=rm[:, None] < S, other=0.0)
    top = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for n in range(0, S, BN):
        rn = n + tl.arange(0, BN)
        keys = tl.load(k + base + rn[:, None] * D + rd[None, :], mask=rn[:, None] < S, other=0.0)
        values = tl.load(v + base + rn[:, None] * D + rd[None, :], mask=rn[:, None] < S, other=0.0)
        scores = tl.dot(queries, tl.trans(keys)) * scale
        scores = tl.where(rn[None, :] < S, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp(scores - new_top[:, None])
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype.element_ty), values)
        top = new_top
    tl.store(
        o + base + rm[:, None] * D + rd[None, :], (acc / total[:, None]).to(o.dtype.element_ty), mask=rm[:, None] < S
    )


@triton.jit
def rms_norm(x, weight, o, D, eps, B: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, B)
    v = tl.load(x + row * D + i, mask=i < D, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(v * v) / D + eps)
    w = tl.load(weight + i, mask=i < D, other=0.0).to(tl.float32)
    tl.store(o + row * D + i, (v * scale * w).to(o.dtype.element_ty), mask=i < D)


@triton.jit
def add(x, y, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)
