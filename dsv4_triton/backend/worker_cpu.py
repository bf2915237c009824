"""vLLM's CPU worker with native execution of Triton kernels, in the variants of the family that was asked for."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from vllm.v1.worker.cpu_worker import CPUWorker

from dsv4_triton.backend.compat import mend_rejection_sampler
from dsv4_triton.backend.serving import Serving
from dsv4_triton.compiler import host
from dsv4_triton.device import acting_as

TRIM_STEPS = 64
"""After so many steps what the heap keeps of freed tensors goes back to the system. Steps of all sizes leave holes that
glibc 2.36 finds no use for again; docs/benchmarks.md has figures."""
LIBC = ctypes.CDLL(None)

Method = TypeVar("Method", bound=Callable[..., Any])


def _as_family(method: Method) -> Method:
    """`method` with CPU tensors taken for the family's; only while it runs, since other engines share the process."""

    @wraps(method)
    def acting(self: HostWorker, *arguments: Any, **named: Any) -> Any:
        with acting_as(self.family):
            return method(self, *arguments, **named)

    return cast(Method, acting)


class HostWorker(CPUWorker):
    """Installs the host Triton driver, so that kernels run on CPU tensors in this process."""

    steps = 0

    def init_device(self) -> None:
        host.install()
        # Only here: later vLLM has its own block size in the config.
        serving = Serving.of(self.vllm_config)
        self.family, self.warm_up = serving.choices.family, serving.options.warm_up == "on"
        super().init_device()
        mend_rejection_sampler()

    determine_available_memory = _as_family(CPUWorker.determine_available_memory)

    @_as_family
    def compile_or_warm_up_model(self) -> Any:
        if self.warm_up:
            self.model_runner.model.warm_up(self.model_runner)
        return super().compile_or_warm_up_model()

    @_as_family
    def execute_model(self, *arguments: Any, **named: Any) -> Any:
        self.steps += 1
        if self.steps % TRIM_STEPS == 0:
            LIBC.malloc_trim(0)
        return super().execute_model(*arguments, **named)

    sample_tokens = _as_family(CPUWorker.sample_tokens)
    execute_dummy_batch = _as_family(CPUWorker.execute_dummy_batch)
