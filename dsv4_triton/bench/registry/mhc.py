"""Cases of the hyper-connections. With D the hidden size, a token has 4 D values of streams and D of a sub-layer."""

from __future__ import annotations

from typing import Any

import torch

from dsv4_triton.bench.registry.case import Entry, Job, Minimum, Shape
from dsv4_triton.bench.registry.compare import BF16_ROUNDING, Tolerance
from dsv4_triton.bench.registry.make import Maker
from dsv4_triton.bench.registry.models import Model
from dsv4_triton.bench.registry.steps import by_tokens

FP32, BF16 = torch.float32, torch.bfloat16
MIXES = 24
_COEFFICIENTS = (4 + 16) * 4
"""Bytes of post and comb of a token."""
_COLLAPSE = Tolerance(
    2**-6, 2e-5, "fp32 sums of 4 D terms in another order; y is rounded to bf16 before and after its norm: two steps"
)
_POST_PRE = Tolerance(
    2**-5, 2e-3, "where a new stream is rounded to bf16 the other way, the collapse and the coefficients follow"
)


def _shapes(model: Model) -> list[Shape]:
    return [Shape(step) for step in by_tokens(model)]


def _mixing(job: Job, make: Maker, rows: int, scales: int) -> dict[str, Any]:
    """Parameters of `rows` mixes, fn as the two bf16 parts that a bf16 model keeps."""
    k = 4 * job.model.hidden
    parts = make.data(2, rows, k, std=k**-0.5)
    if make.fill:
        parts[1] *= 2**-9
    return {
        "fn_parts": parts,
        "scale": make.data(scales, dtype=FP32, mean=1.0, std=0.2),
        "base": make.data(rows, dtype=FP32, std=0.5),
        "norm_eps": job.model.rms_eps,
        "hc_eps": job.model.hc_eps,
    }


def _build_pre(job: Job, make: Maker) -> dict[str, Any]:
    D = job.model.hidden
    return {
        "x": make.data(job.tokens, 4, D),
        **_mixing(job, make, MIXES, 3),
        "sinkhorn_iters": job.model.sinkhorn_iters,
        "norm_weight": make.data(D, mean=1.0, std=0.2),
    }


def _build_post(job: Job, make: Maker) -> dict[str, Any]:
    T, D = job.tokens, job.model.hidden
    return {
        "y": make.data(T, D),
        "x": make.data(T, 4, D),
        "post": make.data(T, 4, dtype=FP32, mean=1.0, std=0.3),
        "comb": make.data(T, 4, 4, dtype=FP32, mean=0.25, std=0.1),
    }


def _build_head(job: Job, make: Maker) -> dict[str, Any]:
    D = job.model.hidden
    return {
        "x": make.data(job.tokens, 4, D),
        **_mixing(job, make, 4, 1),
        "norm_weight": make.data(D, mean=1.0, std=0.2),
    }


def _minimum_pre(job: Job) -> Minimum:
    """Streams in, one row out, coefficients out, fn once (fp32, or as much in bf16 parts)."""
    T, D = job.tokens, job.model.hidden
    return Minimum(T * (10 * D + _COEFFICIENTS) + MIXES * 4 * D * 4, T * MIXES * 4 * D, BF16)


def _minimum_post(job: Job) -> Minimum:
    """One row and the streams in, the streams out."""
    return Minimum(job.tokens * (18 * job.model.hidden + _COEFFICIENTS))


def _minimum_head(job: Job) -> Minimum:
    T, D = job.tokens, job.model.hidden
    return Minimum(T * 10 * D + 4 * 4 * D * 4, T * 4 * 4 * D, BF16)


def _build_post_pre(job: Job, make: Maker) -> dict[str, Any]:
    return {**_build_post(job, make), **{name: v for name, v in _build_pre(job, make).items() if name != "x"}}


def _minimum_post_pre(job: Job) -> Minimum:
    """`hc_post`, and of `hc_pre` what is not made by it: the new streams are not read again."""
    post, pre = _minimum_post(job), _minimum_pre(job)
    return Minimum(post.bytes + pre.bytes - job.tokens * 8 * job.model.hidden, pre.macs, BF16)


ENTRIES = (
    Entry("hc_pre", _shapes, _build_pre, _minimum_pre, _COLLAPSE, baselines=("npu_hc_pre_v2",)),
    Entry("hc_post", _shapes, _build_post, _minimum_post, BF16_ROUNDING, baselines=("npu_hc_post",)),
    Entry("hc_post_pre", _shapes, _build_post_pre, _minimum_post_pre, _POST_PRE),
    Entry("hc_head", _shapes, _build_head, _minimum_head, _COLLAPSE),
)
