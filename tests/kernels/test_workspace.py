"""Cutting scratch out of a workspace: sizes, places, and the messages about what does not fit."""

from __future__ import annotations

import pytest
import torch

from dsv4_triton.kernels._workspace import ALIGNMENT, carve, workspace_bytes

CPU = torch.device("cpu")
PARTS = [((3, 5), torch.float32), ((0, 7), torch.float32), ((700,), torch.int8), ((2, 2, 2), torch.bfloat16)]


def test_parts_are_aligned_apart_and_inside() -> None:
    workspace = torch.zeros(workspace_bytes(PARTS), dtype=torch.uint8)
    pieces = carve("op", workspace, CPU, PARTS)
    for number, (piece, (shape, dtype)) in enumerate(zip(pieces, PARTS, strict=True), 1):
        assert piece.shape == shape and piece.dtype == dtype and piece.is_contiguous()
        assert (piece.data_ptr() - workspace.data_ptr()) % ALIGNMENT == 0 or piece.numel() == 0
        piece.view(torch.uint8).fill_(number)
    assert [int((workspace == number).sum()) for number in (1, 3, 4)] == [60, 700, 16]


def test_same_call_same_addresses() -> None:
    workspace = torch.empty(workspace_bytes(PARTS), dtype=torch.uint8)
    first, second = (carve("op", workspace, CPU, PARTS) for _ in range(2))
    assert [piece.data_ptr() for piece in first] == [piece.data_ptr() for piece in second]


def test_without_a_workspace_memory_is_new() -> None:
    pieces = carve("op", None, CPU, PARTS)
    assert [(tuple(piece.shape), piece.dtype) for piece in pieces] == PARTS


def test_one_byte_short_is_an_error_that_says_what_is_needed() -> None:
    needed = workspace_bytes(PARTS)
    with pytest.raises(ValueError, match=rf"^op: workspace has {needed - 1} bytes, this call needs {needed}$"):
        carve("op", torch.empty(needed - 1, dtype=torch.uint8), CPU, PARTS)


@pytest.mark.parametrize(
    ("workspace", "error", "message"),
    [
        (torch.empty(8192, dtype=torch.int8), TypeError, "dtype torch.int8, expected torch.uint8"),
        (torch.empty(2, 4096, dtype=torch.uint8), ValueError, r"shape \(2, 4096\), expected \(any\)"),
        (torch.empty(8192, dtype=torch.uint8)[::2], ValueError, "axis 0 must have stride 1"),
        (torch.empty(8192, dtype=torch.uint8)[1:], ValueError, "no multiple of 64"),
        (torch.empty(8192, dtype=torch.uint8, device="meta"), ValueError, "on meta, expected cpu"),
    ],
)
def test_what_is_no_workspace_is_refused(workspace: torch.Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        carve("op", workspace, CPU, PARTS)
