"""Product of row groups with one weight matrix each, in plain PyTorch with fp32 maths.

`out[r] = x[r] @ w[expert of r]^T`
"""

from __future__ import annotations

import torch


def grouped_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    tiles: torch.Tensor,
    num_tiles: torch.Tensor,
    *,
    block_rows: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[S, N] fp32 (or out's dtype) from x [S, K] and w [E, N, K]; see `dsv4_triton.kernels.grouped_matmul`."""
    result = x.new_empty(x.shape[0], w.shape[1], dtype=torch.float32) if out is None else out
    for expert, first, rows in tiles[:, : int(num_tiles)].T.tolist():
        assert 0 < rows <= block_rows
        result[first : first + rows] = (x[first : first + rows].float() @ w[expert].float().T).to(result.dtype)
    return result
