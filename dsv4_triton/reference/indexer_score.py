"""Reference of `indexer_score`: weighted relu scores of every visible indexer key (docs/model.md, section 6)."""

from __future__ import annotations

import torch


def indexer_score(
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    weights: torch.Tensor,
    key_cache: torch.Tensor,
    scale_cache: torch.Tensor | None,
    block_table: torch.Tensor,
    token_req: torch.Tensor,
    n_vis: torch.Tensor,
    *,
    max_entries: int,
    hide: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores [T, max_entries] fp32: `k_scale[s] * sum_h weights[t, h] * q_scale[t, h] * relu(<q[t, h], key[s]>)`.

    q [T, HI, 128], weights [T, HI] fp32, key_cache [blocks, rows, 128] of the dtype of q, block_table [B, M] int32,
    token_req and n_vis [T] int32. Entry s of a request is row s % rows of block table[s // rows]. Entries
    s >= n_vis[t] are -inf and their keys are not read; without `hide` they may be anything.
    """
    tokens = q.shape[0]
    rows = key_cache.shape[1]
    scores = torch.empty(tokens, max_entries, device=q.device) if out is None else out
    scores.fill_(-torch.inf)
    for t in range(tokens):
        count = min(int(n_vis[t]), max_entries)
        if count <= 0:
            continue
        entry = torch.arange(count, device=q.device)
        block = block_table[int(token_req[t])][entry // rows].long().clamp(min=0)
        keys = key_cache[block, entry % rows].float()
        weight = weights[t] if q_scale is None else weights[t] * q_scale[t].float()
        score = torch.relu(keys @ q[t].float().T) @ weight
        scores[t, :count] = score if scale_cache is None else score * scale_cache[block, entry % rows].float()
    return scores
