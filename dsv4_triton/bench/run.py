"""Cases of the registry, measured: checked first, then timed in turn with their baselines."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from dsv4_triton.bench import baselines
from dsv4_triton.bench.baselines import INTERPRETER, Interpreter, UnavailableError
from dsv4_triton.bench.measure import Clock, Machine, Times, alternate, host_clock
from dsv4_triton.bench.registry import Case, Inputs, MismatchError
from dsv4_triton.device import Family, family_of

OURS = "this project"
DEVICES = {"host": "cpu", "npu": "npu", "cuda": "cuda"}
"""Torch device types by the name of `--device`."""
Status = Literal["ok", "failed", "skipped"]
_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")
_COPIES = 4
"""Multiples of its inputs that a case is assumed to need: inputs, what the implementations write, fp32 in between."""
_MARGIN = 1 << 30
"""Bytes of memory that are left to others."""


class DeviceMissingError(RuntimeError):
    """The device of a request is not in this machine."""


class NotHereError(RuntimeError):
    """A launch is beyond this machine: a tensor too large to be mirrored, or a vector whose length is no power of two,
    which Triton for a GPU does not have."""


class DeviceLostError(RuntimeError):
    """The device stopped working in the middle."""


@dataclass(frozen=True)
class Figure:
    """What a case came to. Only one that is `ok` has times.

    bytes, macs: the least that the job needs. share: of the speed that this machine reached in a copy or a product, 1
    at best. times: by implementation, `this project` first; `missing` says why a baseline has none.
    """

    op: str
    case: str
    status: Status
    message: str = ""
    bytes: int = 0
    macs: int = 0
    share: float = 0.0
    times: dict[str, Times] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        return self.op, self.case

    def ratio(self, name: str) -> float:
        """How many times as long a baseline takes: above 1 this project is faster."""
        return self.times[name].median / self.times[OURS].median

    def as_dict(self) -> dict[str, Any]:
        ratios = {name: self.ratio(name) for name in self.times if name != OURS}
        return {**asdict(self), "ratios": ratios}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Figure:
        """The figure that `as_dict` wrote; KeyError or TypeError for anything else."""
        known = {name: value for name, value in content.items() if name != "ratios"}
        return cls(**{**known, "times": {name: Times(**times) for name, times in content["times"].items()}})


def device_named(name: str) -> torch.device:
    """The torch device of `host`, `npu` or `cuda`; `DeviceMissingError` where there is none, ValueError for others."""
    if name not in DEVICES:
        raise ValueError(f"unknown device {name!r}. There are: {', '.join(DEVICES)}")
    kind = DEVICES[name]
    if kind == "npu":
        try:
            import torch_npu  # noqa: F401  its import makes torch.npu
        except ImportError:
            raise DeviceMissingError("--device npu needs torch_npu, which is not installed") from None
    if kind != "cpu" and not getattr(torch, kind).is_available():
        raise DeviceMissingError(f"--device {name}: torch finds no such device here")
    return torch.device(kind)


def free_bytes(device: torch.device) -> int:
    """Memory that can be taken on a device."""
    if device.type != "cpu":
        return int(getattr(torch, device.type).mem_get_info()[0])
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def needed_bytes(case: Case, family: Family) -> int:
    """What a case is assumed to take, by the size of its inputs."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in case.build(family, fill=False).tensors.values()
    }
    return _COPIES * sum(storages.values())


