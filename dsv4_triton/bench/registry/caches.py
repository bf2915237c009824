"""The paged caches of a step in a family's formats: pages, permuted block tables, and the slots the step writes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4_triton.backend.geometry import INDEX_STORAGE, Pages
from dsv4_triton.bench.registry.case import Job
from dsv4_triton.bench.registry.make import PAGE_GAP, POOL_BYTES, Maker, reserve
from dsv4_triton.bench.registry.steps import Step
from dsv4_triton.config import HEAD_DIM, INDEX_DIM
from dsv4_triton.device import Family
from dsv4_triton.reference.index_quant import quantise_rows
from dsv4_triton.reference.rows import loaded, pack
from dsv4_triton.reference.token_slots import token_slots


@dataclass(frozen=True)
class Table:
    """Block table [B, M] int32, the number of blocks of the cache, and the slot that each token writes."""

    table: torch.Tensor
    blocks: int
    slots: torch.Tensor


def table(make: Maker, step: Step, pages: Pages) -> Table:
    """Blocks in random order, 0 (the null block) where a request has none or none any more.

    A pool of POOL_BYTES bounds the blocks; requests beyond it share them. The newest blocks come first, so that no two
    tokens write the same slot.
    """
    live = []
    for request, (before, new) in enumerate(step.requests):
        first = 0 if pages.window is None else max(0, before - pages.window + 1)
        block = torch.arange(first // pages.tokens, (before + new - 1) // pages.tokens + 1)
        live.append(torch.stack((block[-1] - block, torch.full_like(block, request), block)))
    age, request, block = torch.cat(live, dim=1)
    newest_first = age.argsort(stable=True)
    blocks = min(len(age), max(1, POOL_BYTES // (pages.page_bytes + PAGE_GAP)))
    rounds = -(-len(age) // blocks)
    ids = torch.cat([make.permutation(blocks) for _ in range(rounds)])[: len(age)] + 1
    result = torch.zeros(len(step.requests), int(block.max()) + 1, dtype=torch.int32)
    result[request[newest_first], block[newest_first]] = ids.to(torch.int32)
    slots = token_slots(
        step.positions(), step.token_req(), result, rows_per_block=pages.rows, ratio=pages.ratio
    )  # fmt: skip
    return Table(make.to(result), blocks + 1, make.to(slots))


def kv_rows(job: Job, make: Maker, pages: Pages) -> tuple[torch.Tensor, Table]:
    """A cache of 512-wide rows, bf16 or records, and its table."""
    where = table(make, job.step, pages)
    cache, rows = make.pages(where.blocks, pages), make.row_pattern(HEAD_DIM)
    make.fill_rows(cache, pack(rows) if pages.dtype == torch.uint8 else rows)
    return cache, where


def state_rows(job: Job, make: Maker, pages: Pages) -> tuple[torch.Tensor, Table]:
    """The fp32 state of a compressor, and its table."""
    where = table(make, job.step, pages)
    state = make.pages(where.blocks, pages)
    make.fill_rows(state, make.row_pattern(pages.width))
    return state, where


def compressor_columns(job: Job, ratio: int) -> int:
    """Columns of the fp32 product of a layer's hidden states: rows of its states and, for c4, the indexer's head
    weights."""
    layout = job.layout
    if ratio == 128:
        return layout.state[128].width
    return layout.state[4].width + layout.index_state.width + job.model.index_heads


def index_dtype(family: Family) -> torch.dtype:
    """dtype of stored indexer keys, and of the queries that meet them."""
    return INDEX_STORAGE[family.index_format][0] if family.index_format in INDEX_STORAGE else torch.bfloat16


def index_keys(job: Job, make: Maker) -> tuple[torch.Tensor, torch.Tensor | None, Table]:
    """Indexer keys [blocks, rows, 128], their scales [blocks, rows] (None for plain keys), and the table.

    A page holds all its keys, then all its scales.
    """
    pages, dtype = job.layout.index_keys, index_dtype(job.family)
    where = table(make, job.step, pages)
    page = make.pages(where.blocks, pages)
    values, row_scales = quantise_rows(make.row_pattern(INDEX_DIM), dtype)
    if row_scales is None:
        make.fill_rows(page, values)
        return page, None, where
    page = page.flatten(1)
    keys = page[:, : pages.rows * INDEX_DIM].view(dtype).unflatten(1, (pages.rows, INDEX_DIM))
    scales = page[:, pages.rows * INDEX_DIM :].view(row_scales.dtype)
    make.fill_rows(keys, values)
    make.fill_rows(scales, row_scales)
    return keys, scales, where


def cos_sin(job: Job, make: Maker, *, compressed: bool = False) -> torch.Tensor:
    """The rotary table [P, 64] fp32 with the rows that the step's tokens use; the others are never written."""
    model = job.model
    rows = reserve((max(model.max_positions, job.step.longest), 64), torch.float32)
    wanted = torch.cat((job.step.positions(), job.step.positions() + 1 - 4, job.step.positions() + 1 - 128))
    wanted = wanted[wanted >= 0].unique().long()
    base = model.compress_rope_theta if compressed else model.rope_theta
    angles = wanted.float()[:, None] * base ** (-torch.arange(0, 64, 2, dtype=torch.float32) / 64)
    rows[wanted] = torch.cat((angles.cos(), angles.sin()), dim=1)
    return make.to(rows)


def written_rows(cache: torch.Tensor, slots: torch.Tensor) -> dict[str, torch.Tensor]:
    """A cache after an insert, for comparison: the rows of `slots` as values, the rest of it bit by bit."""
    slots = slots[slots >= 0].long()
    at = slots // cache.shape[1], slots % cache.shape[1]
    values = loaded(cache[at]) if cache.dtype == torch.uint8 else cache[at]
    rest = cache.contiguous().view(torch.uint8).clone()
    rest[at] = 0
    return {"written rows": values, "other rows": rest}
