"""Attention modules: projections, norms, caches and the call of the custom op.

Projections are vLLM's linear layers. Tensor parallelism shards query heads and output groups; the key-value path, the
compressor and the indexer are replicated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)

from dsv4_triton.backend.caches import LayerCaches
from dsv4_triton.backend.geometry import overlap
from dsv4_triton.backend.metadata import StepPlanner
from dsv4_triton.backend.op import register_ops
from dsv4_triton.backend.serving import Serving
from dsv4_triton.backend.streams import SideStream
from dsv4_triton.backend.workspace import Workspace
from dsv4_triton.config import HEAD_DIM, INDEX_DIM, ModelSettings
from dsv4_triton.hadamard import sylvester
from dsv4_triton.kernels.o_proj import quantise_wo_a
from dsv4_triton.model.loader import Slot, Store, copy_into, into_layer, prefixed
from dsv4_triton.model.rope import RopeTables, half_layout


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter that is not trained: uninitialised, or zero for integers, which dummy loading leaves alone."""
    make = torch.empty if dtype.is_floating_point else torch.zeros
    return nn.Parameter(make(shape, dtype=dtype), requires_grad=False)


def permuted(store: Store, dim: int, axis: int = 0) -> Store:
    """`store` behind the permutation of heads of `dim` features along `axis` to half layout."""
    return lambda tensor: store(half_layout(tensor, dim, axis))


class Ends:
    """Embedding and head of a model, for its MTP block; there when the model is made."""

    embed_tokens: nn.Module
    lm_head: nn.Module


class Shared(NamedTuple):
    """What all layers of a model use together, those of the MTP block included.

    `selection` [max tokens, index_topk] int32, where c4 layers share selections, holds that of the running step.
    `side`, where prologues run on two streams, is the second one.
    """

    planner: StepPlanner
    workspace: Workspace
    tables: RopeTables
    ends: Ends
    selection: torch.Tensor | None = None
    side: SideStream | None = None


