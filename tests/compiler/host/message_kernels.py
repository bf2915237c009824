"""Kernels that print and assert, for test_host_messages.py."""

import triton
import triton.language as tl


@triton.jit
def show(x, N: tl.constexpr, HEX: tl.constexpr):
    tl.device_print("v", tl.load(x + tl.arange(0, N)), hex=HEX)


@triton.jit
def show_scalars(x, i, f, flag, NAME: tl.constexpr):
    tl.device_print("one", tl.load(x))
    tl.device_print("given", i, f, flag, NAME)


@triton.jit
def show_tile(x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    a, b, c = tl.arange(0, A)[:, None, None], tl.arange(0, B)[None, :, None], tl.arange(0, C)[None, None, :]
    tile = tl.load(x + (a * B + b) * C + c)
    tl.device_print("sum", tl.sum(tile, 1))
    tl.device_print("turned", tl.trans(tl.sum(tile, 2)))
    tl.device_print("tile", tile)


@triton.jit
def show_texts(x):
    tl.device_print("plain")
    tl.device_print('"quoted" \\ %d %s: ', tl.load(x))
    tl.device_print("", tl.load(x))
    print("built-in", tl.load(x))


@triton.jit
def show_program(x, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.device_print("i", i, tl.program_id(1))
    tl.store(x + tl.program_id(1) * tl.num_programs(0) * B + i, i)


@triton.jit
def show_steps(x, n, B: tl.constexpr):
    total = tl.zeros((B,), tl.float32)
    for i in range(n):
        total += tl.load(x + i * B + tl.arange(0, B))
        if i % 2 == 0:
            tl.device_print("even", i, total)
        else:
            tl.device_print("odd", i)
    tl.store(x + tl.arange(0, B), total)


@triton.jit
def show_masked(x, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.device_print("masked", tl.load(x + i, mask=i < n, other=-7), i < n)


@triton.jit
def show_after_use(x, o, limit, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    w = v * 2 + 1
    fits = w < limit
    both = tl.where(fits, w, -w)
    tl.store(o + i, both + 1)
    tl.device_print("v", v, w, fits, both)
    tl.device_assert(fits, "w")
    tl.store(o + i, both)


@triton.jit
def show_pointer(x):
    tl.store(x, 1.0)
    tl.device_print("x", x)


@triton.jit
def show_pointers(x, N: tl.constexpr):
    tl.device_print("x", x + tl.arange(0, N))


@triton.jit(noinline=True)
def _separate(v):
    tl.device_print("v", v)
    return v + 1


@triton.jit
def show_in_separate_function(x):
    tl.store(x, _separate(tl.load(x)))


@triton.jit
def _checked_maximum(a, b):
    tl.device_print("a", a)
    return tl.maximum(a, b)


@triton.jit
def show_in_reduction(x, N: tl.constexpr):
    tl.store(x, tl.reduce(tl.load(x + tl.arange(0, N)), 0, _checked_maximum))


@triton.jit
def scatter(x, index, n):
    i = tl.load(index + tl.program_id(0))
    tl.device_assert((i >= 0) & (i < n), "index out of range")
    tl.store(x + i, tl.program_id(0))


@triton.jit(debug=True)
def scatter_checked(x, index, n):
    i = tl.load(index + tl.program_id(0))
    tl.device_assert((i >= 0) & (i < n), "index out of range")
    tl.store(x + i, tl.program_id(0))


@triton.jit
def require(x, limit, M: tl.constexpr, N: tl.constexpr):
    v = tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    tl.device_assert(v < limit, "too large")


@triton.jit
def require_flags(x, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.device_assert(tl.load(x + i, mask=i < n, other=1) != 0)


@triton.jit
def require_scalar(flag, n):
    assert n != 3, "n is three"
    tl.device_assert(flag, "flag")


@triton.jit
def _positive(v):
    tl.device_assert(v > 0, "not positive")
    return v


@triton.jit
def require_in_helper(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), _positive(tl.load(x + tl.arange(0, N))) + 1)


@triton.jit
def add_one(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), tl.add(tl.load(x + tl.arange(0, N)), 1))


@triton.jit
def count_down(x, n):
    """Fails in the last iteration, with a value carried through the loop."""
    total = tl.load(x)
    for _ in range(n):
        total += 1
        tl.store(x, total)
        tl.device_assert(total < n, "counted too far")
    tl.store(x, -1.0)
