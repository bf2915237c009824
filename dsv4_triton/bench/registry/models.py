"""The models of the cases: DeepSeek-V4-Flash and -Pro by their official config.json, and the demo checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsv4_triton.config import ModelSettings
from dsv4_triton.demo.checkpoint import DemoSettings, model_config

_SHARED: dict[str, Any] = {
    "vocab_size": 129280,
    "index_n_heads": 64,
    "o_lora_rank": 1024,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "swiglu_limit": 10.0,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 1048576,
    "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8"},
}
_FLASH = _SHARED | {
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "index_topk": 512,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 1.5,
}
_PRO = _SHARED | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    "index_topk": 1024,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5,
}


@dataclass(frozen=True)
class Model:
    """A name and the numbers behind it; `demo` models are small enough to run on the host in milliseconds."""

    name: str
    settings: ModelSettings
    demo: bool = False


MODELS = {
    model.name: model
    for model in (
        Model("flash", ModelSettings.of(_FLASH)),
        Model("pro", ModelSettings.of(_PRO)),
        Model("demo", ModelSettings.of(model_config(DemoSettings())), demo=True),
    )
}
