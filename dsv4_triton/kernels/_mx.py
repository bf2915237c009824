"""Device helpers: MX quantisation to e4m3 in blocks of 32, in the grid of one exponent a row.

Bit exact with `reference.mx`, which defines both. Exponents come from integer bits: an integer maximum of |x| is exact
and lets infinities and NaN win. They are handled as e8m0 has them, biased by 127. Families: those with fp8 types.
"""

import triton
import triton.language as tl

BLOCK = tl.constexpr(32)
"""Values that share an exponent."""
EMAX = tl.constexpr(8)
"""Exponent of the largest power of two that e4m3 has, 256."""
LARGEST = tl.constexpr(0x43E00000)
"""The bits of 448, the largest e4m3 value, in fp32."""
BROKEN = tl.constexpr(255 - 8)
"""What `block_exponent` makes of an infinity or a NaN; finite values give less."""
QUIET_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def block_exponent(x):
    """Biased shared exponents `[n, 1]` int32 of blocks `x [n, 32]` (bf16 or fp32): floor(log2(amax)) - 8, at
    least 0."""
    if x.dtype == tl.bfloat16:
        largest = tl.max(x.to(tl.int16, bitcast=True) & 0x7FFF, axis=1, keep_dims=True).to(tl.int32) >> 7
    else:
        largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1, keep_dims=True) >> 23
    return tl.maximum(largest - EMAX, 0)


@triton.jit
def elements(x, exponent, row):
    """e4m3 elements of blocks `x [n, 32]` with the scale of exponent `row`: saturated as their block's exponent
    wants it, then rounded once."""
    bound = tl.maximum(LARGEST + ((exponent - row) << 23), 0).to(tl.float32, bitcast=True)
    y = x.to(tl.float32) * ((254 - row) << 23).to(tl.float32, bitcast=True)
    y = tl.minimum(y, bound, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(y, -bound, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def row_scale(row):
    """2^(row - 127) in fp32; NaN where a value of the row is not finite."""
    return tl.where(row == BROKEN, QUIET_NAN, row << 23).to(tl.float32, bitcast=True)
