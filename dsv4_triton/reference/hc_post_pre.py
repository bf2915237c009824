"""mHC write-back followed by the collapse for the next sub-layer, in plain PyTorch with fp32 maths."""

from __future__ import annotations

import torch

from dsv4_triton.reference.hc_post import hc_post
from dsv4_triton.reference.hc_pre import hc_pre


def hc_post_pre(
    y: torch.Tensor,
    x: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn_parts: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iters: int = 20,
    norm_weight: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    wide: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`hc_post` into the new streams, rounded to x's dtype, then `hc_pre` of them; see the kernel's launcher."""
    streams = hc_post(y, x, post, comb, out=out)
    collapsed = hc_pre(
        streams,
        fn_parts,
        scale,
        base,
        norm_eps=norm_eps,
        hc_eps=hc_eps,
        sinkhorn_iters=sinkhorn_iters,
        norm_weight=norm_weight,
        wide=wide,
    )
    return streams, *collapsed
