"""What a launch keeps to while an NPU captures a graph; an error that names the kernel where it does not.

A kernel that had to be compiled or loaded breaks the capture; one that was to be tuned would be timed. One with a lock
is given the lock's start value by a copy that waits at every launch (triton-ascend 3.2.0, `backends/ascend/driver.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from dsv4_triton.backend.compat import existing
from dsv4_triton.device import CaptureError, capturing, refuse_in_capture

REPLACED = {"triton.runtime.jit:JITFunction": ("run", "cache_hook"), "triton.runtime.autotuner:Autotuner": ("run",)}
"""Names that `enforced` relies on, by the class of triton-ascend ("module:class") that has them."""


def check() -> None:
    """UpstreamChangedError where triton-ascend lacks one of `REPLACED`: in an unknown place nothing can be refused."""
    for path, names in REPLACED.items():
        module, _, title = path.partition(":")
        owner = existing(import_module(module), module, title, "triton-ascend")
        for name in names:
            existing(owner, title, name, "triton-ascend")


@contextmanager
def enforced(device: torch.device) -> Iterator[None]:
    """While active, launches in a capture on `device` raise CaptureError for what a graph cannot hold, before they do
    it. Holds for all threads of the process; does not change launches outside of captures."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    launch, look_up, hook = JITFunction.run, Autotuner.__getattribute__, JITFunction.cache_hook

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        if not warmup and capturing(device):
            _check_lock(kernel.__name__, launch(kernel, *args, grid=grid, warmup=True, **kwargs))
        return launch(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    def looked_up(tuner: Any, name: str) -> Any:
        if name == "run":
            refuse_in_capture(device, f"kernel {tuner.base_fn.__name__} was to be tuned")
        return look_up(tuner, name)

    def compiling(*args: Any, fn: Any, **kwargs: Any) -> Any:
        refuse_in_capture(device, f"kernel {fn.name} had to be compiled")
        return hook(*args, fn=fn, **kwargs) if hook is not None else False

    # triton-ascend's own tuners each have a `run`, which share no step, and may be loaded at any time.
    JITFunction.run, Autotuner.__getattribute__, JITFunction.cache_hook = run, looked_up, compiling
    try:
        yield
    finally:
        JITFunction.run, Autotuner.__getattribute__, JITFunction.cache_hook = launch, look_up, hook


def _check_lock(name: str, compiled: Any) -> None:
    if getattr(getattr(compiled, "metadata", None), "lock_num", -1) > 0:
        raise CaptureError(
            f"kernel {name} has a lock, which a copy that waits sets at every launch; a graph cannot hold that: serve "
            f"with --enforce-eager"
        )
