"""Cases of rotary embedding, window cache, sparse attention and output projection. A head has 512 features.

Variants of attention are the kinds of layers: `window` alone; `c4` with the indexer's selection; `c4-dense` while all
visible entries are selected; `c128`, which attends all its entries.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from dsv4_triton.backend.geometry import Pages
from dsv4_triton.bench.registry import caches
from dsv4_triton.bench.registry.case import Entry, Inputs, Job, Minimum, Shape, of_each_geometry
from dsv4_triton.bench.registry.compare import BF16_ROUNDING, Tolerance
from dsv4_triton.bench.registry.make import Maker
from dsv4_triton.bench.registry.models import Model
from dsv4_triton.bench.registry.steps import BATCHES, KI, Step, by_context, by_slots, by_tokens, decode
from dsv4_triton.config import HEAD_DIM, INDEX_DIM, ROPE_DIM, WINDOW
from dsv4_triton.device import RowFormat

BF16, FP32 = torch.bfloat16, torch.float32
ANGLES = ROPE_DIM * 4
"""Bytes of a row of the rotary table."""
GATHER_BLOCK = 32
_ROUNDED_TWICE = Tolerance(2**-6, 2**-9, "512 squares in another order may move a value across two roundings to bf16")
_ONE_E4M3_STEP = Tolerance(0.13, 2**-6, "where a rounding to bf16 goes the other way, e4m3 may too: one step of it")
_O = Tolerance(2**-7, 2e-3, "fp32 sums of 4,096 terms in another order, one rounding of o and one of z to bf16")
_MX_O = Tolerance(2**-7, 1e-2, "where a rounding of o to bf16 goes the other way, its e4m3 may too: a step of 2^-3")
_ATTENTION = Tolerance(2**-7, 2**-7, "one step of bf16, and P in bf16: 2^-9 of a convex combination of rows of size 4")


def _tokens(model: Model) -> list[Shape]:
    return [Shape(step) for step in by_tokens(model)]


def _heads(job: Job, tokens: int) -> int:
    """Bytes of the heads of so many tokens."""
    return tokens * job.model.heads * HEAD_DIM * 2


def _positions(job: Job, make: Maker) -> dict[str, Any]:
    return {"positions": make.to(job.step.positions()), "cos_sin": caches.cos_sin(job, make)}


def _rope_shapes(model: Model) -> list[Shape]:
    return [Shape(step, variant) for step in by_tokens(model) for variant in ("inverse", "interleaved")]


def _build_rope(job: Job, make: Maker) -> dict[str, Any]:
    """`inverse` is the attention output's rotation, in place; `interleaved` is out of place."""
    x = make.data(job.tokens, job.model.heads, HEAD_DIM)
    if job.variant == "interleaved":
        return {"x": x, **_positions(job, make), "interleaved": True}
    return {"x": x, **_positions(job, make), "inverse": True, "out": x}


def _minimum_rope(job: Job) -> Minimum:
    """The rotated features in and out, and out of place the others too; zeros for padding."""
    features = ROPE_DIM if job.variant == "inverse" else HEAD_DIM
    rotated = 2 * _heads(job, job.live) * features // HEAD_DIM
    return Minimum(rotated + _heads(job, job.step.padding) + job.live * ANGLES)


def _q_shapes(model: Model) -> list[Shape]:
    """`c4` layers rotate the indexer's queries in the same launch."""
    return [Shape(step, variant) for variant in ("", "c4") for step in by_tokens(model)]


def _build_q(job: Job, make: Maker) -> dict[str, Any]:
    q = make.data(job.tokens, job.model.heads, HEAD_DIM)
    arguments = {"q": q, **_positions(job, make), "eps": job.model.rms_eps, "out": q}
    if job.variant == "c4":
        arguments["index_q"] = make.data(job.tokens, job.model.index_heads, INDEX_DIM)
    return arguments


def _minimum_q(job: Job) -> Minimum:
    """All features in and out, and the rotated ones of the indexer's heads; zeros for padding."""
    index = job.live * ROPE_DIM * 4 + job.step.padding * INDEX_DIM * 2 if job.variant == "c4" else 0
    return Minimum(_heads(job, job.live + job.tokens) + job.model.index_heads * index + job.live * ANGLES)


def _kv_shapes(model: Model) -> list[Shape]:
    variants = ("", "fake-quant")
    return of_each_geometry([Shape(step, variant) for step in by_slots(model) for variant in variants])