class Compressor(nn.Module):
    """Position terms and norm of a compressor with entries of `dim` features. Its two matrices, `sizes` rows together,
    belong to the layer's fp32 projection."""

    def __init__(self, dim: int, ratio: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._dim = dim
        self._width = overlap(ratio) * dim
        self.sizes = [self._width] * 2
        self.ape = parameter(ratio, self._width, dtype=torch.float32)
        self.norm = parameter(dim, dtype=dtype)

    def slots(self, hidden: int, store_kv: Store, store_gate: Store) -> dict[str, Slot]:
        matrix = (self._width, hidden)
        return {
            "wkv.weight": Slot(matrix, permuted(store_kv, self._dim)),
            "wgate.weight": Slot(matrix, permuted(store_gate, self._dim)),
            "ape": Slot(tuple(self.ape.shape), permuted(copy_into(self.ape), self._dim, axis=1)),
            "norm.weight": Slot((self._dim,), permuted(copy_into(self.norm), self._dim)),
        }


class Indexer(nn.Module):
    """The lightning indexer of a c4 layer. The weights of its heads come from the layer's fp32 projection."""

    hadamard: torch.Tensor

    def __init__(self, settings: ModelSettings, dtype: torch.dtype, prefix: str) -> None:
        super().__init__()
        self.heads = settings.index_heads
        self._factor = INDEX_DIM**-0.5 * self.heads**-0.5
        self.wq_b = ReplicatedLinear(
            settings.q_lora, self.heads * INDEX_DIM, bias=False, return_bias=False, prefix=f"{prefix}.wq_b"
        )
        self.compressor = Compressor(INDEX_DIM, 4, dtype)
        # Rotates features in half layout, queries and keys alike: products are those of the interleaved order.
        self.register_buffer("hadamard", sylvester(INDEX_DIM, dtype=dtype), persistent=False)

    def queries(self, latent: torch.Tensor) -> torch.Tensor:
        return self.wq_b(latent)

    def slots(self, hidden: int, store_kv: Store, store_gate: Store, store_weights: Store) -> dict[str, Slot]:
        return {
            "wq_b.weight": Slot(
                (self.heads * INDEX_DIM, self.wq_b.input_size), permuted(into_layer(self.wq_b), INDEX_DIM)
            ),
            "weights_proj.weight": Slot(
                (self.heads, hidden), lambda tensor: store_weights(tensor.float() * self._factor)
            ),
            **prefixed("compressor", self.compressor.slots(hidden, store_kv, store_gate)),
        }


class Attention(nn.Module):
    """Attention of layer `index`; the forward pass is `torch.ops.vllm.triton_dsa_forward`."""

    cos_sin: torch.Tensor

    def __init__(
        self,
        vllm_config: VllmConfig,
        serving: Serving,
        index: int,
        shared: Shared,
        prefix: str,
    ) -> None:
        super().__init__()
        register_ops()
        layers = vllm_config.compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"attention layer {prefix!r} is registered twice")
        layers[prefix] = self
        dtype = vllm_config.model_config.dtype
        settings, choices = serving.model, serving.choices
        shards = get_tensor_model_parallel_world_size()
        if settings.o_groups % shards:
            raise ValueError(f"tensor parallel size {shards} does not divide o_groups {settings.o_groups}")
        self.prefix = prefix
        self.settings = settings
        self.ratio = ratio = settings.ratio(index)
        self.heads = settings.heads // shards
        self.eps = settings.rms_eps
        self.scale = HEAD_DIM**-0.5
        self.fake_quant = choices.kv_fake_quant
        self.shared = shared
        self.workspace = shared.workspace
        self.index_topk = settings.index_topk
        self.selection = shared.selection
        self.side = shared.side
        selects = index not in choices.shared_indices
        assert selects or shared.selection is not None
        self.caches = LayerCaches(vllm_config, prefix, ratio, serving.layout, shared.planner, selects=selects)

        self.wq_a_wkv = MergedColumnParallelLinear(
            settings.hidden,
            [settings.q_lora, HEAD_DIM],
            bias=False,
            return_bias=False,
            disable_tp=True,
            prefix=f"{prefix}.wq_a_wkv",
        )
        self.q_norm = parameter(settings.q_lora, dtype=torch.float32)
        self.wq_b = ColumnParallelLinear(
            settings.q_lora, settings.heads * HEAD_DIM, bias=False, return_bias=False, prefix=f"{prefix}.wq_b"
        )
        self.kv_norm = parameter(HEAD_DIM, dtype=dtype)
        self.sink = parameter(self.heads, dtype=torch.float32)
        group_width = settings.heads // settings.o_groups * HEAD_DIM
        groups, mx = settings.o_groups // shards, choices.o_proj_format == "mxfp8"
        self.dtype = dtype
        self.wo_a = parameter(groups, settings.o_lora, group_width, dtype=torch.float8_e4m3fn if mx else dtype)
        self.wo_scale = parameter(groups, settings.o_lora, dtype=torch.float32) if mx else None
        self.wo_b = RowParallelLinear(
            settings.o_groups * settings.o_lora,
            settings.hidden,
            bias=False,
            return_bias=False,
            prefix=f"{prefix}.wo_b",
        )
        self.compressor = Compressor(HEAD_DIM, ratio, dtype) if ratio else None
        self.indexer = Indexer(settings, dtype, f"{prefix}.indexer") if ratio == 4 and selects else None
        self.wide_rows = self._wide_rows(f"{prefix}.wide_rows")
        base, yarn = (settings.compress_rope_theta, settings.yarn) if ratio else (settings.rope_theta, None)
        self.register_buffer("cos_sin", shared.tables.table(base, yarn), persistent=False)

    def _wide_rows(self, prefix: str) -> MergedColumnParallelLinear | None:
        """The fp32 projections of a token in one product: [u | g] of the main compressor, [u | g] of the indexer's,
        and the weights of the indexer's heads."""
        if self.compressor is None:
            return None
        sizes = list(self.compressor.sizes)
        if self.indexer is not None:
            sizes += [*self.indexer.compressor.sizes, self.indexer.heads]
        return MergedColumnParallelLinear(
            self.settings.hidden,
            sizes,
            bias=False,
            params_dtype=torch.float32,
            return_bias=False,
            disable_tp=True,
            prefix=prefix,
        )

    def forward(self, hidden: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        """[T, D] of `hidden` [T, D]; `wide` is `hidden` in fp32."""
        groups, rank, _ = self.wo_a.shape
        z = torch.empty(len(hidden), groups * rank, dtype=hidden.dtype, device=hidden.device)
        torch.ops.vllm.triton_dsa_forward(hidden, wide, z, self.prefix)
        return self.wo_b(z)

    def latents(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latent, kv = self.wq_a_wkv(hidden).split((self.settings.q_lora, HEAD_DIM), dim=-1)
        return latent, kv

    def compressor_rows(self, wide: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert self.wide_rows is not None and self.compressor is not None
        sizes = [sum(self.compressor.sizes)]
        if self.indexer is not None:
            sizes += [sum(self.indexer.compressor.sizes), self.indexer.heads]
        return self.wide_rows(wide).split(sizes, dim=-1)

    def queries(self, latent: torch.Tensor) -> torch.Tensor:
        return self.wq_b(latent)

    def slots(self) -> dict[str, Slot]:
        s = self.settings
        group_width = self.wo_a.shape[2]
        slots = {
            "wq_a.weight": Slot((s.q_lora, s.hidden), into_layer(self.wq_a_wkv, 0)),
            "q_norm.weight": Slot((s.q_lora,), copy_into(self.q_norm)),
            "wq_b.weight": Slot((s.heads * HEAD_DIM, s.q_lora), permuted(into_layer(self.wq_b), HEAD_DIM)),
            "wkv.weight": Slot((HEAD_DIM, s.hidden), permuted(into_layer(self.wq_a_wkv, 1), HEAD_DIM)),
            "kv_norm.weight": Slot((HEAD_DIM,), permuted(copy_into(self.kv_norm), HEAD_DIM)),
            "attn_sink": Slot((s.heads,), _rank_rows(copy_into(self.sink), self.heads)),
            "wo_a.weight": Slot((s.o_groups * s.o_lora, group_width), permuted(self._store_wo_a, HEAD_DIM, axis=1)),
            "wo_b.weight": Slot((s.hidden, s.o_groups * s.o_lora), into_layer(self.wo_b)),
        }
        if self.wide_rows is not None and self.compressor is not None:
            matrices = [into_layer(self.wide_rows, shard) for shard in range(len(self.wide_rows.output_sizes))]
            slots |= prefixed("compressor", self.compressor.slots(s.hidden, *matrices[:2]))
            if self.indexer is not None:
                slots |= prefixed("indexer", self.indexer.slots(s.hidden, *matrices[2:]))
        return slots

    def _store_wo_a(self, tensor: torch.Tensor) -> None:
        groups = tensor.view(self.settings.o_groups, *self.wo_a.shape[1:])
        store = copy_into(self.wo_a) if self.wo_scale is None else self._store_mx
        _rank_rows(store, self.wo_a.shape[0])(groups)

    def _store_mx(self, groups: torch.Tensor) -> None:
        """Quantise the weights, on the device that they are for and from the dtype that they would have there."""
        elements, scale = quantise_wo_a(groups.to(self.wo_a.device, self.dtype).contiguous())
        self.wo_a.data.copy_(elements)
        assert self.wo_scale is not None
        self.wo_scale.data.copy_(scale)


def _rank_rows(store: Store, count: int) -> Store:
    """`store` of this rank's `count` rows."""
    start = get_tensor_model_parallel_rank() * count
    return lambda tensor: store(tensor[start : start + count])
