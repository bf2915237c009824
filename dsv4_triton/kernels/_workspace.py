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

from dsv4_triton.device import refuse_in_capture
from dsv4_triton.kernels._checks import check_tensor

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


def check_workspace(op: str, workspace: torch.Tensor, device: torch.device) -> None:
    """TypeError or ValueError for anything but a flat, contiguous and aligned uint8 tensor on `device`."""
    check_tensor(op, "workspace", workspace, (None,), torch.uint8, device=device)
    if workspace.data_ptr() % START_ALIGNMENT:
        raise ValueError(f"{op}: workspace starts at an address that is no multiple of {START_ALIGNMENT}")


def carve(op: str, workspace: torch.Tensor | None, device: torch.device, parts: Iterable[Part]) -> list[torch.Tensor]:
    """One contiguous, uninitialised tensor for each part, cut out of `workspace`, or new ones where it is None.

    TypeError or ValueError for what is no workspace (`check_workspace`) or too small a one; the message says how many
    bytes are needed. CaptureError for a capture without one.
    """
    if workspace is None:
        refuse_in_capture(device, f"{op}: scratch was to be allocated, for want of a workspace,")
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in parts]
    check_workspace(op, workspace, device)
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
