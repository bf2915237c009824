"""What configurations on the own platform come to, one after the other: `python -m tests.npu.starts JSON`.

The argument has the `checkpoint`; the JSON that is printed has the block size and the worker, or the message, of every
case. No engine is started.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch

Results = Iterator[tuple[str, Any]]


def message_of(action: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What the action returns, or the message it ends with."""
    try:
        return action(*arguments, **named)
    except Exception as error:
        return str(error)


def ours(**options: Any) -> dict[str, Any]:
    """vLLM's option that carries options of this project."""
    return {"additional_config": {"dsv4_triton": options}}


def settled(checkpoint: str, **options: Any) -> Any:
    """vLLM's config of a server with these options."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(checkpoint, dtype="bfloat16", max_model_len=512, **options).create_engine_config()


def start(checkpoint: str, **options: Any) -> tuple[int, str]:
    """Its block size and worker."""
    config = settled(checkpoint, **options)
    return config.cache_config.block_size, config.parallel_config.worker_cls


def starts(checkpoint: str, cases: dict[str, dict[str, Any]]) -> Results:
    for name, options in cases.items():
        yield name, message_of(start, checkpoint, **options)


def show(*parts: Results) -> None:
    torch.set_num_threads(1)
    print(json.dumps(dict(chain(*parts))), flush=True)


BEYOND_A2: dict[str, dict[str, Any]] = {
    "e4m3 keys": ours(index_format="e4m3"),
    "mxfp8 projection": ours(o_proj_format="mxfp8"),
    "another family": ours(device_family="a5"),
    "the host": ours(device_family="host"),
    "threads of the host": ours(host_threads=4),
    "fp8 cache": {"kv_cache_dtype": "fp8"},
}
"""What an A2 cannot honour."""
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    **BEYOND_A2,
    "piecewise graphs": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "mode none": {"compilation_config": {"mode": 0}},
    "mode 3": {"compilation_config": {"mode": 3}},
    "sleep mode": {"enable_sleep_mode": True},
}
ENVIRONMENTS = {
    "another chip": {"SIMNPU_SOC": "Ascend310P3"},
    "no task queue": {"TRITON_ENABLE_TASKQUEUE": "0"},
    "task queue of two levels": {"TASK_QUEUE_ENABLE": "2"},
    "blocking launches": {"ASCEND_LAUNCH_BLOCKING": "1"},
    "second runner": {"VLLM_USE_V2_MODEL_RUNNER": "1"},
}
"""Machines and shells that are not as they should be."""


REFUSED = {
    "e4m3 keys": "index_format is 'e4m3', which family 'a2' has no instructions for",
    "mxfp8 projection": "o_proj_format is 'mxfp8', but family 'a2' has no fp8",
    "another family": "device_family is 'a5' on a device of family 'a2'",
    "the host": "device_family is 'host' on a device of family 'a2'",
    "threads of the host": "host_threads is 4, but no kernel of family 'a2' runs on the host; it takes \"auto\"",
    "fp8 cache": "--kv-cache-dtype is 'fp8', but family 'a2' .* has no fp8",
    "another chip": r"chip 'Ascend310P3' is not supported; supported are Ascend910B\* \(a2\)",
    "no task queue": "TRITON_ENABLE_TASKQUEUE is 0: .*--enforce-eager",
    "task queue of two levels": "TASK_QUEUE_ENABLE is 2: torch_npu captures no graph .*--enforce-eager",
    "blocking launches": "ASCEND_LAUNCH_BLOCKING is 1: .*--enforce-eager",
    "second runner": "VLLM_USE_V2_MODEL_RUNNER is 1",
}
"""On the own platform and inside vllm-ascend alike."""


def check_refused(results: dict[str, Any], refused: dict[str, str]) -> None:
    """The results of these cases are messages that say this."""
    for name, says in refused.items():
        assert isinstance(results[name], str) and re.search(says, results[name], re.DOTALL), (name, results[name])


def environments(checkpoint: str) -> Results:
    from dsv4_triton.device import _npu_family

    for name, variables in ENVIRONMENTS.items():
        _npu_family.cache_clear()
        with patch.dict(os.environ, variables):
            yield name, message_of(start, checkpoint)
    _npu_family.cache_clear()
    with patch.dict(os.environ, ENVIRONMENTS["task queue of two levels"] | ENVIRONMENTS["blocking launches"]):
        yield "no graphs", message_of(start, checkpoint, enforce_eager=True)


def no_torch_npu() -> Results:
    from dsv4_triton.backend.platform_npu import NpuPlatform

    with patch.dict(sys.modules, {"torch_npu": None}):
        yield "torch_npu does not load", message_of(NpuPlatform)


def no_model() -> Results:
    """The worker of a config of vLLM's defaults, which programs make that run parts of it."""
    from vllm.config import VllmConfig

    yield "no model", message_of(lambda: VllmConfig().parallel_config.worker_cls)


if __name__ == "__main__":
    checkpoint = json.loads(sys.argv[1])["checkpoint"]
    show(starts(checkpoint, CASES), environments(checkpoint), no_torch_npu(), no_model())
