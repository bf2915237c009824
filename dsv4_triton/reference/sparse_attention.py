"""Sparse attention over window rows, compressed rows and a sink, in plain PyTorch with fp32 maths.

For token t at position p of request b and head h, with K the window rows max(0, p - window + 1)..p and the
compressed rows:

    a_s = scale * <q[t, h], k_s>
    M   = max(max_s a_s, sink[h])
    Z   = sum_s exp(a_s - M) + exp(sink[h] - M)
    out[t, h] = sum_s round(exp(a_s - M)) * k_s / Z

A row is key and value at once. `round` is the cast to q's dtype (nothing for fp32); Z sums the unrounded terms. Rows
may be records (uint8), which are decoded. The window and the compressed set overlap on purpose: a position may be
attended raw and compressed. Source: the official inference code, restated in docs/model.md (scores and
softmax; which keys).
"""

from __future__ import annotations

import torch

from dsv4_triton.reference.rows import loaded

HEAD_DIM = 512
_TOKENS_PER_CHUNK = 16


def sparse_attention(
    q: torch.Tensor,
    window_cache: torch.Tensor,
    window_table: torch.Tensor,
    sink: torch.Tensor,
    token_req: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    window: int = 128,
    cmp_cache: torch.Tensor | None = None,
    cmp_table: torch.Tensor | None = None,
    n_vis: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    max_n_vis: int | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention output [T, H, 512] in q's dtype; the arguments are those of `dsv4_triton.kernels.sparse_attention`.

    `workspace` is not used.
    """
    if n_vis is not None and max_n_vis is not None:
        n_vis = n_vis.clamp(max=max_n_vis)
    result = torch.zeros_like(q) if out is None else out.zero_()
    compressed = cmp_cache is not None
    dense_rows = 0
    if compressed and indices is None:
        assert n_vis is not None
        dense_rows = int(n_vis.max().clamp(min=0)) if n_vis.numel() else 0
    for start in range(0, q.shape[0], _TOKENS_PER_CHUNK):
        chunk = slice(start, start + _TOKENS_PER_CHUNK)
        p, req = positions[chunk].long(), token_req[chunk].long().clamp(min=0)
        at = p[:, None] - (window - 1) + torch.arange(window, device=q.device)
        rows, valid = _rows(window_cache, window_table, req, at, (at >= 0) & (p >= 0)[:, None])
        if cmp_cache is not None:
            assert cmp_table is not None
            if indices is not None:
                at = indices[chunk].long()
                chosen = at >= 0
            else:
                assert n_vis is not None
                at = torch.arange(dense_rows, device=q.device).expand(len(p), -1)
                chosen = at < n_vis[chunk, None]
            extra, extra_valid = _rows(cmp_cache, cmp_table, req, at, chosen & (p >= 0)[:, None])
            rows, valid = torch.cat((rows, extra), 1), torch.cat((valid, extra_valid), 1)
        rounding = q.dtype
        scores = torch.einsum("thd,tsd->ths", q[chunk].float(), rows) * scale
        scores = scores.masked_fill(~valid[:, None], float("-inf"))
        top = torch.maximum(scores.amax(-1), sink.float())[..., None]
        terms = torch.exp(scores - top)
        total = terms.sum(-1, keepdim=True) + torch.exp(sink.float()[:, None] - top)
        attended = torch.einsum("ths,tsd->thd", terms.to(rounding).float(), rows) / total
        attended = torch.where(valid.any(1)[:, None, None], attended, 0.0)
        result[chunk] = attended.to(q.dtype)
    return result


def _rows(
    cache: torch.Tensor, table: torch.Tensor, req: torch.Tensor, at: torch.Tensor, valid: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `at` [t, S] of requests `req` [t] as fp32 [t, S, 512], zero where not valid, and the mask."""
    per_page = cache.shape[1]
    safe = torch.where(valid, at, 0)
    page = table[req[:, None], safe // per_page].long()
    rows = loaded(cache[torch.where(valid, page, 0), safe % per_page])
    return torch.where(valid[..., None], rows, 0.0), valid
