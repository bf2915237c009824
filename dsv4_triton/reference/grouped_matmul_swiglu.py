"""Product of row groups with gate and up matrices of one expert each, and their clamped SwiGLU, in plain PyTorch.

    a = w_gate x,  b = w_up x
    out[r] = row_weight[r] * silu(min(a, limit)) * clamp(b, -limit, limit)                 fp32, rounded once

w13 [E, 2I, K] holds runs of B = gcd(I, 64) gate rows, each followed by the up rows of the same features.
"""

from __future__ import annotations

import math

import torch

from dsv4_triton.reference.swiglu import swiglu


def gate_up(w13: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gate and the up matrices [..., I, K] of w13 [..., 2I, K]."""
    inner, width = w13.shape[-2] // 2, w13.shape[-1]
    runs = w13.reshape(*w13.shape[:-2], -1, 2, math.gcd(inner, 64), width)
    gate, up = runs.unbind(-3)
    return gate.flatten(-3, -2), up.flatten(-3, -2)


def grouped_matmul_swiglu(
    x: torch.Tensor,
    w13: torch.Tensor,
    tiles: torch.Tensor,
    num_tiles: torch.Tensor,
    *,
    block_rows: int,
    limit: float | None,
    row_weights: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[S, I] in x's dtype from x [S, K] and w13 [E, 2I, K]; see `dsv4_triton.kernels.grouped_matmul_swiglu`."""
    result = x.new_empty(x.shape[0], w13.shape[1] // 2) if out is None else out
    for expert, first, rows in tiles[:, : int(num_tiles)].T.tolist():
        assert 0 < rows <= block_rows
        part = slice(first, first + rows)
        products = torch.cat([x[part].float() @ w.float().T for w in gate_up(w13[expert])], dim=1)
        weights = None if row_weights is None else row_weights[part]
        result[part] = swiglu(products, limit=limit, row_weights=weights).to(result.dtype)
    return result
