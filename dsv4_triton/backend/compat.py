"""The parts of vLLM's API that move between versions (VERIFIED has which it was), each behind one function.

A name that is replaced has to be there. What a worker or a platform replaces ends the start otherwise. The plugin runs
in every process of vLLM, whatever that serves: it notes what it misses, and `check_hooks` ends the start of this model.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from importlib import import_module
from typing import Any

import torch

from dsv4_triton.backend import ascend
from dsv4_triton.backend.geometry import Pages
from dsv4_triton.config import ConfigError

logger = logging.getLogger(f"vllm.{__name__}")

API_SERVER = "vllm.entrypoints.openai.api_server"
TRANSFORMERS_IMPLEMENTATION = "TransformersMoEForCausalLM"
"""Under what name `--model-impl transformers` runs a text model with experts."""
ENDLESS = 1 << 30
"""A window, in tokens, longer than any request."""
VERIFIED = {"vLLM": "0.27.1", "triton-ascend": "3.2.0"}
"""The version of each package in which what is replaced has been found."""

_lost: set[str] = set()


class UpstreamChangedError(RuntimeError):
    """`package`, a key of VERIFIED, lacks a name that this project replaces or extends."""

    def __init__(self, what: str, package: str = "vLLM") -> None:
        super().__init__(
            f"{what}: this version of {package} is not known here, dsv4_triton was verified with {VERIFIED[package]}"
        )


def existing(owner: Any, title: str, name: str, package: str = "vLLM") -> Any:
    """`name` of `owner`, which is called `title` and is of `package`; UpstreamChangedError where there is none."""
    if not hasattr(owner, name):
        raise UpstreamChangedError(f"{title} has no {name}", package)
    return getattr(owner, name)


def check_hooks() -> None:
    """UpstreamChangedError where `existing_hook` missed something in this process."""
    if _lost:
        raise UpstreamChangedError("; ".join(sorted(_lost)))


def existing_hook(owner: Any, title: str, name: str) -> Any:
    """`existing`, but None, which `check_hooks` tells of, where there is none."""
    found = getattr(owner, name, None)
    if found is None:
        _lost.add(f"{title} has no {name}")
    return found


def pin_model(architecture: str, model_class: str) -> None:
    """Register `model_class` ("module:Class") and keep it, whichever plugin registers the architecture later.

    vLLM calls general plugins in the order packages are discovered and the last registration wins; vllm-ascend
    registers the same architectures.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    register = existing_hook(ModelRegistry, "ModelRegistry", "register_model")
    if register is None:
        return
    pinned = getattr(ModelRegistry, "_dsv4_triton_pinned", None)
    if pinned is None:
        pinned = {}

        def register_unless_pinned(model_arch: str, model_cls: type[torch.nn.Module] | str) -> None:
            register(model_arch, pinned.get(model_arch, model_cls))

        ModelRegistry._dsv4_triton_pinned = pinned
        ModelRegistry.register_model = register_unless_pinned
    pinned[architecture] = model_class
    ModelRegistry.register_model(architecture, model_class)


def cache_spec(pages: Pages, growing_tokens: int) -> Any:
    """vLLM's spec of a cache with these pages; block sizes count tokens.

    vLLM puts all caches without a window into one group with one block size, here `growing_tokens`. A cache that grows
    by other blocks is one with a window that never slides: it frees nothing and is hit from the first block on.
    Inside vllm-ascend, which has a group for every block size, the specs are its own.
    """
    if ascend.active():
        return ascend.cache_spec(pages)
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

    fields: dict[str, Any] = {
        "block_size": pages.tokens,
        "num_kv_heads": 1,
        "head_size": pages.width,
        "dtype": pages.dtype,
        "page_size_padded": pages.padded,
        "compress_ratio": pages.ratio,
        "model_version": "deepseek_v4",
    }
    if pages.window is None and pages.tokens == growing_tokens:
        return MLAAttentionSpec(**fields)
    return SlidingWindowMLASpec(sliding_window=pages.window or ENDLESS, **fields)


def register_op(name: str, op: Callable[..., None], fake: Callable[..., None], mutates: list[str]) -> None:
    """Make `torch.ops.vllm.<name>` for the current platform's device."""
    from vllm.utils.torch_utils import direct_register_custom_op

    direct_register_custom_op(op_name=name, op_func=op, mutates_args=mutates, fake_impl=fake)


