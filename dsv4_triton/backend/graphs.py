"""Which steps vLLM captures as graphs on an NPU, on this project's platform and inside vllm-ascend alike."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from dsv4_triton.config import ConfigError

TASK_QUEUE = "TRITON_ENABLE_TASKQUEUE"
"""triton-ascend's switch for launches through torch_npu's task queue; without it each launch ends in a wait."""


class Switch(NamedTuple):
    """An environment variable, which of its values end a capture, and why."""

    name: str
    ends_capture: Callable[[str], bool]
    reason: str


SWITCHES = (
    Switch(
        TASK_QUEUE,
        lambda value: value.lower() not in ("true", "1"),
        "triton-ascend then waits for every kernel, which no graph can capture",
    ),
    Switch("TASK_QUEUE_ENABLE", lambda value: value == "2", "torch_npu captures no graph at that level of its queue"),
    Switch(
        "ASCEND_LAUNCH_BLOCKING",
        lambda value: value == "1",
        "torch_npu then waits for every operator, which no graph can capture",
    ),
)


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
    for switch in SWITCHES:
        value = os.environ.get(switch.name)
        if value is not None and switch.ends_capture(value):
            raise ConfigError(f"{switch.name} is {value}: {switch.reason}; unset it or say --enforce-eager")
