"""The CPU worker, without a model: what it does around vLLM's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.worker.cpu_worker import CPUWorker

from dsv4_triton.backend import worker_cpu
from dsv4_triton.device import HOST


def test_freed_memory_goes_back_after_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    monkeypatch.setattr(worker_cpu, "LIBC", SimpleNamespace(malloc_trim=trims.append))
    monkeypatch.setattr(CPUWorker, "execute_model", lambda self, given, **named: (given, named))
    worker: Any = object.__new__(worker_cpu.HostWorker)
    worker.family = HOST
    for step in range(3 * worker_cpu.TRIM_STEPS):
        assert len(trims) == step // worker_cpu.TRIM_STEPS
        assert worker.execute_model(step, more=1) == (step, {"more": 1})
    assert trims == [0, 0, 0]
