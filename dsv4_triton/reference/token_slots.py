"""Cache slot of each token's row, from its position and its request's block table."""

from __future__ import annotations

import torch


def token_slots(
    positions: torch.Tensor,
    token_req: torch.Tensor,
    block_table: torch.Tensor,
    *,
    rows_per_block: int,
    ratio: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Flat slots `[T]` int32, `block * rows_per_block + offset`, of tokens `positions [T]` of requests `token_req [T]`.

    Ratio 1 (window and state rows): token p has row p. Ratio r (compressed entries): only a token that closes a window,
    `(p + 1) % r == 0`, has a row, `p // r`. The slot is -1 for all others, for padding tokens (negative position or
    request), and where the row's block is the null block 0, negative or beyond the table.
    """
    row = torch.div(positions, ratio, rounding_mode="floor").long()
    column = torch.div(row, rows_per_block, rounding_mode="floor")
    valid = (positions >= 0) & (token_req >= 0) & ((positions + 1) % ratio == 0) & (column < block_table.shape[1])
    slots = torch.full_like(positions, -1)
    block = block_table[token_req[valid].long(), column[valid]]
    slots[valid] = torch.where(block > 0, block * rows_per_block + (row[valid] % rows_per_block).int(), -1)
    return slots if out is None else out.copy_(slots)