def split_graph_at(op: str) -> None:
    """Let vLLM cut compiled graphs at the attention op `op` ("vllm::name"), as it does at its own attention ops."""
    from vllm.config import CompilationConfig

    ops = existing(CompilationConfig, "CompilationConfig", "_attention_ops")
    if op not in ops:
        ops.append(op)


def attention_metadata() -> dict[str, Any] | None:
    """The step's metadata per cache prefix; None in a profiling run, where no cache exists."""
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    return metadata if isinstance(metadata, dict) and metadata else None


def forward_context(metadata: dict[str, Any], vllm_config: Any, tokens: int) -> AbstractContextManager[None]:
    """The context in which a step with this metadata per cache prefix runs."""
    from vllm.forward_context import set_forward_context

    return set_forward_context(metadata, vllm_config, num_tokens=tokens)


def metadata_builders(runner: Any, requests: int) -> Iterator[tuple[Any, list[str], torch.Tensor]]:
    """Of each group of caches of a model runner: its metadata builder, the prefixes of its caches, and its block table
    for `requests` requests."""
    for index, groups in enumerate(runner.attn_groups):
        table = runner.input_batch.block_table[index].get_device_tensor(requests)
        for group in groups:
            yield group.get_metadata_builder(), group.layer_names, table


def mend_rejection_sampler() -> None:
    """Let a step that verifies drafts on a CPU see the temperature, top-k and top-p of its requests.

    There vLLM 0.27.1 converts the tensor that its kernel writes, so that the caller's stays uninitialised unless it is
    int64: answers are drawn at a random temperature, and top-k ends the engine. Pull request 42638 of vLLM describes
    the same symptom.
    """
    from vllm.v1.sample import rejection_sampler

    existing(rejection_sampler, rejection_sampler.__name__, "expand_batch_to_tokens")
    rejection_sampler.expand_batch_to_tokens = _expanded


