"""Scratch memory of the launchers: parts of one block of bytes that the caller owns.

An op that needs more than its outputs takes `workspace=`, a flat uint8 tensor, and cuts its scratch out of it. Beside
the launcher a pure function `<op>_workspace(...)` gives the bytes that suffice for every call up to the given sizes.
Nothing is kept in a workspace from one call to the next, so all ops and layers of a device share one, at an address
that never changes. Without a workspace a launcher allocates its scratch: convenient in tests and scripts.

    def _scratch(tokens, ...) -> list[Part]: ...                        # shapes and dtypes
    def OP_workspace(tokens, ...) -> int: return workspace_bytes(_scratch(tokens, ...))
    def OP(..., workspace=None): part, gram = carve("OP", workspace, x.device, _scratch(len(x), ...))
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

Part = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of one piece of scratch."""
ALIGNMENT = 512
"""Distance in bytes that parts keep from the start of a workspace is a multiple of this, as torch_npu allocates."""
START_ALIGNMENT = 64
"""Alignment of the workspace itself: what torch gives every tensor on a CPU."""


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _bytes(part: Part) -> int:
    shape, dtype = part
    return math.prod(shape) * dtype.itemsize


def workspace_bytes(parts: Iterable[Part]) -> int:
    """Bytes of a workspace that holds all `parts` at once."""
    return sum(_aligned(_bytes(part)) for part in parts)


def carve(op: str, workspace: torch.Tensor | None, device: torch.device, parts: Iterable[Part]) -> list[torch.Tensor]:
    """One contiguous, uninitialised tensor for each part, cut out of `workspace`, or new ones where it is None.

    TypeError or ValueError for a workspace that is no flat, contiguous and aligned uint8 tensor on `device`, or too
    small; the message says how many bytes are needed.
    """
    if workspace is None:
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in parts]
    if workspace.dtype != torch.uint8:
        raise TypeError(f"{op}: workspace has dtype {workspace.dtype}, expected torch.uint8")
    if workspace.dim() != 1 or not workspace.is_contiguous():
        raise ValueError(f"{op}: workspace has shape {tuple(workspace.shape)}, expected one contiguous axis of bytes")
    if workspace.device != device:
        raise ValueError(f"{op}: workspace is on {workspace.device}, expected {device} like the other arguments")
    if workspace.data_ptr() % START_ALIGNMENT:
        raise ValueError(f"{op}: workspace starts at an address that is no multiple of {START_ALIGNMENT}")
    pieces: list[torch.Tensor] = []
    parts = list(parts)
    needed = workspace_bytes(parts)
    if len(workspace) < needed:
        raise ValueError(f"{op}: workspace has {len(workspace)} bytes, this call needs {needed}")
    start = 0
    for part in parts:
        shape, dtype = part
        count = _bytes(part)
        pieces.append(workspace[start : start + count].view(dtype).view(shape))
        start += _aligned(count)
    return pieces
