"""Mixture of experts: fp32 router (top-k or by token id), routed and shared experts in Triton.

vLLM's own fused MoE layer does not compute this model's maths (square root of softplus, choice by token id, clamped
SwiGLU with the routing weight before the second matrix), so the experts are this project's grouped product. The shared
expert is of the routed ones' size: it stands behind them, and every token chooses it with weight 1.
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
from vllm.model_executor.layers.linear import ReplicatedLinear

from dsv4_triton.backend.workspace import Workspace
from dsv4_triton.config import ModelSettings
from dsv4_triton.kernels.grouped_matmul_swiglu import gate_up_view
from dsv4_triton.kernels.moe_experts import moe_experts
from dsv4_triton.kernels.moe_router import moe_router
from dsv4_triton.model.attention import parameter
from dsv4_triton.model.loader import CheckpointError, Slot, Store, copy_into, into_layer


class MoE(nn.Module):
    """The feed-forward part of a layer; `hashed` layers choose experts by token id."""

    def __init__(
        self, settings: ModelSettings, dtype: torch.dtype, hashed: bool, workspace: Workspace, prefix: str
    ) -> None:
        super().__init__()
        self.settings = settings
        self.workspace = workspace
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
        # The last expert is the shared one.
        self.w13 = parameter(settings.experts + 1, 2 * local, settings.hidden, dtype=dtype)
        self.w2 = parameter(settings.experts + 1, settings.hidden, local, dtype=dtype)

    def forward(self, hidden: torch.Tensor, wide: torch.Tensor, input_ids: torch.Tensor | None) -> torch.Tensor:
        """[T, D] of `hidden` [T, D]; `wide` is `hidden` in fp32."""
        s = self.settings
        if self.tid2eid is not None and input_ids is None:
            raise ValueError("layers that route by token id need input_ids; embeddings alone cannot be served")
        weights, ids = moe_router(
            self.gate(wide),
            s.experts_per_token,
            routed_scaling_factor=s.routed_scaling,
            bias=self.bias,
            input_ids=input_ids if self.tid2eid is not None else None,
            tid2eid=self.tid2eid,
            shared_expert=True,
        )
        output = torch.empty_like(hidden)
        moe_experts(
            hidden,
            self.w13,
            self.w2,
            weights,
            ids,
            swiglu_limit=s.swiglu_limit,
            out=output,
            workspace=self.workspace.memory,
        )
        return tensor_model_parallel_all_reduce(output) if self.shards > 1 else output

    def slots(self) -> dict[str, Slot]:
        s = self.settings
        inner, hidden = s.moe_intermediate, s.hidden
        slots = {
            "gate.weight": Slot((s.experts, hidden), into_layer(self.gate)),
        }
        if self.bias is not None:
            slots["gate.bias"] = Slot((s.experts,), copy_into(self.bias))
        if self.tid2eid is not None:
            slots["gate.tid2eid"] = Slot(tuple(self.tid2eid.shape), self._store_table, integer=True)
        experts = [*(f"experts.{expert}" for expert in range(s.experts)), "shared_experts"]
        for expert, prefix in enumerate(experts):
            for name, shape in (("w1", (inner, hidden)), ("w3", (inner, hidden)), ("w2", (hidden, inner))):
                slots[f"{prefix}.{name}.weight"] = Slot(shape, self._expert_store(expert, name))
        return slots

    def _expert_store(self, expert: int, name: str) -> Store:
        local = self.w2.shape[2]
        start = get_tensor_model_parallel_rank() * local

        def store(tensor: torch.Tensor) -> None:
            if name == "w2":
                self.w2.data[expert].copy_(tensor[:, start : start + local])
            else:
                runs = gate_up_view(self.w13.data)[expert, :, 0 if name == "w1" else 1]
                runs.copy_(tensor[start : start + local].view(runs.shape))

        return store

    def _store_table(self, tensor: torch.Tensor) -> None:
        assert self.tid2eid is not None
        low, high = int(tensor.min()), int(tensor.max())
        if low < 0 or high >= self.settings.experts:
            raise CheckpointError(
                f"gate.tid2eid holds experts {low} to {high}, the model has experts 0 to {self.settings.experts - 1}"
            )
        self.tid2eid.data.copy_(tensor)
