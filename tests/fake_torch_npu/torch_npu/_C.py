# ruff: noqa: N999
"""What torch_npu keeps in its extension module."""

import torch


def _weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A weak reference keeps its tensor here, since graphs have no pool."""
    return tensor


def _npu_getCurrentRawStream(device: int) -> int:  # noqa: N802  (torch_npu's name)
    """The stream that triton-ascend launches kernels on."""
    return torch.npu.current_stream(device).native_handle
