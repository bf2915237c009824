"""What configurations on the own platform come to, one after the other: `python -m tests.npu.starts CHECKPOINT`.

Prints JSON with the block size and the worker, or the message, of every case. No engine is started.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch

from tests.npu.ascend_starts import message_of, start


def starts(checkpoint: str) -> Iterator[tuple[str, Any]]:
    def ours(**options: Any) -> dict[str, Any]:
        return {"dtype": "bfloat16", "additional_config": {"dsv4_triton": options}}

    cases: dict[str, dict[str, Any]] = {
        "default": {},
        "e4m3 keys": ours(index_format="e4m3"),
        "mxfp8 projection": ours(o_proj_format="mxfp8"),
        "another family": ours(device_family="a5"),
        "the host": ours(device_family="host"),
        "fp8 cache": {"kv_cache_dtype": "fp8"},
        "piecewise graphs": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
        "sleep mode": {"enable_sleep_mode": True},
    }
    for name, options in cases.items():
        yield name, message_of(lambda options=options: start(checkpoint, **options))


def environments(checkpoint: str) -> Iterator[tuple[str, Any]]:
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
            yield name, message_of(lambda: start(checkpoint))
    with patch.dict(sys.modules, {"torch_npu": None}):
        yield "torch_npu does not load", message_of(NpuPlatform)


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {**dict(starts(sys.argv[1])), **dict(environments(sys.argv[1]))}
    print(json.dumps(found), flush=True)
