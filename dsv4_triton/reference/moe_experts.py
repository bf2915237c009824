"""The experts of a mixture-of-experts layer, in plain PyTorch with fp32 maths.

    [a | b] = w13_e x
    h = weight * silu(min(a, limit)) * clamp(b, -limit, limit), in x's dtype
    out = sum over the token's choices of w2_e h

The routing weight is applied before w2. Source: `Expert` and `MoE` of the official DeepSeek inference code.
"""

from __future__ import annotations

import torch

from dsv4_triton.reference._deliver import deliver
from dsv4_triton.reference.grouped_matmul_swiglu import gate_up
from dsv4_triton.reference.swiglu import swiglu


def moe_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    swiglu_limit: float | None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, D] fp32 (or out's dtype): the weighted sum of each token's experts; see `dsv4_triton.kernels.moe_experts`."""
    result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        if not 0 <= expert < w13.shape[0]:
            continue
        token, choice = (ids == expert).nonzero(as_tuple=True)
        products = torch.cat([x[token].float() @ w.float().T for w in gate_up(w13[expert])], dim=1)
        h = swiglu(products, limit=swiglu_limit, row_weights=weights[token, choice]).to(x.dtype)
        result.index_add_(0, token, h.float() @ w2[expert].float().T)
    return deliver(result, out)
