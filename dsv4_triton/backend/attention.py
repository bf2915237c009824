"""The attention of one layer: prologue, compressor, indexer, sparse attention, output projection.

Prefill and decode, alone or mixed, take the same path: every stage works on the step's tokens in one ragged pass, and
what a token sees depends on its position alone.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from dsv4_triton.backend.caches import LayerCaches
from dsv4_triton.backend.metadata import CacheMetadata, StepLayout
from dsv4_triton.config import INDEX_DIM, WINDOW
from dsv4_triton.kernels.compressor_fold import compressor_fold
from dsv4_triton.kernels.compressor_state_insert import compressor_state_insert
from dsv4_triton.kernels.indexer_insert_k import indexer_insert_k
from dsv4_triton.kernels.indexer_quant_q import indexer_quant_q
from dsv4_triton.kernels.indexer_score import indexer_score
from dsv4_triton.kernels.indexer_topk import indexer_topk
from dsv4_triton.kernels.kv_norm_rope_insert import kv_norm_rope_insert
from dsv4_triton.kernels.o_proj import o_proj
from dsv4_triton.kernels.q_norm_rope import q_norm_rope
from dsv4_triton.kernels.sparse_attention import sparse_attention

SCORE_BYTES = 64 << 20
"""Bound of the indexer's score buffer: steps with more scores run the indexer over runs of tokens."""


class CompressorWeights(Protocol):
    """`project` gives [u | g] [T, 2W] fp32 of hidden states; `ape` [ratio, W] fp32; `norm` [d]."""

    ape: torch.Tensor
    norm: torch.Tensor

    def project(self, hidden: torch.Tensor) -> torch.Tensor: ...


class IndexerWeights(Protocol):
    """Indexer of a c4 layer: `queries` [T, heads * 128] of the query latent, `head_weights` [T, heads] fp32 of hidden
    states (both constant factors included), the +-1 `hadamard` matrix [128, 128] and the key compressor."""

    heads: int
    topk: int
    hadamard: torch.Tensor
    compressor: CompressorWeights

    def queries(self, latent: torch.Tensor) -> torch.Tensor: ...

    def head_weights(self, hidden: torch.Tensor) -> torch.Tensor: ...


