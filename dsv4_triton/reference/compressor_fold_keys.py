"""Reference of `compressor_fold_keys`: the entries and index keys that close in a step of a c4 layer."""

from __future__ import annotations

import torch

from dsv4_triton.reference.compressor_fold import compressor_fold
from dsv4_triton.reference.indexer_insert_k import indexer_insert_k


def compressor_fold_keys(
    state: torch.Tensor,
    state_table: torch.Tensor,
    slots: torch.Tensor,
    weight: torch.Tensor,
    cache: torch.Tensor,
    key_state: torch.Tensor,
    key_state_table: torch.Tensor,
    key_slots: torch.Tensor,
    key_weight: torch.Tensor,
    hadamard: torch.Tensor,
    key_cache: torch.Tensor,
    scale_cache: torch.Tensor | None,
    token_req: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    eps: float,
    fake_quant: bool = False,
) -> None:
    """`compressor_fold` of the main compressor, `compressor_fold` of the indexer's into rows in hadamard's dtype, and
    `indexer_insert_k` of those."""
    compressor_fold(
        state, state_table, token_req, positions, slots, weight, cos_sin, ratio=4, eps=eps, cache=cache,
        fake_quant=fake_quant,
    )  # fmt: skip
    keys = torch.empty(len(positions), 128, dtype=hadamard.dtype, device=hadamard.device)
    compressor_fold(
        key_state, key_state_table, token_req, positions, key_slots, key_weight, cos_sin, ratio=4, eps=eps, out=keys
    )
    indexer_insert_k(keys, hadamard, key_cache, scale_cache, key_slots)
