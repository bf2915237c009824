"""Entry points of vLLM's plugin groups.

Both run in every vLLM process, spawned children included, and may run more than once. They import neither torch_npu nor
a kernel, and touch no device.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from importlib.util import find_spec

ARCHITECTURE = "DeepseekV4ForCausalLM"
MODEL_TYPE = "deepseek_v4"
MODEL_CLASS = "dsv4_triton.model.causal_lm:TritonDeepseekV4ForCausalLM"
DRAFT_ARCHITECTURE = "DeepSeekV4MTPModel"
"""What vLLM calls the MTP block of a DeepSeek-V4 checkpoint."""
DRAFT_CLASS = "dsv4_triton.model.mtp:DeepSeekV4MTPModel"
BACKEND_CLASS = "dsv4_triton.backend.attention_backend.TritonDsaBackend"
CONFIG_CHECK = "dsv4_triton.backend.limits:check"
DRAFT_CHECK = "dsv4_triton.backend.limits:check_draft"
API_EXTENSION = "dsv4_triton.backend.api_server:answer_client_errors"
HOST_PLATFORM_CLASS = "dsv4_triton.backend.platform_cpu.HostPlatform"
NPU_PLATFORM_CLASS = "dsv4_triton.backend.platform_npu.NpuPlatform"
PLATFORM_VARIABLE = "DSV4_TRITON_PLATFORM"
"""Environment variable that asks for a platform of this project: "npu" although vllm-ascend is installed, which must be
left out of VLLM_PLUGINS then; "cpu" although torch_npu is."""

_PLATFORM_GROUP = "vllm.platform_plugins"
_probing_platforms = False


def register() -> None:
    """Register with vLLM the model classes, the attention backend `CUSTOM`, and what checks options and requests."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from dsv4_triton.backend.compat import check_draft_first, check_first, extend_api_server, pin_model

    pin_model(ARCHITECTURE, MODEL_CLASS)
    pin_model(DRAFT_ARCHITECTURE, DRAFT_CLASS)
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND_CLASS)
    check_first(ARCHITECTURE, CONFIG_CHECK)
    check_draft_first(MODEL_TYPE, DRAFT_CHECK)
    extend_api_server(ARCHITECTURE, API_EXTENSION)


def platform() -> str | None:
    """The NPU platform's class where torch_npu is installed, the development platform's on a CPU build of vLLM; None
    where another plugin serves the machine."""
    global _probing_platforms
    if _probing_platforms:
        return None
    _probing_platforms = True
    try:
        asked = os.environ.get(PLATFORM_VARIABLE)
        if asked == "npu":
            return NPU_PLATFORM_CLASS
        if _other_platform_active():
            return None
        if asked != "cpu" and find_spec("torch_npu") is not None and find_spec("vllm_ascend") is None:
            return NPU_PLATFORM_CLASS
        from vllm.platforms import cpu_platform_plugin

        return HOST_PLATFORM_CLASS if cpu_platform_plugin() is not None else None
    finally:
        _probing_platforms = False


def _other_platform_active() -> bool:
    """Whether a platform plugin of another package (vllm-ascend on an NPU machine) claims this machine."""
    from vllm import envs

    for entry in entry_points(group=_PLATFORM_GROUP):
        if entry.value == f"{__name__}:platform":
            continue
        if envs.VLLM_PLUGINS is not None and entry.name not in envs.VLLM_PLUGINS:
            continue
        try:
            if entry.load()() is not None:
                return True
        except Exception:  # vLLM skips a plugin that fails to load, so it claims nothing
            continue
    return False
