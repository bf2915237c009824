"""Kernels on an NVIDIA GPU with upstream Triton 3.6 or newer: checks of the code, not a way to serve.

    with cuda.installed():                 # CUDA tensors
        muls_add(x, y, 2.0)
    with cuda.installed(mirror=True):      # CPU tensors: each launch runs on copies and brings them back
        muls_add(x, y, 2.0)

Programs of a launch really run at once there, which shows races that a host run cannot. Kernels that use operations of
triton-ascend cannot be imported with upstream Triton; `ops()` names the others. `python -m dsv4_triton.bench.cuda ops`
prints them, `... compile 90` compiles their cases for a compute capability without a GPU.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch

from dsv4_triton.autotune.space import trial
from dsv4_triton.bench.registry import Case, select
from dsv4_triton.bench.registry import ops as registered
from dsv4_triton.bench.run import NotHereError
from dsv4_triton.device import CUDA, acting_as

CONFIGS = {"grouped_matmul": {"BN": 64, "BK": 64}}
"""Launch parameters for shared memory instead of an NPU's L1, where they fit the sizes."""
LARGE = 4 << 30
"""Bytes of a tensor's memory that a mirrored launch does not copy."""
SHARED_BYTES = 99 << 10
"""Shared memory of a program that every GPU since compute capability 8.6 has."""


def ops() -> list[str]:
    """The public ops whose kernels need nothing that the installed Triton lacks."""
    found = []
    for op in registered():
        try:
            importlib.import_module(f"dsv4_triton.kernels.{op}")
        except ImportError:
            continue
        found.append(op)
    return found


class Mirror:
    """Copies of CPU tensors on another device, which share memory there where they do here."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, value: Any) -> Any:
        """The copy of a CPU tensor with the same strides; anything else as it is."""
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in self._copies:
            if storage.nbytes() > LARGE:
                raise NotHereError(f"{storage.nbytes() >> 30} GiB are not copied to {self._device}")
            whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
            self._copies[storage.data_ptr()] = whole, whole.to(self._device, copy=True)
        copied = self._copies[storage.data_ptr()][1].untyped_storage()
        place = value.storage_offset(), value.size(), value.stride()
        return torch.empty(0, dtype=value.dtype, device=self._device).set_(copied, *place)

    def bring_back(self) -> None:
        """Overwrite the CPU tensors with their copies."""
        for here, there in self._copies.values():
            here.copy_(there)


@contextmanager
def _replaced(run: Callable[..., Any]) -> Iterator[None]:
    """`run` instead of every kernel's; launchers take the GPU's configuration meanwhile."""
    from triton.runtime.jit import JITFunction

    saved = JITFunction.__dict__["run"]
    JITFunction.run = run
    try:
        with acting_as(CUDA), trial(CONFIGS):
            yield
    finally:
        JITFunction.run = saved


def _understood(kernel: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a launch without the options of the NPU's compiler."""
    from triton.backends.nvidia.compiler import CUDAOptions

    known = {*kernel.arg_names, *(option.name for option in fields(CUDAOptions))}
    return {name: value for name, value in options.items() if name in known}


@contextmanager
def _exact_products() -> Iterator[None]:
    """fp32 products in fp32, as on the host and on an NPU, instead of in TF32."""
    from triton import knobs

    with knobs.language.scope():
        knobs.language.fp32_default = "ieee"
        yield


@contextmanager
def installed(*, mirror: bool = False, device: torch.device | None = None) -> Iterator[None]:
    """Kernels launch on the GPU. With `mirror` CPU tensors do, too: on `device`, by default the current GPU."""
    from triton.runtime.jit import JITFunction

    original = JITFunction.run
    target = device or torch.device("cuda")

    def run(kernel: Any, *args: Any, **options: Any) -> Any:
        known = _understood(kernel, {k: v for k, v in options.items() if k not in ("grid", "warmup")})
        launch = {"grid": options["grid"], "warmup": options.get("warmup", False)}
        copies = Mirror(target)
        if mirror:
            args, known = tuple(map(copies.of, args)), {name: copies.of(value) for name, value in known.items()}
        try:
            result = original(kernel, *args, **launch, **known)
        except Exception as error:
            if "power of 2" in str(error):
                raise NotHereError(f"{kernel.fn.__name__} has a vector whose length is no power of two") from error
            raise
        copies.bring_back()
        return result

    with _exact_products(), _replaced(run):
        yield


@dataclass(frozen=True)
class Built:
    """One kernel of a case compiled without a GPU: shared memory of a program in bytes, or why there is none."""

    case: Case
    kernel: str
    shared: int
    problem: str = ""


class _NoGpu:
    """What Triton asks of its driver when it only compiles."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)


def compiled(cases: Sequence[Case], capability: int) -> Iterator[Built]:
    """Compile the kernels of `cases` down to machine code for a compute capability such as 90; nothing runs.

    Triton has no other driver from then on: for a process of its own."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    original = JITFunction.run
    built: list[tuple[str, int, str]] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        try:
            code = original(kernel, *args, grid=grid, warmup=True, **_understood(kernel, options))
            built.append((kernel.fn.__name__, int(code.metadata.shared), ""))
        except Exception as error:
            # The finding that the command is there for; Triton's errors share no class.
            built.append((kernel.fn.__name__, 0, f"{type(error).__name__}: {str(error).strip()[:600]}"))

    driver.set_active(_NoGpu(capability))
    with _exact_products(), _replaced(run):
        for case in cases:
            built.clear()
            case.launcher(**case.build(CUDA, fill=False).arguments)
            for name, shared, problem in built:
                small = problem or shared <= SHARED_BYTES
                yield Built(case, name, shared, problem if small else f"{shared} bytes of shared memory")


def main(arguments: Sequence[str]) -> int:
    """`ops`, or `compile CAPABILITY`; the status is 1 where a kernel does not compile."""
    if list(arguments) == ["ops"]:
        print("\n".join(ops()))
        return 0
    if len(arguments) != 2 or arguments[0] != "compile" or not arguments[1].isdecimal():
        print("python -m dsv4_triton.bench.cuda ops | compile CAPABILITY", file=sys.stderr)
        return 2
    cases = [case for case in select(kernel=ops(), model=["demo", "flash"]) if case.runs_on(CUDA)]
    number, problems = 0, 0
    for built in compiled(cases, int(arguments[1])):
        number, problems = number + 1, problems + bool(built.problem)
        if built.problem:
            print(f"{built.case}: {built.kernel}: {built.problem}", flush=True)
    print(f"{number} kernels of {len(cases)} cases compiled for {arguments[1]}, {problems} with problems; nothing ran")
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
