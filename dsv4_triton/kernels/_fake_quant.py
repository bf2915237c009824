"""Device helpers: the fp8 (e4m3) simulation of blocks of 64 values in fp32 arithmetic, without an fp8 type.

Bit exact with `reference.fake_quant` on every family: A2 and A3 have no fp8 conversions at all. The exponents come from
bits, and a value is rounded to its e4m3 step by adding and subtracting 1.5 * 2^23 steps (round to nearest even; neither
triton-ascend nor the host driver reassociates fp32 arithmetic).
"""

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
INV_E4M3_MAX = tl.constexpr(1.0 / 448.0)
AMAX_FLOOR = tl.constexpr(1e-4)
E4M3_MIN_NORMAL = tl.constexpr(0.015625)
EXPONENT_MASK = tl.constexpr(0x7F800000)
MANTISSA_MASK = tl.constexpr(0x7FFFFF)
MAGIC = tl.constexpr((20 << 23) + 0x400000)
"""Added to the bits of 2^e it gives 1.5 * 2^(e + 20), whose last place is 2^(e - 3): the e4m3 step at exponent e."""


@triton.jit
def round_to_e4m3(y):
    """The fp32 values of `y`, |y| <= 448, rounded to the nearest e4m3 value (ties to even, subnormals included)."""
    normal = tl.maximum(tl.abs(y), E4M3_MIN_NORMAL, propagate_nan=tl.PropagateNan.ALL)
    magic = ((normal.to(tl.int32, bitcast=True) & EXPONENT_MASK) + MAGIC).to(tl.float32, bitcast=True)
    return (y + magic) - magic


@triton.jit
def quantise64(x):
    """Quantise the rows of `x [n, 64]` fp32: (e4m3 values as fp32 [n, 64], biased scale exponents [n, 1] int32).

    A value that is not finite stays so; the rest of its row is then unspecified.
    """
    amax = tl.max(tl.abs(x), axis=1, keep_dims=True)
    quotient = tl.maximum(amax, AMAX_FLOOR, propagate_nan=tl.PropagateNan.ALL) * INV_E4M3_MAX
    biased = (quotient.to(tl.int32, bitcast=True) + MANTISSA_MASK) >> 23
    inverse = ((254 - biased) << 23).to(tl.float32, bitcast=True)
    y = tl.clamp(x * inverse, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    return round_to_e4m3(y), biased


@triton.jit
def fp8_sim64(x):
    """What e4m3 storage with a power-of-two scale per row makes of `x [n, 64]` fp32."""
    values, biased = quantise64(x)
    return values * (biased << 23).to(tl.float32, bitcast=True)
