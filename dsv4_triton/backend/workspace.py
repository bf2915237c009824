"""The scratch memory of a device: one block that all ops and layers share, as large as the largest op may need.

It is allocated when the model is built and never moves, so that a captured graph finds it at the same address. What ops
keep in it lives no longer than the op; the indexer's scores live until its top-k has read them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsv4_triton.backend.serving import Serving
from dsv4_triton.config import HEAD_DIM
from dsv4_triton.kernels._workspace import Part, workspace_bytes
from dsv4_triton.kernels.hc_head import hc_head_workspace
from dsv4_triton.kernels.hc_post_pre import hc_post_pre_workspace
from dsv4_triton.kernels.indexer_topk import MIN_TILE, indexer_topk_workspace
from dsv4_triton.kernels.moe_experts import moe_experts_workspace
from dsv4_triton.kernels.o_proj import o_proj_workspace
from dsv4_triton.kernels.sparse_attention import sparse_attention_workspace

SCORE_BYTES = 64 << 20
"""Bound of the indexer's scores: steps with more scores run the indexer over runs of tokens."""


class Workspace:
    """`memory` is the block, flat uint8."""

    def __init__(self, size: int, device: torch.device | str) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)


def score_run(entries: int) -> int:
    """Tokens whose scores of `entries` entries the indexer holds at a time."""
    return max(1, SCORE_BYTES // (4 * entries))


def scores(tokens: int, entries: int) -> list[Part]:
    """The indexer's scores of a run, at the start of the workspace."""
    return [((tokens, entries), torch.float32)]


def indexer_workspace(tokens: int, entries: int, k: int) -> int:
    """Bytes for the scores and the top-k of steps of up to `tokens` tokens and up to `entries` entries.

    With fewer entries more tokens make a run, so the top-k needs the most just above a number of whole tiles, or at the
    end; the scores of a run are bounded by themselves.
    """
    held = min(workspace_bytes(scores(tokens, entries)), workspace_bytes(scores(1, max(entries, SCORE_BYTES // 4))))
    counts = (*range(1, entries, MIN_TILE), entries)
    return held + max(indexer_topk_workspace(min(tokens, score_run(count)), count, k) for count in counts)


def step_workspace(
    serving: Serving, dtype: torch.dtype, *, tokens: int, context: int, shards: int = 1, drafts: bool = False
) -> int:
    """Bytes that suffice for every step of up to `tokens` tokens whose sequences are up to `context` long; with
    `drafts` also for the layer of the MTP block."""
    ratios = {*serving.model.ratios, 0} if drafts else set(serving.model.ratios)
    return max(_needs(serving, dtype, tokens, context, shards, ratios))


def _needs(
    serving: Serving, dtype: torch.dtype, tokens: int, context: int, shards: int, ratios: set[int]
) -> Iterator[int]:
    model, layout, family = serving.model, serving.layout, serving.choices.family
    yield hc_post_pre_workspace(tokens, model.hidden, dtype, family)
    yield hc_head_workspace(tokens, dtype, family)
    yield moe_experts_workspace(
        tokens, model.experts_per_token + 1, model.experts + 1, model.hidden, model.moe_intermediate // shards, dtype
    )
    if serving.choices.o_proj_format == "mxfp8":
        yield o_proj_workspace(tokens, model.o_groups // shards, model.heads // model.o_groups * HEAD_DIM)
    for ratio in ratios:
        entries = context // ratio if ratio else 0
        selects = ratio == 4 and entries > model.index_topk
        yield sparse_attention_workspace(
            tokens,
            model.heads // shards,
            dtype,
            family,
            window_page=layout.window.rows,
            cmp_page=layout.compressed[ratio].rows if ratio else 1,
            topk=model.index_topk if selects else 0,
            max_n_vis=min(entries, model.index_topk) if ratio == 4 else entries,
            record=layout.window.dtype == torch.uint8,
        )
        if selects:
            yield indexer_workspace(tokens, entries, model.index_topk)
