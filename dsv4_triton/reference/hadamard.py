"""The Hadamard rotation of the indexer: `128^-0.5 * H x` with the +-1 Sylvester matrix H.

`hadamard(x, matrix)` maps [..., n] to [..., n]; the matrix is that of `dsv4_triton/hadamard.py`. It is symmetric and,
with the factor, orthonormal, so queries and keys that are both rotated keep their dot products. Source: docs/model.md,
section 6.
"""

from __future__ import annotations

import torch


def hadamard(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """`n^-0.5 * x @ matrix` over the last axis in fp32, rounded once to `x.dtype`; `matrix` is `sylvester(n)`."""
    scale = matrix.shape[0] ** -0.5
    return ((x.float() @ matrix.float()) * scale).to(x.dtype)
