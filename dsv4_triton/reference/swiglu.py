"""Clamped SwiGLU, in plain PyTorch with fp32 maths.

    gate = min(x[:, :I], limit);  up = clamp(x[:, I:], -limit, limit);  out = row_weight * silu(gate) * up

The gate has no lower bound and is clamped before silu. Source: `Expert` of the official DeepSeek inference code.
"""

from __future__ import annotations

import torch

from dsv4_triton.reference._deliver import deliver


def swiglu(
    x: torch.Tensor,
    *,
    limit: float | None,
    row_weights: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[M, I] from [M, 2I], in out's dtype (x's without out); see `dsv4_triton.kernels.swiglu`."""
    gate, up = x.float().chunk(2, dim=-1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    result = gate * torch.sigmoid(gate) * up
    if row_weights is not None:
        result = result * row_weights[:, None]
    return deliver(result if out is not None else result.to(x.dtype), out)
