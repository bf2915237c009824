"""vLLM's options that cannot be served: each refused by name, before vLLM's own checks and before loading."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4_triton.backend.compat import TRANSFORMERS_IMPLEMENTATION
from dsv4_triton.backend.limits import EXTRAS, LIMITS, Extra, Limit
from dsv4_triton.backend.plugin import ARCHITECTURE, register
from dsv4_triton.config import ConfigError
from dsv4_triton.demo.checkpoint import DemoSettings, model_config, write_checkpoint

WORKS = {
    "model_config.dtype": [torch.bfloat16, torch.float32],
    "load_config.load_format": ["auto", "safetensors", "dummy"],
    "model_config.runner_type": ["generate"],
    "model_config.model_impl": ["auto", "vllm"],
    "attention_config.backend.name": [None, "CUSTOM"],
    "kernel_config.moe_backend": ["auto"],
    "parallel_config.ubatch_size": [0],
    "structured_outputs_config.backend": ["auto", "guidance"],
    "scheduler_config.disable_hybrid_kv_cache_manager": [None, False],
}
"""Values that are served; of options that are not listed here None, False, 0 or 1, the ones that mean off."""
REFUSED = {
    "model_config.dtype": (torch.float16, "--dtype is float16: .*; it takes bfloat16 or float32"),
    "model_config.quantization": (
        "deepseek_v4_fp8",
        "--quantization is deepseek_v4_fp8: .* bf16 and fp32 .*leave it out",
    ),
    "load_config.load_format": ("gguf", "--load-format is gguf: .*; it takes auto or hf or safetensors"),
    "model_config.runner_type": ("pooling", "--runner or --convert is pooling: .*; it takes generate"),
    "model_config.model_impl": ("transformers", "--model-impl is transformers: .*; it takes auto or vllm"),
    "attention_config.backend.name": ("FLASHMLA", "--attention-backend is FLASHMLA: .*; it takes CUSTOM"),
    "kernel_config.moe_backend": ("triton", "--moe-backend is triton: .*; it takes auto"),
    "parallel_config.pipeline_parallel_size": (2, "--pipeline-parallel-size is 2: .*; it takes 1"),
    "structured_outputs_config.backend": ("outlines", "backend is outlines: .*; it takes auto or xgrammar or guidance"),
    "offload_config.uva.cpu_offload_gb": (0.5, "--cpu-offload-gb is 0.5: .*; it takes 0"),
    "parallel_config.enable_expert_parallel": (True, "--enable-expert-parallel is True: .*; it takes False"),
    "lora_config": (SimpleNamespace(rank=8), "--enable-lora is set: .*; leave it out"),
    "kv_transfer_config": (SimpleNamespace(), "--kv-transfer-config is set: .*not supported.*; leave it out"),
    "speculative_config.method": ("ngram", "method of --speculative-config is ngram: .* MTP block .*; it takes mtp"),
    "speculative_config.num_speculative_tokens": (4, "num_speculative_tokens .* is 4: .*; it takes 1 or 2 or 3"),
}


def config_with(field: str, value: Any) -> Any:
    """A config that has only this field."""
    for name in reversed(field.split(".")):
        value = SimpleNamespace(**{name: value})
    return value


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.field)
def test_a_limit_takes_what_works_and_nothing_else(limit: Limit) -> None:
    off = [value for value in (None, False, 0, 1) if value in limit.takes]
    works = WORKS.get(limit.field, off)
    assert works
    for value in works:
        limit.check(config_with(limit.field, value))
    value, says = REFUSED.get(limit.field, (7, f"^{limit.option} is 7: "))
    with pytest.raises(ConfigError, match=says):
        limit.check(config_with(limit.field, value))


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: extra.field)
def test_a_module_that_is_missing_is_named(extra: Extra) -> None:
    there = replace(extra, modules={"asked": "json"})
    there.check(config_with(extra.field, "asked"))
    there.check(config_with(extra.field, "other"))
    missing = replace(extra, modules={"asked": "no_such_module"})
    with pytest.raises(ConfigError, match=f"^{extra.option} is asked: .* no_such_module"):
        missing.check(config_with(extra.field, "asked"))


def test_limits_are_where_vllm_keeps_the_options(tmp_path: Path) -> None:
    """A field that moves with a new vLLM would be read as unset."""
    config = engine_config(tmp_path, {"num_nextn_predict_layers": 1}, {"speculative_config": MTP})
    for limit in (*LIMITS, *EXTRAS):
        *path, name = limit.field.split(".")
        if path[-1:] == ["backend"]:
            assert config.attention_config.backend is None
            continue
        if path[-1:] == ["attention_backend"]:
            assert config.speculative_config.attention_backend is None
            continue
        part = config
        for step in path:
            part = getattr(part, step)
        assert hasattr(part, name), limit.field
    assert config.model_config._get_transformers_backend_cls() == TRANSFORMERS_IMPLEMENTATION


def engine_config(folder: Path, config: dict[str, Any], arguments: dict[str, Any]) -> Any:
    """What `vllm serve` makes of a checkpoint with these fields in config.json, and of these options."""
    from vllm.engine.arg_utils import EngineArgs

    settings = DemoSettings(ratios=(0,), hash_layers=0, mtp_layers=0, experts=6, hidden=64, intermediate=32)
    write_checkpoint(folder / "model", settings)
    (folder / "model" / "config.json").write_text(json.dumps(model_config(settings) | config))
    return EngineArgs(
        model=str(folder / "model"), **({"dtype": "float32", "enforce_eager": True} | arguments)
    ).create_engine_config()


MTP = {"method": "mtp", "num_speculative_tokens": 1}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}}


ONE_BLOCK = {"num_nextn_predict_layers": 1}


def speculating(**options: Any) -> dict[str, Any]:
    return {"speculative_config": MTP | options}


@pytest.mark.parametrize(
    ("config", "arguments", "says"),
    [
        (FP8, {}, r"quantization_config of config\.json .* is deepseek_v4_fp8: .* bf16 and fp32"),
        (FP8, {"dtype": "bfloat16"}, r"quantization_config of config\.json .* is deepseek_v4_fp8: .* bf16 and fp32"),
        ({}, {"quantization": "awq"}, "--quantization is awq: "),
        ({}, {"pipeline_parallel_size": 2}, "--pipeline-parallel-size is 2: "),
        ({}, {"enable_lora": True}, "--enable-lora is set: "),
        (
            {},
            {"tensor_parallel_size": 4},
            r"--tensor-parallel-size is 4, it must divide o_groups of config\.json \(2\)",
        ),
        ({}, {"runner": "pooling"}, "--runner or --convert is pooling: "),
        ({"hc_mult": 3}, {"dtype": "bfloat16"}, "hc_mult is 3"),
        (ONE_BLOCK, speculating(num_speculative_tokens=4), "num_speculative_tokens .* is 4: .* it takes 1 or 2 or 3"),
        (ONE_BLOCK, speculating(num_speculative_tokens=999), "num_speculative_tokens .* is 999: .* it takes 1 or 2"),
        (ONE_BLOCK, speculating(num_speculative_tokens=0), r"num_speculative_tokens\s+Input should be greater than 0"),
        (ONE_BLOCK, speculating(num_speculative_tokens=-1), r"num_speculative_tokens\s+Input should be greater than 0"),
        (
            ONE_BLOCK,
            speculating(num_speculative_tokens=1.5),
            r"num_speculative_tokens\s+Input should be a valid integer",
        ),
        (
            {"num_nextn_predict_layers": 0},
            speculating(),
            r"has no MTP blocks \(num_nextn_predict_layers .*leave it out",
        ),
        ({"num_nextn_predict_layers": None}, speculating(), "has no MTP blocks"),
        ({"num_nextn_predict_layers": 3}, speculating(num_speculative_tokens=3), "has 3 MTP blocks .* one can be"),
        (ONE_BLOCK | {"dspark_block_size": 5}, speculating(), "has DSpark stages .* in place of an MTP block"),
        (ONE_BLOCK, speculating(method="ngram", prompt_lookup_max=2), "method of --speculative-config is ngram"),
        (
            ONE_BLOCK,
            {"tensor_parallel_size": 2, **speculating(draft_tensor_parallel_size=1)},
            "leave it out or make it 2",
        ),
    ],
    ids=[
        "fp8 fp32",
        "fp8 bf16",
        "awq",
        "pipeline",
        "lora",
        "tensor-parallel",
        "pooling",
        "model",
        "four drafts",
        "999 drafts",
        "no drafts",
        "minus one draft",
        "a draft and a half",
        "no block",
        "no field",
        "three blocks",
        "dspark",
        "ngram",
        "draft tensor-parallel",
    ],
)
def test_our_message_comes_first(tmp_path: Path, config: dict[str, Any], arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        engine_config(tmp_path, config, arguments)


def test_drafts_of_another_checkpoint_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_checkpoint(other, DemoSettings(ratios=(0,), hash_layers=0, experts=6, hidden=64, intermediate=32))
    with pytest.raises(ValueError, match=f"model of --speculative-config is {other}: .*own MTP block; leave it out"):
        engine_config(tmp_path, ONE_BLOCK, speculating(model=str(other)))


def test_another_implementation_of_this_model_is_refused_and_of_other_models_is_not() -> None:
    """What `--model-impl transformers` comes to, without the half minute in which vLLM inspects that implementation."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    register()
    check = MODELS_CONFIG_MAP[TRANSFORMERS_IMPLEMENTATION].verify_and_update_config
    asked = {"dtype": torch.bfloat16, "runner_type": "generate", "model_impl": "transformers"}
    load = SimpleNamespace(load_format="auto")
    ours = SimpleNamespace(architectures=[ARCHITECTURE], quantization=None, **asked)
    with pytest.raises(ConfigError, match="--model-impl is transformers: "):
        check(SimpleNamespace(model_config=ours, load_config=load))
    check(SimpleNamespace(model_config=SimpleNamespace(architectures=["OtherForCausalLM"], **asked), load_config=load))


def test_token_ids_outside_of_the_vocabulary_are_refused_without_a_tokenizer() -> None:
    """Of this model, where vLLM looks at none; what is refused there for another reason still is."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    register()
    lengths: list[int] = []
    server = SimpleNamespace(tokenizer=None, _validate_prompt_len=lambda length, kind: lengths.append(length))

    def check(tokens: list[int], architecture: str = ARCHITECTURE) -> None:
        server.model_config = SimpleNamespace(architectures=[architecture], get_vocab_size=lambda: 512)
        prompt: Any = {"type": "token", "prompt_token_ids": tokens}
        InputProcessor._validate_model_input(server, prompt, "decoder")  # type: ignore[arg-type]

    for token in (-1, 512, 1 << 40):
        with pytest.raises(VLLMValidationError, match=f"token id {token} is out of the vocabulary, which has 512"):
            check([5, token, 6])
    check([0, 511, 0])
    check([])
    check([512], "OtherForCausalLM")
    assert lengths == [3, 0, 1]
