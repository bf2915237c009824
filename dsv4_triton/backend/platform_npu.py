"""The platform of vLLM on an Ascend machine with torch_npu and without vllm-ascend; it serves DeepSeek-V4 alone.

vLLM imports this module while it is itself half imported: only its platform module may be imported at the top.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms.interface import Platform, PlatformEnum

from dsv4_triton.backend import graphs, installation, upstream_triton
from dsv4_triton.backend.op import OP_NAME
from dsv4_triton.backend.plugin import ARCHITECTURE
from dsv4_triton.config import ConfigError
from dsv4_triton.device import family_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's logger, so that its handlers print it

WORKER_CLASS = "dsv4_triton.backend.worker_npu.NpuWorker"
EAGER_BREAKS = "VLLM_USE_BREAKABLE_CUDAGRAPH"
"""vLLM's graphs with eager pieces, which it switches on for DeepSeek-V4: here a decode step is one graph."""


def _npu() -> Any:
    return torch.get_device_module("npu")


class NpuPlatform(Platform):
    """NPUs through torch_npu: what vLLM asks of a platform, answered by `torch.npu`. What is not here, such as streams
    and graph pools, vLLM takes from `torch.npu` itself."""

    _enum = PlatformEnum.OOT
    device_name = "npu"
    device_type = "npu"
    dispatch_key = "PrivateUse1"
    ray_device_key = "NPU"
    device_control_env_var = "ASCEND_RT_VISIBLE_DEVICES"
    dist_backend = "hccl"
    simple_compile_backend = "eager"

    def __init__(self) -> None:
        """ConfigError where torch_npu does not load. vLLM makes one platform in every process, before anything that it
        imports asks for torch_npu or for Triton, and also where torch has been told not to load it."""
        try:
            import torch_npu  # noqa: F401
        except Exception as error:  # of the loader, of torch, or of CANN's Python modules
            installation.check("npu")  # a torch_npu for another torch does not load either
            raise ConfigError(
                f"torch_npu is installed but does not load: {error}; is CANN in this shell (source its set_env.sh)? "
                f"`dsv4-triton doctor` says what is missing"
            ) from error
        upstream_triton.complete()

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    @classmethod
    def import_kernels(cls) -> None:
        """vLLM's own kernels are for other devices."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> None:
        """CUDA's; an NPU has none."""
        return None

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return _npu().get_device_name(device_id)

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return _npu().get_device_properties(device_id).total_memory

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return family_of("npu").cube_cores

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        _npu().set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        _npu().manual_seed_all(seed)

    @classmethod
    def get_current_memory_usage(cls, device: torch.device | None = None) -> float:
        _npu().reset_peak_memory_stats(device)
        return _npu().max_memory_allocated(device)

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return True

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return True

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """vLLM's for XPU, which is the one of plain torch.distributed calls."""
        return "vllm.distributed.device_communicators.xpu_communicator.XpuCommunicator"

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        os.environ.setdefault(EAGER_BREAKS, "0")

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        """Nothing is compiled by torch, and decode steps are graphs. ConfigError for a mode that compiles, or for
        graphs that cannot be captured, in place of which vLLM would make none a little later."""
        from vllm.config import CompilationMode

        compilation = vllm_config.compilation_config
        graphs.settle(compilation)
        graphs.check(compilation.cudagraph_mode)
        if compilation.mode not in (None, CompilationMode.NONE):  # None where the user gave none, until after this
            raise ConfigError(
                f"mode of --compilation-config is {compilation.mode.name}: torch compiles nothing of DeepSeek-V4 on an "
                f"NPU; it takes NONE"
            )
        compilation.mode = CompilationMode.NONE

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """ConfigError for a model that is not DeepSeek-V4 and for what would end a capture or a step of it."""
        from dsv4_triton.backend.compat import split_graph_at
        from dsv4_triton.backend.serving import Serving

        model = vllm_config.model_config
        if model is None:
            return
        if ARCHITECTURE not in (model.architectures or ()):
            raise ConfigError(
                f"the NPU platform of dsv4_triton serves {ARCHITECTURE} and no {' or '.join(model.architectures)}; "
                f"install vllm-ascend for other models"
            )
        if vllm_config.use_v2_model_runner:
            raise ConfigError(
                "VLLM_USE_V2_MODEL_RUNNER is 1, but NPUs are served by vLLM's first model runner; unset it"
            )
        vllm_config.cache_config.block_size = Serving.of(vllm_config).layout.block_size
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = WORKER_CLASS
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a fork has no usable device
        split_graph_at(f"vllm::{OP_NAME}")

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None:
        """The block size is that of the cache geometry."""
