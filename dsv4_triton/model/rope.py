"""RoPE tables and the half layout of rotated features.

Checkpoints rotate interleaved pairs (2i, 2i+1) of the last 64 features. The kernels want the even features first, then
the odd ones, so weights that produce or consume rotated features are permuted once, at load time (`half_layout`).
Source of the frequencies: `precompute_freqs_cis` of the official DeepSeek inference code.
"""

from __future__ import annotations

import math

import torch

from dsv4_triton.config import ROPE_DIM, Yarn


def frequencies(base: float, yarn: Yarn | None) -> torch.Tensor:
    """The 32 rotation frequencies [32] fp32, in radians per position."""
    index = torch.arange(0, ROPE_DIM, 2, dtype=torch.float32)
    plain = 1.0 / (base ** (index / ROPE_DIM))
    if yarn is None:
        return plain

    def dim_of(turns: float) -> float:
        return ROPE_DIM * math.log(yarn.original_positions / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dim_of(yarn.beta_fast)), 0)
    high = float(min(math.ceil(dim_of(yarn.beta_slow)), ROPE_DIM - 1))
    if low == high:
        high += 0.001
    ramp = ((torch.arange(ROPE_DIM // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def rope_table(base: float, yarn: Yarn | None, positions: int) -> torch.Tensor:
    """[positions, 64] fp32: cos(32) | sin(32) of each position.

    The angle is the fp32 product of position and frequency: at a million positions its rounding is far larger than
    that of the cosine, and it is what the checkpoints were trained with.
    """
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies(base, yarn))
    return torch.cat((angles.cos(), angles.sin()), dim=1)


class RopeTables:
    """Tables of `positions` rows, one per base and scaling, shared by all layers."""

    def __init__(self, positions: int) -> None:
        self._positions = positions
        self._tables: dict[tuple[float, Yarn | None], torch.Tensor] = {}

    def table(self, base: float, yarn: Yarn | None) -> torch.Tensor:
        key = (base, yarn)
        if key not in self._tables:
            self._tables[key] = rope_table(base, yarn, self._positions)
        return self._tables[key]


def half_order(dim: int) -> torch.Tensor:
    """Source index of each feature of a `dim`-wide head in half layout: [0 .. dim-65, even of the last 64, odd]."""
    start = dim - ROPE_DIM
    return torch.cat((torch.arange(start), torch.arange(start, dim, 2), torch.arange(start + 1, dim, 2)))


def half_layout(tensor: torch.Tensor, dim: int, axis: int) -> torch.Tensor:
    """`tensor` with every run of `dim` features along `axis` brought from interleaved to half layout."""
    size = tensor.shape[axis]
    if size % dim:
        raise ValueError(f"axis {axis} of size {size} is not made of heads of {dim} features")
    order = half_order(dim)
    index = (torch.arange(0, size, dim)[:, None] + order).flatten()
    return tensor.index_select(axis, index.to(tensor.device))
