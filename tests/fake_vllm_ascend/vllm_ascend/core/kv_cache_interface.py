from dataclasses import dataclass

import torch
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowMLASpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


@dataclass(frozen=True, kw_only=True)
class AscendMLAAttentionSpec(MLAAttentionSpec):
    scale_dim: int = 0
    scale_dtype: torch.dtype = torch.int8

    @property
    def storage_block_size(self) -> int:
        return self.block_size // self.compress_ratio

    @property
    def page_size_bytes(self) -> int:
        """Without padding, whatever was asked for."""
        values = self.head_size * self.dtype.itemsize + self.scale_dim * self.scale_dtype.itemsize
        return self.storage_block_size * self.num_kv_heads * values


@dataclass(frozen=True, kw_only=True)
class AscendSlidingWindowMLASpec(SlidingWindowMLASpec):
    def __post_init__(self) -> None:
        """No alignment."""


def register_ascend_kv_cache_specs() -> None:
    for spec, manager, base in (
        (AscendMLAAttentionSpec, FullAttentionManager, FullAttentionSpec),
        (AscendSlidingWindowMLASpec, SlidingWindowManager, SlidingWindowMLASpec),
    ):
        KVCacheSpecRegistry.register(kvcache_spec_cls=spec, manager_class=manager, uniform_type_base_spec=base)
