"""The NPU platform refuses what it cannot serve before anything is loaded; its device is not needed for that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dsv4_triton.backend.plugin import ARCHITECTURE
from dsv4_triton.config import ConfigError


def config(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(architectures=[changed.pop("architecture", ARCHITECTURE)]),
        use_v2_model_runner=changed.pop("second_runner", False),
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"architecture": "LlamaForCausalLM"}, "no LlamaForCausalLM; install vllm-ascend"),
        ({"second_runner": True}, "VLLM_USE_V2_MODEL_RUNNER is 1"),
    ],
)
def test_what_cannot_be_served(changed: dict[str, Any], message: str) -> None:
    from dsv4_triton.backend.platform_npu import NpuPlatform

    with pytest.raises(ConfigError, match=message):
        NpuPlatform.check_and_update_config(config(**changed))


def test_graphs_of_prefills() -> None:
    from vllm.config import CUDAGraphMode

    from dsv4_triton.backend.platform_npu import NpuPlatform

    asked = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    with pytest.raises(ConfigError, match=r"is FULL_AND_PIECEWISE: .* it takes FULL_DECODE_ONLY or NONE"):
        NpuPlatform.apply_config_platform_defaults(SimpleNamespace(compilation_config=asked))


def test_graphs_need_the_task_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import CUDAGraphMode

    from dsv4_triton.backend import graphs

    monkeypatch.setenv(graphs.TASK_QUEUE, "0")
    graphs.check(CUDAGraphMode.NONE)
    with pytest.raises(ConfigError, match="TRITON_ENABLE_TASKQUEUE is 0"):
        graphs.check(CUDAGraphMode.FULL_DECODE_ONLY)
    monkeypatch.delenv(graphs.TASK_QUEUE)
    graphs.check(CUDAGraphMode.FULL_DECODE_ONLY)
