"""Where each (token, choice) pair goes when rows are grouped by expert, in plain PyTorch.

Pairs are ordered by expert, then by token and choice. Tiles cut each expert's rows into runs of at most `block_rows`.
"""

from __future__ import annotations

import torch

from dsv4_triton.reference._deliver import deliver


def tile_capacity(pairs: int, num_experts: int, block_rows: int) -> int:
    """Tiles that `pairs` rows can need at most, however they are spread over the experts."""
    active = min(pairs, num_experts)
    return active + (pairs - active) // block_rows


def moe_plan(
    ids: torch.Tensor,
    num_experts: int,
    *,
    block_rows: int,
    positions: torch.Tensor | None = None,
    tiles: torch.Tensor | None = None,
    num_tiles: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(positions [T, k], tiles [3, C], num_tiles [1])`, all int32; see `dsv4_triton.kernels.moe_plan`."""
    flat = ids.flatten().long()
    valid = (flat >= 0) & (flat < num_experts)
    order = torch.sort(torch.where(valid, flat, num_experts), stable=True).indices
    place = torch.empty_like(flat)
    place[order] = torch.arange(len(flat), device=ids.device)
    place = torch.where(valid, place, -1).to(torch.int32).view(ids.shape)
    runs = torch.zeros(3, tile_capacity(len(flat), num_experts, block_rows), dtype=torch.int32, device=ids.device)
    count, first = 0, 0
    for expert, rows in enumerate(torch.bincount(flat[valid], minlength=num_experts).tolist()):
        for row in range(0, rows, block_rows):
            runs[:, count] = torch.tensor([expert, first + row, min(block_rows, rows - row)])
            count += 1
        first += rows
    used = torch.tensor([count], dtype=torch.int32, device=ids.device)
    return deliver(place, positions), deliver(runs, tiles), deliver(used, num_tiles)
