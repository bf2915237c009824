"""The NPU platform refuses what it cannot serve before anything is loaded; its device is not needed for that."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4_triton.backend import installation
from dsv4_triton.backend.plugin import ARCHITECTURE
from dsv4_triton.config import ConfigError


def config(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(architectures=[changed.pop("architecture", ARCHITECTURE)]),
        use_v2_model_runner=changed.pop("second_runner", False),
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"architecture": "LlamaForCausalLM"}, "no LlamaForCausalLM; install vllm-ascend"),
        ({"second_runner": True}, "VLLM_USE_V2_MODEL_RUNNER is 1"),
    ],
)
def test_what_cannot_be_served(changed: dict[str, Any], message: str) -> None:
    from dsv4_triton.backend.platform_npu import NpuPlatform

    with pytest.raises(ConfigError, match=message):
        NpuPlatform.check_and_update_config(config(**changed))


@pytest.mark.parametrize(
    ("made_for", "says"),
    [
        ("2.13", "torch_npu is installed but does not load: .*; is CANN in this"),
        ("2.10", "is made for torch 2.10, but"),
    ],
)
def test_a_torch_npu_that_does_not_load(made_for: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is made for another torch, that is the reason."""
    from dsv4_triton.backend.platform_npu import NpuPlatform

    versions = {"torch": "2.13.0+cpu", "torch-npu": f"{made_for}.0", "vllm": "0.27.1"}
    monkeypatch.setattr(installation, "version_of", versions.get)
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(ConfigError, match=says):
        NpuPlatform()


def test_a_config_without_a_model_stays_as_it_is() -> None:
    """Programs that run parts of vLLM, such as its benchmarks of layers, make such configs."""
    from dsv4_triton.backend.platform_npu import NpuPlatform

    bare = SimpleNamespace(model_config=None)
    NpuPlatform.check_and_update_config(bare)
    assert vars(bare) == {"model_config": None}


def test_graphs_of_prefills() -> None:
    from vllm.config import CUDAGraphMode

    from dsv4_triton.backend.platform_npu import NpuPlatform

    asked = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    with pytest.raises(ConfigError, match=r"is FULL_AND_PIECEWISE: .* it takes FULL_DECODE_ONLY or NONE"):
        NpuPlatform.apply_config_platform_defaults(SimpleNamespace(compilation_config=asked))


def test_graphs_need_the_task_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import CUDAGraphMode

    from dsv4_triton.backend import graphs

    monkeypatch.setenv(graphs.TASK_QUEUE, "0")
    graphs.check(CUDAGraphMode.NONE)
    with pytest.raises(ConfigError, match="TRITON_ENABLE_TASKQUEUE is 0"):
        graphs.check(CUDAGraphMode.FULL_DECODE_ONLY)
    monkeypatch.delenv(graphs.TASK_QUEUE)
    graphs.check(CUDAGraphMode.FULL_DECODE_ONLY)


@pytest.mark.parametrize(
    ("changed", "before"),
    [
        ({}, 0),
        ({"data_parallel_index": 3}, 6),
        ({"data_parallel_index": 3, "data_parallel_rank_local": 1}, 2),
        ({"data_parallel_index": 3, "data_parallel_backend": "ray"}, 0),
        ({"data_parallel_index": 3, "distributed_executor_backend": "external_launcher"}, 0),
        ({"data_parallel_index": 3, "nnodes_within_dp": 2}, 0),
    ],
)
def test_engines_of_one_machine_take_devices_of_their_own(changed: dict[str, Any], before: int) -> None:
    """Two each; not where the launcher has shown every process its devices alone."""
    from dsv4_triton.backend.worker_npu import NpuWorker

    parallel = {
        "distributed_executor_backend": "mp", "data_parallel_backend": "mp", "nnodes_within_dp": 1,
        "data_parallel_rank_local": None, "data_parallel_index": 0, "pipeline_parallel_size": 1,
        "tensor_parallel_size": 2,
    }  # fmt: skip
    worker = NpuWorker.__new__(NpuWorker)
    worker.parallel_config = SimpleNamespace(**parallel | changed)
    assert worker._local_ranks_before() == before


@pytest.mark.parametrize("warm_up", [True, False])
def test_kernels_are_compiled_before_graphs_are_captured(warm_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.jit import JITFunction
    from vllm.v1.worker.gpu_worker import Worker

    from dsv4_triton.backend.worker_npu import NpuWorker

    done: list[str] = []
    hook = JITFunction.cache_hook

    def capture(worker: NpuWorker) -> None:
        done.append("captured" if JITFunction.cache_hook is not hook else "captured without rules")

    monkeypatch.setattr(Worker, "compile_or_warm_up_model", capture)
    worker = NpuWorker.__new__(NpuWorker)
    worker.warm_up, worker.device = warm_up, torch.device("cpu")
    worker.model_runner = SimpleNamespace(model=SimpleNamespace(warm_up=lambda runner: done.append("compiled")))
    worker.compile_or_warm_up_model()
    assert done == [*(["compiled"] if warm_up else []), "captured"] and JITFunction.cache_hook is hook


@pytest.mark.parametrize("changed", [{}, {"kv_cache_memory_bytes": 1000}, {"mode": "NONE"}, {"estimates": "0"}])
def test_what_graphs_hold_is_no_room_for_caches(changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is measured by capturing some of them, which keeps to the rules of captures; unless the caches' size is given,
    there are no graphs, or vLLM was told not to count them."""
    from triton.runtime.jit import JITFunction
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu_worker import Worker

    from dsv4_triton.backend.worker_npu import NpuWorker

    hook, hooks = JITFunction.cache_hook, list[Any]()
    monkeypatch.setattr(Worker, "determine_available_memory", lambda worker: 100)
    monkeypatch.setenv("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", changed.get("estimates", "1"))
    worker = NpuWorker.__new__(NpuWorker)
    worker.device, worker.peak_activation_memory, worker.available_kv_cache_memory_bytes = torch.device("cpu"), 7, 100
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=changed.get("kv_cache_memory_bytes"))
    mode = CUDAGraphMode[changed.get("mode", "FULL_DECODE_ONLY")]
    worker.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))
    measure = lambda: hooks.append(JITFunction.cache_hook) or 30  # noqa: E731
    worker.model_runner = SimpleNamespace(profile_cudagraph_memory=measure)
    available = worker.determine_available_memory()
    assert JITFunction.cache_hook is hook
    if changed:
        assert (available, hooks, worker.peak_activation_memory) == (100, [], 7)
    else:
        assert available == worker.available_kv_cache_memory_bytes == 70 and worker.peak_activation_memory == 37
        assert len(hooks) == 1 and hooks[0] is not hook, "captured without rules"
