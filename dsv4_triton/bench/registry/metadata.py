"""Cases of the step's layout and of cache slots."""

from __future__ import annotations

from typing import Any

from dsv4_triton.backend.geometry import Pages
from dsv4_triton.bench.registry import caches
from dsv4_triton.bench.registry.case import Entry, Job, Minimum, Shape, of_each_geometry
from dsv4_triton.bench.registry.compare import EXACT
from dsv4_triton.bench.registry.make import Maker
from dsv4_triton.bench.registry.models import Model
from dsv4_triton.bench.registry.steps import KI, by_context, by_tokens

KINDS = ("window", "c4", "c128", "c4-state", "c128-state")
"""Caches of a layer; the slots of indexer keys and of the indexer's state are those of `c4` and `c4-state`."""


def _pages(job: Job) -> Pages:
    kind, *state = job.variant.split("-")
    layout = job.layout
    if kind == "window":
        return layout.window
    return (layout.state if state else layout.compressed)[int(kind[1:])]


def _layout_shapes(model: Model) -> list[Shape]:
    return [Shape(step) for step in by_tokens(model)]


def _build_layout(job: Job, make: Maker) -> dict[str, Any]:
    step = job.step
    return {
        "query_start_loc": make.to(step.query_start_loc()),
        "seq_lens": make.to(step.seq_lens()),
        "num_tokens": step.tokens,
    }


def _minimum_layout(job: Job) -> Minimum:
    """Two numbers a request in, four a token out."""
    return Minimum(len(job.step.requests) * 8 + 4 + job.tokens * 16)


def _slot_shapes(model: Model) -> list[Shape]:
    return of_each_geometry([Shape(step, kind) for kind in KINDS for step in by_context(model, 32 * KI)])


def _build_slots(job: Job, make: Maker) -> dict[str, Any]:
    pages = _pages(job)
    return {
        "positions": make.to(job.step.positions()),
        "token_req": make.to(job.step.token_req()),
        "block_table": caches.table(make, job.step, pages).table,
        "rows_per_block": pages.rows,
        "ratio": pages.ratio,
    }


def _minimum_slots(job: Job) -> Minimum:
    """Position and request in (of padding the position), a slot out, and a table entry for each row that is written."""
    return Minimum(job.tokens * 8 + job.live * 4 + job.step.closing(_pages(job).ratio) * 4)


ENTRIES = (
    Entry("step_layout", _layout_shapes, _build_layout, _minimum_layout, EXACT),
    Entry("token_slots", _slot_shapes, _build_slots, _minimum_slots, EXACT),
)
