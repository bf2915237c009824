"""Reference of `compressor_state_insert`: one raw row [u | g + ape] per token (docs/model.md, section 5)."""

from __future__ import annotations

import torch


def compressor_state_insert(
    proj: torch.Tensor, ape: torch.Tensor, positions: torch.Tensor, state: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write `[u | g + ape[p mod r]]` of each token to its state row.

    proj [T, 2W] fp32 is [u | g], ape [r, W] fp32, positions [T] int32 absolute, state [blocks, rows, 2W] fp32,
    slots [T] int32 (block * rows + offset; -1 = skip).
    """
    live = (slots >= 0).nonzero().squeeze(-1)
    if not len(live):
        return
    ratio, width = ape.shape
    rows = proj[live].clone()
    rows[:, width:] += ape[positions[live].long() % ratio]
    slot = slots[live].long()
    state[slot // state.shape[1], slot % state.shape[1]] = rows
