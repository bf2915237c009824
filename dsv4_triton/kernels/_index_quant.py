"""Device helpers: how indexer queries and keys are stored, bit exact with `reference.index_quant` on every family.

INT8: integers with an fp16 scale per row, computed from the scale as it is stored. E4M3: e4m3 codes, written through
an int8 pointer because A2 and A3 have no fp8 type, with a power-of-two fp32 scale per row. PLAIN: a cast, no scale.
"""

import torch
import triton
import triton.language as tl

from dsv4_triton.kernels._fake_quant import E4M3_MIN_NORMAL, quantise64

PLAIN = tl.constexpr(0)
INT8 = tl.constexpr(1)
E4M3 = tl.constexpr(2)

ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding and subtracting it rounds an fp32 value below 2^22 to the nearest integer, ties to even."""

FORMATS = {torch.bfloat16: 0, torch.float32: 0, torch.int8: 1, torch.float8_e4m3fn: 2}
"""Format number of each dtype of queries and keys."""
SCALE_DTYPES = {torch.int8: torch.float16, torch.float8_e4m3fn: torch.float32}
"""Scale dtype of each format that has a scale."""


def codes(values: torch.Tensor) -> torch.Tensor:
    """`values` as kernels write them: e4m3 tensors as int8 codes, others as they are."""
    return values.view(torch.int8) if values.dtype == torch.float8_e4m3fn else values


@triton.jit
def e4m3_code(value):
    """The e4m3 codes (int32, -128..127) of fp32 values that e4m3 can represent.

    Fields of a normal value move down by 20 bits and are rebiased from 127 to 7. A subnormal value first gets 2^-6,
    which aligns its last place with bit 20. The sign bit is subtracted, so that the result fits int8 without
    wrapping.
    """
    magnitude = tl.abs(value)
    normal = magnitude.to(tl.int32, bitcast=True) - (120 << 23)
    subnormal = (magnitude + E4M3_MIN_NORMAL).to(tl.int32, bitcast=True) - (121 << 23)
    code = tl.where(magnitude < E4M3_MIN_NORMAL, subnormal, normal) >> 20
    return code - ((value.to(tl.int32, bitcast=True) >> 24) & 128)


@triton.jit
def quantise_rows(y, FORMAT: tl.constexpr):
    """The rows of `y [n, m]` fp32 as INT8 or E4M3: (int8 [n, m], scale [n, 1] in its storage dtype)."""
    if FORMAT == INT8:
        scale = (tl.max(tl.abs(y), axis=1, keep_dims=True) / 127.0).to(tl.float16)
        divisor = scale.to(tl.float32)
        divisor = tl.where(divisor > 0.0, divisor, float("inf"))
        rounded = (y / divisor + ROUND) - ROUND
        return tl.clamp(rounded, -127.0, 127.0, propagate_nan=tl.PropagateNan.ALL).to(tl.int8), scale
    else:
        values, biased = quantise64(y)
        return e4m3_code(values).to(tl.int8), (biased << 23).to(tl.float32, bitcast=True)
