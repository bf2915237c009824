"""Stand-in for vllm-ascend: the platform, cache planning and model runner that a model meets there, and nothing else.

Written from what main of 22 August 2026 (commit 182b75ea) does. Device, worker and steps are those of this project's
NPU platform on the simulated device. It has its own cache specs, its replacements of vLLM's planning, allocation and
binding of caches, and the arguments of metadata builders. It registers a model of its own for DeepSeek-V4, which must
not win.
"""


def register() -> str:
    return "vllm_ascend.platform.NPUPlatform"


def register_model() -> None:
    from vllm_ascend.models import register_model

    register_model()
