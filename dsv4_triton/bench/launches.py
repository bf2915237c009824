"""Launches of one decode step in a decoder layer of each kind: every Triton kernel and every other operation.

The layers are built at a model's full size, but kernels are recorded and not run, and memory that nobody touches is
never filled. Counted is what starts on a device: Triton launches, and PyTorch operations that compute or copy. Views
and allocations start nothing.

    dsv4-triton bench launches [--model flash] [--family a2] [--tokens 16] [--context 32768] [--json FILE]
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.linear import LinearBase
from vllm.v1.attention.backend import CommonAttentionMetadata

from dsv4_triton.backend.caches import CacheLayer
from dsv4_triton.backend.op import OP_NAME, dsa_forward
from dsv4_triton.bench.registry.make import reserve
from dsv4_triton.bench.registry.models import MODELS
from dsv4_triton.bench.step import KINDS
from dsv4_triton.compiler.launches import Launch, recording
from dsv4_triton.console import print_line
from dsv4_triton.demo.checkpoint import DemoSettings, model_config
from dsv4_triton.device import FAMILIES, acting_as
from dsv4_triton.model.causal_lm import TritonDeepseekV4ForCausalLM

ROUTERS = ("hash", "top-k")
PARTS = ("mHC", "dense", "attention", "MoE")
"""`dense` are the matrix products of an attention layer, `attention` is what stands between them."""
_IDLE = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""PyTorch operations that start nothing on a device, besides the views."""
_PRODUCTS = {"mm", "addmm", "bmm", "_grouped_product_kernel"}
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True)
class Launched:
    """One launch: the part of the layer that makes it and the name of the kernel or operation."""

    part: str
    name: str


@dataclass(frozen=True)
class LayerLaunches:
    """What one layer launches, in order."""

    kind: str
    router: str
    launches: tuple[Launched, ...]

    def of(self, part: str) -> int:
        return sum(launched.part == part for launched in self.launches)

    @property
    def total(self) -> int:
        return len(self.launches)


class Log:
    """The launches of the running layer, in order: operations by `note`, kernels from the list of `recording`."""

    def __init__(self, recorded: list[Launch]) -> None:
        self._recorded = recorded
        self._launches: list[Launched] = []
        self._scope = "mHC"

    def note(self, name: str) -> None:
        self._drain()
        self._add(name)

    def take(self) -> tuple[Launched, ...]:
        """The launches since the last call."""
        self._drain()
        taken, self._launches = self._launches, []
        return tuple(taken)

    def watch(self, scope: str, module: torch.nn.Module) -> None:
        """What `module` launches belongs to `scope`."""
        module.register_forward_pre_hook(lambda *_: self._enter(scope))
        module.register_forward_hook(lambda *_: self._enter("mHC"))

    def _enter(self, scope: str) -> None:
        self._drain()
        self._scope = scope

    def _drain(self) -> None:
        for launch in self._recorded:
            self._add(launch.kernel.fn.__name__)
        self._recorded.clear()

    def _add(self, name: str) -> None:
        product = self._scope == "attention" and name in _PRODUCTS
        self._launches.append(Launched("dense" if product else self._scope, name))


