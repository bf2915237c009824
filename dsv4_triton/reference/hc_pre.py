"""mHC collapse of the four streams into a sub-layer's input, in plain PyTorch with fp32 maths.

    F = x as [T, 4D], stream-major;  s = rsqrt(mean(F^2) + norm_eps);  m = (F @ fn^T) * s
    pre_j = sigmoid(m[j] scale[0] + base[j]) + hc_eps
    post_j = 2 sigmoid(m[4+j] scale[1] + base[4+j])
    comb = Sinkhorn(m[8:] scale[2] + base[8:]): row softmax + hc_eps, then alternately columns and rows, columns last
    y = sum_j pre_j x_j

Source: `hc_pre` and `hc_split_sinkhorn` of the official DeepSeek inference code, restated in docs/model.md.
"""

from __future__ import annotations

import torch

from dsv4_triton.reference._deliver import deliver


def split_fn(fn: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The fp32 mixing matrix `[N, K]` as `[P, N, K]` parts in the activations' dtype that add up to it.

    fp32 activations take it whole (P = 1). For bf16 activations it is two bf16 parts, `bf16(fn)` and
    `bf16(fn - bf16(fn))`: relative error at most 2^-17, and products with bf16 activations are exact in fp32.
    """
    if dtype == torch.float32:
        return fn.float()[None].contiguous()
    high = fn.to(torch.bfloat16)
    return torch.stack((high, (fn.float() - high.float()).to(torch.bfloat16)))


def mixes(x: torch.Tensor, fn_parts: torch.Tensor, norm_eps: float) -> torch.Tensor:
    """`m` [T, N] fp32 of the formula above."""
    flat = x.float().flatten(1)
    scale = torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    return flat @ fn_parts.float().sum(0).T * scale


def collapse(x: torch.Tensor, pre: torch.Tensor, norm_weight: torch.Tensor | None, norm_eps: float) -> torch.Tensor:
    """`sum_j pre_j x_j` in x's dtype and, where a weight is given, its RMS norm (from the rounded value)."""
    y = (pre[..., None] * x.float()).sum(1).to(x.dtype)
    if norm_weight is None:
        return y
    wide = y.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm_eps)
    return (norm_weight.float() * wide * scale).to(x.dtype)


def hc_pre(
    x: torch.Tensor,
    fn_parts: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iters: int = 20,
    norm_weight: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
    wide: torch.Tensor | None = None,
    post: torch.Tensor | None = None,
    comb: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(y [T, D] in x's dtype, post [T, 4] fp32, comb [T, 4, 4] fp32)`; see `dsv4_triton.kernels.hc_pre`."""
    m = mixes(x, fn_parts, norm_eps)
    pre = torch.sigmoid(m[:, :4] * scale[0] + base[:4]) + hc_eps
    result_post = 2 * torch.sigmoid(m[:, 4:8] * scale[1] + base[4:8])
    c = torch.softmax((m[:, 8:] * scale[2] + base[8:]).unflatten(-1, (4, 4)), dim=-1) + hc_eps
    c = c / (c.sum(1, keepdim=True) + hc_eps)
    for _ in range(sinkhorn_iters - 1):
        c = c / (c.sum(2, keepdim=True) + hc_eps)
        c = c / (c.sum(1, keepdim=True) + hc_eps)
    result = collapse(x, pre, norm_weight, norm_eps)
    if wide is not None:
        wide.copy_(result)
    return deliver(result, y), deliver(result_post, post), deliver(c, comb)
