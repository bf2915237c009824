"""Reference of `indexer_topk`: the k best visible entries under an exact tie rule (docs/model.md, section 6)."""

from __future__ import annotations

import torch


def indexer_topk(
    scores: torch.Tensor,
    n_vis: torch.Tensor,
    k: int,
    *,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Indices [T, k] int32 of the k best of the first `n_vis[t]` entries of scores [T, N] fp32.

    Higher score first, equal scores (-0.0 equals 0.0) by lower index; NaN is never selected, -inf is the lowest score.
    The selected indices stand in ascending order, followed by -1.
    """
    tokens, entries = scores.shape
    result = torch.full((tokens, k), -1, dtype=torch.int32, device=scores.device)
    if entries:
        index = torch.arange(entries, device=scores.device)
        valid = (index < n_vis[:, None]) & ~torch.isnan(scores)
        by_score = torch.sort(torch.where(valid, scores, -torch.inf), dim=1, descending=True, stable=True).indices
        valid_first = torch.sort(valid.gather(1, by_score).int(), dim=1, descending=True, stable=True).indices
        best = by_score.gather(1, valid_first)[:, :k]
        chosen = torch.where(valid.gather(1, best), best, entries).sort(dim=1).values
        result[:, : chosen.shape[1]] = torch.where(chosen < entries, chosen, -1).int()
    return result if out is None else out.copy_(result)
