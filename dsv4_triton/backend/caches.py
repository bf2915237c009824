"""The paged caches of one attention layer, geometry `fine`, as vLLM cache layers.

    cache             block (tokens)  row every       row
    window            64              token           512 values or a record of 640 bytes, kept for 128 tokens
    c4 compressed     256             4 tokens        512 values or a record
    c128 compressed   256             128 tokens      512 values or a record
    indexer keys      256             4 tokens        128 values and a scale (one page, two views), or 128 plain values
    c4 state          4               token           2048 fp32, kept for 8 tokens
    indexer state     4               token           512 fp32, kept for 8 tokens
    c128 state        8               token           1024 fp32, kept for 128 tokens

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

from dsv4_triton.backend.attention_backend import TritonDsaBackend
from dsv4_triton.backend.compat import growing_cache_spec, sliding_cache_spec
from dsv4_triton.backend.geometry import HIT_TOKENS, RECORD_BYTES, STATE_BLOCK, STATE_WINDOW, WINDOW_BLOCK, overlap
from dsv4_triton.backend.metadata import StepPlanner
from dsv4_triton.config import HEAD_DIM, INDEX_DIM, WINDOW
from dsv4_triton.device import IndexFormat, RowFormat

INDEX_STORAGE = {"int8": (torch.int8, torch.float16), "e4m3": (torch.float8_e4m3fn, torch.float32)}
"""Key and scale dtype of the quantised indexer formats."""


class CacheLayer(nn.Module, AttentionLayerBase):
    """One paged cache, known to vLLM by its prefix.

    `rows` is the bound cache [blocks, rows per block, width], empty before that; a row stands for `ratio` tokens.
    """

    def __init__(self, vllm_config: VllmConfig, prefix: str, spec: Any, ratio: int, planner: StepPlanner) -> None:
        super().__init__()
        self.prefix = prefix
        self.spec = spec
        self.ratio = ratio
        self.rows_per_block = spec.block_size // ratio
        self.planner = planner
        self.kv_cache = torch.empty(0)
        layers = vllm_config.compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"cache {prefix!r} is registered twice")
        layers[prefix] = self

    @property
    def rows(self) -> torch.Tensor:
        """The cache vLLM bound, under a name that says what it holds."""
        return self.kv_cache

    def get_attn_backend(self) -> type[AttentionBackend]:
        return TritonDsaBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        return self.spec


class IndexKeyCache(CacheLayer):
    """Indexer keys; `keys` [blocks, rows, 128] and `scales` [blocks, rows] (None for plain keys) view the same page.

    A quantised page holds all keys, then all scales. Source: the layout vllm-ascend gives its indexer cache.
    """

    def __init__(
        self, vllm_config: VllmConfig, prefix: str, index_format: IndexFormat, dtype: torch.dtype, planner: StepPlanner
    ):
        storage = INDEX_STORAGE.get(index_format)
        if storage is None:
            width, page_dtype = INDEX_DIM, dtype
        else:
            width, page_dtype = INDEX_DIM + storage[1].itemsize, torch.uint8
        spec = growing_cache_spec(block_size=HIT_TOKENS, ratio=4, width=width, dtype=page_dtype)
        super().__init__(vllm_config, prefix, spec, 4, planner)
        self.storage = storage
        self.keys = torch.empty(0)
        self.scales: torch.Tensor | None = None

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        super().bind_kv_cache(kv_cache)
        if self.storage is None:
            self.keys = kv_cache
            return
        key_dtype, scale_dtype = self.storage
        blocks, rows, _ = kv_cache.shape
        stride, start, key_bytes = kv_cache.stride(0), kv_cache.storage_offset(), rows * INDEX_DIM
        self.keys = kv_cache.as_strided((blocks, rows, INDEX_DIM), (stride, INDEX_DIM, 1), start).view(key_dtype)
        scale_bytes = kv_cache.as_strided((blocks, rows * scale_dtype.itemsize), (stride, 1), start + key_bytes)
        self.scales = scale_bytes.view(scale_dtype)


class LayerCaches(nn.Module):
    """The caches one attention layer owns: the window, and for compressed layers the entries and the state."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        prefix: str,
        ratio: int,
        dtype: torch.dtype,
        row_format: RowFormat,
        index_format: IndexFormat,
        planner: StepPlanner,
    ) -> None:
        super().__init__()
        width, row_dtype = (HEAD_DIM, dtype) if row_format is RowFormat.PLAIN else (RECORD_BYTES, torch.uint8)

        def cache(name: str, spec: Any, tokens_per_row: int = 1) -> CacheLayer:
            return CacheLayer(vllm_config, f"{prefix}.{name}", spec, tokens_per_row, planner)

        self.window = cache(
            "window", sliding_cache_spec(block_size=WINDOW_BLOCK, window=WINDOW, width=width, dtype=row_dtype)
        )
        self.compressed: CacheLayer | None = None
        self.state: CacheLayer | None = None
        self.index_keys: IndexKeyCache | None = None
        self.index_state: CacheLayer | None = None
        if ratio:
            self.compressed = cache(
                "compressed",
                growing_cache_spec(block_size=HIT_TOKENS, ratio=ratio, width=width, dtype=row_dtype),
                ratio,
            )
            self.state = cache("state", _state_spec(ratio, HEAD_DIM))
        if ratio == 4:
            self.index_keys = IndexKeyCache(vllm_config, f"{prefix}.index_keys", index_format, dtype, planner)
            self.index_state = cache("index_state", _state_spec(ratio, INDEX_DIM))


def _state_spec(ratio: int, dim: int) -> Any:
    """Rows [u | g] of both halves where windows overlap, fp32."""
    width = 2 * overlap(ratio) * dim
    return sliding_cache_spec(
        block_size=STATE_BLOCK[ratio], window=STATE_WINDOW[ratio], width=width, dtype=torch.float32
    )
