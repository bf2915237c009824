"""Cases of the indexer, in the family's format of index keys."""

from __future__ import annotations

from typing import Any

import torch

from dsv4_triton.bench.registry import caches
from dsv4_triton.bench.registry.attention import ANGLES
from dsv4_triton.bench.registry.case import Entry, Inputs, Job, Minimum, Shape, of_each_geometry
from dsv4_triton.bench.registry.compare import EXACT, Tolerance
from dsv4_triton.bench.registry.make import Maker
from dsv4_triton.bench.registry.models import Model
from dsv4_triton.bench.registry.steps import KI, by_context, by_tokens
from dsv4_triton.config import INDEX_DIM
from dsv4_triton.hadamard import sylvester
from dsv4_triton.reference.index_quant import quantise_rows

BF16, FP32 = torch.bfloat16, torch.float32
_ONE_STEP = Tolerance(
    2**-3, 0.05, "sums of 128 terms in another order: where they straddle a tie, one step of e4m3 or of amax / 127"
)
_SCORES = Tolerance(1e-5, 2e-4, "fp32 sums over the heads in another order, whose terms cancel")


def _insert_shapes(model: Model) -> list[Shape]:
    return of_each_geometry([Shape(step) for step in by_context(model, 32 * KI)])


def _topk_shapes(model: Model) -> list[Shape]:
    return [Shape(step) for step in by_context(model, 32 * KI, 1024 * KI, chunk=True)]


def _score_shapes(model: Model) -> list[Shape]:
    """Served without hiding; `hidden` fills the rest of each row with -inf."""
    hidden = [Shape(step, "hidden") for step in by_context(model, 32 * KI)]
    return [*of_each_geometry(_topk_shapes(model)), *hidden]


def _quant_shapes(model: Model) -> list[Shape]:
    """Served queries were rotated together with the main ones; `raw` ones are rotated by a launch of their own."""
    return [Shape(step, variant) for variant in ("", "raw") for step in by_tokens(model)]


def _build_quant(job: Job, make: Maker) -> dict[str, Any]:
    return {
        "q": make.data(job.tokens, job.model.index_heads, INDEX_DIM),
        "positions": make.to(job.step.positions()),
        "cos_sin": caches.cos_sin(job, make, compressed=True),
        "hadamard": make.to(sylvester(INDEX_DIM, dtype=BF16)),
        "dtype": caches.index_dtype(job.family),
        "rotated": job.variant != "raw",
    }


def _dequantised(inputs: Inputs, returned: Any) -> dict[str, torch.Tensor]:
    values, scale = returned
    return {"queries": values.float() if scale is None else values.float() * scale.float()[..., None]}


def _minimum_quant(job: Job) -> Minimum:
    """bf16 queries in, stored ones out; the rotation as a product with the Hadamard matrix. Raw queries of padding are
    zero."""
    raw, heads = job.variant == "raw", job.model.index_heads
    read = job.live if raw else job.tokens
    size = heads * (read * INDEX_DIM * 2 + job.tokens * job.layout.index_keys.row_bytes)
    return Minimum(size + raw * read * ANGLES, read * heads * INDEX_DIM * INDEX_DIM, BF16)


def _build_insert(job: Job, make: Maker) -> dict[str, Any]:
    keys, scales, where = caches.index_keys(job, make)
    return {
        "e": make.data(job.tokens, INDEX_DIM),
        "hadamard": make.to(sylvester(INDEX_DIM, dtype=BF16)),
        "key_cache": keys,
        "scale_cache": scales,
        "slots": where.slots,
    }


def stored_keys(inputs: Inputs, slots: str = "slots") -> dict[str, torch.Tensor]:
    """The key cache after an insert: the written keys dequantised, everything else bit by bit."""
    keys, scales, where = (inputs.arguments[name] for name in ("key_cache", "scale_cache", slots))
    after = {f"keys, {name}": rows for name, rows in caches.written_rows(keys, where).items()}
    rows = after.pop("keys, written rows").float()
    if scales is not None:
        scale_after = caches.written_rows(scales[..., None], where)
        rows = rows * scale_after["written rows"].float()
        after["scales, other rows"] = scale_after["other rows"]
    return after | {"keys, written rows": rows}


