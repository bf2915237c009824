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
    rotated: bool = False,
    q_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Queries [T, HI, 128] -> (values [T, HI, 128] of `dtype`, scale [T, HI] or None).

    RoPE (half layout, last 64 features) rounds to `q.dtype`, unless q is `rotated` already; the Hadamard rotation
    rounds to `q.dtype`; then `index_quant.quantise_rows`. Padding tokens (position -1) give zero values, or with
    `rotated` what q holds.
    """
    if not rotated:
        q = rope(q, positions, cos_sin)
    values, scale = quantise_rows(rotate(q, hadamard), dtype)
    if q_out is not None:
        values = q_out.copy_(values)
    if scale_out is not None and scale is not None:
        scale = scale_out.copy_(scale)
    return values, scale
