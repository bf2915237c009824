"""Expert choice and routing weights (sqrt-softplus scores), in plain PyTorch with fp32 maths.

    s = sqrt(softplus(logit))
    ids = the k best of s + bias (of equal ones the lower expert) in ascending order, or tid2eid[token id]
    w = routed_scaling_factor * s[ids] / (sum s[ids] + 1e-20)          the bias chooses and never weighs

Source: `Gate` of the official DeepSeek inference code, restated in docs/model.md; the 1e-20 (which only
matters where every chosen score underflows) is from transformers' DeepSeek-V4 router.
"""

from __future__ import annotations

import torch

from dsv4_triton.reference._deliver import deliver

_LOWEST = -3.0e38


def moe_router(
    logits: torch.Tensor,
    k: int,
    *,
    routed_scaling_factor: float,
    bias: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    shared_expert: bool = False,
    weights: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(weights [T, k] fp32, ids [T, k] int32)`; see `dsv4_triton.kernels.moe_router`.

    Token ids outside the table count as token 0. A NaN score ranks last. `shared_expert` adds a column: expert E with
    weight 1.
    """
    logits = logits.float()
    score = torch.sqrt(logits.clamp(min=0) + torch.log1p(torch.exp(-logits.abs())))
    if tid2eid is not None:
        assert input_ids is not None
        token = torch.where((input_ids >= 0) & (input_ids < tid2eid.shape[0]), input_ids, 0)
        chosen = tid2eid[token.long()].long()
    else:
        key = score if bias is None else score + bias.float()
        key = torch.where(key.isnan(), _LOWEST, key).clamp(min=_LOWEST)
        chosen = torch.sort(key, dim=-1, descending=True, stable=True).indices[:, :k].sort(dim=-1).values
    picked = score.gather(1, chosen)
    weight = picked / (picked.sum(-1, keepdim=True) + 1e-20) * routed_scaling_factor
    if shared_expert:
        weight = torch.nn.functional.pad(weight, (0, 1), value=1.0)
        chosen = torch.nn.functional.pad(chosen, (0, 1), value=logits.shape[1])
    return deliver(weight, weights), deliver(chosen.to(torch.int32), ids)
