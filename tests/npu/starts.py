"""What configurations on the own platform come to, one after the other: `python -m tests.npu.starts JSON`.

The argument has the `checkpoint`; the JSON that is printed has the block size and the worker, or the message, of every
case. No engine is started.
"""

from __future__ import annotations

import json
import os
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


CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "e4m3 keys": ours(index_format="e4m3"),
    "mxfp8 projection": ours(o_proj_format="mxfp8"),
    "another family": ours(device_family="a5"),
    "the host": ours(device_family="host"),
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "piecewise graphs": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "sleep mode": {"enable_sleep_mode": True},
}


def environments(checkpoint: str) -> Results:
    """Of machines that are not as they should be."""
    from dsv4_triton.backend.graphs import TASK_QUEUE
    from dsv4_triton.backend.platform_npu import NpuPlatform
    from dsv4_triton.device import _npu_family

    for name, variables in {
        "another chip": {"SIMNPU_SOC": "Ascend310P3"},
        "no task queue": {TASK_QUEUE: "0"},
        "second runner": {"VLLM_USE_V2_MODEL_RUNNER": "1"},
    }.items():
        _npu_family.cache_clear()
        with patch.dict(os.environ, variables):
            yield name, message_of(start, checkpoint)
    with patch.dict(sys.modules, {"torch_npu": None}):
        yield "torch_npu does not load", message_of(NpuPlatform)


def no_model() -> Results:
    """The worker of a config of vLLM's defaults, which programs make that run parts of it."""
    from vllm.config import VllmConfig

    yield "no model", message_of(lambda: VllmConfig().parallel_config.worker_cls)


if __name__ == "__main__":
    checkpoint = json.loads(sys.argv[1])["checkpoint"]
    show(starts(checkpoint, CASES), environments(checkpoint), no_model())
