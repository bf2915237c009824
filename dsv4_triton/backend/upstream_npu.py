"""What vLLM 0.27.1's GPU classes take from CUDA, pointed to the NPU: names of torch.cuda, functions that ask for CUDA,
and launches of vLLM's own Triton kernels, which are tuned for GPUs (`upstream_kernels` does the same in torch).

Each name is checked before it is replaced: a release that moved one ends the start with a message, not a step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

import torch

from dsv4_triton.backend import upstream_kernels, upstream_triton
from dsv4_triton.backend.compat import existing
from dsv4_triton.backend.upstream_kernels import PageZeroer

CUDA_NAMES = {
    "Stream": "Stream",
    "stream": "stream",
    "set_stream": "set_stream",
    "current_stream": "current_stream",
    "default_stream": "default_stream",
    "synchronize": "synchronize",
    "mem_get_info": "mem_get_info",
    "CUDAGraph": "NPUGraph",
    "graph": "graph",
    "graph_pool_handle": "graph_pool_handle",
    "is_current_stream_capturing": "is_current_stream_capturing",
}
"""Names of torch.cuda that vLLM's GPU classes use, and what torch.npu calls them. Streams are of torch itself."""

KERNELS = {
    "vllm.v1.worker.block_table": ("_compute_slot_mapping_kernel",),
    "vllm.v1.spec_decode.utils": ("eagle_step_slot_mapping_metadata_kernel",),
    "vllm.v1.spec_decode.llm_base_proposer": (
        "eagle_prepare_inputs_padded_kernel",
        "eagle_prepare_next_token_padded_kernel",
    ),
    "vllm.v1.sample.rejection_sampler": (
        "rejection_greedy_sample_kernel",
        "rejection_random_sample_kernel",
        "sample_recovered_tokens_kernel",
    ),
}
"""Triton kernels of vLLM that a served step launches, by the module whose name is looked up at the launch."""

METHODS = {
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": ("_init_device_properties", "_warmup_and_capture"),
    "vllm.v1.worker.gpu_worker:Worker": ("_maybe_get_memory_pool_context",),
}
"""Private methods that the classes of `worker_npu` override, by the class of vLLM that calls them."""


def replace(module: str, name: str, value: Any) -> Any:
    """Set `name` in `module`, where it has to exist; the former value."""
    target = import_module(module)
    former = existing(target, module, name)
    setattr(target, name, value)
    return former


def check_methods() -> None:
    """UpstreamChangedError where vLLM lacks one of `METHODS`, so that nothing would call what stands for it."""
    for owner, names in METHODS.items():
        for name in names:
            existing(resolve_name(owner), owner, name)


class Launches:
    """Stands for a Triton kernel: `kernel[grid](...)` calls a function with the grid and the kernel's arguments."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._function, grid)


@cache
def use_npu() -> None:
    """Point this process's vLLM to the NPU, once; UpstreamChangedError where vLLM has changed."""
    check_methods()
    module = torch.get_device_module("npu")
    for cuda, npu in CUDA_NAMES.items():
        replace("torch.cuda", cuda, getattr(module, npu))
    replace("torch.cuda", "Event", _event)
    for owner, names in KERNELS.items():
        for name in names:
            replace(owner, name, Launches(getattr(upstream_kernels, name.lstrip("_"))))
    replace("vllm.v1.sample.ops.topk_topp_sampler", "HAS_TRITON", False)  # it has the same in torch
    replace("vllm.v1.worker.gpu_model_runner", "KVBlockZeroer", PageZeroer)
    for owner in ("vllm.v1.worker.utils", "vllm.v1.worker.gpu_model_runner"):
        replace(owner, "bind_kv_cache", _bind_kv_cache)
    replace("vllm.v1.worker.gpu_worker", "kernel_warmup", _no_warm_up)
    replace("vllm.utils.torch_utils", "weak_ref_tensor", _weak_ref_tensor)
    # vLLM's own remembers the stream that torch.cuda.set_stream was last given, and otherwise the first that it saw.
    for owner in ("vllm.utils.torch_utils", "vllm.compilation.cuda_graph"):
        replace(owner, "current_stream", module.current_stream)
    monitor = "vllm.utils.jit_monitor"
    tell = existing(import_module(monitor), monitor, "_log_triton_jit_compile")
    replace(monitor, "_setup_triton_jit_hook", partial(upstream_triton.watch_compilation, tell))
    replace(monitor, "_setup_triton_autotuning_print", upstream_triton.print_tuning)


def _event(*, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    """torch.cuda.Event; an NPU's events have no way of waiting to choose."""
    return torch.get_device_module("npu").Event(enable_timing=enable_timing)


def _bind_kv_cache(
    kv_caches: dict[str, torch.Tensor],
    forward_context: dict[str, Any],
    runner_kv_caches: list[torch.Tensor],
    num_attn_module: int = 1,
) -> None:
    """Bind caches to layers; upstream refuses several caches in one layer on a platform that it does not know."""
    assert not runner_kv_caches
    runner_kv_caches.extend(kv_caches.values())
    for name, kv_cache in kv_caches.items():
        forward_context[name].bind_kv_cache(kv_cache)


def _no_warm_up(worker: Any, **_: Any) -> None:
    """Upstream's warm-up is of kernels for GPUs; this project's own is called by the worker."""


def _weak_ref_tensor(tensor: Any) -> Any:
    """The tensor's memory without keeping it alive, as graph outputs are held."""
    if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0:
        return tensor
    import torch_npu

    return torch_npu._C._weak_ref_tensor(tensor)
