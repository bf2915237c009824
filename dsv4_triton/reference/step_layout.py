"""Per-token layout of one step's ragged batch: position, request row and visible compressed entries."""

from __future__ import annotations

import torch

StepLayout = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def step_layout(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_tokens: int,
    *,
    positions: torch.Tensor | None = None,
    token_req: torch.Tensor | None = None,
    n_vis4: torch.Tensor | None = None,
    n_vis128: torch.Tensor | None = None,
) -> StepLayout:
    """Expand `query_start_loc [B + 1]` and `seq_lens [B]` (tokens after this step) to `num_tokens` rows.

    Token i of request b has position `seq_lens[b] - (query_start_loc[b + 1] - i)`, sees `n_vis4 = (p + 1) // 4` and
    `n_vis128 = (p + 1) // 128` compressed entries. Rows beyond the last request, and rows whose position would be
    negative (a capture run with empty sequences), are padding: position -1, request -1, nothing visible.
    All results are `[num_tokens]` int32; the keyword tensors are outputs to reuse.
    """
    token = torch.arange(num_tokens, dtype=torch.int32, device=seq_lens.device)
    ends = query_start_loc[1:].contiguous()
    request = torch.searchsorted(ends, token, right=True, out_int32=True)
    inside = request < len(ends)
    index = torch.where(inside, request, 0).long()
    position = torch.where(inside, (seq_lens[index] - ends[index] + token) if len(ends) else token, -1)
    live = inside & (position >= 0)
    position = torch.where(live, position, -1).int()
    results = (
        position,
        torch.where(live, request, -1).int(),
        (position + 1) // 4,
        (position + 1) // 128,
    )
    outs = (positions, token_req, n_vis4, n_vis128)
    return tuple(r if out is None else out.copy_(r) for r, out in zip(results, outs, strict=True))  # type: ignore[return-value]
