from typing import Any

from dsv4_triton.backend.platform_npu import NpuPlatform


class NPUPlatform(NpuPlatform):
    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        super().pre_register_and_update(parser)
        import vllm_ascend.core.planning  # noqa: F401  (replaces functions of vLLM)

    @classmethod
    def register_custom_kv_cache_specs(cls, vllm_config: Any) -> None:
        from vllm_ascend.core.kv_cache_interface import register_ascend_kv_cache_specs

        register_ascend_kv_cache_specs()

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None) -> str:
        """Whatever was selected."""
        return "vllm_ascend.attention.dsa_v1.AscendDSABackend"

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        """None that a model meets."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = "vllm_ascend.worker.worker.NPUWorker"
        if cache.block_size not in (32, 64, 128):
            cache.block_size = 32
        vllm_config.compilation_config.custom_ops = ["all"]
        if vllm_config.additional_config:
            vllm_config.additional_config.setdefault("ascend_compilation_config", {})
