"""How indexer queries and keys are stored: int8 with an fp16 scale, e4m3 with a power-of-two fp32 scale, or plain.

Source: docs/model.md, section 6. For int8 the integers are computed from the scale as it is stored (rounded to fp16),
so that `q * scale` is the nearest representable value; a row whose scale is zero has zero integers.
"""

from __future__ import annotations

import torch

from dsv4_triton.reference.fake_quant import AMAX_FLOOR, E4M3_MAX, power_of_two, scale_exponent

SCALE_DTYPES = {torch.int8: torch.float16, torch.float8_e4m3fn: torch.float32}
"""Scale dtype of each quantised format; plain formats (bf16, fp32) have no scale."""


def quantise_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantise the last axis of `x` to `dtype` with one scale per row.

    int8: scale = fp16(amax / 127), integer = round-half-even(x / scale) clamped to +-127.
    e4m3: scale = 2^ceil(log2(max(amax, 1e-4) / 448)), value = x / scale rounded half to even.
    bf16, fp32: a cast, and no scale. Returns (values, scale [...] or None). All maths is fp32.
    """
    x = x.float()
    if dtype not in SCALE_DTYPES:
        return x.to(dtype), None
    amax = x.abs().amax(-1)
    if dtype == torch.int8:
        scale = (amax / 127.0).to(torch.float16)
        divisor = scale.float().unsqueeze(-1)
        integers = torch.where(divisor > 0, torch.round(x / divisor), 0.0).clamp(-127, 127)
        return integers.to(torch.int8), scale
    scale = power_of_two(scale_exponent(amax.clamp_min(AMAX_FLOOR)))
    return (x / scale.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale
