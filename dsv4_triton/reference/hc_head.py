"""mHC collapse of the four streams before the language-model head, in plain PyTorch with fp32 maths.

    m = (F @ fn^T) * rsqrt(mean(F^2) + norm_eps);  pre_j = sigmoid(m_j scale[0] + base_j) + hc_eps;  h = sum_j pre_j x_j

Source: `hc_head` of the official DeepSeek inference code, restated in docs/model.md.
"""

from __future__ import annotations

import torch

from dsv4_triton.reference._deliver import deliver
from dsv4_triton.reference.hc_pre import collapse, mixes


def hc_head(
    x: torch.Tensor,
    fn_parts: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    norm_weight: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """The collapsed stream [T, D] in x's dtype, normed where a weight is given; see `dsv4_triton.kernels.hc_head`."""
    pre = torch.sigmoid(mixes(x, fn_parts, norm_eps) * scale[0] + base) + hc_eps
    return deliver(collapse(x, pre, norm_weight, norm_eps), out)
