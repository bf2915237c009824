"""Reference of `latent_norm_insert`: the query latent's norm, the window row, and the state rows of a step."""

from __future__ import annotations

import torch

from dsv4_triton.reference._deliver import deliver
from dsv4_triton.reference.compressor_state_insert import compressor_state_insert
from dsv4_triton.reference.kv_norm_rope_insert import kv_norm_rope_insert


def latent_norm_insert(
    latent: torch.Tensor,
    latent_weight: torch.Tensor,
    kv: torch.Tensor,
    kv_weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    eps: float,
    fake_quant: bool = False,
    proj: torch.Tensor | None = None,
    ape: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    state_slots: torch.Tensor | None = None,
    index_proj: torch.Tensor | None = None,
    index_ape: torch.Tensor | None = None,
    index_state: torch.Tensor | None = None,
    index_slots: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`latent * rsqrt(mean(latent^2) + eps) * latent_weight` in fp32 with one cast; `kv_norm_rope_insert` of kv, and
    `compressor_state_insert` of each projection that is given."""
    kv_norm_rope_insert(kv, kv_weight, positions, cos_sin, cache, slots, eps=eps, fake_quant=fake_quant)
    for row, phases, rows, where in (
        (proj, ape, state, state_slots),
        (index_proj, index_ape, index_state, index_slots),
    ):
        if row is not None and phases is not None and rows is not None and where is not None:
            compressor_state_insert(row, phases, positions, rows, where)
    x = latent.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * latent_weight.float()
    return deliver(x.to(latent.dtype), out)
