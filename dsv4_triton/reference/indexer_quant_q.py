"""Reference of `indexer_quant_q`: RoPE, Hadamard and quantisation of the indexer's queries, docs/model.md section 6."""

from __future__ import annotations

import torch

from dsv4_triton.reference.hadamard import hadamard as rotate
from dsv4_triton.reference.index_quant import quantise_rows
from dsv4_triton.reference.rope import rope


def indexer_quant_q(
    q: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    hadamard: torch.Tensor,
    *,
    dtype: torch.dtype,
    q_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Queries [T, HI, 128] -> (values [T, HI, 128] of `dtype`, scale [T, HI] or None).

    RoPE (half layout, last 64 features) rounds to `q.dtype`, the Hadamard rotation rounds to `q.dtype`, then
    `index_quant.quantise_rows`. Padding tokens (position -1) give zero values and zero scales.
    """
    live = positions >= 0
    rotated = rotate(rope(q, positions.clamp(min=0), cos_sin), hadamard)
    values, scale = quantise_rows(torch.where(live[:, None, None], rotated, 0), dtype)
    if scale is not None:
        scale = torch.where(live[:, None], scale, 0)
    if q_out is not None:
        values = q_out.copy_(values)
    if scale_out is not None and scale is not None:
        scale = scale_out.copy_(scale)
    return values, scale
