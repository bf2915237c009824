"""The MTP block: one decoder layer that drafts the token after next from the target's streams and the next token.

At position p, of the target's streams S_p [4, D] before its head and the token t that follows:

    e = RMS(embed(t); enorm)          g_j = RMS(S_p[j]; hnorm)          j = 0..3, one weight for all streams
    X_j = e_proj e + h_proj g_j       each product rounded to the model's dtype, then their sum
    X = decoder layer (window-only, not hashed) at position p
    logits of the token after t = head(RMS(hc_head(X; mtp.0.hc_head_*); mtp.0.norm))

Embedding and head are the target's. The block's own X is the S of the next draft, so one block drafts any number.
Source: the `MTPBlock` of the official DeepSeek inference code, which, unlike vLLM's, keeps the embedding at position 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.sequence import IntermediateTensors

from dsv4_triton.backend.serving import Serving
from dsv4_triton.config import HC_MULT
from dsv4_triton.model.attention import Attention, Shared
from dsv4_triton.model.layer import DecoderLayer, HcHead
from dsv4_triton.model.loader import DRAFT_PREFIX, Slot, copy_into, into_layer, load_strict, prefixed

BLOCK_PREFIX = f"{DRAFT_PREFIX}0"
"""The block's tensors in a checkpoint."""
COPIES = (f"{BLOCK_PREFIX}.emb.", f"{BLOCK_PREFIX}.head.")
"""Copies of the target's embedding and head that official checkpoints carry under the block's name."""


class MTPBlock(nn.Module):
    """Streams [T, 4, D] of the target, or of the block itself, and the next tokens -> streams."""

    def __init__(self, vllm_config: VllmConfig, serving: Serving, shared: Shared, prefix: str) -> None:
        super().__init__()
        settings, dtype = serving.model, vllm_config.model_config.dtype
        self.ends = shared.ends
        self.hidden = hidden = settings.hidden
        # Weights in fp32: a norm then has one rounding, at its end.
        self.enorm = RMSNorm(hidden, settings.rms_eps, dtype=torch.float32)
        self.hnorm = RMSNorm(hidden, settings.rms_eps, dtype=torch.float32)
        self.e_proj = self._projection(f"{prefix}.e_proj")
        self.h_proj = self._projection(f"{prefix}.h_proj")
        self.layer = DecoderLayer(vllm_config, serving, settings.layers, shared, f"{prefix}.layers.{settings.layers}")
        self.hc_head = HcHead(settings, dtype, shared.workspace)

    def _projection(self, prefix: str) -> ReplicatedLinear:
        return ReplicatedLinear(self.hidden, self.hidden, bias=False, return_bias=False, prefix=prefix)

    @property
    def layers(self) -> dict[str, Any]:
        """Where vllm-ascend looks for heads that it could replace by the target's: it is the target's."""
        return {"0": SimpleNamespace(shared_head=SimpleNamespace(head=self.ends.lm_head))}

    def forward(self, embedded: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        """[T, 4, D] of `embedded` [T, D] and `streams` [T, 4, D]."""
        e = self.e_proj(self.enorm(embedded))
        h = self.h_proj(self.hnorm(streams.reshape(-1, self.hidden)))
        return self.layer(h.view(streams.shape) + e[:, None], None).written()

    def slots(self) -> dict[str, Slot]:
        square, vector = (self.hidden, self.hidden), (self.hidden,)
        return {
            "enorm.weight": Slot(vector, copy_into(self.enorm.weight)),
            "hnorm.weight": Slot(vector, copy_into(self.hnorm.weight)),
            "e_proj.weight": Slot(square, into_layer(self.e_proj)),
            "h_proj.weight": Slot(square, into_layer(self.h_proj)),
            **self.layer.slots(),
            **self.hc_head.slots("hc_head", "norm"),
        }


class DeepSeekV4MTPModel(nn.Module):
    """The draft model class vLLM loads for `--speculative-config '{"method": "mtp", ...}'`.

    Embedding and head are taken from the target; vLLM sets them here, too, and vllm-ascend does not.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        serving = Serving.of(vllm_config)
        self.model = MTPBlock(
            vllm_config, serving, _shared_with_target(vllm_config), f"{prefix}.mtp" if prefix else "mtp"
        )
        self.logits_processor = LogitsProcessor(serving.model.vocab)
        self.logits_processor.head_dtype = torch.float32

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.ends.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The block's streams [T, 4 D] of the target's `hidden_states` [T, 4 D] and the tokens that follow them.
        Positions come from the attention metadata."""
        embedded = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        return self.model(embedded, hidden_states.view(len(embedded), HC_MULT, -1)).flatten(1)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Logits [T, V] of what `forward` returned."""
        hidden = self.model.hc_head(hidden_states.view(len(hidden_states), HC_MULT, -1))
        return self.logits_processor(self.model.ends.lm_head, hidden.float())

    def slots(self) -> dict[str, Slot]:
        """Every tensor of the block by its official name."""
        return prefixed(BLOCK_PREFIX, self.model.slots())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        of_drafts = ((name, tensor) for name, tensor in weights if name.startswith(DRAFT_PREFIX))
        load_strict(of_drafts, self.slots(), skipped=COPIES)
        return {name for name, _ in self.named_parameters()}


def _shared_with_target(vllm_config: VllmConfig) -> Shared:
    """What the target's layers share; vLLM builds the target first and has its attention layers in the config."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return next(layer.shared for layer in layers if isinstance(layer, Attention))
