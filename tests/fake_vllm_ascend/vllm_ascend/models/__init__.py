from vllm import ModelRegistry


def register_model() -> None:
    for architecture in ("DeepseekV4ForCausalLM", "DeepSeekV4MTPModel"):
        ModelRegistry.register_model(architecture, f"vllm_ascend.models.absent:{architecture}")
