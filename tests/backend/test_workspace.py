"""The size of the shared workspace: enough for every step up to the limits it was made for."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4_triton.backend.geometry import layout
from dsv4_triton.backend.workspace import (
    SCORE_BYTES,
    Workspace,
    indexer_workspace,
    score_run,
    scores,
    step_workspace,
)
from dsv4_triton.bench.registry.models import MODELS
from dsv4_triton.device import A2, A5, HOST, Family
from dsv4_triton.kernels._workspace import workspace_bytes
from dsv4_triton.kernels.indexer_topk import indexer_topk_workspace
from dsv4_triton.kernels.o_proj import o_proj_workspace
from dsv4_triton.options import BLOCK_SIZES, Choices, Geometry

BF16, FP32 = torch.bfloat16, torch.float32


def serving(model: str, family: Family, geometry: Geometry, dtype: torch.dtype) -> Any:
    settings = MODELS[model].settings
    block_size = BLOCK_SIZES[geometry][0]
    choices = Choices(family, False, family.index_format, geometry, block_size)
    return SimpleNamespace(
        model=settings, choices=choices, layout=layout(choices, settings.ratios, family.row_format, dtype)
    )


@pytest.mark.parametrize("geometry", ["fine", "vllm-ascend"])
@pytest.mark.parametrize("family", [HOST, A2, A5], ids=lambda family: family.name)
def test_more_tokens_or_context_never_need_less(family: Family, geometry: Geometry) -> None:
    served = serving("flash", family, geometry, BF16)
    sizes = [
        [step_workspace(served, BF16, tokens=tokens, context=context) for context in (256, 2048, 4096, 32768, 1 << 20)]
        for tokens in (1, 16, 64, 300, 4096, 8192)
    ]
    for row in (*sizes, *map(list, zip(*sizes, strict=True))):
        assert row == sorted(row)
    assert sizes[-1][-1] < 2 << 30, "a small part of a device's memory, whatever the limits"


def test_shards_need_less() -> None:
    served = serving("pro", A2, "fine", BF16)
    whole, part = (step_workspace(served, BF16, tokens=4096, context=32768, shards=n) for n in (1, 8))
    assert part < whole


@pytest.mark.parametrize("shards", [1, 8])
def test_quantised_outputs_of_attention_fit(shards: int) -> None:
    served = serving("pro", A5, "fine", BF16)
    served.choices = replace(served.choices, o_proj_format="mxfp8")
    sizes = [step_workspace(served, BF16, tokens=n, context=256, shards=shards) for n in (1, 16, 17, 64, 100, 8192)]
    needs = [o_proj_workspace(n, 16 // shards, 4096) for n in (1, 16, 17, 64, 100, 8192)]
    assert all(size >= need for size, need in zip(sizes, needs, strict=True)) and sizes == sorted(sizes)


@pytest.mark.parametrize("k", [32, 512, 1024, 2048])
def test_any_smaller_step_of_the_indexer_fits(k: int) -> None:
    """Fewer entries make longer runs: the bound holds for every number of tokens and entries below the limits."""
    rng = random.Random(k)
    for tokens, entries in ((1, 262144), (64, 262144), (8192, 262144), (8192, 9000), (300, 4097), (7, 40)):
        bound = indexer_workspace(tokens, entries, k)
        for _ in range(200):
            count = rng.choice((rng.randint(1, entries), min(entries, 4096 * rng.randint(1, 64) + rng.choice((0, 1)))))
            run = min(rng.randint(1, tokens), score_run(count))
            need = workspace_bytes(scores(run, count)) + indexer_topk_workspace(run, count, k)
            assert need <= bound, (tokens, entries, run, count)


@pytest.mark.parametrize("entries", [1, 40, 8192, 262144, 1 << 25])
def test_a_run_of_scores_is_bounded(entries: int) -> None:
    assert score_run(entries) >= 1
    assert score_run(entries) == 1 or score_run(entries) * entries * 4 <= SCORE_BYTES


def test_one_flat_block_of_bytes() -> None:
    memory = Workspace(1000, "cpu").memory
    assert (memory.dtype, memory.shape, memory.device.type) == (torch.uint8, (1000,), "cpu")
