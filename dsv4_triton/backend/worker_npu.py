"""vLLM's GPU worker and model runner on an NPU."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm import envs
from vllm.config import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.utils.mem_utils import MemorySnapshot
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.utils import report_usage_stats
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.utils import request_memory
from vllm.v1.worker.workspace import init_workspace_manager

from dsv4_triton.backend import capture_rules
from dsv4_triton.backend.compat import mend_rejection_sampler
from dsv4_triton.backend.serving import Serving
from dsv4_triton.backend.upstream_npu import use_npu


class NpuModelRunner(GPUModelRunner):
    """vLLM's runner; `use_npu` has pointed what it takes from CUDA to the NPU."""

    def _init_device_properties(self) -> None:
        self.num_sms = current_platform.num_compute_units(self.device.index)

    def _warmup_and_capture(
        self, desc: Any, cudagraph_runtime_mode: Any, profile_seq_lens: int | None = None, **options: Any
    ) -> None:
        """Run the step before it is captured with the launches of the capture, which are those of the longest
        sequences: none may be compiled or loaded then."""
        super()._warmup_and_capture(desc, cudagraph_runtime_mode, profile_seq_lens=self.max_model_len, **options)


class NpuWorker(Worker):
    """vLLM's worker, which knows how to begin on CUDA only."""

    def init_device(self) -> None:
        capture_rules.check()
        use_npu()
        mend_rejection_sampler()
        # Only here: later vLLM has its own block size in the config.
        self.warm_up = Serving.of(self.vllm_config).options.warm_up == "on"
        self.local_rank += self._local_ranks_before()
        self.device = torch.device("npu", self.local_rank)
        current_platform.set_device(self.device)
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, current_platform.dist_backend
        )
        set_random_seed(self.model_config.seed)
        gc.collect()
        torch.accelerator.empty_cache()
        self.init_snapshot = MemorySnapshot(device=self.device)
        self.requested_memory = request_memory(self.init_snapshot, self.cache_config)
        init_workspace_manager(self.device, 1)
        self.model_runner = NpuModelRunner(self.vllm_config, self.device)
        if self.rank == 0:
            report_usage_stats(self.vllm_config)

    def _local_ranks_before(self) -> int:
        """Devices of this machine that other data-parallel engines take, where every process sees all devices."""
        parallel = self.parallel_config
        outside = ("ray", "external_launcher")
        if (
            parallel.distributed_executor_backend in outside
            or parallel.data_parallel_backend == "ray"
            or parallel.nnodes_within_dp != 1
        ):
            return 0
        before = parallel.data_parallel_rank_local
        if before is None:
            before = parallel.data_parallel_index
        return before * parallel.pipeline_parallel_size * parallel.tensor_parallel_size

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        """Memory pools are for vLLM's sleep mode, which it refuses on this platform."""
        return nullcontext()

    def determine_available_memory(self) -> int:
        """Bytes for the caches: vLLM's plan, less what graphs of steps hold, which vLLM measures on GPUs alone."""
        available = super().determine_available_memory()
        graphs = self.vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE
        if self.cache_config.kv_cache_memory_bytes or not graphs or not envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS:
            return available
        with capture_rules.enforced(self.device):  # it captures some of them
            held = self.model_runner.profile_cudagraph_memory()
        self.cudagraph_memory_estimate = held
        self.peak_activation_memory += held
        self.available_kv_cache_memory_bytes -= held
        return available - held

    def compile_or_warm_up_model(self) -> Any:
        """Compile what requests can ask for, before graphs are captured."""
        if self.warm_up:
            self.model_runner.model.warm_up(self.model_runner)
        with capture_rules.enforced(self.device):
            return super().compile_or_warm_up_model()
