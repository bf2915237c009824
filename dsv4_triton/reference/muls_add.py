"""`x * scale + y`, in plain PyTorch with fp32 maths."""

from __future__ import annotations

import torch

from dsv4_triton.reference._deliver import deliver


def muls_add(x: torch.Tensor, y: torch.Tensor, scale: float, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """`x * scale + y` in y's dtype, one rounding; see `dsv4_triton.kernels.muls_add`."""
    return deliver((x.float() * scale + y.float()).to(y.dtype), out)
