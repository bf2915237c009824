"""Recording launches instead of running them: what an offline compile or a cost count takes as its input.

    with acting_as(A2), recording() as launches:
        rope(x, positions, cos_sin)          # any code that launches kernels on CPU tensors
    launches[0].kernel, launches[0].signature, launches[0].grid

Tensors are only asked for dtype, device and address, so their contents need never have been written. A kernel under
`triton.autotune` is recorded with the first configuration that its pruning leaves, without a benchmark and without its
hooks; `triton.heuristics` apply as usual.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dsv4_triton.compiler.binding import Binder
from dsv4_triton.compiler.frontend import Signature

_lock = threading.Lock()
_recorded: list[Launch] | None = None


@dataclass(frozen=True)
class Launch:
    """One kernel launch, as its launcher made it.

    kernel: the `triton.jit` function.
    signature: its specialisation: types, constants (constexprs, arguments that are 1 or None) and which arguments are
        multiples of 16, as triton-ascend's own launch decides them.
    grid: programs along x, y and z.
    options: options of the NPU compiler given at the launch, such as `multibuffer`.
    arguments: values of the run-time parameters by name: CPU tensors, numbers, None.
    """

    kernel: Any
    signature: Signature
    grid: tuple[int, int, int]
    options: dict[str, Any]
    arguments: dict[str, Any]


def _record(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
    from triton.backends.ascend.compiler import AscendAttrsDescriptor

    binder = kernel.__dict__.get("_launch_binder")
    if binder is None:
        binder = kernel._launch_binder = Binder(kernel)
    key, _, extra = binder.bind(*args, **kwargs)
    options = {**binder.options(extra), **(kernel.bishengir_option or {})}
    named = binder.named(*args, **kwargs)
    extents = binder.grid(grid, lambda: named)
    if warmup or _recorded is None or 0 in extents:
        return
    attributes = AscendAttrsDescriptor(kernel.params, tuple(named.values()))
    arguments = {p.name: named[p.name] for p in binder.runtime}
    _recorded.append(Launch(kernel, binder.signature(key, named, attributes), extents, options, arguments))


def _record_tuned(tuner: Any, *args: Any, **kwargs: Any) -> None:
    tuner.nargs = dict(zip(tuner.arg_names, args))
    config = tuner.prune_configs(kwargs)[0]
    tuner.nargs = None
    tuner.fn.run(*args, **kwargs, **config.all_kwargs())


def is_recording() -> bool:
    """Whether kernels are recorded instead of run."""
    return _recorded is not None


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """While active, `kernel[grid](...)` appends to the list that this yields; nothing is compiled or run.

    Works with any Triton driver or none, and inside `host.installed()`; does not nest (`RuntimeError`). Holds for all
    threads of the process.
    """
    global _recorded
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    with _lock:
        if _recorded is not None:
            raise RuntimeError("launches are being recorded already")
        _recorded = []
    replaced = {JITFunction: _record, Autotuner: _record_tuned}
    # Importing this module asks the device for its cores, so where it is not loaded nothing uses it.
    if tiling := sys.modules.get("triton.runtime.autotiling_tuner"):
        replaced[tiling.AutoTilingTuner] = _record_tuned
    saved = [(cls, cls.__dict__["run"]) for cls in replaced]
    for cls, run in replaced.items():
        cls.run = run
    try:
        yield _recorded
    finally:
        for cls, run in saved:
            cls.run = run
        _recorded = None


@contextmanager
def compiling() -> Iterator[dict[int, Any]]:
    """While active, `kernel[grid](...)` compiles its specialisation where that is not done yet, and runs nothing.

    Yields what was compiled or was there, each specialisation once. Works with the driver that is active, an NPU's too;
    not inside `recording()`, does not nest (`RuntimeError`). Holds for all threads of the process.
    """
    from triton.runtime.jit import JITFunction

    found: dict[int, Any] = {}
    with _lock:
        launch = JITFunction.run
        if launch in (_record, _compile):
            raise RuntimeError("launches are being recorded or compiled already")
        _compile.launch, _compile.found = launch, found  # type: ignore[attr-defined]
        JITFunction.run = _compile
    try:
        yield found
    finally:
        JITFunction.run = launch


def _compile(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
    compiled = _compile.launch(kernel, *args, grid=grid, warmup=True, **kwargs)  # type: ignore[attr-defined]
    _compile.found[id(compiled)] = compiled  # type: ignore[attr-defined]
    return compiled
