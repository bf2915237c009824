"""MXFP8: blocks of 32 e4m3 elements with a shared e8m0 exponent, and their alignment to one exponent a row.

Quantisation is the conversion of the OCP Microscaling specification v1.0, as in CANN's DynamicMxQuant with its default
`scale_alg` 0 (`torch_npu.npu_dynamic_mx_quant`). For each block of 32 values along the last axis:

    exponent = max(floor(log2(amax)) - 8, -127)            8 is the exponent of 256, e4m3's largest power of two
    element  = e4m3(clamp(x / 2^exponent, -448, 448))      round to nearest even, subnormals kept

The exponent is read from the bits of the fp32 amax, so there is no logarithm; amounts of fp32's subnormal range have
the field of 2^-127. Because of the floor, amounts from 448 to 512 times the scale saturate. A block of zeros has
exponent -127 and zero elements; with a NaN or an infinity the exponent is e8m0's NaN and so is the block.

The matrix unit that Triton reaches multiplies e4m3 elements without block scales, so a product needs rows with one
scale: `quantise_rows` puts the elements of a row on the grid of the row's largest exponent. What its blocks saturate is
as in `quantise`, and so is every value of at least 2^-6 of the row's scale, bit for bit. Smaller ones, below 2^-14 of
the row's largest value, are rounded once to a multiple of 2^-9 of the scale: an error of at most 2^-18 of that value.
"""

from __future__ import annotations

import torch

BLOCK = 32
EMAX = 8
E4M3_MAX = 448.0
LEAST_EXPONENT = -127
NAN_EXPONENT = 128
"""Stands for e8m0's NaN (255): the exponent of a block that has none."""
LEAST_ROW_EXPONENT = -126
"""The least exponent of a row, whose scale is then a normal fp32 number."""


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MX blocks along the last axis of `x` (bf16 or fp32).

    Elements as float8_e4m3fn in `x`'s shape, and int32 exponents `[..., n / 32]`.
    """
    if x.shape[-1] % BLOCK:
        raise ValueError(f"MX quantisation works on blocks of {BLOCK} values, got a last axis of {x.shape[-1]}")
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1)
    field = amax.contiguous().view(torch.int32) >> 23
    exponent = (field - 127 - EMAX).clamp_min(LEAST_EXPONENT)
    finite = torch.isfinite(amax)
    scaled = (blocks * _power_of_two(-exponent)[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    elements = torch.where(finite[..., None], scaled, torch.nan).to(torch.float8_e4m3fn)
    return elements.flatten(-2), torch.where(finite, exponent, NAN_EXPONENT)


def dequantise(elements: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """fp32 values of `quantise`'s result."""
    scale = torch.where(exponent == NAN_EXPONENT, torch.nan, _power_of_two(exponent))
    return (elements.float().unflatten(-1, (-1, BLOCK)) * scale[..., None]).flatten(-2)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MX elements of the rows of `x` on one grid a row: float8_e4m3fn in `x`'s shape and fp32 powers of two `[...]`.

    What is multiplied is `elements * scale`. A row with a NaN or an infinity has the scale NaN, and unspecified
    elements.
    """
    _, exponent = quantise(x)
    row = exponent.amax(-1, keepdim=True).clamp_min(LEAST_ROW_EXPONENT)
    finite = row != NAN_EXPONENT
    row = torch.where(finite, row, 0)
    bound = E4M3_MAX * _power_of_two(exponent - row)[..., None]
    scaled = (x.float().unflatten(-1, (-1, BLOCK)) * _power_of_two(-row)[..., None]).clamp(-bound, bound)
    scale = torch.where(finite, _power_of_two(row), torch.nan)
    return scaled.flatten(-2).to(torch.float8_e4m3fn), scale[..., 0]


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """`2^exponent` in fp32 for int32 exponents: exact, zero below fp32's range."""
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent).float()
