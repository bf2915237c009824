"""`torch.npu` of the simulated device."""

import contextlib
import ctypes
import functools
import itertools
import os
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Event, Stream  # noqa: F401  (part of this module's interface)

_ops = torch.ops.simnpu
_type = "npu"
_PRIVATE_USE_1 = 20
"""Number of this device type in torch."""


def _index(device: Any = None) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def init() -> None: ...


_lazy_init = init


def device_count() -> int:
    return int(os.environ.get("SIMNPU_DEVICES", "1"))


def current_device() -> int:
    return torch._C._accelerator_getDeviceIndex()


def set_device(device: Any) -> None:
    torch._C._accelerator_setDeviceIndex(_index(device))


@contextlib.contextmanager
def device(device: Any) -> Iterator[None]:
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def get_device_name(device: Any = None) -> str:
    return os.environ.get("SIMNPU_SOC", "Ascend910B2")


def get_device_properties(device: Any = None) -> SimpleNamespace:
    from dsv4_triton.device import family_of_soc

    family = family_of_soc(get_device_name())
    return SimpleNamespace(
        name=get_device_name(),
        total_memory=mem_get_info(device)[1],
        cube_core_num=family.cube_cores,
        vector_core_num=family.vector_cores,
    )


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


# Streams


def current_stream(device: Any = None) -> Stream:
    return torch._C._accelerator_getStream(_index(device))


def default_stream(device: Any = None) -> Stream:
    return Stream(stream_id=0, device_index=_index(device), device_type=_PRIVATE_USE_1)


def set_stream(stream: Stream) -> None:
    torch._C._accelerator_setStream(stream)


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    before = current_stream(stream.device)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


def synchronize(device: Any = None) -> None:
    torch._C._accelerator_synchronizeDevice(_index(device))


_work: dict[int, Callable[[], Any]] = {}
_numbers = itertools.count()


def submit(work: Callable[[], Any]) -> None:
    """Give work to the current stream: a kernel launch, or whatever else is not an operator of torch."""
    number = next(_numbers)
    _work[number] = work
    if NPUGraph.capturing is not None:
        NPUGraph.capturing.keep(number)
    _ops.submit(number)


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)
def _run(number: int) -> int:
    """Do what was submitted, for the device, which keeps work of graphs."""
    try:
        work = _work[number] if number in _captured else _work.pop(number)
        work()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


_captured: set[int] = set()
_ops.set_python(ctypes.cast(_run, ctypes.c_void_p).value)


# Memory

# vllm-ascend points these names of torch to this module.
_memory_stats, _reset_peak = torch.accelerator.memory_stats, torch.accelerator.reset_peak_memory_stats


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return torch._C._accelerator_getMemoryInfo(_index(device))


def empty_cache() -> None:
    torch._C._accelerator_emptyCache()


def memory_stats(device: Any = None) -> dict[str, Any]:
    return _memory_stats(_index(device))


def memory_allocated(device: Any = None) -> int:
    return memory_stats(device)["allocated_bytes.all.current"]


def max_memory_allocated(device: Any = None) -> int:
    return memory_stats(device)["allocated_bytes.all.peak"]


def memory_reserved(device: Any = None) -> int:
    return memory_stats(device)["reserved_bytes.all.current"]


def reset_peak_memory_stats(device: Any = None) -> None:
    _reset_peak(_index(device))


# Random numbers

default_generators = ()


def manual_seed(seed: int) -> None:
    _generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _generator(index).manual_seed(seed)


def _generator(index: int | None = None) -> torch.Generator:
    return _ops.generator(_index(index))


def get_rng_state(device: Any = _type) -> torch.Tensor:
    return _generator(_index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: Any = _type) -> None:
    _generator(_index(device)).set_state(state)


# Graphs


class NPUGraph:
    """Work recorded between `capture_begin` and `capture_end`; the counts are those of the process."""

    capturing: "ClassVar[NPUGraph | None]" = None
    captures: ClassVar[int] = 0
    replays: ClassVar[int] = 0

    def __init__(self) -> None:
        self._graph = _ops.graph_new()
        self._work: list[int] = []

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if current_stream() == default_stream():
            raise RuntimeError("NPU graphs must be captured on a non-default stream.")  # as torch_npu
        self._forget()
        _ops.graph_begin(self._graph)
        NPUGraph.capturing = self

    def capture_end(self) -> None:
        NPUGraph.capturing = None
        _ops.graph_end()
        NPUGraph.captures += 1

    def keep(self, number: int) -> None:
        """Work that replays do."""
        self._work.append(number)
        _captured.add(number)

    def replay(self) -> None:
        _ops.graph_replay(self._graph)
        NPUGraph.replays += 1

    def reset(self) -> None:
        synchronize()
        self._forget()
        _ops.graph_free(self._graph)

    def _forget(self) -> None:
        for number in self._work:
            del _work[number]
            _captured.discard(number)
        self._work.clear()

    def pool(self) -> tuple[int, int]:
        return (0, self._graph)


@functools.cache
def _capture_stream() -> Stream:
    return Stream()


@contextlib.contextmanager
def graph(
    npu_graph: NPUGraph,
    pool: Any = None,
    stream: Stream | None = None,
    auto_dispatch_capture: bool = False,
    capture_error_mode: str = "global",
) -> Iterator[None]:
    """On `stream`, otherwise on one that all captures share."""
    synchronize()
    empty_cache()
    with globals()["stream"](stream or _capture_stream()):
        npu_graph.capture_begin(pool, capture_error_mode)
        try:
            yield
        finally:
            npu_graph.capture_end()


def graph_pool_handle() -> tuple[int, int]:
    return (0, 0)


def is_current_stream_capturing() -> bool:
    return _ops.capturing()


def __getattr__(name: str) -> None:
    raise AttributeError(f"torch.npu.{name}: the stand-in of the tests (tests/fake_torch_npu) has no such attribute")
