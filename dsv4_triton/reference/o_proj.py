"""Attention output: inverse RoPE at the query's position, then the grouped low-rank projection."""

from __future__ import annotations

import torch

from dsv4_triton.reference.rope import rotate_last


def o_proj(
    o: torch.Tensor,
    wo_a: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`z[t, g] = wo_a[g] @ unrope(o[t])[heads of group g]` for `o [T, H, 512]` and `wo_a [G, R, H / G * 512]`.

    Returns `[T, G * R]` in `o`'s dtype: the rotation is rounded to that dtype, the product accumulates in fp32. Rows of
    padding tokens (position -1) are zero. Callers must not rely on `o` afterwards: the kernel uses it as scratch.
    """
    groups, rank, width = wo_a.shape
    x = rotate_last(o, positions, cos_sin, inverse=True).to(o.dtype).float().reshape(-1, groups, width)
    z = torch.einsum("tgk,grk->tgr", x, wo_a.float()).reshape(-1, groups * rank).to(o.dtype)
    return z if out is None else out.copy_(z)
