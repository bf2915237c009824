"""The prologue of a layer's attention: queries, the step's rows in the layer's caches, and the entries that they close.

On one stream, kernels of the vector cores and products of the cube take turns. On two streams (option
`prologue_overlap`) the products and the queries' RoPE stay on the current stream, and what goes into caches is done
beside them, on the vector cores:

    current stream                                second stream
    query latent and kv: product
    fp32 rows of the compressors: product         norms, window row                behind the first product
    queries, queries of the indexer: products     compressor rows, entries, keys   behind the second product
    norm and RoPE of the queries

Both do the same arithmetic and give the same bits. Two streams take one or two launches more, since compressor rows are
then written apart from the norms. All memory is the current stream's: none is allocated on the second one, and what
work there reads is held until the current stream has waited for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dsv4_triton.backend.metadata import CacheMetadata
from dsv4_triton.config import INDEX_DIM
from dsv4_triton.kernels.compressor_fold import compressor_fold
from dsv4_triton.kernels.compressor_fold_keys import compressor_fold_keys
from dsv4_triton.kernels.compressor_state_insert import compressor_state_insert
from dsv4_triton.kernels.latent_norm_insert import latent_norm_insert
from dsv4_triton.kernels.q_norm_rope import q_norm_rope

if TYPE_CHECKING:
    from dsv4_triton.backend.attention import AttentionWeights


STATES = ("proj", "ape", "state", "state_slots", "index_proj", "index_ape", "index_state", "index_slots")
"""Arguments of `latent_norm_insert` for compressors."""


class Prologue(NamedTuple):
    """Normed and rotated queries [T, heads, 512]; where the layer's indexer is asked, its rotated queries
    [T, index heads, 128] and the weights of its heads [T, index heads] in fp32."""

    q: torch.Tensor
    index_q: torch.Tensor | None
    head_weights: torch.Tensor | None


def on_one_stream(
    layer: AttentionWeights, hidden: torch.Tensor, wide: torch.Tensor, metadata: dict[str, Any], *, selects: bool
) -> Prologue:
    """The prologue for `hidden` [T, D] and the same in fp32, `wide`, on the current stream."""
    latent, kv = layer.latents(hidden)
    rows = layer.compressor_rows(wide) if layer.ratio else ()
    normed = torch.empty(latent.shape, dtype=latent.dtype, device=latent.device)
    _norm(layer, latent, kv, normed, metadata, _states(layer, rows, metadata))
    prologue = _queries(layer, normed, rows, metadata, selects)
    if layer.ratio:
        _store_entries(layer, metadata)
    return prologue


def on_two_streams(
    layer: AttentionWeights, hidden: torch.Tensor, wide: torch.Tensor, metadata: dict[str, Any], *, selects: bool
) -> Prologue:
    """The same of a compressed layer, with work for caches on `layer.side`; the current stream waits for it at the
    end."""
    side = layer.side
    assert side is not None
    latent, kv = layer.latents(hidden)
    normed = torch.empty(latent.shape, dtype=latent.dtype, device=latent.device)
    with side.beside():
        _norm(layer, latent, kv, normed, metadata)
        latent_is_normed = side.mark()
    rows = layer.compressor_rows(wide)
    with side.beside():
        positions = metadata[layer.caches.window.prefix].step.positions
        for proj, ape, state, slots in _states(layer, rows, metadata):
            compressor_state_insert(proj, ape, positions, state, slots)
        _store_entries(layer, metadata)
        entries_are_stored = side.mark()
    side.wait_for(latent_is_normed)
    prologue = _queries(layer, normed, rows, metadata, selects)
    side.wait_for(entries_are_stored)
    return prologue


def _norm(
    layer: AttentionWeights,
    latent: torch.Tensor,
    kv: torch.Tensor,
    normed: torch.Tensor,
    metadata: dict[str, Any],
    states: Iterable[tuple[torch.Tensor, ...]] = (),
) -> None:
    window: CacheMetadata = metadata[layer.caches.window.prefix]
    latent_norm_insert(
        latent,
        layer.q_norm,
        kv,
        layer.kv_norm,
        window.step.positions,
        layer.cos_sin,
        layer.caches.window.rows,
        window.slots,
        eps=layer.eps,
        fake_quant=layer.fake_quant,
        out=normed,
        **dict(zip(STATES, chain(*states))),
    )


def _queries(
    layer: AttentionWeights,
    latent: torch.Tensor,
    rows: tuple[torch.Tensor, ...],
    metadata: dict[str, Any],
    selects: bool,
) -> Prologue:
    tokens = len(latent)
    q = layer.queries(latent).view(tokens, layer.heads, -1)
    index_q = head_weights = None
    if selects and layer.indexer is not None:
        index_q = layer.indexer.queries(latent).view(tokens, layer.indexer.heads, INDEX_DIM)
        head_weights = rows[2]
    positions = metadata[layer.caches.window.prefix].step.positions
    q_norm_rope(q, positions, layer.cos_sin, eps=layer.eps, index_q=index_q, out=q)
    return Prologue(q, index_q, head_weights)


def _states(
    layer: AttentionWeights, rows: tuple[torch.Tensor, ...], metadata: dict[str, Any]
) -> list[tuple[torch.Tensor, ...]]:
    """What each of the layer's compressors keeps: projected rows, ape, the state and its slots."""
    caches = layer.caches
    found: list[tuple[torch.Tensor, ...]] = []
    if layer.compressor is not None and caches.state is not None:
        slots = metadata[caches.state.prefix].slots
        found.append((rows[0], layer.compressor.ape, caches.state.rows, slots))
    if layer.indexer is not None and caches.index_state is not None:
        slots = metadata[caches.index_state.prefix].slots
        found.append((rows[1], layer.indexer.compressor.ape, caches.index_state.rows, slots))
    return found


def _store_entries(layer: AttentionWeights, metadata: dict[str, Any]) -> None:
    """Fold and store the entries, and the index keys, that close in this step; keys also in steps that need no scores,
    since later steps read them."""
    caches, compressor, indexer = layer.caches, layer.compressor, layer.indexer
    assert caches.compressed is not None and caches.state is not None and compressor is not None
    entries: CacheMetadata = metadata[caches.compressed.prefix]
    state: CacheMetadata = metadata[caches.state.prefix]
    step = entries.step
    if indexer is None:
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
        return
    assert caches.index_keys is not None and caches.index_state is not None
    keys: CacheMetadata = metadata[caches.index_keys.prefix]
    key_state: CacheMetadata = metadata[caches.index_state.prefix]
    compressor_fold_keys(
        caches.state.rows,
        state.block_table,
        entries.slots,
        compressor.norm,
        caches.compressed.rows,
        caches.index_state.rows,
        key_state.block_table,
        keys.slots,
        indexer.compressor.norm,
        indexer.hadamard,
        caches.index_keys.keys,
        caches.index_keys.scales,
        step.token_req,
        step.positions,
        layer.cos_sin,
        eps=layer.eps,
        fake_quant=layer.fake_quant,
    )
