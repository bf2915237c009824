"""Query prologue: per-head RMS norm without a weight, then RoPE (spec of the model: q_b projection to attention)."""

from __future__ import annotations

import torch

from dsv4_triton.reference.rope import rope, rotate_last


def q_norm_rope(
    q: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    eps: float,
    index_q: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rope(q * rsqrt(mean(q^2) + eps))` of `q [T, H, 512]` per head, fp32 throughout, one cast to `q`'s dtype; and
    `rope(index_q)` of `index_q [T, HI, 128]` in place."""
    x = q.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    result = rotate_last(x, positions, cos_sin).to(q.dtype)
    if index_q is not None:
        rope(index_q, positions, cos_sin, out=index_q)
    return result if out is None else out.copy_(result)
