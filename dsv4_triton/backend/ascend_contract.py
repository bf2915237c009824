"""What this project relies on in vllm-ascend, checked at start-up.

A cache of another class than vllm-ascend's own is not refused there: its model runner takes the tensor apart element by
element until the process is killed for its memory. Everything here fails before that, in one message.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from dsv4_triton.config import ConfigError

PACKAGE = "vllm_ascend"
KNOWN = "vllm-ascend main of 22 August 2026 (commit 182b75ea) with vLLM 0.27.1"
"""What the contract was read from."""
SPECS = "vllm_ascend.core.kv_cache_interface"
SPEC_FIELDS = {
    "AscendMLAAttentionSpec": (
        *("block_size", "num_kv_heads", "head_size", "dtype", "compress_ratio", "model_version", "scale_dim"),
    ),
    "AscendSlidingWindowMLASpec": (
        *("block_size", "num_kv_heads", "head_size", "dtype", "compress_ratio", "model_version", "sliding_window"),
        "page_size_padded",
    ),
}
PATCHED = {
    "vllm.v1.core.kv_cache_utils": (
        "group_and_unify_kv_cache_specs",
        "_get_kv_cache_groups_uniform_groups",
        "_get_kv_cache_config_packed",
        "resolve_kv_cache_block_sizes",
    ),
    "vllm.v1.core.kv_cache_coordinator": ("get_kv_cache_coordinator",),
}
"""Functions of vLLM that vllm-ascend replaces, so that c4 and c128 caches may have pages of the same rows."""
METADATA = (
    *("query_start_loc", "seq_lens", "block_table_tensor", "num_actual_tokens", "num_input_tokens", "max_seq_len"),
    "positions",
)
"""Fields of vllm-ascend's batch metadata that are read."""
RUNNER_METHODS = {
    "_allocate_kv_cache_tensors": ("kv_cache_config",),
    "_reshape_kv_cache_tensors": ("kv_cache_config", "kv_cache_raw_tensors"),
    "initialize_kv_cache_tensors": ("kv_cache_config",),
}
DRAFTER_METHODS = ("build_draft_attn_metadata", "attn_update_stack_num_spec_norm", "_run_merged_draft")
"""Where its drafter has all drafts planned, the first through `build`, before it runs, or replays, all of them."""
BUILDER_METHODS = {
    "build": ("common_prefix_len", "common_attn_metadata"),
    "build_for_drafting": ("common_attn_metadata", "draft_index"),
    "build_for_graph_capture": ("common_attn_metadata",),
}
"""How metadata builders are called, to which vllm-ascend's own builder for this model is the witness."""
BUILDER = ("vllm_ascend.attention.dsa_v1", "AscendDSAMetadataBuilder")


def check(hf_config: Any = None) -> None:
    """ConfigError that names every expectation that is not met in this process; `hf_config` is config.json's."""
    found = [*_specs(), *_patches(), *_functions(), *(() if hf_config is None else _model(hf_config))]
    if found:
        raise broken(found)


def check_runner(runner: Any) -> None:
    """The same of a model runner, before it loads the model."""
    found = []
    if getattr(runner, "use_compress", None) is not True:
        found.append(f"use_compress of its model runner is {getattr(runner, 'use_compress', 'missing')}, not True")
    for name, parameters in RUNNER_METHODS.items():
        found += _signature(f"{type(runner).__name__}.{name}", getattr(runner, name, None), parameters)
    found += [*_shape(runner), *_drafter(getattr(runner, "drafter", None)), *_builder()]
    metadata = _name("vllm_ascend.attention.utils", "AscendCommonAttentionMetadata")
    if isinstance(metadata, str):
        found.append(metadata)
    else:
        found += _fields(metadata, METADATA)
    if found:
        raise broken(found)


def broken(found: list[str]) -> ConfigError:
    """The error for expectations that are not met."""
    return ConfigError(
        f"vllm-ascend {installed()} is not what dsv4_triton was made for: {'; '.join(found)}. "
        f"It was made for, and has served on a simulated NPU inside, {KNOWN}. "
        f"Install that, or serve without vllm-ascend by DSV4_TRITON_PLATFORM=npu and VLLM_PLUGINS=dsv4_triton"
    )


