"""Triton kernels on the simulated NPU: the host driver of this project runs them on the device's memory."""

from types import SimpleNamespace
from typing import Any

import torch


def _on_host(kernel: Any, value: Any) -> Any:
    """A tensor argument as a CPU tensor over the same memory."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.device.type != "npu":
        raise RuntimeError(f"kernel {kernel.__name__} got a tensor on {value.device}; an NPU cannot address it")
    current = torch.npu.current_device()
    if value.device.index != current:
        raise RuntimeError(f"kernel {kernel.__name__} got a tensor on {value.device} while the device is npu:{current}")
    return torch.ops.simnpu.host(value)


def _is_new(kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    launcher = kernel.__dict__.get("_host_launcher")
    return launcher is None or launcher.bind(*args, **named)[0] not in launcher.cache


def install() -> None:
    """Launch kernels on tensors of "npu" on the current stream; while a graph is captured they wait for its replays.

    triton-ascend's driver says that it is active, as it does where CANN's compiler is, so that vLLM uses Triton. Only
    this project's kernels are launched: others, such as vLLM's for GPUs, are refused.
    """
    from triton.backends import backends
    from triton.runtime.jit import JITFunction

    from dsv4_triton.compiler import host

    host.install()
    backends["ascend"].driver.is_active = classmethod(lambda cls: True)
    launch = JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **named: Any) -> Any:
        from torch_npu import npu

        if kernel.__module__.partition(".")[0] != "dsv4_triton":
            raise RuntimeError(f"kernel {kernel.__name__} was launched, which is of {kernel.__module__}")
        args = tuple(_on_host(kernel, value) for value in args)
        named = {name: _on_host(kernel, value) for name, value in named.items()}
        if torch.ops.simnpu.capturing() and _is_new(kernel, args, named):
            if JITFunction.cache_hook is not None:  # as Triton before it compiles
                JITFunction.cache_hook(fn=SimpleNamespace(name=kernel.__name__))
            raise RuntimeError(f"kernel {kernel.__name__} had to be compiled while a graph is captured")
        if warmup or not (torch.ops.simnpu.capturing() or torch.ops.simnpu.deferring()):
            return launch(kernel, *args, grid=grid, warmup=warmup, **named)
        compiled = launch(kernel, *args, grid=grid, warmup=True, **named)
        npu.submit(lambda: launch(kernel, *args, grid=grid, **named))
        return compiled

    JITFunction.run = run
