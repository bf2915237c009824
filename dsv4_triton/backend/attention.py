"""The attention of one layer: prologue (`prologue.py`), indexer, sparse attention, grouped output projection.

Prefill and decode, alone or mixed, take the same path: every stage works on the step's tokens in one ragged pass, and
what a token sees depends on its position alone.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from dsv4_triton.backend.caches import LayerCaches
from dsv4_triton.backend.metadata import CacheMetadata, StepLayout
from dsv4_triton.backend.prologue import on_one_stream, on_two_streams
from dsv4_triton.backend.streams import SideStream
from dsv4_triton.backend.workspace import Workspace, score_run, scores
from dsv4_triton.config import WINDOW
from dsv4_triton.kernels._workspace import carve, workspace_bytes
from dsv4_triton.kernels.indexer_quant_q import indexer_quant_q
from dsv4_triton.kernels.indexer_score import indexer_score
from dsv4_triton.kernels.indexer_topk import indexer_topk
from dsv4_triton.kernels.o_proj import o_proj
from dsv4_triton.kernels.sparse_attention import sparse_attention

OP = "dsa_forward"


class CompressorWeights(Protocol):
    """`ape` [ratio, W] fp32 and `norm` [d]."""

    ape: torch.Tensor
    norm: torch.Tensor


class IndexerWeights(Protocol):
    """Indexer of a c4 layer: `queries` [T, heads * 128] of the query latent, the +-1 `hadamard` matrix [128, 128] and
    the key compressor."""

    heads: int
    hadamard: torch.Tensor
    compressor: CompressorWeights

    def queries(self, latent: torch.Tensor) -> torch.Tensor: ...


class AttentionWeights(Protocol):
    """What the forward pass needs of a layer; feature order is that of half-layout RoPE. `wo_scale` comes with MXFP8
    weights `wo_a`.

    `selection` [max tokens, index_topk] int32 is one for all layers of a model in which c4 layers share selections:
    those with an indexer write the step's rows of it, those without read them.

    `side`, where the prologue of compressed layers runs on two streams, is the second one.
    """

    ratio: int
    heads: int
    eps: float
    scale: float
    fake_quant: bool
    caches: LayerCaches
    workspace: Workspace
    q_norm: torch.Tensor
    kv_norm: torch.Tensor
    sink: torch.Tensor
    wo_a: torch.Tensor
    wo_scale: torch.Tensor | None
    cos_sin: torch.Tensor
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None
    index_topk: int
    selection: torch.Tensor | None
    side: SideStream | None

    def latents(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Raw query latent [T, q_lora] and raw kv [T, 512]."""
        ...

    def compressor_rows(self, wide: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of a compressed layer, in fp32: [u | g] [T, 2W]; with an indexer also its [u | g] and the weights of its
        heads [T, heads], constant factors included."""
        ...

    def queries(self, latent: torch.Tensor) -> torch.Tensor:
        """[T, heads * 512] of the normed latent."""
        ...


def attend(
    layer: AttentionWeights, hidden: torch.Tensor, wide: torch.Tensor, output: torch.Tensor, metadata: dict[str, Any]
) -> None:
    """Write the grouped projection of the attention of `hidden` [T, D] into `output` [T, G R] and update the layer's
    caches; `wide` is `hidden` in fp32."""
    caches = layer.caches
    window: CacheMetadata = metadata[caches.window.prefix]
    step = window.step
    tokens = step.num_tokens
    if hidden.shape[0] != tokens:
        raise ValueError(f"{OP}: hidden has {hidden.shape[0]} tokens, the step's metadata {tokens}")

    selects = layer.ratio == 4 and step.max_seq_len // layer.ratio > layer.index_topk
    two_streams = layer.side is not None and layer.ratio > 0
    prologue = on_two_streams if two_streams else on_one_stream
    q, index_q, head_weights = prologue(layer, hidden, wide, metadata, selects=selects)
    compressed: dict[str, Any] = {}
    if layer.ratio:
        indices = _indices(layer, head_weights, index_q, metadata) if selects else None
        compressed = _visible(layer, indices, metadata)
    attended = sparse_attention(
        q,
        caches.window.rows,
        window.block_table,
        layer.sink,
        step.token_req,
        step.positions,
        scale=layer.scale,
        window=WINDOW,
        workspace=layer.workspace.memory,
        **compressed,
    )
    o_proj(
        attended,
        layer.wo_a,
        step.positions,
        layer.cos_sin,
        wo_scale=layer.wo_scale,
        out=output,
        workspace=layer.workspace.memory,
    )


def rehearse(layer: AttentionWeights, hidden: torch.Tensor, wide: torch.Tensor, output: torch.Tensor) -> None:
    """Write zeros into `output` [T, G R] and hold in between as much memory as `attend` can hold at once, without
    caches: what vLLM's profiling run takes is what it leaves free beside them."""
    latent, kv = layer.latents(hidden)
    rows = layer.compressor_rows(wide) if layer.ratio else ()
    latent = torch.zeros(latent.shape, dtype=latent.dtype, device=latent.device)
    q = layer.queries(latent)
    held = [kv, *rows, torch.empty_like(q)]
    if layer.ratio == 4 and len(layer.cos_sin) // layer.ratio > layer.index_topk:
        if layer.indexer is not None:
            held.append(layer.indexer.queries(latent))
        if layer.selection is None:
            held.append(torch.empty(len(hidden), layer.index_topk, dtype=torch.int32, device=hidden.device))
    output.zero_()


def _visible(layer: AttentionWeights, indices: torch.Tensor | None, metadata: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `sparse_attention` that say what tokens see of the compressed entries: those at `indices`
    [T, topk], or all of them."""
    cache = layer.caches.compressed
    assert cache is not None
    entries: CacheMetadata = metadata[cache.prefix]
    step = entries.step
    arguments: dict[str, Any] = {"cmp_cache": cache.rows, "cmp_table": entries.block_table}
    if indices is not None:
        return arguments | {"indices": indices}
    return arguments | {"n_vis": step.visible(layer.ratio), "max_n_vis": step.max_seq_len // layer.ratio}


def _indices(
    layer: AttentionWeights,
    head_weights: torch.Tensor | None,
    index_q: torch.Tensor | None,
    metadata: dict[str, Any],
) -> torch.Tensor:
    """The entries of each token, [T, topk] int32 with -1 after the last: those that the rotated queries `index_q`
    select, or without an indexer those that the last layer with one has selected in this step."""
    if layer.indexer is not None:
        assert index_q is not None and head_weights is not None
        return _select(layer, layer.indexer, head_weights, index_q, metadata)
    assert layer.selection is not None
    step: StepLayout = metadata[layer.caches.window.prefix].step
    return layer.selection[: step.num_tokens]


def _select(
    layer: AttentionWeights,
    indexer: IndexerWeights,
    head_weights: torch.Tensor,
    index_q: torch.Tensor,
    metadata: dict[str, Any],
) -> torch.Tensor:
    """The best `topk` entries of each token, [T, topk] int32 with -1 after the last."""
    cache = layer.caches.index_keys
    assert cache is not None
    keys: CacheMetadata = metadata[cache.prefix]
    step: StepLayout = keys.step
    q, q_scale = indexer_quant_q(
        index_q, step.positions, layer.cos_sin, indexer.hadamard, dtype=cache.keys.dtype, rotated=True
    )
    visible = step.visible(layer.ratio)
    entries = step.max_seq_len // layer.ratio
    run = min(step.num_tokens, score_run(entries))
    memory, held = layer.workspace.memory, scores(run, entries)
    (buffer,) = carve(OP, memory, index_q.device, held)
    rest = memory[workspace_bytes(held) :]
    if layer.selection is None:
        indices = torch.empty(step.num_tokens, layer.index_topk, dtype=torch.int32, device=index_q.device)
    else:
        indices = layer.selection[: step.num_tokens]
    for start in range(0, step.num_tokens, run):
        part = slice(start, start + run)
        found = indexer_score(
            q[part],
            None if q_scale is None else q_scale[part],
            head_weights[part],
            cache.keys,
            cache.scales,
            keys.block_table,
            step.token_req[part],
            visible[part],
            max_entries=entries,
            hide=False,
            out=buffer[: len(q[part])],
        )
        indexer_topk(found, visible[part], layer.index_topk, out=indices[part], workspace=rest)
    return indices