def _expanded(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> torch.Tensor:
    """`x` [B] of each request for each of its tokens, [num_tokens], with one value replaced."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)


def layer_of(name: str) -> Any:
    """The module registered under `name` in the forward context."""
    from vllm.forward_context import get_forward_context

    return get_forward_context().no_compile_layers[name]


def extend_api_server(architecture: str, extension: str) -> None:
    """Let `extension` ("module:function") change each HTTP app that this process builds for a model of `architecture`.

    A process that has not loaded vLLM's API server (an engine, a worker, offline use) builds no app and is left alone.
    An extension that fails is logged: without it some malformed requests are answered with 500, all others as usual.
    """
    for module in (sys.modules.get(API_SERVER), sys.modules.get("__main__")):
        if getattr(getattr(module, "__spec__", None), "name", None) != API_SERVER:
            continue
        build = existing_hook(module, API_SERVER, "build_app")
        if build is not None and not hasattr(build, "_dsv4_triton_extended"):
            module.build_app = _extending(build, architecture, extension)  # type: ignore[union-attr]


def _extending(build: Callable[..., Any], architecture: str, extension: str) -> Callable[..., Any]:
    def build_app(args: Any, supported_tasks: Any = None, model_config: Any = None) -> Any:
        app = build(args, supported_tasks, model_config)
        if architecture in (getattr(model_config, "architectures", None) or ()):
            try:
                _named(extension)(app)
            except (ImportError, AttributeError) as error:
                logger.warning("some malformed requests will be answered with 500: %s", error)
        return app

    build_app._dsv4_triton_extended = True  # type: ignore[attr-defined]
    return build_app


def check_draft_first(model_type: str, check: str) -> None:
    """Call `check` ("module:function") with config.json of a checkpoint of `model_type` that is to draft for itself.

    vLLM divides by the number of MTP blocks before it lets an architecture check anything.
    """
    from vllm.config import SpeculativeConfig

    override = existing_hook(SpeculativeConfig, "SpeculativeConfig", "hf_config_override")
    if override is None or hasattr(override, "_dsv4_triton_check"):
        return

    @wraps(override)
    def checked(hf_config: Any) -> Any:
        if hf_config.model_type == model_type:
            _named(check)(hf_config)
        return override(hf_config)

    checked._dsv4_triton_check = check  # type: ignore[attr-defined]
    SpeculativeConfig.hf_config_override = staticmethod(checked)


def check_room_for_a_request(architecture: str) -> None:
    """Refuse a cache of a model of `architecture` in which a request of full length would wait for ever.

    vLLM 0.27.1 counts block 0, its null block, among those that requests can take. Without this hook a cache that is
    one block too small is accepted, and the request is neither scheduled nor ended.
    """
    from vllm.v1.core import kv_cache_utils

    capacity = existing_hook(kv_cache_utils, kv_cache_utils.__name__, "get_kv_cache_capacity")
    if capacity is None or hasattr(capacity, "_dsv4_triton_checked"):
        return

    @wraps(capacity)
    def checked(vllm_config: Any, kv_cache_config: Any) -> tuple[int, float]:
        tokens, requests = capacity(vllm_config, kv_cache_config)
        blocks, longest = kv_cache_config.num_blocks, vllm_config.model_config.max_model_len
        needed = round(blocks / requests)
        if architecture in (vllm_config.model_config.architectures or ()) and blocks <= needed:
            raise ConfigError(
                f"the KV cache has {blocks} blocks, of which requests get {blocks - 1}, and one of --max-model-len "
                f"({longest}) tokens takes {needed}: make the cache larger (--kv-cache-memory-bytes, on the host "
                f"VLLM_CPU_KVCACHE_SPACE; or --num-gpu-blocks-override) or --max-model-len smaller"
            )
        return tokens, requests

    checked._dsv4_triton_checked = True  # type: ignore[attr-defined]
    kv_cache_utils.get_kv_cache_capacity = checked


def check_token_ids(architecture: str) -> None:
    """Refuse a request to a model of `architecture` with a token id outside of its vocabulary.

    vLLM 0.27.1 looks at the largest id only, and without a tokenizer at none; such an id ends the engine when it is
    embedded.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    check = existing_hook(InputProcessor, "InputProcessor", "_validate_model_input")
    if check is None or hasattr(check, "_dsv4_triton_checked"):
        return

    @wraps(check)
    def checked(self: Any, prompt: Any, *arguments: Any, **named: Any) -> None:
        config, ids = self.model_config, prompt.get("prompt_token_ids")
        if ids and architecture in (config.architectures or ()):
            for token in (min(ids), max(ids)):
                if not 0 <= token < config.get_vocab_size():
                    raise VLLMValidationError(
                        f"token id {token} is out of the vocabulary, which has {config.get_vocab_size()} tokens"
                    )
        check(self, prompt, *arguments, **named)

    checked._dsv4_triton_checked = True  # type: ignore[attr-defined]
    InputProcessor._validate_model_input = checked


def _named(function: str) -> Callable[..., Any]:
    """The function under the name "module:function"."""
    module, name = function.split(":")
    return getattr(import_module(module), name)


def check_first(architecture: str, check: str) -> None:
    """Call `check` ("module:function") with the VllmConfig of a model of `architecture` before vLLM checks it itself.

    vLLM's hook for an architecture, which its own entry for the architecture keeps too. vLLM looks it up under the name
    of the implementation, so that a model which is to be run by another one is checked as well.
    """
    from vllm.model_executor.models import config
    from vllm.model_executor.models.config import VerifyAndUpdateConfig

    # Without it nothing of this model would be checked, the hooks included.
    checks = existing(config, config.__name__, "MODELS_CONFIG_MAP")

    def add(name: str) -> None:
        upstream = checks.get(name, VerifyAndUpdateConfig)
        if hasattr(upstream, "_dsv4_triton_check"):
            return

        class Checked(upstream):  # type: ignore[misc, valid-type]
            _dsv4_triton_check = check

            @staticmethod
            def verify_and_update_config(vllm_config: Any) -> None:
                if architecture in (name, *(vllm_config.model_config.architectures or ())):
                    _named(check)(vllm_config)
                upstream.verify_and_update_config(vllm_config)

        checks[name] = Checked

    add(architecture)
    add(TRANSFORMERS_IMPLEMENTATION)
