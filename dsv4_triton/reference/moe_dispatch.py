"""Rows and weights grouped by expert, in plain PyTorch: the plan of `moe_plan`, and copies."""

from __future__ import annotations

import torch

from dsv4_triton.reference.moe_plan import moe_plan


def moe_dispatch(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    *,
    block_rows: int,
    rows: torch.Tensor | None = None,
    row_weights: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    tiles: torch.Tensor | None = None,
    num_tiles: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(rows [T k, D], row_weights [T k], positions, tiles, num_tiles)`; rows without a pair are left as they are."""
    plan = moe_plan(ids, num_experts, block_rows=block_rows, positions=positions, tiles=tiles, num_tiles=num_tiles)
    rows = x.new_zeros(ids.numel(), x.shape[1]) if rows is None else rows
    row_weights = weights.new_zeros(ids.numel()) if row_weights is None else row_weights
    token, choice = (plan[0] >= 0).nonzero(as_tuple=True)
    place = plan[0][token, choice].long()
    rows[place] = x[token]
    row_weights[place] = weights[token, choice]
    return rows, row_weights, *plan
