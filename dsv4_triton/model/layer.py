"""One decoder layer: attention and mixture of experts, each between an mHC collapse and an mHC expansion."""

from __future__ import annotations

import torch
from torch import nn
from vllm.config import VllmConfig

from dsv4_triton.backend.metadata import StepPlanner
from dsv4_triton.backend.serving import Serving
from dsv4_triton.config import HC_MULT
from dsv4_triton.kernels.hc_post import hc_post
from dsv4_triton.kernels.hc_pre import hc_pre, split_fn
from dsv4_triton.model.attention import Attention, parameter
from dsv4_triton.model.loader import Slot, copy_into, prefixed
from dsv4_triton.model.moe import MoE
from dsv4_triton.model.rope import RopeTables


class HcParameters(nn.Module):
    """mHC parameters of `rows` mixes over four streams (fp32; the matrix as parts in the activations' dtype) and the
    weight of the norm that follows the collapse."""

    def __init__(self, hidden: int, rows: int, scales: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._shape = (rows, HC_MULT * hidden)
        self.fn_parts = parameter(1 if dtype == torch.float32 else 2, *self._shape, dtype=dtype)
        self.base = parameter(rows, dtype=torch.float32)
        self.scale = parameter(scales, dtype=torch.float32)
        self.norm = parameter(hidden, dtype=dtype)

    def slots(self, name: str, norm_name: str) -> dict[str, Slot]:
        """Slots of `<name>_fn`, `_base` and `_scale` and of the norm's weight."""
        store_parts = copy_into(self.fn_parts)
        return {
            f"{name}_fn": Slot(self._shape, lambda tensor: store_parts(split_fn(tensor.float(), self._dtype))),
            f"{name}_base": Slot(tuple(self.base.shape), copy_into(self.base)),
            f"{name}_scale": Slot(tuple(self.scale.shape), copy_into(self.scale)),
            f"{norm_name}.weight": Slot(tuple(self.norm.shape), copy_into(self.norm)),
        }


class DecoderLayer(nn.Module):
    """Streams [T, 4, D] -> streams; there is no other residual than the mHC expansion."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        serving: Serving,
        index: int,
        planner: StepPlanner,
        tables: RopeTables,
        prefix: str,
    ) -> None:
        super().__init__()
        dtype = vllm_config.model_config.dtype
        self.settings = settings = serving.model
        self.attn = Attention(vllm_config, serving, settings.ratio(index), planner, tables, f"{prefix}.attn")
        self.ffn = MoE(settings, dtype, settings.is_hashed(index), f"{prefix}.ffn")
        rows = (2 + HC_MULT) * HC_MULT
        self.hc_attn = HcParameters(settings.hidden, rows, 3, dtype)
        self.hc_ffn = HcParameters(settings.hidden, rows, 3, dtype)

    def forward(self, streams: torch.Tensor, input_ids: torch.Tensor | None) -> torch.Tensor:
        hidden, post, comb = self._collapse(streams, self.hc_attn)
        streams = hc_post(self.attn(hidden), streams, post, comb)
        hidden, post, comb = self._collapse(streams, self.hc_ffn)
        return hc_post(self.ffn(hidden, input_ids), streams, post, comb)

    def _collapse(self, streams: torch.Tensor, hc: HcParameters) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return hc_pre(
            streams,
            hc.fn_parts,
            hc.scale,
            hc.base,
            norm_eps=self.settings.rms_eps,
            hc_eps=self.settings.hc_eps,
            sinkhorn_iters=self.settings.sinkhorn_iters,
            norm_weight=hc.norm,
        )

    def slots(self) -> dict[str, Slot]:
        return {
            **self.hc_attn.slots("hc_attn", "attn_norm"),
            **self.hc_ffn.slots("hc_ffn", "ffn_norm"),
            **prefixed("attn", self.attn.slots()),
            **prefixed("ffn", self.ffn.slots()),
        }
