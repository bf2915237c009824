"""Rotary embedding of the last 64 features: each pair `a + jb` is multiplied by `e^{j theta}`, or by its conjugate."""

from __future__ import annotations

import torch

ROTARY = 64


def rotate_last(
    x: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    inverse: bool = False,
    interleaved: bool = False,
) -> torch.Tensor:
    """fp32 copy of `x [T, ..., d]` with its last 64 features rotated by the angles of `positions [T]`.

    `cos_sin [P, 64]` fp32 holds `[cos(32) | sin(32)]` per position. Pairs are `(i, 32 + i)` of the 64 features, or
    `(2i, 2i + 1)` when interleaved. Rows of negative positions become zero.
    """
    x = x.float()
    rows = cos_sin[positions.clamp_min(0).long()].reshape(-1, *(1,) * (x.dim() - 2), ROTARY)
    cos, sin = rows[..., : ROTARY // 2], rows[..., ROTARY // 2 :]
    if inverse:
        sin = -sin
    plain, tail = x[..., :-ROTARY], x[..., -ROTARY:]
    if interleaved:
        a, b = tail[..., 0::2], tail[..., 1::2]
        tail = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = tail.chunk(2, dim=-1)
        tail = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    padding = (positions < 0).reshape(-1, *(1,) * (x.dim() - 1))
    return torch.cat((plain, tail), dim=-1).masked_fill(padding, 0.0)


def rope(
    x: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    inverse: bool = False,
    interleaved: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate the last 64 features of `x [T, H, d]` in fp32 and cast once to its dtype; see `rotate_last`.

    `out` may be `x`.
    """
    result = rotate_last(x, positions, cos_sin, inverse=inverse, interleaved=interleaved).to(x.dtype)
    return result if out is None else out.copy_(result)
