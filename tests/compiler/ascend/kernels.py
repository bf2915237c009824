"""Kernels for the tests of the offline compile, and their launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4_triton.compiler.launches import Launch, recording


@triton.jit
def add(x, y, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


@triton.jit
def copy_persistently(x, o, n, B: tl.constexpr):
    for j in range(tl.program_id(0), n, tl.num_programs(0)):
        i = j * B + tl.arange(0, B)
        tl.store(o + i, tl.load(x + i))


@triton.jit
def matmul(a, b, c, N, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    acc = tl.dot(tl.load(a + rm[:, None] * K + rk[None, :]), tl.trans(tl.load(b + rn[:, None] * K + rk[None, :])))
    for k in range(BK, K, BK):
        x = tl.load(a + rm[:, None] * K + k + rk[None, :])
        acc = tl.dot(x, tl.trans(tl.load(b + rn[:, None] * K + k + rk[None, :])), acc)
    tl.store(c + rm[:, None] * N + rn[None, :], acc.to(c.dtype.element_ty))


@triton.jit
def flash(q, k, v, o, S, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    rm, rd, rn = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D), tl.arange(0, BN)
    queries = tl.load(q + rm[:, None] * D + rd[None, :])
    m = tl.full([BM], -1e30, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for s in range(0, S, BN):
        keys = tl.load(k + (s + rn)[:, None] * D + rd[None, :])
        scores = tl.dot(queries, tl.trans(keys))
        larger = tl.maximum(m, tl.max(scores, 1), propagate_nan=tl.PropagateNan.ALL)
        p = tl.exp(scores - larger[:, None])
        decay = tl.exp(m - larger)
        total = total * decay + tl.sum(p, 1)
        values = tl.load(v + (s + rn)[:, None] * D + rd[None, :])
        acc = acc * decay[:, None] + tl.dot(p.to(tl.bfloat16), values)
        m = larger
    tl.store(o + rm[:, None] * D + rd[None, :], (acc / total[:, None]).to(tl.bfloat16))


@triton.jit
def product_and_squares(x, x_again, w, o, squares, K: tl.constexpr, TWICE: tl.constexpr, B: tl.constexpr):
    """x W^T and the sum of squares of x, from one load of x or, with TWICE, a second one through another pointer."""
    r, k = tl.arange(0, 16), tl.arange(0, B)
    acc, total = tl.zeros([16, 16], tl.float32), tl.zeros([16], tl.float32)
    for s in range(0, K, B):
        tile = tl.load(x + r[:, None] * K + s + k[None, :])
        acc = tl.dot(tile, tl.trans(tl.load(w + r[:, None] * K + s + k[None, :])), acc)
        if TWICE:
            tile = tl.load(x_again + r[:, None] * K + s + k[None, :])
        total += tl.sum(tile.to(tl.float32) * tile.to(tl.float32), 1)
    tl.store(o + r[:, None] * 16 + r[None, :], acc)
    tl.store(squares + r, total)


@triton.jit
def product_of_one_step(x, w, o, squares, B: tl.constexpr):
    """The same for a single step: no accumulating loop."""
    r, k = tl.arange(0, 16), tl.arange(0, B)
    tile = tl.load(x + r[:, None] * B + k[None, :])
    acc = tl.dot(tile, tl.trans(tl.load(w + r[:, None] * B + k[None, :])))
    tl.store(o + r[:, None] * 16 + r[None, :], acc)
    tl.store(squares + r, tl.sum(tile.to(tl.float32) * tile.to(tl.float32), 1))


@triton.jit
def gather_elements(x, index, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(x + tl.load(index + i)))


@triton.jit
def scatter_elements(x, index, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + tl.load(index + i), tl.load(x + i))


@triton.jit
def gather_rows(x, index, o, N: tl.constexpr, D: tl.constexpr):
    i, d = tl.arange(0, N), tl.arange(0, D)
    tl.store(o + i[:, None] * D + d[None, :], tl.load(x + tl.load(index + i)[:, None] * D + d[None, :]))


@triton.jit
def insert_rows(x, slots, o, n, D: tl.constexpr):
    d = tl.arange(0, D)
    for i in range(n):
        slot = tl.load(slots + i)
        if slot >= 0:
            tl.store(o + slot * D + d, tl.load(x + i * D + d))


@triton.jit
def prefix_sum(x, o, M: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(o + i, tl.cumsum(tl.load(x + i), 0))


@triton.jit
def largest(x, o, p, M: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, M)
    value, at = tl.max(tl.load(x + i[:, None] * N + tl.arange(0, N)[None, :]), 1, return_indices=True)
    tl.store(o + i, value)
    tl.store(p + i, at)


@triton.jit
def convert(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(x + i).to(o.dtype.element_ty))


@triton.jit
def undefined_name(x):
    tl.store(x, no_such_name)  # noqa: F821


@triton.jit
def strided_pairs(x, o, N: tl.constexpr):
    """A load and a store with stride 2: an assertion of triton-ascend 3.2.0's adapter fails."""
    i = tl.arange(0, N)
    tl.store(o + 2 * i, tl.load(x + 2 * i))
    tl.store(o + 2 * i + 1, tl.load(x + 2 * i + 1))


def launch(kernel, *arguments, grid=(1,), **keywords) -> Launch:
    """The launch of a kernel; a shape among the arguments stands for a bf16 tensor."""
    tensors = [torch.empty(a, dtype=torch.bfloat16) if isinstance(a, tuple) else a for a in arguments]
    with recording() as launches:
        kernel[grid](*tensors, **keywords)
    return launches[0]


def empty(*shape, dtype=torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def ADD(B=1024, **options) -> Launch:  # noqa: N802
    x = empty(2**16)
    return launch(add, x, x, x, 2**16, B=B, **options)


def MATMUL(BM=128, BN=256, BK=64, **options) -> Launch:  # noqa: N802
    x = (1024, 1024)
    return launch(matmul, x, x, x, 1024, K=1024, BM=BM, BN=BN, BK=BK, **options)


def FLASH(BM=64, BN=64, D=64, **options) -> Launch:  # noqa: N802
    x = (1024, D)
    return launch(flash, x, x, x, x, 1024, D=D, BM=BM, BN=BN, **options)


def SQUARES(twice: bool) -> Launch:  # noqa: N802
    x = (16, 1024)
    return launch(product_and_squares, x, x, x, empty(16, 16), empty(16), K=1024, TWICE=twice, B=128)
