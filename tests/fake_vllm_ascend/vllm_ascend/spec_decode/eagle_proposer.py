"""vLLM's drafter in vllm-ascend's manner: all drafts of a step are planned first, and then run as one, or replayed."""

from copy import copy
from typing import Any

import torch
from torch.nn.functional import pad
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.forward_context import BatchDescriptor, get_forward_context, set_forward_context
from vllm.v1.spec_decode.eagle import EagleProposer

FURTHER: dict[str, Any] = {"common_ratio_to_sas_metadata": {}}
"""Builders of drafts get this, too."""


def resized(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` rows, zero where there are fewer: new memory then."""
    return pad(tensor, [0] * (2 * tensor.dim() - 1) + [count - len(tensor)]) if count > len(tensor) else tensor[:count]


class AscendEagleProposer(EagleProposer):
    def __init__(self, vllm_config: Any, device: torch.device, runner: Any) -> None:
        super().__init__(vllm_config, device, runner)
        self.runner = runner

    def _maybe_share_embeddings(self, target: Any) -> None:
        """Not for models with compressed caches."""

    def _maybe_share_lm_head(self, target: Any) -> None:
        for layer in self.model.model.layers.values():
            assert torch.equal(layer.shared_head.head.weight, target.lm_head.weight)
            layer.shared_head.head = target.lm_head
        self._runnable: Any = self._run_merged_draft
        compilation = self.vllm_config.compilation_config
        # Of no other mode of compilation, whether the model is compiled or not.
        self._graphs = compilation.mode == CompilationMode.VLLM_COMPILE
        if self._graphs and compilation.cudagraph_mode.has_full_cudagraphs():
            self._runnable = CUDAGraphWrapper(self._run_merged_draft, self.vllm_config, CUDAGraphMode.FULL)
        self._indices = torch.zeros(self.max_num_tokens, dtype=torch.int32, device=self.device)

    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        common_attn_metadata: Any,
        sampling_metadata: Any,
        num_rejected_tokens_gpu: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        self.num_speculative_tokens = num_speculative_tokens
        requests = common_attn_metadata.batch_size()
        if token_indices_to_sample is not None:  # a step that verified drafts
            common_attn_metadata.max_seq_len = 0
        tokens, indices, common = self.set_inputs_first_pass(
            target_token_ids,
            next_token_ids,
            target_positions,
            target_hidden_states,
            token_indices_to_sample,
            common_attn_metadata,
            num_rejected_tokens_gpu,
        )
        mode, batch = CUDAGraphMode.NONE, BatchDescriptor(tokens)
        if self._graphs:
            uniform = self.runner.batch[1].uniform
            mode, batch = self.runner.cudagraph_dispatcher.dispatch(tokens, uniform_decode=uniform)
        plans = self._plans(common, requests, indices, mode, batch)
        self._indices.zero_()
        self._indices[:requests] = indices
        return self._run(mode, batch, requests, plans)[:requests]

    def dummy_run(self, num_tokens: int, **_: Any) -> None:
        mode, batch = self.runner.batch if self._graphs else (CUDAGraphMode.NONE, None)
        plans = None
        count = max(num_tokens // (self.num_speculative_tokens + 1), 1)
        if mode == CUDAGraphMode.FULL:
            plans = self._dummy_plans(count)
        self._indices.zero_()
        self._run(mode, batch, min(count, self.runner.max_num_reqs), plans, num_tokens)

    def _run(self, mode: Any, batch: Any, requests: int, plans: Any, tokens: int | None = None) -> torch.Tensor:
        rows = batch.num_tokens if tokens is None else tokens
        first = None if plans is None else plans[0]
        with set_forward_context(
            first, self.vllm_config, num_tokens=rows, cudagraph_runtime_mode=mode, batch_descriptor=batch
        ):
            drafts = self._runnable(rows, requests, plans)
        if mode == CUDAGraphMode.FULL:
            self.draft_attn_groups[0].backend.get_impl_cls().update_graph_params(None, None, rows)
        return drafts

    def _run_merged_draft(self, rows: int, requests: int, plans: Any) -> torch.Tensor:
        """Drafts [requests, number]."""
        indices = self._indices[:requests]
        hidden = self._hidden(rows)[indices]
        positions = self.positions[indices]
        drafts = [self.model.compute_logits(hidden).argmax(-1)]
        for draft in range(1, self.num_speculative_tokens):
            positions += 1
            self.input_ids[:requests] = drafts[-1]
            self.positions[:requests] = torch.where(positions >= self.max_model_len, 0, positions)
            self.hidden_states[:requests] = hidden
            get_forward_context().attn_metadata = None if plans is None else plans[draft]
            hidden = self._hidden(rows)[:requests]
            drafts.append(self.model.compute_logits(hidden).argmax(-1))
        return torch.stack(drafts, 1)

    def _hidden(self, rows: int) -> torch.Tensor:
        return self.model(
            input_ids=self.input_ids[:rows], positions=self.positions[:rows], hidden_states=self.hidden_states[:rows]
        )

    def _plans(self, common: Any, requests: int, indices: torch.Tensor, mode: Any, batch: Any) -> list[dict[str, Any]]:
        """Lengths go on counting rejected drafts, unlike positions; after the first draft every token of the batch
        is a request where a graph is replayed."""
        own, graph, builder = copy(common), mode == CUDAGraphMode.FULL, self._builder()
        own.num_input_tokens = batch.num_tokens
        if graph:
            own.num_reqs = batch.num_reqs
            starts = torch.arange(batch.num_reqs + 1, dtype=torch.int32, device=self.device)
            own.query_start_loc = starts * (self.num_speculative_tokens + 1)
            own.seq_lens = resized(own.seq_lens, batch.num_reqs)
            own.block_table_tensor = resized(own.block_table_tensor, batch.num_reqs)
        plans = [builder.build(0, own, self.model, **FURTHER)]
        positions = self.positions[indices]
        for draft in range(1, self.num_speculative_tokens):
            own = copy(own)
            if draft == 1:
                own.num_reqs = batch.num_tokens if graph else requests
                own.query_start_loc = self.arange[: own.num_reqs + 1]
                own.block_table_tensor = resized(own.block_table_tensor, own.num_reqs).clone()
                own.seq_lens = resized(own.seq_lens, own.num_reqs)
                own.num_actual_tokens, own.max_query_len = requests, 1
            positions = positions + 1
            own.seq_lens, own.positions = own.seq_lens.clone(), self.runner.positions.clone()
            own.seq_lens[:requests] += 1
            own.seq_lens[:requests].masked_fill_(own.seq_lens[:requests] > self.max_model_len, 1)
            own.positions[:requests] = torch.where(positions >= self.max_model_len, 0, positions)
            plans.append(builder.build_for_drafting(own, draft, **FURTHER))
        return [dict.fromkeys(self._draft_attn_layer_names, plan) for plan in plans]

    def _dummy_plans(self, requests: int) -> list[dict[str, Any]]:
        """Of a capture, or of a step of no request: the block tables may still name the blocks of some."""
        from vllm_ascend.attention.utils import AscendCommonAttentionMetadata

        table = self.runner.input_batch.block_table[self.kv_cache_gid]
        tokens = requests * (self.num_speculative_tokens + 1)
        common = AscendCommonAttentionMetadata(
            query_start_loc=self.runner.query_start_loc.gpu[: requests + 1],
            query_start_loc_cpu=self.runner.query_start_loc.cpu[: requests + 1],
            seq_lens=self.runner.seq_lens[:requests],
            num_reqs=requests,
            num_actual_tokens=tokens,
            num_input_tokens=tokens,
            max_query_len=self.num_speculative_tokens + 1,
            max_seq_len=0,
            block_table_tensor=table.get_device_tensor(requests),
            slot_mapping=table.slot_mapping.gpu,
            positions=self.runner.positions,
        )
        builder = self._builder()
        plans = [builder.build_for_graph_capture(common, None, **FURTHER)]
        for draft in range(1, self.num_speculative_tokens):
            plans.append(builder.build_for_drafting(copy(common), draft, **FURTHER))
        return [dict.fromkeys(self._draft_attn_layer_names, plan) for plan in plans]

    def _builder(self) -> Any:
        return self.draft_attn_groups[0].get_metadata_builder()

    build_draft_attn_metadata = attn_update_stack_num_spec_norm = _plans
