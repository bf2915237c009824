"""Cases of the compressors. Variants: `c4` and `c128` are the main ones, `index` the indexer's (c4, 128 features)."""

from __future__ import annotations

from typing import Any

import torch

from dsv4_triton.backend.geometry import Pages, overlap
from dsv4_triton.bench.registry import caches
from dsv4_triton.bench.registry.attention import ANGLES, insert_tolerance, inserted
from dsv4_triton.bench.registry.case import Entry, Inputs, Job, Minimum, Shape, of_each_geometry
from dsv4_triton.bench.registry.compare import EXACT, Tolerance
from dsv4_triton.bench.registry.indexer import stored_keys
from dsv4_triton.bench.registry.make import Maker
from dsv4_triton.bench.registry.models import Model
from dsv4_triton.bench.registry.steps import KI, by_context
from dsv4_triton.config import HEAD_DIM, INDEX_DIM
from dsv4_triton.hadamard import sylvester

FP32 = torch.float32
_KEYS = Tolerance(0.13, 0.06, "one step of e4m3 or of an int8 key: sums in another order before each rounding")


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
    """A row in and out for each token, every row of the position embedding that is used once; of padding the slot."""
    ratio, row = _kind(job.variant)[0], _state(job).row_bytes
    used = len((job.step.positions()[: job.live] % ratio).unique())
    return Minimum(job.live * (2 * row + 8) + job.step.padding * 4 + used * row // 2)


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


def _folded_bytes(job: Job, ratio: int, dim: int) -> int:
    """Of each closing window the rows of fp32 [u | g] it folds: for c4 half the row of eight tokens, or of the four
    that there are before a request's first entry."""
    windows = overlap(ratio) * job.step.closing(ratio)
    if overlap(ratio) > 1:
        windows -= sum(before < ratio <= before + new for before, new in job.step.requests)
    return windows * ratio * 2 * dim * 4


def _minimum_fold(job: Job) -> Minimum:
    """The rows of the closing windows in, their entries out."""
    ratio, dim = _kind(job.variant)
    entry = dim * 2 if job.variant == "index" else job.layout.window.row_bytes
    rows = _folded_bytes(job, ratio, dim) + job.step.closing(ratio) * (entry + ANGLES)
    return Minimum(rows + dim * 2 + job.tokens * 4)


def _keys_shapes(model: Model) -> list[Shape]:
    return _shapes(model, "c4", "c4-fake-quant")


def _build_fold_keys(job: Job, make: Maker) -> dict[str, Any]:
    """Both compressors of a c4 layer."""
    state, where = caches.state_rows(job, make, job.layout.state[4])
    cache, entries = caches.kv_rows(job, make, job.layout.compressed[4])
    key_state, of_keys = caches.state_rows(job, make, job.layout.index_state)
    keys, scales, key_entries = caches.index_keys(job, make)
    return {
        "state": state,
        "state_table": where.table,
        "slots": entries.slots,
        "weight": make.data(HEAD_DIM, mean=1.0, std=0.2),
        "cache": cache,
        "key_state": key_state,
        "key_state_table": of_keys.table,
        "key_slots": key_entries.slots,
        "key_weight": make.data(INDEX_DIM, mean=1.0, std=0.2),
        "hadamard": make.to(sylvester(INDEX_DIM, dtype=torch.bfloat16)),
        "key_cache": keys,
        "scale_cache": scales,
        "token_req": make.to(job.step.token_req()),
        "positions": make.to(job.step.positions()),
        "cos_sin": caches.cos_sin(job, make, compressed=True),
        "eps": job.model.rms_eps,
        "fake_quant": job.variant.endswith("fake-quant"),
    }


def _folded_keys(inputs: Inputs, returned: Any) -> dict[str, torch.Tensor]:
    return inserted(inputs, returned) | stored_keys(inputs, "key_slots")


def _minimum_fold_keys(job: Job) -> Minimum:
    """The folds of both compressors, the key quantised into its cache."""
    windows, row = job.step.closing(4), job.layout.index_keys.row_bytes
    rows = _folded_bytes(job, 4, HEAD_DIM) + _folded_bytes(job, 4, INDEX_DIM)
    size = rows + windows * (job.layout.window.row_bytes + row + ANGLES)
    weights = (HEAD_DIM + INDEX_DIM) * 2 + INDEX_DIM * INDEX_DIM * 2
    return Minimum(size + weights + job.tokens * 8, windows * INDEX_DIM * INDEX_DIM, torch.bfloat16)


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
        baselines=("torch.ops._C_ascend.compressor",),
    ),
    Entry(
        "compressor_fold_keys",
        _keys_shapes,
        _build_fold_keys,
        _minimum_fold_keys,
        _KEYS,
        written=("cache", "key_cache", "scale_cache"),
        outcome=_folded_keys,
    ),
)