def _stored(inputs: Inputs, returned: Any) -> dict[str, torch.Tensor]:
    return stored_keys(inputs)


def _minimum_insert(job: Job) -> Minimum:
    """Only rows that close an entry are read and written."""
    rows = job.step.closing(4)
    size = rows * (INDEX_DIM * 2 + job.layout.index_keys.row_bytes) + job.tokens * 4 + INDEX_DIM * INDEX_DIM * 2
    return Minimum(size, rows * INDEX_DIM * INDEX_DIM, BF16)


def _build_score(job: Job, make: Maker) -> dict[str, Any]:
    keys, scales, where = caches.index_keys(job, make)
    heads = job.model.index_heads
    q = make.data(job.tokens, heads, INDEX_DIM, dtype=FP32 if make.fill else keys.dtype)
    wide = make.data(job.tokens, caches.compressor_columns(job, 4), dtype=FP32, std=(INDEX_DIM * heads) ** -0.5)
    q_scale = None
    if make.fill:
        q, q_scale = quantise_rows(q, keys.dtype)
    elif scales is not None:
        q_scale = make.data(job.tokens, heads, dtype=scales.dtype)
    return {
        "q": q,
        "q_scale": q_scale,
        "weights": wide[:, -heads:],
        "key_cache": keys,
        "scale_cache": scales,
        "block_table": where.table,
        "token_req": make.to(job.step.token_req()),
        "n_vis": make.to(job.step.visible(4)),
        "max_entries": job.step.longest // 4,
        "hide": job.variant == "hidden",
    }


def _visible(inputs: Inputs, returned: Any) -> dict[str, torch.Tensor]:
    if inputs.arguments["hide"]:
        return {"scores": returned}
    column = torch.arange(returned.shape[1], device=returned.device)
    return {"visible scores": torch.where(column < inputs.arguments["n_vis"][:, None], returned, 0.0)}


def _minimum_score(job: Job) -> Minimum:
    """Queries that see an entry and every key that some token sees in, a score out for each of both that meet; hiding
    fills the rows of all tokens."""
    step, row, heads = job.step, job.layout.index_keys.row_bytes, job.model.index_heads
    visible = step.visible(4)
    seen = int(visible.sum())
    scores = job.tokens * (step.longest // 4) if job.variant == "hidden" else seen
    size = int((visible > 0).sum()) * heads * (row + 4) + step.entries(4) * row + scores * 4
    return Minimum(size, seen * heads * INDEX_DIM, caches.index_dtype(job.family))


def _build_topk(job: Job, make: Maker) -> dict[str, Any]:
    return {
        "scores": make.data(job.tokens, job.step.longest // 4, dtype=FP32),
        "n_vis": make.to(job.step.visible(4)),
        "k": job.model.index_topk,
    }


def _minimum_topk(job: Job) -> Minimum:
    return Minimum((int(job.step.visible(4).sum()) + job.tokens * job.model.index_topk) * 4)


ENTRIES = (
    Entry("indexer_quant_q", _quant_shapes, _build_quant, _minimum_quant, _ONE_STEP, outcome=_dequantised),
    Entry(
        "indexer_insert_k",
        _insert_shapes,
        _build_insert,
        _minimum_insert,
        _ONE_STEP,
        written=("key_cache", "scale_cache"),
        outcome=_stored,
    ),
    Entry(
        "indexer_score",
        _score_shapes,
        _build_score,
        _minimum_score,
        _SCORES,
        outcome=_visible,
        baselines=("npu_vllm_quant_lightning_indexer",),
        touched=lambda job: {"key_cache": job.step.entries(4) * job.layout.index_keys.row_bytes},
    ),
    Entry("indexer_topk", _topk_shapes, _build_topk, _minimum_topk, EXACT, baselines=("torch.topk",)),
)
