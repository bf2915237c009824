"""The fp8 simulation of cache rows that DeepSeek-V4 was trained with (quantisation-aware training).

For each block of 64 values: `amax = max(|x|, 1e-4)`, `s = 2^ceil(log2(amax / 448))` and
`x <- s * e4m3(clamp(x / s, -448, 448))`.
The exponent is read from the bits of `fp32(amax * fp32(1/448))`, so that no approximate logarithm can step by one.
Source: `act_quant` of the official DeepSeek inference kernels.
"""

from __future__ import annotations

import torch

BLOCK = 64
E4M3_MAX = 448.0
AMAX_FLOOR = 1e-4
_MANTISSA = 0x7FFFFF
_EXPONENT_BIAS = 127


def scale_exponent(amax: torch.Tensor) -> torch.Tensor:
    """`ceil(log2(amax / 448))` of positive finite fp32 values, the exponent field, plus 1 unless a power of two."""
    quotient = amax * torch.tensor(1.0 / E4M3_MAX, dtype=torch.float32, device=amax.device)
    bits = quotient.view(torch.int32)
    return (bits >> 23) - _EXPONENT_BIAS + ((bits & _MANTISSA) != 0).to(torch.int32)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """`2^exponent` in fp32 for int32 exponents -126..127, built from its bits."""
    return ((exponent + _EXPONENT_BIAS) << 23).view(torch.float32)


def quantise64(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise blocks of 64 values along the last axis.

    Returns the values as float8_e4m3fn (`x`'s shape, round to nearest even, saturating) and the exponents of their
    power-of-two scales as int32 `[..., n / 64]`. A block with a NaN or an infinity becomes NaN (kernels promise only
    that the broken value itself does not become finite).
    """
    if x.shape[-1] % BLOCK:
        raise ValueError(f"fp8 simulation works on blocks of {BLOCK} values, got a last axis of {x.shape[-1]}")
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1)
    finite = torch.isfinite(amax)
    exponent = torch.where(finite, scale_exponent(torch.where(finite, amax, 1.0).clamp_min(AMAX_FLOOR)), 0)
    scaled = (blocks * power_of_two(-exponent)[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    values = torch.where(finite[..., None], scaled, torch.nan).to(torch.float8_e4m3fn)
    return values.flatten(-2), exponent


def dequantise64(values: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """fp32 values of `quantise64`'s result."""
    return (values.float().unflatten(-1, (-1, BLOCK)) * power_of_two(exponent)[..., None]).flatten(-2)


def fp8sim64(x: torch.Tensor) -> torch.Tensor:
    """What fp8 storage would make of `x [..., 64 n]` (bf16 or fp32), in `x`'s dtype.

    Every result fits bf16 exactly. Rounding: to nearest even in e4m3, subnormals included, saturating at 448 scales.
    """
    return dequantise64(*quantise64(x)).to(x.dtype)
