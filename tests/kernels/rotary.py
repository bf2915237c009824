"""RoPE tables for kernel tests: fp32 angles, and big tables of which only the needed rows exist in memory."""

from __future__ import annotations

import torch

LAST_POSITION = 1_048_575


def frequencies(base: float = 10000.0) -> torch.Tensor:
    """The 32 inverse frequencies of 64 rotary features, fp32."""
    return base ** (-torch.arange(0, 64, 2, dtype=torch.float32) / 64)


def table(positions: torch.Tensor, *, size: int | None = None, base: float = 10000.0) -> torch.Tensor:
    """`[size, 64]` rows `[cos | sin]` of fp32 angles. Only the rows of `positions` are written (and so take memory)."""
    wanted = positions.clamp_min(0).unique().long()
    rows = torch.empty(size or int(wanted.max()) + 1, 64) if len(wanted) else torch.empty(0, 64)
    angles = wanted.float()[:, None] * frequencies(base)
    rows[wanted] = torch.cat((angles.cos(), angles.sin()), dim=1)
    return rows


def to_half(x: torch.Tensor) -> torch.Tensor:
    """Interleaved pairs of the last 64 features to half layout `[even | odd]`."""
    tail = x[..., -64:]
    return torch.cat((x[..., :-64], tail[..., 0::2], tail[..., 1::2]), dim=-1)
