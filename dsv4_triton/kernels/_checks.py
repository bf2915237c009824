"""Argument checks of the launchers: one clear message that names the op, the argument, what it got and what is right."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Dtypes = torch.dtype | Sequence[torch.dtype]
FLOATS = (torch.bfloat16, torch.float32)
"""Activation dtypes: bf16 in production, fp32 for exact comparisons on the host."""


def check_tensor(
    op: str,
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    dtype: Dtypes,
    *,
    device: torch.device | None = None,
    layout: str = "contiguous",
) -> None:
    """Check rank, shape, dtype, device and layout of `tensor`.

    `shape` entries of None match any size. `layout` is "contiguous", "rows" (only the last axis must have stride 1)
    or "page" (the axes after the first are contiguous; the first may have any stride, as in vLLM's packed caches).
    Raises TypeError for a wrong type or dtype and ValueError for anything else.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(tensor).__name__}")
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
    if tensor.dtype not in dtypes:
        raise TypeError(f"{op}: {name} has dtype {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    if tensor.dim() != len(shape) or any(
        want is not None and want != got for want, got in zip(shape, tensor.shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected ({wanted})")
    if device is not None and tensor.device != device:
        raise ValueError(f"{op}: {name} is on {tensor.device}, expected {device} like the other arguments")
    if tensor.numel() == 0:
        return
    inner = {"contiguous": 0, "page": 1, "rows": tensor.dim() - 1}[layout]
    expected = 1
    for axis in range(tensor.dim() - 1, inner - 1, -1):
        if tensor.shape[axis] != 1 and tensor.stride(axis) != expected:
            raise ValueError(f"{op}: {name} has strides {tensor.stride()}, axis {axis} must have stride {expected}")
        expected *= tensor.shape[axis]


def output(
    op: str, name: str, out: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """`out` checked against the result's shape and dtype, or a new tensor."""
    if out is None:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    check_tensor(op, name, out, shape, dtype, device=device)
    return out
