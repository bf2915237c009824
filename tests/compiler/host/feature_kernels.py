"""Small Triton kernels, one per language feature that the host driver has to run."""

import triton
import triton.language as tl


@triton.jit
def copy(x, o, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(x + i, mask=i < n, other=0).to(o.dtype.element_ty), mask=i < n)


@triton.jit
def cast(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(x + i).to(o.dtype.element_ty))


@triton.jit
def add(x, y, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    mask = i < n
    tl.store(o + i, tl.load(x + i, mask=mask) + tl.load(y + i, mask=mask), mask=mask)


@triton.jit
def in_place(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(x + i) * 2 + 1)


@triton.jit
def scalars(o, a, b, c, d, e, f):
    tl.store(o, a)
    tl.store(o + 1, b)
    tl.store(o + 2, c.to(tl.int64))
    tl.store(o + 3, d)
    tl.store(o + 4, e)
    tl.store(o + 5, f.to(tl.int64))


@triton.jit
def annotated(
    o, a: tl.int8, b: tl.uint8, c: tl.int16, d: tl.uint16, e: tl.int32, f: tl.uint32, g: tl.int64, h: tl.uint64
):
    tl.store(o, a.to(tl.int64))
    tl.store(o + 1, b.to(tl.int64))
    tl.store(o + 2, c.to(tl.int64))
    tl.store(o + 3, d.to(tl.int64))
    tl.store(o + 4, e.to(tl.int64))
    tl.store(o + 5, f.to(tl.int64))
    tl.store(o + 6, g)
    tl.store(o + 7, (h >> 1).to(tl.int64))


@triton.jit
def optional(x, y, o, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    if y is not None:
        v += tl.load(y + i)
    tl.store(o + i, v)


@triton.jit
def grid3(o):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tl.store(o + (x * tl.num_programs(1) + y) * tl.num_programs(2) + z, x * 100 + y * 10 + z)


@triton.jit
def early_return(x, n):
    p = tl.program_id(0)
    if p >= n:
        return
    tl.store(x + p, 1.0)


@triton.jit
def persistent(x, n):
    for i in range(tl.program_id(0), n, tl.num_programs(0)):
        tl.store(x + i, i.to(tl.float32))


@triton.jit
def branches(x, o, n, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    if n > 10:
        v = v * 2
    elif n > 3:
        v = v + 1
        for j in range(n):
            v = v + j
    else:
        v = -v
    tl.store(o + i, v)


@triton.jit
def carried_swap(x, o, n, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(x + N + i)
    for _ in range(n):
        a, b = b, a + 1
    tl.store(o + i, a)
    tl.store(o + N + i, b)


@triton.jit
def carried_while(x, o, n, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.zeros((N,), tl.float32)
    b = a + 1.0
    j = 0
    while j < n:
        c = a + b * tl.load(x + j * N + i)
        a = b
        b = c
        j += 1
    tl.store(o + i, a)
    tl.store(o + N + i, b)


@triton.jit
def carried_nested(x, o, n, N: tl.constexpr):
    """The value carried by the outer loop is replaced inside the inner one, and read after both."""
    i = tl.arange(0, N)
    best = tl.full((N,), -float("inf"), tl.float32)
    total = tl.zeros((N,), tl.float32)
    for r in range(n):
        previous = best
        for c in range(n):
            v = tl.load(x + (r * n + c) * N + i)
            best = tl.maximum(best, v)
        total = total * 0.5 + (best - previous + tl.load(x + i))
        total = tl.where(previous == -float("inf"), best, total)
    tl.store(o + i, total)


@triton.jit
def strided(x, o, s0, s1, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i[:, None] * N + i[None, :], tl.load(x + i[:, None] * s0 + i[None, :] * s1))


@triton.jit
def block_offset(x, o, block, stride, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(x + block.to(tl.int64) * stride + i))


@triton.jit
def gather_rows(x, index, o, n, D: tl.constexpr, N: tl.constexpr):
    r, d = tl.arange(0, N), tl.arange(0, D)
    rows = tl.load(index + r, mask=r < n, other=0).to(tl.int64)
    tl.store(
        o + r[:, None] * D + d[None, :], tl.load(x + rows[:, None] * D + d[None, :], mask=r[:, None] < n, other=-1.0)
    )


@triton.jit
def block_pointer(x, o, M, N):
    a = tl.make_block_ptr(x, (M, N), (N, 1), (tl.program_id(0) * 16, tl.program_id(1) * 16), (16, 16), (1, 0))
    b = tl.make_block_ptr(o, (M, N), (N, 1), (tl.program_id(0) * 16, tl.program_id(1) * 16), (16, 16), (1, 0))
    tl.store(b, tl.load(a, boundary_check=(0, 1), padding_option="zero"), boundary_check=(0, 1))


@triton.jit
def reductions(x, o, s, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M), tl.arange(0, N)
    v = tl.load(x + i[:, None] * N + j[None, :])
    tl.store(o + i, tl.sum(v, 1))
    tl.store(o + M + i, tl.max(v, 1))
    tl.store(o + 2 * M + i, tl.min(v, 1))
    tl.store(s + j, tl.sum(v, 0))
    tl.store(s + N + j, tl.max(v, 0))
    tl.store(s + 2 * N, tl.sum(v))


@triton.jit
def reductions_of_broadcasts(x, o, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M), tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(o + i, tl.sum(tl.broadcast_to(v[:, None], (M, N)), 1))
    tl.store(o + M + i, tl.max(v[:, None] * 2.0 + j.to(tl.float32)[None, :], 1))
    tl.store(o + 2 * M + j, tl.sum(tl.full((M, N), 0.5, tl.float32), 0))


@triton.jit
def arg_reductions(x, o, p, M: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, M)
    v = tl.load(x + i[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(o + i, tl.argmax(v, 1))
    tl.store(p + i, tl.argmin(v, 1))


@triton.jit
def _affine(a, b):
    return a * b + 1


@triton.jit
def _product(a, b):
    return a * b


@triton.jit
def custom_reductions(x, o, p, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(o + i, tl.associative_scan(v, 0, _affine))
    tl.store(p, tl.reduce(v, 0, _product))


@triton.jit
def scans(x, a, b, c, d, M: tl.constexpr, N: tl.constexpr):
    p = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    v = tl.load(x + p)
    tl.store(a + p, tl.cumsum(v, 1))
    tl.store(b + p, tl.cumsum(v, 0, reverse=True))
    tl.store(c + p, tl.cumprod(v, 1))
    tl.store(d + p, tl.flip(v))


@triton.jit
def sort(x, o, M: tl.constexpr, N: tl.constexpr, DESCENDING: tl.constexpr):
    p = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(o + p, tl.sort(tl.load(x + p), 1, DESCENDING))


@triton.jit
def gather(x, index, o, M: tl.constexpr, N: tl.constexpr):
    p = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(o + p, tl.gather(tl.load(x + p), tl.load(index + p), 1))


@triton.jit
def histogram(x, o, N: tl.constexpr, K: tl.constexpr):
    tl.store(o + tl.arange(0, K), tl.histogram(tl.load(x + tl.arange(0, N)), K))


@triton.jit
def rearrange(x, o, M: tl.constexpr, N: tl.constexpr):
    p = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    a, b = tl.split(tl.reshape(tl.load(x + p), (M, N // 2, 2)))
    tl.store(o + p, tl.reshape(tl.join(b, a), (M, N)))


@triton.jit
def permute(x, o):
    a, b, c = tl.arange(0, 4), tl.arange(0, 8), tl.arange(0, 16)
    v = tl.load(x + a[:, None, None] * 128 + b[None, :, None] * 16 + c[None, None, :])
    tl.store(o + c[:, None, None] * 32 + a[None, :, None] * 8 + b[None, None, :], tl.permute(v, (2, 0, 1)))


@triton.jit
def extrema(x, y, o, r, N: tl.constexpr):
    i = tl.arange(0, N)
    u, v = tl.load(x + i), tl.load(y + i)
    tl.store(o + i, tl.maximum(u, v, propagate_nan=tl.PropagateNan.ALL))
    tl.store(o + N + i, tl.maximum(u, v))
    tl.store(o + 2 * N + i, tl.minimum(u, v, propagate_nan=tl.PropagateNan.ALL))
    tl.store(o + 3 * N + i, tl.clamp(u, -0.5, 0.5))
    tl.store(r, tl.max(u, 0))
    tl.store(r + 1, tl.sum(u, 0))


@triton.jit
def division(x, y, o, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(o + i, a // b)
    tl.store(o + N + i, a % b)


@triton.jit
def round_each_step(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(o + i, tl.maximum(v * v + v, 0.0))


@triton.jit
def function(x, o, n, WHICH: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + i, mask=i < n, other=0.0)
    if WHICH == "exp":
        r = tl.exp(v)
    elif WHICH == "exp2":
        r = tl.exp2(v)
    elif WHICH == "log":
        r = tl.log(v)
    elif WHICH == "log2":
        r = tl.log2(v)
    elif WHICH == "tanh":
        r = tl.math.tanh(v)
    elif WHICH == "sin":
        r = tl.sin(v)
    elif WHICH == "cos":
        r = tl.cos(v)
    elif WHICH == "erf":
        r = tl.math.erf(v)
    elif WHICH == "rsqrt":
        r = tl.rsqrt(v)
    elif WHICH == "sqrt":
        r = tl.sqrt(v)
    elif WHICH == "floor":
        r = tl.floor(v)
    else:
        r = tl.abs(v)
    tl.store(o + i, r, mask=i < n)


@triton.jit
def dot(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TRANSPOSED: tl.constexpr, OUT: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    if TRANSPOSED:
        y = tl.trans(tl.load(b + n[:, None] * K + k[None, :]))
    else:
        y = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(c + m[:, None] * N + n[None, :], tl.dot(x, y, out_dtype=OUT))


@triton.jit
def batched_dot(a, b, c):
    g, m, k = tl.arange(0, 4), tl.arange(0, 16), tl.arange(0, 32)
    x = tl.load(a + g[:, None, None] * 512 + m[None, :, None] * 32 + k[None, None, :])
    y = tl.load(b + g[:, None, None] * 512 + k[None, :, None] * 16 + m[None, None, :])
    tl.store(c + g[:, None, None] * 256 + m[None, :, None] * 16 + m[None, None, :], tl.dot(x, y))


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
    tl.store(c + rm[:, None] * N + rn[None, :], acc.to(c.dtype.element_ty), mask=(rm[:, None] < M) & (rn[None, :] < N))


@triton.jit
def atomic_add(x, v, o, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.atomic_add(x + i, tl.load(v + i), mask=i < n), mask=i < n)


@triton.jit
def atomic_ticket(counter, o):
    tl.store(o + tl.program_id(0), tl.atomic_add(counter, 1))


@triton.jit
def atomic_histogram(h, index, B: tl.constexpr):
    tl.atomic_add(h + tl.load(index + tl.program_id(0) * B + tl.arange(0, B)), 1.0)


@triton.jit
def atomic_bits(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.atomic_and(x + i, 60)
    tl.atomic_or(x + i, 3)
    tl.store(o + i, tl.atomic_xor(x + i, 5))


@triton.jit
def atomic_extrema(x, y, v, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.atomic_max(x + i, tl.load(v + i))
    tl.atomic_min(y + i, tl.load(v + i))


@triton.jit
def atomic_exchange(x, y, o):
    p = tl.program_id(0)
    tl.store(o + 2 * p, tl.atomic_cas(x, p, p + 1))
    tl.store(o + 2 * p + 1, tl.atomic_xchg(y, p + 10))


@triton.jit
def gather_of_a_value_used_before(x, o, N: tl.constexpr):
    p = tl.arange(0, N)
    value = tl.load(x + p)
    order = tl.where(value > 0.0, N - p, 0).to(tl.float32)
    order = N - tl.sort(order, descending=True)
    at = tl.minimum(order, N - 1.0).to(tl.int32)
    tl.store(o + p, tl.where(order < N, tl.gather(value, at, 0), 0.0))
