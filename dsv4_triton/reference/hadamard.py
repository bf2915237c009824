"""The Hadamard rotation of the indexer: `128^-0.5 * H x` with the +-1 Sylvester matrix H.

Shapes: `sylvester(n)` is [n, n], `hadamard(x, matrix)` maps [..., n] to [..., n]. The matrix is symmetric and, with the
factor, orthonormal, so queries and keys that are both rotated keep their dot products. Source:
docs/model.md, section 6.
"""

from __future__ import annotations

import torch


def sylvester(n: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> torch.Tensor:
    """The Sylvester (natural order) Hadamard matrix [n, n] of +-1: H_1 = [1], H_2m = [[H, H], [H, -H]].

    +-1 is exact in every dtype. ValueError when `n` is not a power of two.
    """
    if n < 1 or n & (n - 1):
        raise ValueError(f"sylvester: n must be a power of two, got {n}")
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while matrix.shape[0] < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return matrix


def hadamard(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """`n^-0.5 * x @ matrix` over the last axis in fp32, rounded once to `x.dtype`; `matrix` is `sylvester(n)`."""
    scale = matrix.shape[0] ** -0.5
    return ((x.float() @ matrix.float()) * scale).to(x.dtype)
