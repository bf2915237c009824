"""One decoder layer: attention and mixture of experts, each between an mHC collapse and an mHC expansion."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.config import VllmConfig

from dsv4_triton.backend.serving import Serving
from dsv4_triton.backend.workspace import Workspace
from dsv4_triton.config import HC_MULT, ModelSettings
from dsv4_triton.kernels.hc_head import hc_head
from dsv4_triton.kernels.hc_post import hc_post
from dsv4_triton.kernels.hc_post_pre import hc_post_pre
from dsv4_triton.kernels.hc_pre import hc_pre, split_fn
from dsv4_triton.model.attention import Attention, Shared, parameter
from dsv4_triton.model.loader import Slot, copy_into, prefixed
from dsv4_triton.model.moe import MoE


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


class HcHead(HcParameters):
    """The collapse of the streams after the last layer, and the norm behind it."""

    def __init__(self, settings: ModelSettings, dtype: torch.dtype, workspace: Workspace) -> None:
        super().__init__(settings.hidden, HC_MULT, 1, dtype)
        self.settings = settings
        self.workspace = workspace

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """[T, D] of `streams` [T, 4, D]."""
        return hc_head(
            streams,
            self.fn_parts,
            self.scale,
            self.base,
            norm_eps=self.settings.rms_eps,
            hc_eps=self.settings.hc_eps,
            norm_weight=self.norm,
            workspace=self.workspace.memory,
        )


class Pending(NamedTuple):
    """A sub-layer's output [T, D] that is still to be written into the streams [T, 4, D], and how: `hc_post`.

    The next sub-layer does it together with its own collapse of the streams.
    """

    streams: torch.Tensor
    output: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor

    def written(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """The streams with the output in them; `out` [T, 4, D] takes them."""
        return hc_post(self.output, self.streams, self.post, self.comb, out=out)


class Collapse(NamedTuple):
    """The input of a sub-layer, [T, D] in the model's dtype and in fp32, and what its output's write-back needs."""

    hidden: torch.Tensor
    wide: torch.Tensor
    streams: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor

    def with_output(self, output: torch.Tensor) -> Pending:
        return Pending(self.streams, output, self.post, self.comb)


class DecoderLayer(nn.Module):
    """Streams [T, 4, D], the last layer's output pending, -> the same; there is no other residual than the mHC
    expansion."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        serving: Serving,
        index: int,
        shared: Shared,
        prefix: str,
    ) -> None:
        super().__init__()
        dtype = vllm_config.model_config.dtype
        self.settings = settings = serving.model
        self.workspace = shared.workspace
        self.attn = Attention(vllm_config, serving, index, shared, f"{prefix}.attn")
        self.ffn = MoE(settings, dtype, settings.is_hashed(index), shared.workspace, f"{prefix}.ffn")
        rows = (2 + HC_MULT) * HC_MULT
        self.hc_attn = HcParameters(settings.hidden, rows, 3, dtype)
        self.hc_ffn = HcParameters(settings.hidden, rows, 3, dtype)

    def forward(self, state: torch.Tensor | Pending, input_ids: torch.Tensor | None) -> Pending:
        """`state`: the streams before the first layer, later what the last layer returned."""
        collapsed = self._collapse(state, self.hc_attn)
        state = collapsed.with_output(self.attn(collapsed.hidden, collapsed.wide))
        collapsed = self._collapse(state, self.hc_ffn)
        return collapsed.with_output(self.ffn(collapsed.hidden, collapsed.wide, input_ids))

    def _collapse(self, state: torch.Tensor | Pending, hc: HcParameters) -> Collapse:
        streams = state.streams if isinstance(state, Pending) else state
        tokens, _, width = streams.shape
        exact = streams.dtype == torch.float32
        wide = None if exact else torch.empty(tokens, width, dtype=torch.float32, device=streams.device)
        parameters = (hc.fn_parts, hc.scale, hc.base)
        options: dict[str, Any] = {
            "norm_eps": self.settings.rms_eps,
            "hc_eps": self.settings.hc_eps,
            "sinkhorn_iters": self.settings.sinkhorn_iters,
            "norm_weight": hc.norm,
            "wide": wide,
            "workspace": self.workspace.memory,
        }
        if isinstance(state, Pending):
            streams, hidden, post, comb = hc_post_pre(
                state.output, state.streams, state.post, state.comb, *parameters, **options
            )
        else:
            hidden, post, comb = hc_pre(streams, *parameters, **options)
        return Collapse(hidden, hidden if wide is None else wide, streams, post, comb)

    def slots(self) -> dict[str, Slot]:
        return {
            **self.hc_attn.slots("hc_attn", "attn_norm"),
            **self.hc_ffn.slots("hc_ffn", "ffn_norm"),
            **prefixed("attn", self.attn.slots()),
            **prefixed("ffn", self.ffn.slots()),
        }
