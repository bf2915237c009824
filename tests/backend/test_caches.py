"""Cache specs, the groups and pages vLLM makes of them, and the views of an indexer page."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4_triton.backend.caches import IndexKeyCache, LayerCaches
from dsv4_triton.backend.geometry import Layout
from dsv4_triton.backend.metadata import StepPlanner
from dsv4_triton.options import IndexCache
from tests.backend.layouts import FLASH_RATIOS, caches_of, layout_of, server_config

KIB = 1024


def planner() -> StepPlanner:
    return StepPlanner(8, torch.device("cpu"))


def vllm_config() -> Any:
    return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))


@pytest.mark.parametrize(
    ("dtype", "index_format", "pages"),
    [
        (torch.bfloat16, "int8", {"window": 64, "compressed": 64, "index_keys": 8.125, "state": 32, "index_state": 8}),
        (torch.bfloat16, "e4m3", {"window": 64, "compressed": 64, "index_keys": 8.25, "state": 32, "index_state": 8}),
        (torch.float32, "plain", {"window": 128, "compressed": 128, "index_keys": 32, "state": 32, "index_state": 8}),
    ],
)
def test_pages_of_a_c4_layer(dtype: torch.dtype, index_format: str, pages: dict[str, float]) -> None:
    """64 rows of 512 values; 64 keys of 128 bytes and a scale; 4 rows of 2048 and 512 fp32."""
    caches = caches_of(layout_of((4,), dtype=dtype, index_format=index_format))
    assert {name.rpartition(".")[2]: cache.spec.page_size_bytes / KIB for name, cache in caches.items()} == pages


def test_pages_of_records() -> None:
    caches = caches_of(layout_of((4, 128), device_family="a5"))
    rows = {name: cache.spec for name, cache in caches.items() if name.endswith(("window", "compressed"))}
    assert {spec.dtype for spec in rows.values()} == {torch.uint8}
    assert [spec.page_size_bytes for spec in rows.values()] == [64 * 640, 64 * 640, 64 * 640, 2 * 640]


def test_pages_of_the_other_layers() -> None:
    caches = caches_of(layout_of((0, 128)))
    assert [name.removeprefix("model.layers.") for name in caches] == [
        "0.attn.window",
        "1.attn.window",
        "1.attn.compressed",
        "1.attn.state",
    ]
    compressed, state = caches["model.layers.1.attn.compressed"], caches["model.layers.1.attn.state"]
    assert (compressed.spec.block_size, compressed.rows_per_block, compressed.spec.page_size_bytes) == (256, 2, 2 * KIB)
    assert (state.spec.block_size, state.spec.sliding_window, state.spec.page_size_bytes) == (8, 128, 32 * KIB)


@pytest.mark.parametrize(
    ("options", "hits"),
    [
        ({}, {"c4": 256, "c128": 256, "window": 256}),
        ({"geometry": "vllm-ascend", "block_size": 32}, {"c4": 128, "c128": 4096, "window": 32}),
        ({"geometry": "vllm-ascend", "device_family": "a5"}, {"c4": 512, "c128": 16384, "window": 128}),
    ],
)
@pytest.mark.parametrize("ratios", [(0, 4, 128, 4, 128, 0), (128, 128, 4, 128, 4), (0, 128), (4, 4), (0, 0)])
def test_groups_and_hit_steps(ratios: tuple[int, ...], options: dict[str, Any], hits: dict[str, int]) -> None:
    """vLLM's own grouping takes every mix of layers, and makes hits come as often as the layout says."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups, resolve_kv_cache_block_sizes

    layout = layout_of(ratios, **options)
    specs = {name: cache.spec for name, cache in caches_of(layout).items()}
    config = server_config()
    config.cache_config.block_size = layout.block_size
    groups = get_kv_cache_groups(config, dict(specs))
    assert sorted(name for group in groups for name in group.layer_names) == sorted(specs)
    hit, _ = resolve_kv_cache_block_sizes(SimpleNamespace(kv_cache_groups=groups), config)
    assert hit == hits["c128" if 128 in ratios else "c4" if 4 in ratios else "window"]
    assert layout.hit_tokens == hit


