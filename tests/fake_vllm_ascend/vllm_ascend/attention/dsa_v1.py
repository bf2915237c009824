from typing import Any

from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder


class AscendDSABackend(AttentionBackend):
    """The runner asks it for the shape of every cache; no layer of this project has it."""

    @staticmethod
    def get_name() -> str:
        return "ASCEND_DSA"

    @staticmethod
    def get_impl_cls() -> type:
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        raise NotImplementedError

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = ""
    ) -> tuple[int, ...]:
        return num_blocks, block_size, num_kv_heads, head_size


class AscendDSAMetadataBuilder:
    """Shows how builders are called."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, **kwargs: Any
    ) -> Any: ...

    def build_for_drafting(
        self, common_attn_metadata: Any, draft_index: int, fast_build: bool = False, **kwargs: Any
    ) -> Any: ...

    def build_for_graph_capture(self, common_attn_metadata: Any, attn_state: Any = None, **kwargs: Any) -> Any: ...
