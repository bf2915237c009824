"""A Triton driver for the CPU: `kernel[grid](...)` on CPU tensors runs the kernel natively.

    from dsv4_triton.compiler import host

    with host.installed():          # or host.install() ... host.uninstall()
        kernel[(n,)](x, y, BLOCK=1024)

While installed, `triton.jit` kernels (also under `triton.autotune` and `triton.heuristics`) launch through this module.
Importing this module changes nothing. It refuses to install where a real NPU or GPU driver is active.

`tl.device_print` writes whole lines to `sys.stdout`: the program's number, the prefix and the values, a tile row by
row; with `hex=True` the bits. `tl.device_assert`, `assert` and the overflow checks of `tl.add`, `tl.sub` and `tl.mul`
are compiled in where Triton's debug mode is on: `kernel[grid](..., debug=True)`, `@triton.jit(debug=True)`, or the
environment variable TRITON_DEBUG, neither empty nor 0, at the kernel's first launch. A program ends where its
assertion fails, the other programs finish, and the launch raises `host.report.DeviceAssertionError`. What cannot be
shown, such as a pointer, is a `KernelCompileError`.

Options are environment variables: DSV4_TRITON_THREADS (threads that share a grid, default the CPUs this process may
use), DSV4_TRITON_CACHE_DIR (compiled code, default ~/.cache/dsv4_triton), DSV4_TRITON_DUMP_DIR (write LLVM IR and
assembly there).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dsv4_triton.compiler import launches
from dsv4_triton.compiler.host.launch import Launcher

_lock = threading.RLock()
_depth = 0
_saved: tuple[Any, Any] | None = None


class HostDriverError(RuntimeError):
    """The host driver cannot be installed here."""


class _HostDriver:
    """What triton asks of its active driver outside a launch."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("npu", "host", 0)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self) -> Any:
        return _benchmark

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    @classmethod
    def is_active(cls) -> bool:
        return True


def _benchmark(call: Any, *, quantiles: Any = None, **_: Any) -> Any:
    """Milliseconds of `call` at the given quantiles (the median without): what `triton.autotune` ranks by."""
    call()
    times: list[float] = []
    deadline = time.perf_counter() + 0.05
    while len(times) < 3 or (time.perf_counter() < deadline and len(times) < 100):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
    times.sort()
    pick = [times[min(len(times) - 1, int(q * len(times)))] for q in (quantiles or (0.5,))]
    return pick if quantiles else pick[0]


def _refuse_over_a_real_driver() -> None:
    import os

    import torch
    from triton.runtime import driver

    if launches.is_recording():
        raise HostDriverError("launches are being recorded; install the host driver outside of it")
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise HostDriverError(
            "TRITON_INTERPRET=1 makes every kernel an interpreted one; unset it to run kernels natively"
        )
    for name in ("npu", "cuda", "xpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            raise HostDriverError(f"a real {name} device is available: the host driver would hide its Triton driver")
    if driver.active is not driver.default:
        raise HostDriverError(f"another Triton driver is active ({type(driver.active).__name__}); reset it first")


def _run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
    launcher = self.__dict__.get("_host_launcher")
    if launcher is None or launcher.source_hash is not self.hash:
        launcher = Launcher(self)
        self._host_launcher = launcher
    return launcher(grid, warmup, args, kwargs)


def install() -> None:
    """Make this the active Triton driver. Calls nest: as many `uninstall` calls undo it.

    Raises `HostDriverError` when a real NPU or GPU, another Triton driver or Triton's interpreter is active.
    """
    global _depth, _saved
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    with _lock:
        if _depth == 0:
            _refuse_over_a_real_driver()
            _saved = driver.active, JITFunction.run
            driver.set_active(_HostDriver())
            JITFunction.run = _run
        _depth += 1


def uninstall() -> None:
    """Undo one `install`; the last one restores the previous driver. `RuntimeError` when nothing is installed."""
    global _depth, _saved
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    with _lock:
        if _depth == 0 or _saved is None:
            raise RuntimeError("the host driver is not installed")
        _depth -= 1
        if _depth == 0:
            driver.active, JITFunction.run = _saved
            _saved = None


def is_installed() -> bool:
    """Whether kernels currently launch through this driver."""
    return _depth > 0


@contextmanager
def installed() -> Iterator[None]:
    """The driver installed for the length of a `with` block."""
    install()
    try:
        yield
    finally:
        uninstall()
