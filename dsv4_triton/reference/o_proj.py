"""Attention output: inverse RoPE at the query's position, then the grouped low-rank projection."""

from __future__ import annotations

import torch

from dsv4_triton.reference.mx import quantise_rows
from dsv4_triton.reference.rope import rotate_last


def quantise_wo_a(wo_a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP8 weights `[G, R, K]` (float8_e4m3fn) and scales `[G, R]` (fp32) of `wo_a [G, R, K]`."""
    return quantise_rows(wo_a)


def o_proj(
    o: torch.Tensor,
    wo_a: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    wo_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """`z[t, g] = wo_a[g] @ unrope(o[t])[heads of group g]` for `o [T, H, 512]` and `wo_a [G, R, H / G * 512]`.

    Returns `[T, G * R]` in `o`'s dtype: the rotation is rounded to that dtype, the product accumulates in fp32. With
    `wo_scale` the weights are those of `quantise_wo_a`, and the rotated rows of a token's group are quantised the same
    way. Rows of padding tokens (position -1) are zero. Callers must not rely on `o` afterwards: the kernel uses it as
    scratch.
    """
    groups, rank, width = wo_a.shape
    x = rotate_last(o, positions, cos_sin, inverse=True).to(o.dtype).float().reshape(-1, groups, width)
    w = wo_a.float()
    if wo_scale is not None:
        elements, scale = quantise_rows(x)
        x, w = elements.float() * scale[..., None], w * wo_scale[..., None]
    z = torch.einsum("tgk,grk->tgr", x, w).reshape(-1, groups * rank).to(o.dtype)
    return z if out is None else out.copy_(z)
