"""The backend class vLLM asks for cache shapes and the metadata builder."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, MultipleOf

from dsv4_triton.backend.metadata import DsaMetadataBuilder


class GraphTensors:
    """What vllm-ascend asks of an attention implementation after each replay of a graph of drafts."""

    @staticmethod
    def update_graph_params(*_: Any, **__: Any) -> None:
        """Nothing is renewed in a graph: it reads what the builders write into tensors that stay."""


class TritonDsaBackend(AttentionBackend):
    """DeepSeek sparse attention in Triton; the forward pass is the custom op `triton_dsa_forward`."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type:
        """No implementation in vLLM's sense: the layers call torch.ops.vllm.triton_dsa_forward."""
        return GraphTensors

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return DsaMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[blocks, rows per block, width]; vLLM passes the rows of a page as `block_size`."""
        return (num_blocks, block_size, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        if include_num_layers_dimension:
            raise NotImplementedError("the caches of DeepSeek-V4 layers differ in shape and cannot be stacked")
        return (0, 1, 2)
