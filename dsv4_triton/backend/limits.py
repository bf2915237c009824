"""vLLM's options that cannot be served for DeepSeek-V4, as data; checked before vLLM's own checks and before loading.

An option that is not named here works, or vLLM refuses it itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from dsv4_triton.backend import ascend, installation
from dsv4_triton.backend.compat import check_hooks
from dsv4_triton.config import ConfigError, ModelSettings
from dsv4_triton.options import Options

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Limit:
    """One option: `field` is where VllmConfig keeps it, `takes` what of it can be served (None: unset)."""

    option: str
    field: str
    takes: tuple[Any, ...]
    reason: str

    def check(self, vllm_config: VllmConfig) -> None:
        """ConfigError for a value that cannot be served."""
        value = _read(vllm_config, self.field)
        if value in self.takes:
            return
        values = [_shown(choice) for choice in self.takes if choice is not None]
        takes = f"it takes {' or '.join(values)}" if values else "leave it out"
        shown = f"is {_shown(value)}" if isinstance(value, (str, int, float, torch.dtype)) else "is set"
        raise ConfigError(f"{self.option} {shown}: {self.reason}; {takes}")


@dataclass(frozen=True)
class Extra:
    """Values of one option that work where a module is installed which vLLM does not require.

    vLLM looks for it when weights are loaded, or at the first request and then ends the server.
    """

    option: str
    field: str
    modules: Mapping[str, str]

    def check(self, vllm_config: VllmConfig) -> None:
        """ConfigError for a value whose module is missing."""
        value = _read(vllm_config, self.field)
        module = self.modules.get(value)
        if module and find_spec(module) is None:
            raise ConfigError(
                f"{self.option} is {value}: it needs the Python module {module}; install that or leave it out"
            )


LIMITS = (
    Limit("--dtype", "model_config.dtype", (torch.bfloat16, torch.float32), "DeepSeek-V4 is defined in bf16"),
    Limit(
        "quantization_config of config.json or --quantization",
        "model_config.quantization",
        (None,),
        "the checkpoint is quantised, and only weights in bf16 and fp32 can be loaded so far",
    ),
    Limit(
        "--load-format",
        "load_config.load_format",
        ("auto", "hf", "safetensors", "fastsafetensors", "runai_streamer", "npcache", "pt", "dummy"),
        "tensors are read by their official names and checked against config.json",
    ),
    Limit("--runner or --convert", "model_config.runner_type", ("generate",), "this model generates text"),
    Limit("--model-impl", "model_config.model_impl", ("auto", "vllm"), "this plugin's model class serves DeepSeek-V4"),
    Limit("--attention-backend", "attention_config.backend.name", (None, "CUSTOM"), "its attention is this plugin's"),
    Limit("--enable-lora", "lora_config", (None,), "there are no LoRA layers in this model class"),
    Limit(
        "method of --speculative-config",
        "speculative_config.method",
        (None, "mtp"),
        "drafts come from the MTP block of the checkpoint",
    ),
    Limit(
        "num_speculative_tokens of --speculative-config",
        "speculative_config.num_speculative_tokens",
        (None, 1, 2, 3),
        "the MTP block was trained to draft one token, and each further one is drafted from its own guess",
    ),
    Limit(
        "quantization of --speculative-config",
        "speculative_config.quantization",
        (None,),
        "only weights in bf16 and fp32 can be loaded so far",
    ),
    Limit(
        "moe_backend of --speculative-config",
        "speculative_config.moe_backend",
        (None, "auto"),
        "the experts are this plugin's Triton kernels",
    ),
    Limit(
        "attention_backend of --speculative-config",
        "speculative_config.attention_backend.name",
        (None, "CUSTOM"),
        "its attention is this plugin's",
    ),
    Limit(
        "kv_cache_dtype of --speculative-config",
        "speculative_config.kv_cache_dtype",
        (None, "auto"),
        "the MTP block keeps its rows as the model does",
    ),
    Limit(
        "rejection_sample_method of --speculative-config",
        "speculative_config.rejection_sample_method",
        (None, "standard"),
        "the model runner that serves DeepSeek-V4 has no other",
    ),
    Limit(
        "parallel_drafting of --speculative-config",
        "speculative_config.parallel_drafting",
        (None, False),
        "the MTP block drafts one token after the other",
    ),
    Limit(
        "use_local_argmax_reduction of --speculative-config",
        "speculative_config.use_local_argmax_reduction",
        (None, False),
        "drafts are chosen from whole logits",
    ),
    Limit(
        "--enable-prompt-embeds",
        "model_config.enable_prompt_embeds",
        (False,),
        "the first layers choose their experts by token id, which an embedding does not have",
    ),
    Limit(
        "--enable-return-routed-experts",
        "model_config.enable_return_routed_experts",
        (False,),
        "the router does not record its choices",
    ),
    Limit(
        "--disable-sliding-window",
        "model_config.disable_sliding_window",
        (False,),
        "every layer attends to a window and to compressed rows, neither of which can be left out",
    ),
    Limit(
        "--kv-transfer-config",
        "kv_transfer_config",
        (None,),
        "pages that another start wrote under other options could be read here, so KV connectors are not supported; "
        "the prefix cache of the server itself is",
    ),
    Limit(
        "--kv-offloading-size",
        "cache_config.kv_offloading_size",
        (None,),
        "pages that another start wrote under other options could be read here, so KV connectors are not supported; "
        "the prefix cache of the server itself is",
    ),
    Limit("--ec-transfer-config", "ec_transfer_config", (None,), "the model reads text only and has no encoder"),
    Limit(
        "--kv-sharing-fast-prefill",
        "cache_config.kv_sharing_fast_prefill",
        (False,),
        "no layer reads another layer's cache",
    ),
    Limit(
        "--disable-hybrid-kv-cache-manager",
        "scheduler_config.disable_hybrid_kv_cache_manager",
        (None, False),
        "the caches of DeepSeek-V4 have windows and blocks of their own",
    ),
    Limit(
        "--pipeline-parallel-size",
        "parallel_config.pipeline_parallel_size",
        (1,),
        "the layers cannot be divided into stages; --tensor-parallel-size divides each layer",
    ),
    Limit(
        "--enable-expert-parallel",
        "parallel_config.enable_expert_parallel",
        (False,),
        "every process has all experts; --tensor-parallel-size divides each of them",
    ),
    Limit(
        "--decode-context-parallel-size",
        "parallel_config.decode_context_parallel_size",
        (1,),
        "every process keeps the whole cache",
    ),
    Limit(
        "--prefill-context-parallel-size",
        "parallel_config.prefill_context_parallel_size",
        (1,),
        "every process keeps the whole cache",
    ),
    Limit("--enable-dbo", "parallel_config.enable_dbo", (False,), "a step's metadata is built for the whole batch"),
    Limit("--ubatch-size", "parallel_config.ubatch_size", (0, 1), "a step's metadata is built for the whole batch"),
    Limit(
        "--moe-backend",
        "kernel_config.moe_backend",
        ("auto",),
        "the experts are this plugin's Triton kernels",
    ),
    Limit(
        "--structured-outputs-config backend",
        "structured_outputs_config.backend",
        ("auto", "xgrammar", "guidance"),
        # outlines_core 0.2.14 offers the end token and then rejects it; lm-format-enforcer 0.11 imports a module that
        # vLLM no longer has.
        "under vLLM 0.27.1 every request to another one ends with an error",
    ),
    Limit(
        "--cpu-offload-gb",
        "offload_config.uva.cpu_offload_gb",
        (0,),
        "kernels read the weights where the model runs",
    ),
    Limit(
        "--offload-group-size",
        "offload_config.prefetch.offload_group_size",
        (0,),
        "kernels read the weights where the model runs",
    ),
)


EXTRAS = (
    Extra(
        "--load-format",
        "load_config.load_format",
        {"fastsafetensors": "fastsafetensors", "runai_streamer": "runai_model_streamer"},
    ),
    Extra(
        "--prefix-caching-hash-algo",
        "cache_config.prefix_caching_hash_algo",
        {"xxhash": "xxhash", "xxhash_cbor": "xxhash"},
    ),
)


def check_draft(hf_config: Any) -> None:
    """ConfigError for a checkpoint without the one MTP block that drafts come from."""
    blocks = getattr(hf_config, "num_nextn_predict_layers", None) or 0
    what = None
    if getattr(hf_config, "dspark_block_size", None):
        what = "has DSpark stages (dspark_block_size of config.json) in place of an MTP block"
    elif blocks != 1:
        what = f"has {blocks or 'no'} MTP blocks (num_nextn_predict_layers of config.json), one can be served"
    if what:
        raise ConfigError(f"--speculative-config asks for MTP, but the checkpoint {what}; leave it out")


def check(vllm_config: VllmConfig) -> None:
    """ConfigError for a checkpoint or an option that cannot be served, as far as that shows without a device;
    UpstreamChangedError for a vLLM that lacks what the plugin hooks into."""
    installation.check(_read(vllm_config, "device_config.device_type"), inside_ascend=ascend.active())
    check_hooks()
    for part in (*LIMITS, *EXTRAS):
        part.check(vllm_config)
    _check_speculation(vllm_config)
    Options.of(vllm_config.additional_config)
    model = ModelSettings.of(vllm_config.model_config.hf_config)
    shards = vllm_config.parallel_config.tensor_parallel_size
    for name, size in (("o_groups", model.o_groups), ("moe_intermediate_size", model.moe_intermediate)):
        if size % shards:
            raise ConfigError(f"--tensor-parallel-size is {shards}, it must divide {name} of config.json ({size})")
    ascend.check(vllm_config)


def _check_speculation(vllm_config: VllmConfig) -> None:
    speculation = vllm_config.speculative_config
    if speculation is None:
        return
    check_draft(vllm_config.model_config.hf_config)
    model, shards = vllm_config.model_config.model, vllm_config.parallel_config.tensor_parallel_size
    if speculation.model != model:
        raise ConfigError(
            f"model of --speculative-config is {speculation.model}: drafts come from the served checkpoint's own MTP "
            f"block; leave it out"
        )
    if speculation.draft_tensor_parallel_size != shards:
        raise ConfigError(
            f"draft_tensor_parallel_size of --speculative-config is {speculation.draft_tensor_parallel_size}: the MTP "
            f"block is divided as the model is; leave it out or make it {shards}"
        )


def _read(vllm_config: VllmConfig, field: str) -> Any:
    value: Any = vllm_config
    for name in field.split("."):
        value = getattr(value, name, None)
    return value


def _shown(value: Any) -> str:
    return str(value).removeprefix("torch.")
