"""Mixture of experts: fp32 router (top-k or by token id), routed experts in Triton, one shared expert.

vLLM's own fused MoE layer does not compute this model's maths (square root of softplus, choice by token id, clamped
SwiGLU with the routing weight before the second matrix), so the experts are this project's grouped product.
Tensor parallelism shards the intermediate size.
"""

from __future__ import annotations

import torch
from torch import nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, ReplicatedLinear, RowParallelLinear

from dsv4_triton.config import ModelSettings
from dsv4_triton.kernels.moe_experts import moe_experts
from dsv4_triton.kernels.moe_router import moe_router
from dsv4_triton.kernels.muls_add import muls_add
from dsv4_triton.kernels.swiglu import swiglu
from dsv4_triton.model.attention import parameter
from dsv4_triton.model.loader import CheckpointError, Slot, Store, copy_into, into_layer


class MoE(nn.Module):
    """The feed-forward part of a layer; `hashed` layers choose experts by token id."""

    def __init__(self, settings: ModelSettings, dtype: torch.dtype, hashed: bool, prefix: str) -> None:
        super().__init__()
        self.settings = settings
        self.shards = get_tensor_model_parallel_world_size()
        inner = settings.moe_intermediate
        if inner % self.shards:
            raise ValueError(f"tensor parallel size {self.shards} does not divide moe_intermediate_size {inner}")
        local = inner // self.shards
        self.gate = ReplicatedLinear(
            settings.hidden,
            settings.experts,
            bias=False,
            params_dtype=torch.float32,
            return_bias=False,
            prefix=f"{prefix}.gate",
        )
        self.bias = None if hashed else parameter(settings.experts, dtype=torch.float32)
        self.tid2eid = parameter(settings.vocab, settings.experts_per_token, dtype=torch.int32) if hashed else None
        self.w13 = parameter(settings.experts, 2 * local, settings.hidden, dtype=dtype)
        self.w2 = parameter(settings.experts, settings.hidden, local, dtype=dtype)
        self.shared_w13 = MergedColumnParallelLinear(
            settings.hidden, [inner, inner], bias=False, return_bias=False, prefix=f"{prefix}.shared_w13"
        )
        self.shared_w2 = RowParallelLinear(
            inner,
            settings.hidden,
            bias=False,
            return_bias=False,
            reduce_results=False,
            prefix=f"{prefix}.shared_w2",
        )

    def forward(self, hidden: torch.Tensor, input_ids: torch.Tensor | None) -> torch.Tensor:
        s = self.settings
        if self.tid2eid is not None and input_ids is None:
            raise ValueError("layers that route by token id need input_ids; embeddings alone cannot be served")
        weights, ids = moe_router(
            self.gate(hidden.float()),
            s.experts_per_token,
            routed_scaling_factor=s.routed_scaling,
            bias=self.bias,
            input_ids=input_ids if self.tid2eid is not None else None,
            tid2eid=self.tid2eid,
        )
        routed = moe_experts(hidden, self.w13, self.w2, weights, ids, swiglu_limit=s.swiglu_limit)
        shared = self.shared_w2(swiglu(self.shared_w13(hidden), limit=s.swiglu_limit))
        total = muls_add(routed, shared, 1.0)
        return tensor_model_parallel_all_reduce(total) if self.shards > 1 else total

    def slots(self) -> dict[str, Slot]:
        s = self.settings
        inner, hidden = s.moe_intermediate, s.hidden
        slots = {
            "gate.weight": Slot((s.experts, hidden), into_layer(self.gate)),
            "shared_experts.w1.weight": Slot((inner, hidden), into_layer(self.shared_w13, 0)),
            "shared_experts.w3.weight": Slot((inner, hidden), into_layer(self.shared_w13, 1)),
            "shared_experts.w2.weight": Slot((hidden, inner), into_layer(self.shared_w2)),
        }
        if self.bias is not None:
            slots["gate.bias"] = Slot((s.experts,), copy_into(self.bias))
        if self.tid2eid is not None:
            slots["gate.tid2eid"] = Slot(tuple(self.tid2eid.shape), self._store_table, integer=True)
        for expert in range(s.experts):
            for name, shape in (("w1", (inner, hidden)), ("w3", (inner, hidden)), ("w2", (hidden, inner))):
                slots[f"experts.{expert}.{name}.weight"] = Slot(shape, self._expert_store(expert, name))
        return slots

    def _expert_store(self, expert: int, name: str) -> Store:
        local = self.w2.shape[2]
        start = get_tensor_model_parallel_rank() * local

        def store(tensor: torch.Tensor) -> None:
            if name == "w2":
                self.w2.data[expert].copy_(tensor[:, start : start + local])
            else:
                row = 0 if name == "w1" else local
                self.w13.data[expert, row : row + local].copy_(tensor[start : start + local])

        return store

    def _store_table(self, tensor: torch.Tensor) -> None:
        assert self.tid2eid is not None
        low, high = int(tensor.min()), int(tensor.max())
        if low < 0 or high >= self.settings.experts:
            raise CheckpointError(
                f"gate.tid2eid holds experts {low} to {high}, the model has experts 0 to {self.settings.experts - 1}"
            )
        self.tid2eid.data.copy_(tensor)
