"""Compile at start-up what requests can ask for, so that none of them waits for a compiler.

What a step launches follows from three numbers: its tokens, its requests and vLLM's bound of the longest sequence.
Launch parameters are chosen by powers of two of these (`autotune.space`), so the powers of two up to the server's
limits reach every specialisation. For each such step one layer of every kind goes through its launches, which compile
and run nothing, and its linear layers multiply nothing; no cache and no buffer is written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4_triton.backend.compat import forward_context, metadata_builders
from dsv4_triton.backend.op import OP_NAME, dsa_forward
from dsv4_triton.compiler.launches import compiling
from dsv4_triton.config import HC_MULT
from dsv4_triton.model.layer import DecoderLayer, Pending

logger = logging.getLogger(f"vllm.{__name__}")
_SAY_SECONDS = 5.0
_LONG = 1 << 16
"""Beyond this context, dense compressed rows come in steps of so many tokens: 512 rows of a c128 layer."""


class _WithoutProducts(TorchDispatchMode):
    """Linear layers return memory without values: on a CPU their products would be nearly all of the warm-up's time."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        match op.name():
            case "aten::linear":
                x, weight = args[:2]
                return x.new_empty(*x.shape[:-1], len(weight))
            case "_C::onednn_mm":  # of vLLM's CPU build, into its first argument
                return None
            case name if name == f"vllm::{OP_NAME}":
                with self:  # which would otherwise end at the op
                    return dsa_forward(*args, **kwargs or {})
        return op(*args, **kwargs or {})


class StepShape(NamedTuple):
    """Tokens and requests of a step, and the bound of its longest sequence."""

    tokens: int
    requests: int
    context: int


def shapes(max_tokens: int, max_requests: int, max_context: int) -> Iterator[StepShape]:
    """Steps that reach every choice: decode, one request, and as many requests as there may be.

    The longest sequence holds at least its share of the step's tokens, of which there are more than half as many.
    """
    contexts = [*_powers(max_context), *range(2 * _LONG, max_context, _LONG)]
    for tokens in _powers(max_tokens):
        requests = sorted({1, min(tokens, max_requests)})
        for count in requests:
            for context in sorted(set(contexts)):
                if context * count > tokens // 2:
                    yield StepShape(tokens, count, context)


def layouts(max_tokens: int, max_requests: int) -> Iterator[StepShape]:
    """Steps that reach every choice of `step_layout`, which alone goes by the number of requests on every family."""
    for tokens in _powers(max_tokens):
        for count in _powers(min(tokens, max_requests)):
            yield StepShape(tokens, count, 1)


def _powers(limit: int) -> list[int]:
    """Powers of two below `limit`, and `limit`."""
    return [1 << i for i in range(limit.bit_length()) if 1 << i < limit] + [limit]


def warm_up(runner: Any) -> int:
    """Compile for all steps that the limits of vLLM's model runner let through; the number of specialisations."""
    scheduler, begin = runner.vllm_config.scheduler_config, time.monotonic()
    limits = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    wanted = list(shapes(*limits, runner.vllm_config.model_config.max_model_len))
    said = begin
    with torch.inference_mode(), compiling() as found:
        for shape in layouts(*limits):
            _metadata(runner, shape)
        for number, shape in enumerate(wanted):
            with _WithoutProducts():
                _step(runner, shape)
            if time.monotonic() - said > _SAY_SECONDS:
                said = time.monotonic()
                logger.info("warm-up: %d of %d steps, %d kernels", number, len(wanted), len(found))
    logger.info("warm-up: %d kernels ready in %.1f s", len(found), time.monotonic() - begin)
    return len(found)


def _step(runner: Any, shape: StepShape) -> None:
    """All launches of a step, of one layer of each kind."""
    metadata = _metadata(runner, shape)
    model = runner.model.model
    weight = model.hc_head.norm
    streams = torch.empty(shape.tokens, HC_MULT, len(weight), dtype=weight.dtype, device=weight.device)
    ids = torch.zeros(shape.tokens, dtype=runner.input_ids.gpu.dtype, device=weight.device)
    with forward_context(metadata, runner.vllm_config, shape.tokens):
        state: torch.Tensor | Pending = streams
        for layer in _kinds(runner):
            state = layer(state, ids)
        assert isinstance(state, Pending)
        model.hc_head(state.written())


def _kinds(runner: Any) -> list[DecoderLayer]:
    """One layer of every kind, the first layer first."""
    drafter = getattr(runner, "drafter", None)
    layers = [*runner.model.model.layers, *([drafter.model.model.layer] if drafter is not None else [])]
    kinds = {
        (layer.attn.ratio, layer.attn.indexer is None, layer.ffn.tid2eid is None): layer for layer in reversed(layers)
    }
    return sorted(kinds.values(), key=layers.index)


def _metadata(runner: Any, shape: StepShape) -> dict[str, Any]:
    """What the builders of all cache groups make of a step."""
    device = runner.device
    starts = torch.zeros(shape.requests + 1, dtype=torch.int32, device=device)
    lengths = torch.zeros(shape.requests, dtype=torch.int32, device=device)
    found: dict[str, Any] = {}
    for builder, layer_names, table in metadata_builders(runner, shape.requests):
        common = SimpleNamespace(
            query_start_loc=starts, seq_lens=lengths, block_table_tensor=table, num_actual_tokens=shape.tokens,
            max_seq_len=shape.context,
        )  # fmt: skip
        found |= dict.fromkeys(layer_names, builder.build(0, common))
    return found
