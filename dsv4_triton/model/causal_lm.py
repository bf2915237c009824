"""DeepSeek-V4 for vLLM: embedding, four streams, decoder layers, mHC head, logits."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.sequence import IntermediateTensors

from dsv4_triton.backend import ascend
from dsv4_triton.backend.metadata import StepPlanner
from dsv4_triton.backend.serving import Serving
from dsv4_triton.backend.streams import SideStream
from dsv4_triton.backend.workspace import Workspace, step_workspace
from dsv4_triton.config import HC_MULT
from dsv4_triton.model.attention import Ends, Shared
from dsv4_triton.model.layer import DecoderLayer, HcHead, Pending
from dsv4_triton.model.loader import DRAFT_PREFIX, Slot, into_layer, load_strict, prefixed
from dsv4_triton.model.rope import RopeTables
from dsv4_triton.model.warmup import warm_up

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's logger, so that its handlers print it


class DeepseekV4Model(nn.Module):
    """Token ids -> hidden states after the mHC head and the last norm.

    `streams` [max tokens, 4, D], where there is speculation, holds the last step's streams before the head.
    """

    streams: torch.Tensor | None

    def __init__(self, vllm_config: VllmConfig, serving: Serving, prefix: str) -> None:
        super().__init__()
        self.settings = settings = serving.model
        model_config = vllm_config.model_config
        tokens, device = vllm_config.scheduler_config.max_num_batched_tokens, vllm_config.device_config.device
        drafts = vllm_config.speculative_config is not None
        workspace = Workspace(
            step_workspace(
                serving,
                model_config.dtype,
                tokens=tokens,
                context=model_config.max_model_len,
                shards=get_tensor_model_parallel_world_size(),
                drafts=drafts,
            ),
            device,
        )
        self.workspace = workspace
        planner = StepPlanner(tokens, torch.device(device))
        selection = None
        if serving.choices.shared_indices:
            selection = torch.full((tokens, settings.index_topk), -1, dtype=torch.int32, device=device)
        self.ends = Ends()
        side = SideStream(device) if serving.choices.prologue_overlap else None
        shared = Shared(planner, workspace, RopeTables(model_config.max_model_len), self.ends, selection, side)
        self.embed_tokens: nn.Module = VocabParallelEmbedding(
            settings.vocab, settings.hidden, prefix=f"{prefix}.embed_tokens"
        )
        self.ends.embed_tokens = self.embed_tokens
        self.layers = nn.ModuleList(
            DecoderLayer(vllm_config, serving, index, shared, f"{prefix}.layers.{index}")
            for index in range(settings.layers)
        )
        self.hc_head = HcHead(settings, model_config.dtype, workspace)
        # What the MTP block reads of a step; it stands at one address, and only where there is such a block.
        streams = torch.empty(tokens, HC_MULT, settings.hidden, dtype=model_config.dtype) if drafts else None
        self.register_buffer("streams", streams, persistent=False)

    def forward(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        state: torch.Tensor | Pending = inputs_embeds[:, None].repeat(1, HC_MULT, 1)
        for layer in self.layers:
            state = layer(state, input_ids)
        assert isinstance(state, Pending)
        return self.hc_head(state.written(None if self.streams is None else self.streams[: len(inputs_embeds)]))

    def slots(self) -> dict[str, Slot]:
        s = self.settings
        slots = {
            "embed.weight": Slot((s.vocab, s.hidden), into_layer(self.embed_tokens)),
            **self.hc_head.slots("hc_head", "norm"),
        }
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            slots |= prefixed(f"layers.{index}", layer.slots())
        return slots


class TritonDeepseekV4ForCausalLM(nn.Module):
    """The model class vLLM loads for the architecture DeepseekV4ForCausalLM."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        ascend.begin()
        serving = Serving.of(vllm_config)
        self.settings = serving.model
        self._unused = tuple(f"layers.{index}.attn.indexer." for index in sorted(serving.choices.shared_indices))
        logger.info("DeepSeek-V4 in Triton: %s", serving.summary())
        drafting = vllm_config.speculative_config
        logger.info(
            "asynchronous scheduling %s, %d drafts a step",
            "on" if vllm_config.scheduler_config.async_scheduling else "off",
            drafting.num_speculative_tokens if drafting else 0,
        )
        self.model = DeepseekV4Model(vllm_config, serving, f"{prefix}.model" if prefix else "model")
        # The head is held in fp32 and fed fp32: logits are products and sums in fp32, whatever the model's dtype.
        self.lm_head = ParallelLMHead(
            self.settings.vocab, self.settings.hidden, params_dtype=torch.float32, prefix="lm_head"
        )
        self.model.ends.lm_head = self.lm_head
        self.logits_processor = LogitsProcessor(self.settings.vocab)
        self.logits_processor.head_dtype = torch.float32

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, D]. Positions come from the attention metadata, which every layer shares."""
        return self.model(input_ids, inputs_embeds)

    def get_mtp_target_hidden_states(self) -> torch.Tensor | None:
        """vLLM's question what its drafter reads: the last step's streams before the head, [max tokens, 4 D]."""
        return None if self.model.streams is None else self.model.streams.flatten(1)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states.float())

    def warm_up(self, runner: Any) -> None:
        """Compile what steps within the limits of `runner`, vLLM's model runner, can ask for (`warmup`)."""
        warm_up(runner)

    def slots(self) -> dict[str, Slot]:
        """Every tensor of the checkpoint by its official name, but those of the draft module and of the indexers of
        layers that share selections."""
        head = Slot((self.settings.vocab, self.settings.hidden), into_layer(self.lm_head))
        return {**self.model.slots(), "head.weight": head}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        load_strict(weights, self.slots(), skipped=(DRAFT_PREFIX, *self._unused))
        return {name for name, _ in self.named_parameters()}
