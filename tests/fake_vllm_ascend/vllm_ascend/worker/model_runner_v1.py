"""Allocation and binding of caches, and the calls of metadata builders, in vllm-ascend's manner."""

from copy import copy
from typing import Any

import numpy as np
import torch
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from dsv4_triton.backend.worker_npu import NpuModelRunner
from vllm_ascend.attention.dsa_v1 import AscendDSABackend
from vllm_ascend.attention.utils import AscendCommonAttentionMetadata
from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec, AscendSlidingWindowMLASpec
from vllm_ascend.spec_decode.eagle_proposer import AscendEagleProposer

gpu_model_runner.CommonAttentionMetadata = AscendCommonAttentionMetadata


class NPUModelRunner(NpuModelRunner):
    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self.use_compress = hasattr(vllm_config.model_config.hf_config, "compress_ratios")
        self._capturing = False
        super().__init__(vllm_config, device)
        self.attn_backend = AscendDSABackend
        if vllm_config.speculative_config is not None:
            self.drafter = AscendEagleProposer(vllm_config, device, self)

    def _layer_specs(self, kv_cache_config: Any) -> dict[str, Any]:
        return {
            name: group.kv_cache_spec.kv_cache_specs[name]
            for group in kv_cache_config.kv_cache_groups
            for name in group.layer_names
        }

    def _allocate_kv_cache_tensors(self, kv_cache_config: Any) -> dict[str, torch.Tensor]:
        raw: dict[str, torch.Tensor] = {}
        for planned in kv_cache_config.kv_cache_tensors:
            assert all("attn" in name for name in planned.shared_by)
            memory = torch.zeros(planned.size, dtype=torch.int8, device=self.device)
            raw |= dict.fromkeys(planned.shared_by, memory)
        return raw

    def _reshape_kv_cache_tensors(
        self, kv_cache_config: Any, kv_cache_raw_tensors: dict[str, torch.Tensor]
    ) -> dict[str, list[torch.Tensor]]:
        views: dict[str, list[torch.Tensor]] = {}
        for name, spec in self._layer_specs(kv_cache_config).items():
            # Another class is taken for keys and values there, and its tensor is taken apart element by element.
            assert isinstance(spec, (AscendMLAAttentionSpec, AscendSlidingWindowMLASpec)), type(spec)
            memory = kv_cache_raw_tensors[name]
            assert memory.numel() // spec.page_size_bytes == kv_cache_config.num_blocks
            shape = AscendDSABackend.get_kv_cache_shape(
                kv_cache_config.num_blocks, spec.storage_block_size, spec.num_kv_heads, spec.head_size
            )
            inner = torch.empty(shape[1:], device="meta").stride()
            stride = (spec.page_size_bytes // spec.dtype.itemsize, *inner)
            view = torch.as_strided(memory.view(spec.dtype), shape, stride)
            views[name] = [view]
        return views

    def initialize_kv_cache_tensors(self, kv_cache_config: Any, kernel_block_sizes: Any = None) -> dict[str, Any]:
        raw = self._allocate_kv_cache_tensors(kv_cache_config)
        views = self._reshape_kv_cache_tensors(kv_cache_config, raw)
        for name, view in views.items():
            self.kv_caches.append(view)
            self.compilation_config.static_forward_context[name].kv_cache = [view]
        return views

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return {name: layer.get_kv_cache_spec(self.vllm_config) for name, layer in self._cache_layers().items()}

    def _cache_layers(self) -> dict[str, Any]:
        layers = self.compilation_config.static_forward_context
        return {name: layer for name, layer in layers.items() if hasattr(layer, "get_kv_cache_spec")}

    def _determine_batch_execution_and_padding(self, *arguments: Any, **named: Any) -> Any:
        found = GPUModelRunner._determine_batch_execution_and_padding(self, *arguments, **named)
        self.batch = found[:2]  # what the drafter goes by
        return found

    # Without this project's care for the launches of a capture.
    _warmup_and_capture = GPUModelRunner._warmup_and_capture

    def _dummy_run(self, *arguments: Any, is_graph_capturing: bool = False, **named: Any) -> Any:
        self._capturing = is_graph_capturing
        return GPUModelRunner._dummy_run(self, *arguments, is_graph_capturing=is_graph_capturing, **named)

    def _build_attention_metadata(
        self,
        num_tokens: int,
        num_reqs: int,
        max_query_len: int,
        num_tokens_padded: int | None = None,
        num_reqs_padded: int | None = None,
        for_cudagraph_capture: bool = False,
        **named: Any,
    ) -> Any:
        """Requests of padding have tokens, and no length. Steps of no request are planned as captures are only while a
        graph is captured."""
        rows, padded = num_tokens_padded or num_tokens, num_reqs_padded or num_reqs
        if rows == padded * self.uniform_decode_query_len:
            starts = self.query_start_loc
            starts.np[num_reqs : padded + 1] = starts.np[num_reqs] + self.uniform_decode_query_len * np.arange(
                padded + 1 - num_reqs
            )
            starts.copy_to_gpu()
        for groups in self.attn_groups:
            for group in groups:
                for builder in group.metadata_builders:
                    self._count_apart(builder)
        self._tokens = num_tokens
        return GPUModelRunner._build_attention_metadata(
            self,
            num_tokens,
            num_reqs,
            max_query_len,
            num_tokens_padded,
            num_reqs_padded,
            for_cudagraph_capture=for_cudagraph_capture and self._capturing,
            **named,
        )

    def _count_apart(self, builder: Any) -> None:
        """Let this builder be told of padding apart from tokens."""
        if "build" in vars(builder):
            return
        build = builder.build

        def build_apart(common_prefix_len: int, common_attn_metadata: Any) -> Any:
            assert isinstance(common_attn_metadata, AscendCommonAttentionMetadata)
            own = copy(common_attn_metadata)
            own.num_input_tokens, own.num_actual_tokens = own.num_actual_tokens, self._tokens
            return build(common_prefix_len=common_prefix_len, common_attn_metadata=own)

        builder.build = build_apart
