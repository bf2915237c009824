from typing import Any

import torch
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.worker.gpu_worker import Worker

from dsv4_triton.backend import worker_npu
from vllm_ascend.worker.model_runner_v1 import NPUModelRunner


def dsa_forward(hidden: torch.Tensor, output: torch.Tensor) -> None:
    """The op of its own attention."""


direct_register_custom_op(op_name="dsa_forward", op_func=dsa_forward, mutates_args=["output"], fake_impl=dsa_forward)


class NPUWorker(worker_npu.NpuWorker):
    def init_device(self) -> None:
        worker_npu.NpuModelRunner = NPUModelRunner
        super().init_device()

    def compile_or_warm_up_model(self) -> Any:
        """Without a warm-up of this project's kernels, of which vllm-ascend knows nothing."""
        return Worker.compile_or_warm_up_model(self)

    def determine_available_memory(self) -> int:
        from vllm_ascend.utils import enable_dsa_cp

        enable_dsa_cp()  # profiling asks, where no config is current
        return super().determine_available_memory()