def installed() -> str:
    """The version of vllm-ascend."""
    try:
        return version("vllm-ascend")
    except PackageNotFoundError:
        return "of unknown version"


def _specs() -> Iterator[str]:
    for name, wanted in SPEC_FIELDS.items():
        spec = _name(SPECS, name)
        if isinstance(spec, str):
            yield spec
            continue
        lacking = list(_fields(spec, wanted))
        yield from lacking
        if not lacking:
            yield from _page(spec)


def _page(spec: Any) -> Iterator[str]:
    """A page of 32 rows of 512 bf16 values, each for 4 tokens."""
    window = {"sliding_window": 128} if "Sliding" in spec.__name__ else {}
    page = spec(block_size=128, num_kv_heads=1, head_size=512, dtype=torch.bfloat16, compress_ratio=4, **window)
    for name, expected in {"storage_block_size": 32, "page_size_bytes": 32 * 512 * 2}.items():
        value = getattr(page, name, None)
        if value != expected:
            yield f"{name} of {spec.__name__} is {value} where {expected} was expected"


def _patches() -> Iterator[str]:
    for module, names in PATCHED.items():
        for name in names:
            function = _name(module, name)
            if isinstance(function, str):
                yield function
            elif function.__module__.partition(".")[0] != PACKAGE:
                yield f"{module}.{name} is not replaced by vllm-ascend"


def _functions() -> Iterator[str]:
    function = _name("vllm_ascend.utils", "enable_dsa_cp")
    if isinstance(function, str):
        yield function
    else:
        yield from _signature("vllm_ascend.utils.enable_dsa_cp", function, ())


def _shape(runner: Any) -> Iterator[str]:
    """Its runner takes the shape of every cache from the attention backend of the model, whatever the layer's is."""
    asked = (5, 32, 1, 512)
    try:
        shape = tuple(runner.attn_backend.get_kv_cache_shape(*asked))
    except (AttributeError, TypeError) as error:
        yield f"its attention backend has no shape of a cache of {asked} ({error})"
        return
    if shape != asked:
        yield f"its attention backend gives a cache of {asked} the shape {shape}"


def _drafter(drafter: Any) -> Iterator[str]:
    if drafter is not None:
        for name in DRAFTER_METHODS:
            if not hasattr(drafter, name):
                yield f"its drafter {type(drafter).__name__} has no {name}"


def _builder() -> Iterator[str]:
    builder = _name(*BUILDER)
    if isinstance(builder, str):
        yield builder
        return
    for name, parameters in BUILDER_METHODS.items():
        yield from _signature(f"{BUILDER[1]}.{name}", getattr(builder, name, None), ("self", *parameters))


def _model(hf_config: Any) -> Iterator[str]:
    """By these two vllm-ascend knows the model, and decides how its caches are allocated and bound."""
    if not hasattr(hf_config, "compress_ratios"):
        yield "config.json has no compress_ratios, by which it recognises compressed caches"
    if hf_config.model_type != "deepseek_v4":
        yield f"config.json has model_type {hf_config.model_type!r}, it binds caches by 'deepseek_v4'"


def _name(module: str, name: str) -> Any:
    """The object, or what is missing."""
    try:
        return getattr(import_module(module), name)
    except ImportError as error:
        return f"{module} cannot be imported ({error})"
    except AttributeError:
        return f"{module} has no {name}"


def _fields(record: Any, wanted: tuple[str, ...]) -> Iterator[str]:
    lacking = [name for name in wanted if name not in {field.name for field in fields(record)}]
    if lacking:
        yield f"{record.__name__} has no {', '.join(lacking)}"


def _signature(name: str, function: Any, parameters: tuple[str, ...]) -> Iterator[str]:
    """Of a function that should take these parameters, and no others without a default."""
    if function is None:
        yield f"there is no {name}"
        return
    taken = list(inspect.signature(function).parameters.values())
    demanded = tuple(
        one.name for one in taken if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    )
    first = tuple(one.name for one in taken[: len(parameters)])
    if first != parameters or not set(demanded) <= set(parameters):
        yield f"{name} takes ({', '.join(one.name for one in taken)}), not ({', '.join(parameters)})"