@contextmanager
def bounded_memory(device: torch.device, addresses: int = 0) -> Iterator[None]:
    """On the host, an allocation that the machine has no memory for fails instead of ending some process. `addresses`
    are bytes that may be taken beyond it, as nobody writes them."""
    if device.type != "cpu":
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + max(_MARGIN, free_bytes(device) - _MARGIN) + addresses
    hard = before[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@dataclass(frozen=True)
class Bench:
    """How cases are measured: where, against what the machine reached, and for how long each.

    `interpreter` times Triton's interpreter too, on the host. `clock` is that of the device.
    """

    device: torch.device
    machine: Machine
    seconds: float
    interpreter: Interpreter | None = None
    clock: Clock = host_clock

    def measure(self, case: Case) -> Figure:
        """Check and time a case; never raises for what is wrong with the case."""
        family = family_of(self.device.type)
        if not case.runs_on(family):
            return Figure(case.op, case.name, "skipped", f"{family.title} has no fp8")
        try:
            launcher = case.launcher
        except ImportError as error:
            return Figure(case.op, case.name, "skipped", str(error))
        try:
            need, free = needed_bytes(case, family), free_bytes(self.device) - _MARGIN
            if need > free:
                room = f"{_gib(max(free, 0))} can be taken"
                return Figure(case.op, case.name, "skipped", f"needs about {_gib(need)}, {room}")
            with bounded_memory(self.device):
                return self._measured(case, family, launcher)
        except NotHereError as error:
            return Figure(case.op, case.name, "skipped", str(error))
        except Exception as error:
            # A finding about the case, and no reason to lose the figures of the others.
            if is_lack_of_memory(error):
                return Figure(case.op, case.name, "skipped", "ran out of memory")
            self._refuse_a_lost_device(error)
            return Figure(case.op, case.name, "failed", error_line(error))

    def _refuse_a_lost_device(self, error: Exception) -> None:
        if self.device.type != "cpu" and problem_of(self.device):
            raise DeviceLostError(f"{self.device} no longer answers: {error_line(error)}") from error

    def _measured(self, case: Case, family: Family, launcher: Callable[..., Any]) -> Figure:
        inputs = case.build(family, device=self.device)
        try:
            case.check(inputs, family)
        except MismatchError as error:
            return Figure(case.op, case.name, "failed", str(error))
        runs: dict[str, Callable[[], Any]] = {OURS: _bound(launcher, inputs.copy())}
        missing: dict[str, str] = {}
        for name in baselines.names(case):
            try:
                run = baselines.implementation(case, name, inputs.arguments)
                if run is not case.reference:
                    case.check(inputs, family, run)
            except UnavailableError as error:
                missing[name] = str(error)
            except MismatchError as error:
                missing[name] = f"differs from the reference: {error}"
            except Exception as error:
                # Somebody else's code: what is wrong with it must not cost the case its own figure.
                missing[name] = error_line(error)
            else:
                runs[name] = _bound(run, inputs.copy())
        times = alternate(runs, self.seconds, self.clock)
        if self.interpreter is not None:
            try:
                seconds = self.interpreter.measure(case)
                times[INTERPRETER] = Times(seconds, seconds, seconds, 1)
            except UnavailableError as error:
                missing[INTERPRETER] = str(error)
        least = case.minimum(family)
        share = self.machine.seconds(least) / times[OURS].median
        return Figure(case.op, case.name, "ok", "", least.bytes, least.macs, share, times, missing)


def is_lack_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY)


def problem_of(device: torch.device) -> str:
    """ "" or why a device does not answer, asked with one addition."""
    try:
        torch.ones(1, device=device).add_(1).item()
    except Exception as error:
        return error_line(error)
    return ""


def _bound(run: Callable[..., Any], inputs: Inputs) -> Callable[[], Any]:
    return lambda: run(**inputs.arguments)


def error_line(error: BaseException) -> str:
    """Kind and first line of an error."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def driver_for(device: torch.device) -> AbstractContextManager[None]:
    """What makes kernels launch on `device`: an NPU's driver is triton-ascend's own."""
    if device.type == "cpu":
        from dsv4_triton.compiler import host

        return host.installed()
    if device.type == "cuda":
        from dsv4_triton.bench import cuda

        return cuda.installed()
    return nullcontext()


def measure_cases(cases: Sequence[Case], bench: Bench, progress: Callable[[int, int, str], None]) -> Iterator[Figure]:
    """The figures of `cases`, one after the other as they are there; `progress(done, total, what)` before each."""
    with driver_for(bench.device), torch.no_grad():
        for number, case in enumerate(cases):
            progress(number, len(cases), str(case))
            yield bench.measure(case)
