"""The paged caches of one attention layer as vLLM cache layers; `geometry` has their pages.

Block 0 of every cache is vLLM's null block. A cache arrives as a view whose block stride is that of the whole packed
block, so it is larger than its page.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend

from dsv4_triton.backend import ascend
from dsv4_triton.backend.attention_backend import TritonDsaBackend
from dsv4_triton.backend.compat import cache_spec
from dsv4_triton.backend.geometry import INDEX_STORAGE, Layout, Pages
from dsv4_triton.backend.metadata import StepPlanner
from dsv4_triton.config import INDEX_DIM


class CacheLayer(nn.Module, AttentionLayerBase):
    """One paged cache, known to vLLM by its prefix.

    `rows` is the bound cache [blocks, rows per block, width], empty before that; a row stands for `ratio` tokens.
    """

    def __init__(
        self, vllm_config: VllmConfig, prefix: str, pages: Pages, layout: Layout, planner: StepPlanner
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.spec = cache_spec(pages, layout.growing_tokens)
        self.ratio = pages.ratio
        self.rows_per_block = pages.rows
        self.planner = planner
        self._pages = pages
        self._rows = torch.empty(0)
        layers = vllm_config.compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"cache {prefix!r} is registered twice")
        layers[prefix] = self

    @property
    def rows(self) -> torch.Tensor:
        """The bound cache."""
        return self._rows

    @property
    def kv_cache(self) -> torch.Tensor:
        """`rows` under the name by which model runners bind it: vLLM's call `bind_kv_cache`, vllm-ascend's set it."""
        return self._rows

    @kv_cache.setter
    def kv_cache(self, bound: Any) -> None:
        self._rows = ascend.bound_cache(bound, self._pages)
        self.take(self._rows)

    def take(self, rows: torch.Tensor) -> None:
        """Called with the cache when it is bound."""

    def get_attn_backend(self) -> type[AttentionBackend]:
        return TritonDsaBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        return self.spec


class IndexKeyCache(CacheLayer):
    """Indexer keys; `keys` [blocks, rows, 128] and `scales` [blocks, rows] (None for plain keys) view the same page.

    A quantised page holds all keys, then all scales. Source: the layout vllm-ascend gives its indexer cache.
    """

    def __init__(self, vllm_config: VllmConfig, prefix: str, layout: Layout, planner: StepPlanner):
        super().__init__(vllm_config, prefix, layout.index_keys, layout, planner)
        self.storage = INDEX_STORAGE.get(layout.index_format)
        self.keys = torch.empty(0)
        self.scales: torch.Tensor | None = None

    def take(self, rows: torch.Tensor) -> None:
        if self.storage is None or not rows.numel():  # vLLM ends by binding an empty tensor
            self.keys, self.scales = rows, None
            return
        key_dtype, scale_dtype = self.storage
        blocks, count, _ = rows.shape
        stride, start, key_bytes = rows.stride(0), rows.storage_offset(), count * INDEX_DIM
        self.keys = rows.as_strided((blocks, count, INDEX_DIM), (stride, INDEX_DIM, 1), start).view(key_dtype)
        scale_bytes = rows.as_strided((blocks, count * scale_dtype.itemsize), (stride, 1), start + key_bytes)
        self.scales = scale_bytes.view(scale_dtype)


class LayerCaches(nn.Module):
    """The caches one attention layer owns: the window, for compressed layers the entries and the state, and for those
    that select their entries the index keys and their state.

    A c4 layer that shares a selection (`selects` is false) has no index keys. It still registers an index state, which
    nothing writes or reads: it is grouped with the c4 states, and vLLM 0.27.1 takes only groups with as many pages of
    one size as of another. All blocks are as large as the largest group's. In `fine` that is the group of the growing
    caches, which the missing keys make smaller, so that the state costs nothing. In `vllm-ascend`, where the states
    are padded to the same sizes, blocks stay as large as without sharing: it saves time there, and no memory.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        prefix: str,
        ratio: int,
        layout: Layout,
        planner: StepPlanner,
        *,
        selects: bool = True,
    ) -> None:
        super().__init__()

        def cache(name: str, pages: Pages) -> CacheLayer:
            return CacheLayer(vllm_config, f"{prefix}.{name}", pages, layout, planner)

        self.window = cache("window", layout.window)
        self.compressed: CacheLayer | None = None
        self.state: CacheLayer | None = None
        self.index_keys: IndexKeyCache | None = None
        self.index_state: CacheLayer | None = None
        if ratio:
            self.compressed = cache("compressed", layout.compressed[ratio])
            self.state = cache("state", layout.state[ratio])
        if ratio == 4:
            if selects:
                self.index_keys = IndexKeyCache(vllm_config, f"{prefix}.index_keys", layout, planner)
            self.index_state = cache("index_state", layout.index_state)
