"""Which steps vLLM captures as graphs on an NPU, on this project's platform and inside vllm-ascend alike."""

from __future__ import annotations

import os
from typing import Any

from dsv4_triton.config import ConfigError

TASK_QUEUE = "TRITON_ENABLE_TASKQUEUE"
"""triton-ascend's switch for launches through torch_npu's task queue; without it each launch ends in a wait."""


def settle(compilation: Any) -> None:
    """Graphs of decode steps, unless another mode is asked for; `compilation` is vLLM's config."""
    from vllm.config import CUDAGraphMode

    if compilation.cudagraph_mode is None:
        compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY


def check(mode: Any) -> None:
    """ConfigError for graphs that cannot be captured."""
    from vllm.config import CUDAGraphMode

    if mode == CUDAGraphMode.NONE:
        return
    if mode != CUDAGraphMode.FULL_DECODE_ONLY:
        raise ConfigError(
            f"cudagraph_mode of --compilation-config is {mode.name}: decode steps are captured whole, prefills are "
            f"not; it takes FULL_DECODE_ONLY or NONE"
        )
    if os.environ.get(TASK_QUEUE, "true").lower() not in ("true", "1"):
        raise ConfigError(
            f"{TASK_QUEUE} is {os.environ[TASK_QUEUE]}: triton-ascend then waits for every kernel, which no graph can "
            f"capture; unset it or say --enforce-eager"
        )
