"""The matrix of the indexer's Hadamard rotation, which the model stores and the references are tested with."""

from __future__ import annotations

import torch


def sylvester(n: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> torch.Tensor:
    """The Sylvester (natural order) Hadamard matrix [n, n] of +-1: H_1 = [1], H_2m = [[H, H], [H, -H]].

    +-1 is exact in every dtype. ValueError when `n` is not a power of two.
    """
    if n < 1 or n & (n - 1):
        raise ValueError(f"sylvester: n must be a power of two, got {n}")
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while matrix.shape[0] < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return matrix
