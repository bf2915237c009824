"""Layouts of every family and geometry, and the caches vLLM makes of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from dsv4_triton.backend.caches import CacheLayer, LayerCaches
from dsv4_triton.backend.geometry import Layout, layout
from dsv4_triton.backend.metadata import StepPlanner
from dsv4_triton.config import ModelSettings
from dsv4_triton.demo.checkpoint import DemoSettings, model_config
from dsv4_triton.device import HOST, RowFormat
from dsv4_triton.options import Options, resolve

DEMO_RATIOS = (0, 4, 128, 4, 128, 0)
FLASH_RATIOS = (0, 0, *(4, 128) * 20, 4)


def layout_of(
    ratios: tuple[int, ...] = DEMO_RATIOS,
    *,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int | None = None,
    **options: Any,
) -> Layout:
    """What a server with these options and this dtype on the host takes."""
    exact = dtype == torch.float32
    model = ModelSettings.of(model_config(DemoSettings(ratios=ratios, hash_layers=0)))
    choices = resolve(model, Options(**options), HOST, exact=exact, block_size=block_size)
    return layout(choices, ratios, RowFormat.PLAIN if exact else choices.family.row_format, dtype)


def caches_of(pages: Layout, tokens: int = 8) -> dict[str, CacheLayer]:
    """The caches of all layers by prefix, planning steps of up to `tokens` tokens."""
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    planner = StepPlanner(tokens, torch.device("cpu"))
    for index, ratio in enumerate(pages.ratios):
        prefix, selects = f"model.layers.{index}.attn", index not in pages.shared_indices
        LayerCaches(config, prefix, ratio, pages, planner, selects=selects)
    return config.compilation_config.static_forward_context


def server_config(**fields: Any) -> Any:
    """The part of a vLLM config that grouping and sizing of caches read."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        model_config=SimpleNamespace(max_model_len=1 << 20),
        speculative_config=None,
        kv_transfer_config=None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        cache_config=SimpleNamespace(
            block_size=256, enable_prefix_caching=True, prefix_match_unit=None, num_gpu_blocks_override=None
        ),
        **fields,
    )
