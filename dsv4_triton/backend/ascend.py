"""Running inside vllm-ascend: what its platform, cache planning and proposer expect of a model that is not its own.

There vllm-ascend has the platform, the worker and the model runner, and this project the model, the contents of caches
and the kernels. `ascend_contract` says what is relied on. No module of vllm-ascend is imported before it is asked for.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from dsv4_triton.backend import ascend_contract, graphs
from dsv4_triton.backend.geometry import Pages
from dsv4_triton.config import ConfigError, ModelSettings

WORKER_CLASS = "dsv4_triton.backend.worker_ascend.AscendWorker"
FOREIGN = {
    "enable_dsa_cp": "the attention of this plugin keeps whole sequences in every process",
    "xlite_graph_config.enabled": "xlite has models of its own",
    "sparse_kv_offload_config.enabled": "the caches of this plugin stay on the device",
    "eplb_config.dynamic_eplb": "the experts of this plugin stay where they were loaded",
    **{
        f"finegrained_tp_config.{part}_tensor_parallel_size": "the layers of this plugin are split over all ranks alike"
        for part in ("oproj", "lmhead", "embedding", "mlp", "olora")
    },
}
"""Options of vllm-ascend in additional_config that this model class cannot honour."""


def active() -> bool:
    """Whether vllm-ascend's platform, or one derived from it, serves this process."""
    from vllm.platforms import current_platform

    return any(base.__module__.partition(".")[0] == ascend_contract.PACKAGE for base in type(current_platform).__mro__)


def check(vllm_config: Any) -> None:
    """Check and settle the options of a server inside vllm-ascend, before its platform does; elsewhere nothing.

    The block size becomes one that both have page tables for, since vllm-ascend silently takes 32 for any other,
    graphs those of decode steps, and the worker vllm-ascend's with this project's warm-up. The mode of compilation
    stays, since vllm-ascend makes graphs of drafts in vLLM's only; of this model vLLM compiles nothing in any. Later
    processes are spawned, unless another way is asked for, since this one has asked for the chip's name.
    ConfigError for what cannot be served there; UnsupportedDeviceError for another chip.
    """
    from dsv4_triton.backend.serving import Serving

    if not active():
        return
    additional = vllm_config.additional_config or {}
    for name, reason in FOREIGN.items():
        option, _, key = name.partition(".")
        given = additional.get(option)
        if given.get(key) if key and isinstance(given, dict) else given:
            raise ConfigError(f"{name} of --additional-config is set: {reason}; leave it out")
    if vllm_config.use_v2_model_runner:
        raise ConfigError(
            "VLLM_USE_V2_MODEL_RUNNER is 1, but inside vllm-ascend the first model runner is supported; unset it"
        )
    hf_config, cache = vllm_config.model_config.hf_config, vllm_config.cache_config
    ascend_contract.check(hf_config)
    missing = sorted({4, 128}.difference(ModelSettings.of(hf_config).ratios))
    if missing:
        raise ConfigError(
            f"config.json: no layer has compress ratio {' or '.join(map(str, missing))}; vllm-ascend plans caches for "
            f"checkpoints with layers of ratio 4 and of ratio 128"
        )
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    cache.block_size = Serving.of(vllm_config).layout.block_size
    if not vllm_config.model_config.enforce_eager:
        graphs.settle(vllm_config.compilation_config)
        graphs.check(vllm_config.compilation_config.cudagraph_mode)
    if vllm_config.parallel_config.worker_cls == "auto":
        vllm_config.parallel_config.worker_cls = WORKER_CLASS


def begin() -> None:
    """Called while the model is made, in each worker: the contract again, in this process, and an answer that
    vllm-ascend caches and cannot find later, when no config is current."""
    if not active():
        return
    ascend_contract.check()
    from vllm_ascend.utils import enable_dsa_cp

    enable_dsa_cp()


def cache_spec(pages: Pages) -> Any:
    """vllm-ascend's spec of a cache with these pages. Its planning pads every page to one of the sizes of c4 caches,
    which geometry `vllm-ascend` does, too."""
    from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec, AscendSlidingWindowMLASpec

    fields: dict[str, Any] = {
        "block_size": pages.tokens,
        "num_kv_heads": 1,
        "head_size": pages.width,
        "dtype": pages.dtype,
        "compress_ratio": pages.ratio,
        "model_version": "deepseek_v4",
    }
    if pages.window is None:
        return AscendMLAAttentionSpec(**fields)
    return AscendSlidingWindowMLASpec(sliding_window=pages.window, page_size_padded=pages.padded, **fields)


def only_drafts(cache_names: list[str]) -> bool:
    """Whether all of these caches are of the MTP block, as those are that vllm-ascend's drafter has metadata built for.
    It looks for the same part of a name, and gives such caches memory that they share with none."""
    return all("mtp" in name.split(".") for name in cache_names)


def bound_cache(bound: Any, pages: Pages) -> torch.Tensor:
    """[blocks, rows, width] of what a model runner binds: vLLM that tensor itself, vllm-ascend a list of a list of one
    tensor [blocks, rows, 1, width]. ConfigError for anything else in a list."""
    if isinstance(bound, torch.Tensor):
        return bound
    inner = bound
    while isinstance(inner, (list, tuple)) and len(inner) == 1:
        inner = inner[0]
    expected = (pages.rows, 1, pages.width)
    if not isinstance(inner, torch.Tensor) or inner.shape[1:] != expected or inner.dtype != pages.dtype:
        shapes = [tuple(part.shape) for part in inner] if isinstance(inner, (list, tuple)) else tuple(inner.shape)
        raise ascend_contract.broken(
            [f"it binds a cache of shape {shapes}, expected was one tensor [blocks, {', '.join(map(str, expected))}]"]
        )
    return inner.squeeze(2)
