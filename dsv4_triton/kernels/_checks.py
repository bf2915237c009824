"""Argument checks of the launchers: one clear message that names the op, the argument, what it got and what fits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsv4_triton.device import UnsupportedDeviceError, device_types

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
    An argument without `device` is the one that decides it, and must lie where there are kernels.
    Raises TypeError for a wrong type or dtype, UnsupportedDeviceError for a device without kernels and ValueError for
    anything else.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(tensor).__name__}")
    found = tensor.dtype
    if found is not dtype and (isinstance(dtype, torch.dtype) or found not in dtype):
        dtypes = (dtype,) if isinstance(dtype, torch.dtype) else dtype
        raise TypeError(f"{op}: {name} has dtype {found}, expected {' or '.join(map(str, dtypes))}")
    sizes = tensor.shape
    fits = len(sizes) == len(shape)
    for want, got in zip(shape, sizes):
        fits = fits and (want is None or want == got)
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{op}: {name} has shape {tuple(sizes)}, expected ({wanted})")
    if device is None:
        if not tensor.is_cpu and tensor.device.type not in device_types():
            wanted = " or ".join(map(repr, device_types()))
            raise UnsupportedDeviceError(f"{op}: {name} is on {tensor.device}, which has no kernels; use {wanted}")
    elif tensor.device != device:
        raise ValueError(f"{op}: {name} is on {tensor.device}, expected {device} like the other arguments")
    # The common case needs one call; a launch on the host costs little more than its checks.
    if tensor.is_contiguous() or tensor.numel() == 0:
        return
    strides = tensor.stride()
    inner = {"contiguous": 0, "page": 1, "rows": len(sizes) - 1}[layout]
    expected = 1
    for axis in range(len(sizes) - 1, inner - 1, -1):
        if sizes[axis] != 1 and strides[axis] != expected:
            raise ValueError(f"{op}: {name} has strides {strides}, axis {axis} must have stride {expected}")
        expected *= sizes[axis]


def check_filled(op: str, **tensors: torch.Tensor | None) -> None:
    """Refuse empty tensors that a kernel reads whatever the indices say: a masked index is read at row 0."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.numel() == 0:
            raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected at least one row")


def output(
    op: str, name: str, out: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """`out` checked against the result's shape and dtype, or a new tensor."""
    if out is None:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    check_tensor(op, name, out, shape, dtype, device=device)
    return out
