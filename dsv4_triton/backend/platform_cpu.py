"""The CPU development platform: vLLM's CPU platform with what DeepSeek-V4 needs.

vLLM 0.27.1 switches chunked prefill off for MLA models on a CPU and offers its own attention backend only. Models of
other architectures are served exactly as without this plugin.

vLLM imports this module while it is itself half imported: only its platform module may be imported at the top.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import psutil  # type: ignore[import-untyped]
from vllm.platforms.cpu import CpuPlatform

from dsv4_triton.backend.op import OP_NAME
from dsv4_triton.backend.plugin import ARCHITECTURE

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's logger, so that its handlers print it

WORKER_CLASS = "dsv4_triton.backend.worker_cpu.HostWorker"
THREADS_VARIABLE = "DSV4_TRITON_THREADS"
"""Read by the host driver; worker processes inherit it."""
DEFAULT_CACHE_BYTES = 4 << 30
"""KV-cache memory when the user gives no size: vLLM would take 92 % of the machine's memory."""


class HostPlatform(CpuPlatform):
    """CPU platform that keeps chunked prefill for DeepSeek-V4 and runs its Triton kernels natively."""

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: AttentionBackendEnum | None, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if selected_backend is not None and selected_backend.name == "CUSTOM":
            return selected_backend.get_path()
        return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        if not _serves_deepseek_v4(vllm_config):
            super().check_and_update_config(vllm_config)
            return
        from dsv4_triton.backend.compat import split_graph_at
        from dsv4_triton.backend.serving import Serving

        serving = Serving.of(vllm_config)
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        chunked_prefill, batched_tokens = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        worker = vllm_config.parallel_config.worker_cls
        super().check_and_update_config(vllm_config)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = chunked_prefill, batched_tokens
        cache.block_size = serving.layout.block_size
        if worker == "auto":
            vllm_config.parallel_config.worker_cls = WORKER_CLASS
        if cache.kv_cache_memory_bytes is None:
            cache.kv_cache_memory_bytes = min(DEFAULT_CACHE_BYTES, psutil.virtual_memory().available // 4)
            logger.info(
                "KV cache: %.1f GiB (set VLLM_CPU_KVCACHE_SPACE to change it)", cache.kv_cache_memory_bytes / 2**30
            )
        if serving.options.host_threads != "auto":
            os.environ[THREADS_VARIABLE] = str(serving.options.host_threads)
        # OpenMP threads that spin between vLLM's matrix products take the core that the next kernel's threads need: a
        # decode step is several times slower. The engine's processes start after this and inherit it.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        split_graph_at(f"vllm::{OP_NAME}")


def _serves_deepseek_v4(vllm_config: VllmConfig) -> bool:
    model_config = vllm_config.model_config
    return model_config is not None and ARCHITECTURE in (model_config.architectures or ())
