"""mHC write-back of a sub-layer's output into the four streams, in plain PyTorch with fp32 maths.

    x'_k = post_k y + sum_j comb[j, k] x_j        the sum runs over the FIRST index of comb

Source: `hc_post` of the official DeepSeek inference code, restated in docs/model.md.
"""

from __future__ import annotations

import torch

from dsv4_triton.reference._deliver import deliver


def hc_post(
    y: torch.Tensor,
    x: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """New streams [T, 4, D] in x's dtype, one rounding; see `dsv4_triton.kernels.hc_post`."""
    mixed = torch.einsum("tjk,tjd->tkd", comb.float(), x.float())
    return deliver((post.float()[..., None] * y.float()[:, None] + mixed).to(x.dtype), out)