def _build_kv(job: Job, make: Maker) -> dict[str, Any]:
    cache, where = caches.kv_rows(job, make, job.layout.window)
    return {
        "kv": make.data(job.tokens, HEAD_DIM),
        "weight": make.data(HEAD_DIM, mean=1.0, std=0.2),
        **_positions(job, make),
        "cache": cache,
        "slots": where.slots,
        "eps": job.model.rms_eps,
        "fake_quant": job.variant == "fake-quant",
    }


def _latent_shapes(model: Model) -> list[Shape]:
    """The kinds of layers: c4 layers have two compressors whose rows go to their states, c128 layers one."""
    kinds = ("window", "c4", "c128")
    return of_each_geometry([Shape(step, kind) for step in by_slots(model) for kind in kinds])


def _build_latent(job: Job, make: Maker) -> dict[str, Any]:
    """Latent and kv, and the rows of the compressors, are columns of one product each, as the model's layers give."""
    m, layout, ratio = job.model, job.layout, ratio_of(job.variant)
    product = make.data(job.tokens, m.q_lora + HEAD_DIM)
    cache, where = caches.kv_rows(job, make, layout.window)
    arguments: dict[str, Any] = {
        "latent": product[:, : m.q_lora],
        "latent_weight": make.data(m.q_lora, mean=1.0, std=0.2),
        "kv": product[:, m.q_lora :],
        "kv_weight": make.data(HEAD_DIM, mean=1.0, std=0.2),
        **_positions(job, make),
        "cache": cache,
        "slots": where.slots,
        "eps": m.rms_eps,
    }
    for prefix, pages in state_pages(job).items():
        state, of_state = caches.state_rows(job, make, pages)
        width = pages.width
        wide = make.data(job.tokens, caches.compressor_columns(job, ratio), dtype=FP32)
        start = 0 if not prefix else layout.state[4].width
        arguments |= {
            f"{prefix}proj": wide[:, start : start + width],
            f"{prefix}ape": make.data(ratio, width // 2, dtype=FP32, std=0.5),
            f"{prefix}state": state,
            "index_slots" if prefix else "state_slots": of_state.slots,
        }
    return arguments


def state_pages(job: Job) -> dict[str, Pages]:
    """Pages of the compressor states of the variant's kind of layer, by the prefix of their arguments."""
    ratio = ratio_of(job.variant)
    pages = {"": job.layout.state[ratio]} if ratio else {}
    return pages | {"index_": job.layout.index_state} if ratio == 4 else pages


def _latent_after(inputs: Inputs, returned: Any) -> dict[str, torch.Tensor]:
    left = {"latent": returned, **inserted(inputs, returned)}
    for cache, slots in (("state", "state_slots"), ("index_state", "index_slots")):
        if cache in inputs.arguments:
            after = caches.written_rows(inputs.arguments[cache], inputs.arguments[slots])
            left |= {f"{cache}, {name}": rows for name, rows in after.items()}
    return left


def _minimum_latent(job: Job) -> Minimum:
    """Latent in and out, padding's too, a row into the window cache, and one into each state."""
    states = sum(2 * pages.row_bytes + 4 for pages in state_pages(job).values())
    latent = (2 * job.tokens + 1) * job.model.q_lora * 2
    return Minimum(_minimum_kv(job).bytes + latent + job.live * states)


def insert_tolerance(job: Job) -> Tolerance:
    """For rows in a cache: whether they pass through e4m3."""
    coarse = job.variant.endswith("fake-quant") or job.family.row_format is RowFormat.RECORD
    return _ONE_E4M3_STEP if coarse else _ROUNDED_TWICE


def inserted(inputs: Inputs, returned: Any) -> dict[str, torch.Tensor]:
    return caches.written_rows(inputs.arguments["cache"], inputs.arguments["slots"])


def _minimum_kv(job: Job) -> Minimum:
    """A raw row in, a stored row out, an angle a token, the weight once; of padding the slot."""
    row = HEAD_DIM * 2 + job.layout.window.row_bytes + ANGLES + 8
    return Minimum(job.live * row + job.step.padding * 4 + HEAD_DIM * 2)


def _attention_shapes(model: Model) -> list[Shape]:
    if model.demo:
        kinds = ("window", "c4", "c4-dense", "c128")
        return of_each_geometry([Shape(step, kind) for step in by_tokens(model) for kind in kinds])
    selected = by_context(model, 32 * KI, 1024 * KI, chunk=True)
    everything = 4 * model.settings.index_topk
    dense = (*(decode(b, everything) for b in BATCHES), by_tokens(model)[-1])
    return of_each_geometry(
        [
            *(Shape(step, "window") for step in by_context(model, 32 * KI)),
            *(Shape(step, "c4") for step in selected),
            *(Shape(step, "c4-dense") for step in dense),
            *(Shape(step, "c128") for step in selected),
        ]
    ) + [Shape(decode(64, 32 * KI), kind, "vllm-ascend") for kind in ("window", "c128")]


def ratio_of(variant: str) -> int:
    """The compression ratio of the layers a variant stands for; 0 for window-only ones."""
    return {"c4": 4, "c4-dense": 4, "c128": 128}.get(variant, 0)


@lru_cache(maxsize=4)
def selection(step: Step, k: int) -> torch.Tensor:
    """[T, k] int32: for each token k of its visible c4 entries, spread over all of them and in ascending order, or
    all of them, followed by -1. Depends on the case alone."""
    visible = step.visible(4).long()[:, None]
    rank = torch.arange(k)
    start, end = rank * visible // k, (rank + 1) * visible // k
    random = torch.rand(step.tokens, k, generator=torch.Generator().manual_seed(0))
    spread = start + (random * (end - start)).long()
    every = torch.where(rank < visible, rank, -1)
    return torch.where(visible >= k, spread, every).to(torch.int32)


def _compressed(job: Job, make: Maker) -> dict[str, Any]:
    ratio = ratio_of(job.variant)
    if not ratio:
        return {}
    cache, where = caches.kv_rows(job, make, job.layout.compressed[ratio])
    chosen: dict[str, Any] = {"cmp_cache": cache, "cmp_table": where.table}
    if job.variant == "c4":
        return chosen | {"indices": make.to(selection(job.step, job.model.index_topk))}
    return chosen | {"n_vis": make.to(job.step.visible(ratio))}


def _sources(job: Job, make: Maker) -> dict[str, Any]:
    window_cache, where = caches.kv_rows(job, make, job.layout.window)
    return {
        "window_cache": window_cache,
        "window_table": where.table,
        "token_req": make.to(job.step.token_req()),
        "positions": make.to(job.step.positions()),
        "window": WINDOW,
        **_compressed(job, make),
    }


def _build_attention(job: Job, make: Maker) -> dict[str, Any]:
    arguments = {
        "q": make.data(job.tokens, job.model.heads, HEAD_DIM, std=2.0),
        "sink": make.data(job.model.heads, dtype=FP32),
        "scale": HEAD_DIM**-0.5,
        **_sources(job, make),
    }
    if "n_vis" in arguments:
        arguments["max_n_vis"] = job.step.longest // ratio_of(job.variant)
    return arguments


class Attended(NamedTuple):
    """Rows that a step reads: distinct ones of the window and of the compressed cache, and all, summed over tokens."""

    window: int
    compressed: int
    summed: int


def _attended(job: Job) -> Attended:
    step, ratio = job.step, ratio_of(job.variant)
    window = (step.positions() + 1).clamp(0, WINDOW)
    recent = sum(new + min(before, WINDOW - 1) for before, new in step.requests)
    distinct, summed = 0, int(window.sum())
    if job.variant == "c4":
        chosen = selection(step, job.model.index_topk)
        summed += int((chosen >= 0).sum())
        for request, (before, new) in enumerate(step.requests):
            seen = torch.zeros((before + new) // 4 + 1, dtype=torch.bool)
            seen[chosen[step.token_req() == request].long()] = True
            distinct += int(seen[:-1].sum())
    elif ratio:
        summed += int(step.visible(ratio).sum())
        distinct = step.entries(ratio)
    return Attended(recent, distinct, summed)


def _touched(job: Job) -> dict[str, int]:
    """Every row that some token attends."""
    rows = _attended(job)
    row = job.layout.window.row_bytes
    return {"window_cache": rows.window * row, "cmp_cache": rows.compressed * row}


def _minimum_attention(job: Job) -> Minimum:
    """Queries in, outputs out (zeros for padding), every row that some token attends once; two products of 512 for a
    head and row."""
    rows = _attended(job)
    indices = job.live * job.model.index_topk * 4 if job.variant == "c4" else 0
    return Minimum(
        _heads(job, job.live + job.tokens) + (rows.window + rows.compressed) * job.layout.window.row_bytes + indices,
        2 * HEAD_DIM * job.model.heads * rows.summed,
        BF16,
    )


def _gather_shapes(model: Model) -> list[Shape]:
    """Where attention gathers: selected rows on every family, dense c128 rows (two rows a page) too."""
    if model.demo:
        return [Shape(step, kind) for step in by_tokens(model) for kind in ("window", "c4", "c128")]
    steps = by_context(model, 32 * KI, 1024 * KI)[:-1]
    return [*(Shape(s, "c4") for s in steps), *(Shape(s, "c128") for s in steps if s.name.endswith("32k"))]


def _build_gather(job: Job, make: Maker) -> dict[str, Any]:
    arguments = _sources(job, make)
    columns = WINDOW
    if "indices" in arguments:
        columns += arguments["indices"].shape[1]
    elif "n_vis" in arguments:
        columns += job.step.longest // ratio_of(job.variant)
    return {**arguments, "columns": -(-columns // GATHER_BLOCK) * GATHER_BLOCK, "dtype": BF16}


def _gathered(inputs: Inputs, returned: Any) -> dict[str, torch.Tensor]:
    """Rows that exist; the others, and their bias below -1e29, may hold anything that is large and negative."""
    rows, bias = returned
    live = (bias > -1e29) & (inputs.arguments["positions"] >= 0)[:, None]
    if "n_vis" in inputs.arguments:
        column = torch.arange(bias.shape[1], device=bias.device)
        live &= (column < WINDOW) | (column < WINDOW + inputs.arguments["n_vis"][:, None])
    return {"rows": torch.where(live[..., None], rows, 0.0), "bias": torch.where(live, bias, -1e30)}


def _minimum_gather(job: Job) -> Minimum:
    """Every row that some token attends in once as it is stored; out as bf16 for each token, with a mask value each."""
    rows = _attended(job)
    return Minimum((rows.window + rows.compressed) * job.layout.window.row_bytes + rows.summed * (HEAD_DIM * 2 + 4))


def _o_shapes(model: Model) -> list[Shape]:
    """With operands in bf16, and with `mxfp8` ones where there is fp8."""
    return [*_tokens(model), *(Shape(step, "mxfp8", fp8=True) for step in by_tokens(model))]


def _build_o(job: Job, make: Maker) -> dict[str, Any]:
    m = job.model
    width = m.heads // m.o_groups * HEAD_DIM
    weights = (m.o_groups, m.o_lora, width)
    arguments = {"o": make.data(job.tokens, m.heads, HEAD_DIM), **_positions(job, make)}
    if job.variant == "mxfp8":
        elements = make.data(*weights, dtype=torch.float8_e4m3fn, std=64.0)
        return arguments | {"wo_a": elements, "wo_scale": make.to(torch.full(weights[:2], width**-0.5 / 64))}
    return arguments | {"wo_a": make.data(*weights, std=width**-0.5)}


def _projected(inputs: Inputs, returned: Any) -> dict[str, torch.Tensor]:
    """The result alone: what becomes of o, which is scratch, is the op's own affair."""
    return {"z": returned}


def _minimum_o(job: Job) -> Minimum:
    """Heads in, weights once, the low-rank result out; zeros for padding."""
    m = job.model
    weights = m.o_groups * m.o_lora * (m.heads // m.o_groups * HEAD_DIM)
    stored, operands = 2 * weights, BF16
    if job.variant == "mxfp8":
        stored, operands = weights + 4 * m.o_groups * m.o_lora, torch.float8_e4m3fn
    size = _heads(job, job.live) + stored + job.tokens * m.o_groups * m.o_lora * 2 + job.live * ANGLES
    return Minimum(size, job.live * weights, operands)


def _o_tolerance(job: Job) -> Tolerance:
    return _MX_O if job.variant == "mxfp8" else _O


ENTRIES = (
    Entry(
        "rope", _rope_shapes, _build_rope, _minimum_rope, BF16_ROUNDING, written=("out",), baselines=("npu_rotary_mul",)
    ),
    Entry("q_norm_rope", _q_shapes, _build_q, _minimum_q, BF16_ROUNDING, written=("out", "index_q")),
    Entry(
        "kv_norm_rope_insert",
        _kv_shapes,
        _build_kv,
        _minimum_kv,
        insert_tolerance,
        written=("cache",),
        outcome=inserted,
    ),
    Entry(
        "latent_norm_insert",
        _latent_shapes,
        _build_latent,
        _minimum_latent,
        insert_tolerance,
        written=("cache", "state", "index_state"),
        outcome=_latent_after,
    ),
    Entry(
        "sparse_attention",
        _attention_shapes,
        _build_attention,
        _minimum_attention,
        _ATTENTION,
        baselines=("npu_sparse_attn_sharedkv", "npu_kv_quant_sparse_attn_sharedkv"),
        touched=_touched,
    ),
    Entry(
        "gather_rows",
        _gather_shapes,
        _build_gather,
        _minimum_gather,
        BF16_ROUNDING,
        outcome=_gathered,
        touched=_touched,
    ),
    Entry(
        "o_proj",
        _o_shapes,
        _build_o,
        _minimum_o,
        _o_tolerance,
        written=("o",),
        outcome=_projected,
        baselines=("npu_transpose_batchmatmul",),
    ),
)
