"""Rows, bytes, padding and capacity of every layout against vllm-ascend's tables."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dsv4_triton.backend.geometry import Layout, Pages
from tests.backend import page_tables
from tests.backend.layouts import DEMO_RATIOS, FLASH_RATIOS, caches_of, layout_of, server_config

FAMILIES = ("a2", "a3", "a5")
BLOCK_SIZES = (None, 32, 64, 128)
"""None is geometry `fine`."""


def build(family: str, block_size: int | None, ratios: tuple[int, ...] = DEMO_RATIOS) -> Layout:
    geometry = "fine" if block_size is None else "vllm-ascend"
    return layout_of(ratios, device_family=family, geometry=geometry, block_size=block_size)


def kinds(layout: Layout) -> dict[str, Pages]:
    pages = (layout.window, layout.compressed[4], layout.compressed[128], layout.index_keys)
    states = (layout.state[4], layout.index_state, layout.state[128])
    return dict(zip(page_tables.KINDS, (*pages, *states), strict=True))


def kind_of(prefix: str, ratio: int) -> str:
    name = prefix.rpartition(".")[2]
    by_name = {"window": "window", "index_keys": "keys", "index_state": "key state"}
    return by_name.get(name) or f"c{ratio}{' state' * (name == 'state')}"


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_pages_are_those_of_the_tables(family: str, block_size: int | None) -> None:
    found = kinds(build(family, block_size))
    assert {kind: pages.rows for kind, pages in found.items()} == page_tables.rows_per_page(family, block_size)
    assert {kind: pages.row_bytes for kind, pages in found.items()} == page_tables.row_bytes(family)
    assert {kind: pages.page_bytes for kind, pages in found.items()} == page_tables.page_bytes(family, block_size)
    windows = {"window": 128, "c4 state": 8, "key state": 8, "c128 state": 128}
    assert {kind: pages.window for kind, pages in found.items()} == {kind: windows.get(kind) for kind in found}


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_reads_the_same_pages(family: str, block_size: int | None) -> None:
    """The specs handed to vLLM: bytes, tokens of a block, rows of a page, dtypes."""
    layout = build(family, block_size)
    rows, sizes = page_tables.rows_per_page(family, block_size), page_tables.page_bytes(family, block_size)
    dtypes = {"window": torch.uint8 if family == "a5" else torch.bfloat16, "keys": torch.uint8}
    for prefix, cache in caches_of(layout).items():
        kind = kind_of(prefix, DEMO_RATIOS[int(prefix.split(".")[2])])
        per_row = {"c4": 4, "keys": 4, "c128": 128}.get(kind, 1)
        assert cache.spec.block_size == rows[kind] * per_row, kind
        assert cache.spec.storage_block_size == cache.rows_per_block == rows[kind], kind
        assert cache.spec.page_size_bytes == sizes[kind], kind
        assert cache.spec.dtype == dtypes.get(kind, torch.float32 if "state" in kind else dtypes["window"]), kind


@pytest.mark.parametrize(("block_size", "c4", "c128"), [(128, 512, 16384), (64, 256, 8192), (32, 128, 4096)])
def test_logical_blocks_and_hit_steps(block_size: int, c4: int, c128: int) -> None:
    for family in FAMILIES:
        layout = build(family, block_size)
        assert (layout.compressed[4].tokens, layout.compressed[128].tokens) == (c4, c128)
        assert layout.hit_tokens == c128
        assert build(family, block_size, (0, 4, 4)).hit_tokens == c4
        assert build(family, None).hit_tokens == 256


@pytest.mark.parametrize(("family", "expected"), [("a2", 6218.5), ("a3", 6218.5), ("a5", 4153.0)])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_bytes_of_a_token_of_flash(family: str, expected: float, block_size: int | None) -> None:
    """21 c4 layers with a row and a key per four tokens, 20 c128 layers with a row per 128: nothing is padded there."""
    row, key = page_tables.ROW_BYTES[family]["c4"], page_tables.ROW_BYTES[family]["keys"]
    assert 21 * (row + key) / 4 + 20 * row / 128 == expected
    assert build(family, block_size, FLASH_RATIOS).token_bytes == expected


def packed(layout: Layout, blocks: int) -> Any:
    """vLLM's plan of the memory of a pool with `blocks` blocks, for all layers of `layout`."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

    config = server_config()
    specs = {prefix: cache.spec for prefix, cache in caches_of(layout).items()}
    groups = get_kv_cache_groups(config, specs)
    stride = max(group.kv_cache_spec.page_size_bytes for group in groups)
    return get_kv_cache_config_from_groups(config, groups, blocks * stride + stride - 1)


@pytest.mark.parametrize("ratios", [DEMO_RATIOS, FLASH_RATIOS], ids=["demo", "flash"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("family", ["a2", "a5"])
def test_a_block_holds_one_page_of_every_layer_of_a_group(
    family: str, block_size: int | None, ratios: tuple[int, ...]
) -> None:
    """Pages of a group lie side by side in a block; the memory given makes exactly the blocks that fit."""
    plan = packed(build(family, block_size, ratios), 100)
    assert plan.num_blocks == 100
    sizes = page_tables.page_bytes(family, block_size)
    offsets = {name: tensor.offset for tensor in plan.kv_cache_tensors for name in tensor.shared_by}
    strides = {tensor.block_stride for tensor in plan.kv_cache_tensors}
    ends = []
    for group in plan.kv_cache_groups:
        end = 0
        for name in group.layer_names:
            assert offsets[name] == end
            end += sizes[kind_of(name, ratios[int(name.split(".")[2])])]
        ends.append(end)
    assert strides == {max(ends)}
    assert all(tensor.size == 100 * max(ends) for tensor in plan.kv_cache_tensors)


@pytest.mark.parametrize(("family", "block_size"), [("a2", None), ("a2", 32), ("a3", 128), ("a5", 32), ("a5", 64)])
def test_blocks_of_a_request_around_every_boundary(family: str, block_size: int | None) -> None:
    """A prompt of a page's tokens takes that page, one more token the next; vLLM's own manager counts."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
    from vllm.v1.request import Request

    layout = build(family, block_size)
    plan = packed(layout, 9000)
    manager = KVCacheManager(
        generate_scheduler_kv_cache_config([plan]),
        max_model_len=1 << 15,
        scheduler_block_size=layout.hit_tokens,
        hash_block_size=math.gcd(*(group.kv_cache_spec.block_size for group in plan.kv_cache_groups)),
        enable_caching=False,
    )
    rows = page_tables.rows_per_page(family, block_size)
    per_row = {"c4": 4, "keys": 4, "c128": 128}
    boundaries = {rows["c4"] * 4, rows["c128"] * 128}
    for tokens in sorted(boundary + step for boundary in boundaries for step in (-1, 0, 1)):
        request = Request("r", [1] * tokens, SamplingParams(max_tokens=1), None)
        blocks = manager.allocate_slots(request, tokens)
        assert blocks is not None
        for group, taken in zip(plan.kv_cache_groups, blocks.blocks, strict=True):
            for name in group.layer_names:
                kind = kind_of(name, DEMO_RATIOS[int(name.split(".")[2])])
                assert len(taken) == math.ceil(tokens / (rows[kind] * per_row.get(kind, 1))), (kind, tokens)
        manager.free(request)
