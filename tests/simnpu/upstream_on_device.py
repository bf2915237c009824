"""What vLLM's own code does with Triton and with streams on the own platform, for a process that has the simulated
device and in which vLLM uses Triton."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from triton.backends.ascend.compiler import AscendAttrsDescriptor, NPUOptions
from triton.runtime.jit import JITFunction
from vllm import triton_utils
from vllm.compilation import cuda_graph
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.platforms import current_platform
from vllm.utils import jit_monitor, torch_utils

from dsv4_triton.backend.platform_npu import NpuPlatform
from dsv4_triton.backend.upstream_npu import use_npu
from dsv4_triton.kernels.muls_add import _muls_add_kernel

NPU = torch.device("npu", 0)


@pytest.fixture(autouse=True, scope="module")
def _on_npu() -> None:
    use_npu()


def test_vllm_uses_triton() -> None:
    assert isinstance(current_platform, NpuPlatform) and triton_utils.HAS_TRITON


def test_no_kernel_of_vllm_is_launched() -> None:
    from vllm.v1.sample.ops.topk_topp_triton import apply_top_k_top_p_triton

    with pytest.raises(RuntimeError, match=r"was launched, which is of vllm\.v1\.sample\.ops\.topk_topp_triton"):
        apply_top_k_top_p_triton(torch.ones(8, 16, device=NPU), torch.full((8,), 3, device=NPU), None)


def compiled() -> None:
    """What triton-ascend does when it has compiled a kernel at a launch."""
    descriptor = (AscendAttrsDescriptor(),)
    _muls_add_kernel._call_hook("key", {"x_ptr": "*fp32"}, 0, {"BLOCK": 8}, NPUOptions(), descriptor, False, False)


@pytest.fixture
def _monitored() -> Iterator[None]:
    """vLLM's monitor as it is before a worker has activated it."""
    with patch.object(jit_monitor, "_active", False), patch.object(JITFunction, "compiled_hook", None):
        yield


@pytest.mark.usefixtures("_monitored")
@pytest.mark.parametrize("verbose", [False, True])
def test_vllm_is_told_what_is_compiled_between_requests(verbose: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `--jit-monitor-mode=error` it ends the launch."""
    monkeypatch.setenv("TRITON_PRINT_AUTOTUNING", "0")
    compiled()
    jit_monitor.activate(mode="error", verbose=verbose)
    with pytest.raises(RuntimeError, match="kernel JIT compilation during inference: _muls_add_kernel"):
        compiled()


@pytest.mark.parametrize("module", [torch_utils, cuda_graph])
def test_the_current_stream_is_asked_for(module: Any) -> None:
    """Whatever it was when vLLM asked before."""
    side = torch.npu.Stream()
    assert module.current_stream() == torch.npu.default_stream()
    with torch.cuda.stream(side):
        assert module.current_stream() == side
    assert module.current_stream() == torch.npu.default_stream()


def test_vllm_captures_where_it_was_told_to() -> None:
    """On the stream that `graph_capture` makes current, whatever was current when vLLM first asked."""
    torch_utils.current_stream()
    streams = list[torch.npu.Stream]()

    def step(x: torch.Tensor) -> torch.Tensor:
        streams.append(torch.npu.current_stream())
        return x + 1

    config, mode, side, x = VllmConfig(), CUDAGraphMode.FULL, torch.npu.Stream(), torch.ones(4, device=NPU)
    wrapped = cuda_graph.CUDAGraphWrapper(step, config, mode)
    descriptor = cuda_graph.BatchDescriptor(4)
    with set_forward_context(None, config, cudagraph_runtime_mode=mode, batch_descriptor=descriptor):
        with torch.cuda.stream(side):
            y = wrapped(x)
        x.fill_(5)
        wrapped(x)
    assert streams == [side] and y.tolist() == [6] * 4
