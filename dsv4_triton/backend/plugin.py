"""Entry points of vLLM's plugin groups.

Both run in every vLLM process, spawned children included, and may run more than once. They import neither torch_npu nor
a kernel, and touch no device.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import NamedTuple

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

ASCEND_PLUGIN = "ascend"
"""vllm-ascend's name among platform plugins."""

_PLATFORM_GROUP = "vllm.platform_plugins"
_probing_platforms = False


def register() -> None:
    """Register with vLLM the model classes, the attention backend `CUSTOM`, and what checks options and requests."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from dsv4_triton.backend.compat import (
        check_draft_first,
        check_first,
        check_room_for_a_request,
        check_token_ids,
        extend_api_server,
        pin_model,
    )

    pin_model(ARCHITECTURE, MODEL_CLASS)
    pin_model(DRAFT_ARCHITECTURE, DRAFT_CLASS)
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND_CLASS)
    check_first(ARCHITECTURE, CONFIG_CHECK)
    check_draft_first(MODEL_TYPE, DRAFT_CHECK)
    check_room_for_a_request(ARCHITECTURE)
    check_token_ids(ARCHITECTURE)
    extend_api_server(ARCHITECTURE, API_EXTENSION)


class Setting(NamedTuple):
    """Who serves DeepSeek-V4 on this machine, by what reason; `conflict` names another platform plugin in the way."""

    platform: str | None
    name: str
    reason: str
    conflict: str | None = None


def platform() -> str | None:
    """The NPU platform's class where torch_npu is installed, the development platform's on a CPU build of vLLM; None
    where another plugin serves the machine.

    SystemExit with what to do where this platform was asked for beside another: of any Exception here vLLM takes no
    notice, and then ends with a message that only names the two.
    """
    found = setting()
    if found is not None and found.conflict:
        raise SystemExit(conflict_message(found.conflict))
    return None if found is None else found.platform


def conflict_message(other: str) -> str:
    """What to do where two platforms would be active, which vLLM refuses."""
    return (
        f"{PLATFORM_VARIABLE}=npu asks for the platform of dsv4_triton, but platform plugin {other!r} claims this "
        f"machine, too, and vLLM takes one only: set VLLM_PLUGINS=dsv4_triton to leave the other out, or unset "
        f"{PLATFORM_VARIABLE} to serve inside it"
    )


def setting() -> Setting | None:
    """The setting of this process; None while it is being found out, and where vLLM is no CPU build and has no NPU."""
    global _probing_platforms
    if _probing_platforms:
        return None
    _probing_platforms = True
    try:
        return _setting()
    finally:
        _probing_platforms = False


def _setting() -> Setting | None:
    asked, other = os.environ.get(PLATFORM_VARIABLE), _other_platform()
    if asked == "npu":
        return Setting(NPU_PLATFORM_CLASS, "torch_npu alone", f"{PLATFORM_VARIABLE} is npu", other)
    if other is not None:
        name = "vllm-ascend" if other == ASCEND_PLUGIN else f"platform plugin {other}"
        return Setting(None, name, f"the platform plugin {other!r} claims this machine")
    ascend, reason = find_spec("vllm_ascend") is not None, f"{PLATFORM_VARIABLE} is {asked}"
    if asked != "cpu":
        reason = "torch_npu is not installed"
        if find_spec("torch_npu") is not None:
            if not ascend:
                return Setting(NPU_PLATFORM_CLASS, "torch_npu alone", "torch_npu is installed, vllm-ascend is not")
            reason = f"vllm-ascend is installed and claims no device; {PLATFORM_VARIABLE}=npu would do without it"
    from vllm.platforms import cpu_platform_plugin

    return None if cpu_platform_plugin() is None else Setting(HOST_PLATFORM_CLASS, "host", reason)


def _other_platform() -> str | None:
    """The name of a platform plugin of another package (vllm-ascend on an NPU machine) that claims this machine."""
    from vllm import envs

    for entry in entry_points(group=_PLATFORM_GROUP):
        if entry.value == f"{__name__}:platform":
            continue
        if envs.VLLM_PLUGINS is not None and entry.name not in envs.VLLM_PLUGINS:
            continue
        try:
            if entry.load()() is not None:
                return entry.name
        except Exception:  # vLLM skips a plugin that fails to load, so it claims nothing
            continue
    return None