class AttentionWeights(Protocol):
    """What the forward pass needs of a layer; feature order is that of half-layout RoPE."""

    ratio: int
    heads: int
    eps: float
    scale: float
    fake_quant: bool
    caches: LayerCaches
    kv_norm: torch.Tensor
    sink: torch.Tensor
    wo_a: torch.Tensor
    cos_sin: torch.Tensor
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None

    def latents(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normed query latent [T, q_lora] and raw kv [T, 512]."""
        ...

    def queries(self, latent: torch.Tensor) -> torch.Tensor:
        """[T, heads * 512]."""
        ...

    def project_out(self, z: torch.Tensor) -> torch.Tensor:
        """[T, D] of the grouped projection's result."""
        ...


def attend(layer: AttentionWeights, hidden: torch.Tensor, output: torch.Tensor, metadata: dict[str, Any]) -> None:
    """Write the attention output of `hidden` [T, D] into `output` [T, D] and update the layer's caches."""
    caches = layer.caches
    window: CacheMetadata = metadata[caches.window.prefix]
    step = window.step
    tokens = step.num_tokens
    if hidden.shape[0] != tokens:
        raise ValueError(f"dsa_forward: hidden has {hidden.shape[0]} tokens, the step's metadata {tokens}")

    latent, kv = layer.latents(hidden)
    q = layer.queries(latent).view(tokens, layer.heads, -1)
    q_norm_rope(q, step.positions, layer.cos_sin, eps=layer.eps, out=q)
    kv_norm_rope_insert(
        kv,
        layer.kv_norm,
        step.positions,
        layer.cos_sin,
        caches.window.rows,
        window.slots,
        eps=layer.eps,
        fake_quant=layer.fake_quant,
    )
    compressed: dict[str, Any] = {}
    if layer.ratio:
        compressed = _compress(layer, hidden, latent, metadata)
    attended = sparse_attention(
        q,
        caches.window.rows,
        window.block_table,
        layer.sink,
        step.token_req,
        step.positions,
        scale=layer.scale,
        window=WINDOW,
        **compressed,
    )
    z = o_proj(attended, layer.wo_a, step.positions, layer.cos_sin)
    output.copy_(layer.project_out(z))


def _compress(
    layer: AttentionWeights, hidden: torch.Tensor, latent: torch.Tensor, metadata: dict[str, Any]
) -> dict[str, Any]:
    """Store the step's compressed entries; the arguments of `sparse_attention` that select what tokens see of them."""
    caches, compressor = layer.caches, layer.compressor
    assert caches.compressed is not None and caches.state is not None and compressor is not None
    entries: CacheMetadata = metadata[caches.compressed.prefix]
    state: CacheMetadata = metadata[caches.state.prefix]
    step = entries.step
    compressor_state_insert(compressor.project(hidden), compressor.ape, step.positions, caches.state.rows, state.slots)
    compressor_fold(
        caches.state.rows,
        state.block_table,
        step.token_req,
        step.positions,
        entries.slots,
        compressor.norm,
        layer.cos_sin,
        ratio=layer.ratio,
        eps=layer.eps,
        cache=caches.compressed.rows,
        fake_quant=layer.fake_quant,
    )
    arguments: dict[str, Any] = {"cmp_cache": caches.compressed.rows, "cmp_table": entries.block_table}
    if layer.indexer is not None:
        _store_index_keys(layer, layer.indexer, hidden, metadata)
        if step.max_seq_len // layer.ratio > layer.indexer.topk:
            arguments["indices"] = _select(layer, layer.indexer, hidden, latent, metadata)
            return arguments
    arguments["n_vis"] = step.visible(layer.ratio)
    arguments["max_n_vis"] = step.max_seq_len // layer.ratio
    return arguments


def _store_index_keys(
    layer: AttentionWeights, indexer: IndexerWeights, hidden: torch.Tensor, metadata: dict[str, Any]
) -> None:
    """Fold and store the step's index keys, also in steps that need no scores: later steps read them."""
    caches, compressor = layer.caches, indexer.compressor
    assert caches.index_keys is not None and caches.index_state is not None
    keys: CacheMetadata = metadata[caches.index_keys.prefix]
    state: CacheMetadata = metadata[caches.index_state.prefix]
    step = keys.step
    compressor_state_insert(
        compressor.project(hidden), compressor.ape, step.positions, caches.index_state.rows, state.slots
    )
    folded = torch.empty(step.num_tokens, INDEX_DIM, dtype=hidden.dtype, device=hidden.device)
    compressor_fold(
        caches.index_state.rows,
        state.block_table,
        step.token_req,
        step.positions,
        keys.slots,
        compressor.norm,
        layer.cos_sin,
        ratio=layer.ratio,
        eps=layer.eps,
        out=folded,
    )
    indexer_insert_k(folded, indexer.hadamard, caches.index_keys.keys, caches.index_keys.scales, keys.slots)


def _select(
    layer: AttentionWeights,
    indexer: IndexerWeights,
    hidden: torch.Tensor,
    latent: torch.Tensor,
    metadata: dict[str, Any],
) -> torch.Tensor:
    """The best `topk` entries of each token, [T, topk] int32 with -1 after the last."""
    cache = layer.caches.index_keys
    assert cache is not None
    keys: CacheMetadata = metadata[cache.prefix]
    step: StepLayout = keys.step
    q, q_scale = indexer_quant_q(
        indexer.queries(latent).view(step.num_tokens, indexer.heads, INDEX_DIM),
        step.positions,
        layer.cos_sin,
        indexer.hadamard,
        dtype=cache.keys.dtype,
    )
    weights = indexer.head_weights(hidden)
    visible = step.visible(layer.ratio)
    entries = step.max_seq_len // layer.ratio
    run = max(1, SCORE_BYTES // (4 * entries))
    indices = torch.empty(step.num_tokens, indexer.topk, dtype=torch.int32, device=hidden.device)
    for start in range(0, step.num_tokens, run):
        part = slice(start, start + run)
        scores = indexer_score(
            q[part],
            None if q_scale is None else q_scale[part],
            weights[part],
            cache.keys,
            cache.scales,
            keys.block_table,
            step.token_req[part],
            visible[part],
            max_entries=entries,
        )
        indexer_topk(scores, visible[part], indexer.topk, out=indices[part])
    return indices
