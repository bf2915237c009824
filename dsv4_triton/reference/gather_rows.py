"""Rows that each token attends, copied into one contiguous run per token with an additive mask, in plain PyTorch."""

from __future__ import annotations

import torch

from dsv4_triton.reference.rows import is_record, unpack

BLOCK = 32
MASKED = -1e30


def gather_rows(
    window_cache: torch.Tensor,
    window_table: torch.Tensor,
    token_req: torch.Tensor,
    positions: torch.Tensor,
    *,
    window: int,
    columns: int,
    cmp_cache: torch.Tensor | None = None,
    cmp_table: torch.Tensor | None = None,
    n_vis: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    no_bias: bool = False,
    dtype: torch.dtype | None = None,
    fill: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows [T, columns, 512] and mask [T, columns]: 0 where a row exists, -1e30 and a zero row elsewhere; no mask with
    `no_bias`.

    `fill` changes nothing: all rows are stored.
    """
    tokens = len(positions)
    if is_record(window_cache):
        dtype = dtype or torch.bfloat16
        window_cache = unpack(window_cache)
        cmp_cache = None if cmp_cache is None else unpack(cmp_cache)
    rows = torch.empty(tokens, columns, 512, dtype=dtype or window_cache.dtype) if rows is None else rows
    bias = torch.empty(tokens, columns) if bias is None else bias
    rows.zero_()
    bias.fill_(MASKED)
    first = -(-window // BLOCK) * BLOCK
    for t in range(tokens):
        p, b = int(positions[t]), int(token_req[t])
        if p < 0:
            continue
        for j, at in enumerate(range(max(0, p - window + 1), p + 1)):
            page = int(window_table[b, at // window_cache.shape[1]])
            rows[t, j], bias[t, j] = window_cache[page, at % window_cache.shape[1]], 0.0
        if cmp_cache is None or cmp_table is None:
            continue
        if indices is not None:
            picked = indices[t].tolist()
        else:
            assert n_vis is not None
            picked = list(range(int(n_vis[t])))
        for j, at in enumerate(picked):
            if at >= 0:
                page = int(cmp_table[b, at // cmp_cache.shape[1]])
                rows[t, first + j], bias[t, first + j] = cmp_cache[page, at % cmp_cache.shape[1]], 0.0
    return rows, None if no_bias else bias