def block_bytes(layout: Layout) -> int:
    """What vLLM takes for a block of these caches."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

    specs = {name: cache.spec for name, cache in caches_of(layout).items()}
    groups = get_kv_cache_groups(server_config(), specs)
    assert sorted(name for group in groups for name in group.layer_names) == sorted(specs)
    return max(group.kv_cache_spec.page_size_bytes for group in groups)


@pytest.mark.parametrize("family", ["a2", "a5", "host"])
@pytest.mark.parametrize("ratios", [FLASH_RATIOS, (4, 4, 4), (0, 4, 128, 4, 128, 0)], ids=["flash", "c4", "demo"])
@pytest.mark.parametrize("pattern", ["F", "FS", "FFS", "FSSS"])
def test_caches_of_shared_layers(family: str, ratios: tuple[int, ...], pattern: str) -> None:
    """They have no keys: blocks of `fine` are smaller by their pages. Those of `vllm-ascend` keep their size."""
    count = ratios.count(4)
    option = IndexCache(pattern=(pattern * count)[:count])
    for geometry in ("fine", "vllm-ascend"):
        plain = layout_of(ratios, device_family=family, geometry=geometry)
        sharing = layout_of(ratios, device_family=family, geometry=geometry, index_cache=option)
        layers = sharing.shared_indices
        assert len(layers) == option.pattern.count("S")
        keys = {int(name.split(".")[2]) for name in caches_of(sharing) if name.endswith("index_keys")}
        assert keys == {layer for layer, ratio in enumerate(ratios) if ratio == 4} - layers
        saved = len(layers) * plain.index_keys.page_bytes if geometry == "fine" else 0
        assert block_bytes(plain) - block_bytes(sharing) == saved
        assert (plain.token_bytes - sharing.token_bytes) * plain.index_keys.tokens == saved


@pytest.mark.parametrize(("index_format", "key", "scale"), [
    ("int8", torch.int8, torch.float16),
    ("e4m3", torch.float8_e4m3fn, torch.float32),
])  # fmt: skip
def test_key_and_scale_view_the_same_page(index_format: Any, key: torch.dtype, scale: torch.dtype) -> None:
    """All keys of a page, then all scales; blocks further apart than a page; nothing outside is touched."""
    cache = IndexKeyCache(vllm_config(), "x", layout_of(index_format=index_format), planner())
    page = cache.spec.page_size_bytes
    stride, offset, blocks = page + 256, 64, 3
    memory = torch.full((blocks, stride), 0x11, dtype=torch.uint8)
    cache.bind_kv_cache(memory[:, offset : offset + page].view(blocks, 64, -1))
    assert (cache.keys.dtype, cache.keys.shape) == (key, (blocks, 64, 128))
    assert cache.scales is not None
    assert (cache.scales.dtype, cache.scales.shape) == (scale, (blocks, 64))
    cache.keys.view(torch.uint8)[1] = 0x22
    cache.scales.view(torch.uint8).view(blocks, 64, -1)[1] = 0x33
    expected = torch.full_like(memory, 0x11)
    expected[1, offset : offset + 64 * 128] = 0x22
    expected[1, offset + 64 * 128 : offset + page] = 0x33
    assert torch.equal(memory, expected)


def test_plain_keys_have_no_scale() -> None:
    cache = IndexKeyCache(vllm_config(), "x", layout_of(dtype=torch.float32), planner())
    rows = torch.zeros(2, 64, 128)
    cache.bind_kv_cache(rows)
    assert cache.keys is rows
    assert cache.scales is None


def test_a_prefix_is_registered_once() -> None:
    config = vllm_config()
    LayerCaches(config, "model.layers.0.attn", 0, layout_of(), planner())
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.attn\.window' is registered twice"):
        LayerCaches(config, "model.layers.0.attn", 0, layout_of(), planner())
