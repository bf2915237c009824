"""Cases of the compressors. Variants: `c4` and `c128` are the main ones, `index` the indexer's (c4, 128 features)."""

from __future__ import annotations

from typing import Any

import torch

from dsv4_triton.backend.geometry import Pages, overlap
from dsv4_triton.bench.registry import caches
from dsv4_triton.bench.registry.attention import ANGLES, insert_tolerance, inserted
from dsv4_triton.bench.registry.case import Entry, Inputs, Job, Minimum, Shape, of_each_geometry
from dsv4_triton.bench.registry.compare import EXACT
from dsv4_triton.bench.registry.make import Maker
from dsv4_triton.bench.registry.models import Model
from dsv4_triton.bench.registry.steps import KI, by_context
from dsv4_triton.config import HEAD_DIM, INDEX_DIM

FP32 = torch.float32


def _kind(variant: str) -> tuple[int, int]:
    """(ratio, features of an entry)."""
    return (128, HEAD_DIM) if variant.startswith("c128") else (4, HEAD_DIM if variant.startswith("c4") else INDEX_DIM)


def _state(job: Job) -> Pages:
    """Pages of the state of the variant's compressor."""
    return job.layout.index_state if job.variant == "index" else job.layout.state[_kind(job.variant)[0]]


def _shapes(model: Model, *variants: str) -> list[Shape]:
    return of_each_geometry([Shape(step, variant) for variant in variants for step in by_context(model, 32 * KI)])


def _build_insert(job: Job, make: Maker) -> dict[str, Any]:
    ratio = _kind(job.variant)[0]
    state, where = caches.state_rows(job, make, _state(job))
    width = state.shape[2]
    return {
        "proj": make.data(job.tokens, width, dtype=FP32),
        "ape": make.data(ratio, width // 2, dtype=FP32, std=0.5),
        "positions": make.to(job.step.positions()),
        "state": state,
        "slots": where.slots,
    }


def _state_after(inputs: Inputs, returned: Any) -> dict[str, torch.Tensor]:
    return caches.written_rows(inputs.arguments["state"], inputs.arguments["slots"])


def _minimum_insert(job: Job) -> Minimum:
    """A row in and out for each token, every row of the position embedding that is used once."""
    ratio, row = _kind(job.variant)[0], _state(job).row_bytes
    used = len((job.step.positions()[: job.tokens - job.step.padding] % ratio).unique())
    return Minimum(job.tokens * (2 * row + 8) + used * row // 2)


def _build_fold(job: Job, make: Maker) -> dict[str, Any]:
    """The main compressors write to the cache, the indexer's to a dense tensor."""
    ratio, dim = _kind(job.variant)
    state, where = caches.state_rows(job, make, _state(job))
    cache, entries = caches.kv_rows(job, make, job.layout.compressed[ratio])
    target = {"cache": cache, "fake_quant": job.variant.endswith("fake-quant")}
    if job.variant == "index":
        target = {"out": make.data(job.tokens, dim)}
    return {
        "state": state,
        "state_table": where.table,
        "token_req": make.to(job.step.token_req()),
        "positions": make.to(job.step.positions()),
        "slots": entries.slots,
        "weight": make.data(dim, mean=1.0, std=0.2),
        "cos_sin": caches.cos_sin(job, make, compressed=True),
        "ratio": ratio,
        "eps": job.model.rms_eps,
        **target,
    }


def _folded(inputs: Inputs, returned: Any) -> dict[str, torch.Tensor]:
    if "cache" in inputs.arguments:
        return inserted(inputs, returned)
    return {"out": inputs.arguments["out"]}


def _minimum_fold(job: Job) -> Minimum:
    """Of each closing window the rows of fp32 [u | g] it folds (c4: half the row of eight tokens), its entry out."""
    ratio, dim = _kind(job.variant)
    windows = job.step.closing(ratio)
    entry = dim * 2 if job.variant == "index" else job.layout.window.row_bytes
    rows = overlap(ratio) * ratio * 2 * dim * 4
    return Minimum(windows * (rows + entry + ANGLES) + dim * 2 + job.tokens * 4)


ENTRIES = (
    Entry(
        "compressor_state_insert",
        lambda model: _shapes(model, "c4", "c128", "index"),
        _build_insert,
        _minimum_insert,
        EXACT,
        written=("state",),
        outcome=_state_after,
    ),
    Entry(
        "compressor_fold",
        lambda model: _shapes(model, "c4", "c128", "index", "c4-fake-quant", "c128-fake-quant"),
        _build_fold,
        _minimum_fold,
        insert_tolerance,
        written=("cache", "out"),
        outcome=_folded,
        baselines=("torch.ops.custom.compressor",),
    ),
)