class _Unwritten(TorchDispatchMode):
    """Tensors are born without memory: a layer of Pro has more weights than the machine that counts."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.empty.memory_format:
            return reserve(tuple(args[0]), (kwargs or {}).get("dtype") or torch.get_default_dtype())
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Notes every operation that starts work, also those inside the attention op."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name == OP_NAME:
            with self:
                return dsa_forward(*args, **(kwargs or {}))
        if torch._C.DispatchKey.CompositeImplicitAutograd in func.py_kernels or func._can_decompose():
            with self:
                return func.decompose(*args, **(kwargs or {}))
        if not func.is_view and name not in _IDLE:
            self._log.note(name)
        return func(*args, **(kwargs or {}))


def _vllm_config(settings: DemoSettings, max_tokens: int, options: dict[str, Any], folder: str) -> VllmConfig:
    from vllm.engine.arg_utils import EngineArgs

    Path(folder, "config.json").write_text(json.dumps(model_config(settings)))
    arguments = EngineArgs(
        model=folder, dtype=settings.dtype, skip_tokenizer_init=True, enforce_eager=True, max_num_seqs=max_tokens,
        max_model_len=settings.context, max_num_batched_tokens=max_tokens,
        additional_config={"dsv4_triton": options},
    )  # fmt: skip
    return arguments.create_engine_config()


@contextmanager
def _built(config: VllmConfig, dtype: torch.dtype, folder: str) -> Iterator[TritonDeepseekV4ForCausalLM]:
    """The model of `config` in a process group of one, with memory that was never written."""
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )

    usual = torch.get_default_dtype()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
        torch.set_default_dtype(dtype)
        try:
            with _Unwritten():
                model = TritonDeepseekV4ForCausalLM(vllm_config=config)
            for module in model.modules():
                if isinstance(module, LinearBase):  # vLLM chooses a CPU's product when it has loaded the weights
                    module.cpu_linear = torch.nn.functional.linear
            yield model
        finally:
            torch.set_default_dtype(usual)
            cleanup_dist_env_and_memory()


def _bind_caches(config: VllmConfig, tokens: int, context: int) -> dict[str, Any]:
    """Give every cache two blocks, and plan a decode step of `tokens` requests at `context`."""
    starts = torch.arange(tokens + 1, dtype=torch.int32)
    lengths = torch.full((tokens,), context, dtype=torch.int32)
    planned = {}
    for name, cache in config.compilation_config.static_forward_context.items():
        if isinstance(cache, CacheLayer):
            spec: Any = cache.spec
            bind: Any = cache.bind_kv_cache
            bind(torch.empty(2, cache.rows_per_block, spec.head_size, dtype=spec.dtype))
            blocks = -(-context // (cache.rows_per_block * cache.ratio))
            common = CommonAttentionMetadata(
                query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=tokens,
                num_actual_tokens=tokens, max_query_len=1, max_seq_len=context,
                block_table_tensor=torch.zeros(tokens, blocks, dtype=torch.int32),
                slot_mapping=torch.empty(0, dtype=torch.int64),
            )  # fmt: skip
            planned[name] = cache.planner.plan(common, cache.rows_per_block, cache.ratio, again=False)
    return planned


def layer_launches(
    *, model: str = "flash", family: str = "a2", tokens: int = 16, context: int = 32768, dtype: str = "bfloat16",
    max_tokens: int = 256,
) -> list[LayerLaunches]:  # fmt: skip
    """What each kind of layer launches in a decode step of `tokens` requests that are `context` long.

    `max_tokens` is the largest step the model is built for. Each layer follows another one, as inside the model.
    """
    os.environ.update(_ENVIRONMENT)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    s = MODELS[model].settings
    settings = DemoSettings(
        ratios=(0, *KINDS.values(), *KINDS.values()), hash_layers=1 + len(KINDS), mtp_layers=0, hidden=s.hidden,
        heads=s.heads, q_lora=s.q_lora, o_groups=s.o_groups, o_lora=s.o_lora, index_heads=s.index_heads,
        index_topk=s.index_topk, experts=s.experts, experts_per_token=s.experts_per_token,
        intermediate=s.moe_intermediate, swiglu_limit=s.swiglu_limit, context=-(-context // 256) * 256,
        dtype=dtype,  # type: ignore[arg-type]  # DemoSettings checks it
    )  # fmt: skip
    found = []
    with tempfile.TemporaryDirectory() as folder:
        config = _vllm_config(settings, max(tokens, max_tokens), {"device_family": family}, folder)
        activations = config.model_config.dtype
        with (
            _built(config, activations, folder) as built,
            acting_as(FAMILIES[family]),
            recording() as recorded,
            torch.no_grad(),
        ):
            metadata = _bind_caches(config, tokens, context)
            recorded.clear()
            log = Log(recorded)
            ids = torch.zeros(tokens, dtype=torch.int64)
            state = torch.zeros(tokens, 4, s.hidden, dtype=activations)
            with set_forward_context(metadata, config), Operations(log):
                kinds = [("", ""), *[(kind, router) for router in ROUTERS for kind in KINDS]]
                layers: Any = built.model.layers
                for layer, (kind, router) in zip(layers, kinds, strict=True):
                    log.watch("attention", layer.attn)
                    log.watch("MoE", layer.ffn)
                    state = layer(state, ids)
                    found.append(LayerLaunches(kind, router, log.take()))
    return found[1:]


def print_layers(layers: list[LayerLaunches], title: str, detail: bool, console: Console) -> None:
    """The launches of each layer by part; with `detail` also their names."""
    table = Table(title=title)
    for column in ("layer", "router", *PARTS, "all"):
        table.add_column(column, justify="right")
    for layer in layers:
        table.add_row(layer.kind, layer.router, *(str(layer.of(part)) for part in PARTS), str(layer.total))
    console.print(table)
    for layer in layers if detail else ():
        print_line(console, f"{layer.kind}, {layer.router}", "bold")
        for part in PARTS:
            names = Counter(launched.name for launched in layer.launches if launched.part == part)
            listed = ", ".join(name if count == 1 else f"{count} {name}" for name, count in names.items())
            print_line(console, f"  {part}: {listed}")


def as_dicts(layers: list[LayerLaunches]) -> list[dict[str, Any]]:
    """The layers as `--json` has them: the names of the launches by part."""
    return [
        {"kind": layer.kind, "router": layer.router, "all": layer.total,
         **{part: [x.name for x in layer.launches if x.part == part] for part in PARTS}}
        for layer in layers
    ]  # fmt: skip
