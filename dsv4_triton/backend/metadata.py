"""What every attention layer needs to know of a step, computed once per step on the device.

The step-wide part (`StepLayout`) depends on the ragged batch alone; the part per cache (`CacheMetadata`) adds a block
table and slots. Builders of all groups share one `StepPlanner`, so each tensor is computed once, whichever groups and
layers use it, and stands at the same address in every step. Nothing is copied from the device to the host: the only
host number is vLLM's own upper bound of the sequence length.

That is also what captured graphs need. A captured decode step is launched as if its sequences were as long as they can
become, reads these tensors, and is replayed after a builder has written the next step into them; `docs/graphs.md`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata

from dsv4_triton.backend import ascend
from dsv4_triton.device import refuse_in_capture
from dsv4_triton.kernels.step_layout import step_layout
from dsv4_triton.kernels.token_slots import token_slots


@dataclass(frozen=True)
class StepLayout:
    """One step's tokens; all tensors [num_tokens] int32, with -1, -1, 0, 0 in padding rows.

    `max_seq_len` is an upper bound of the longest sequence after the step. What is launched follows from it and from
    the shapes, and from nothing else.
    """

    num_tokens: int
    max_seq_len: int
    positions: torch.Tensor
    token_req: torch.Tensor
    n_vis4: torch.Tensor
    n_vis128: torch.Tensor

    def visible(self, ratio: int) -> torch.Tensor:
        """Compressed entries each token sees."""
        return self.n_vis4 if ratio == 4 else self.n_vis128


@dataclass(frozen=True)
class CacheMetadata:
    """A step as one cache sees it: block table [B, M] int32 and the slot each token writes, -1 for none."""

    step: StepLayout
    block_table: torch.Tensor
    slots: torch.Tensor


class StepPlanner:
    """Buffers of the step-wide tensors and of the slots, and the memory of which are already computed."""

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        self._max_tokens = max_tokens
        self._device = device
        self._fields = torch.full((4, max_tokens), -1, dtype=torch.int32, device=device)
        self._slots: dict[tuple[int, int, int], torch.Tensor] = {}
        self._planned: set[tuple[int, int, int]] = set()
        self._step: StepLayout | None = None
        self._source: tuple[torch.Tensor, torch.Tensor] | None = None

    def plan(self, common: CommonAttentionMetadata, rows_per_block: int, ratio: int, *, again: bool) -> CacheMetadata:
        """Metadata of one cache; `again` recomputes the step-wide part although the batch looks like the last one."""
        step = self._layout(common, again)
        table = common.block_table_tensor
        key = (table.data_ptr(), rows_per_block, ratio)
        slots = self._slots_of(key)[: step.num_tokens]
        if key not in self._planned:
            token_slots(step.positions, step.token_req, table, rows_per_block=rows_per_block, ratio=ratio, out=slots)
            self._planned.add(key)
        return CacheMetadata(step, table, slots)

    def plan_idle(
        self, common: CommonAttentionMetadata, rows_per_block: int, ratio: int, max_seq_len: int
    ) -> CacheMetadata:
        """Metadata of one cache for a step of padding alone, in the same tensors: whatever vLLM's batch tensors and
        block tables hold from earlier steps, no cache is written, and nothing of it is read but its null block."""
        count, table = rows_of(common), common.block_table_tensor
        self._step = self._source = None
        self._planned.clear()
        self._fields[:2, :count].fill_(-1)
        self._fields[2:, :count].zero_()
        slots = self._slots_of((table.data_ptr(), rows_per_block, ratio))[:count].fill_(-1)
        return CacheMetadata(StepLayout(count, max_seq_len, *self._fields[:, :count]), table, slots)

    def _slots_of(self, key: tuple[int, int, int]) -> torch.Tensor:
        if key not in self._slots:
            refuse_in_capture(self._device, "slots that later steps write were to be allocated")
            self._slots[key] = torch.empty(self._max_tokens, dtype=torch.int32, device=self._device)
        return self._slots[key]

    def _layout(self, common: CommonAttentionMetadata, again: bool) -> StepLayout:
        """The step-wide tensors. A step is recognised by its batch tensors: vLLM makes new views of them every step
        and hands the same objects to all groups, and holding them here keeps their identities from being reused."""
        source = (common.query_start_loc, common.seq_lens)
        same = self._source is not None and all(new is old for new, old in zip(source, self._source, strict=True))
        count = rows_of(common)
        if self._step is None or again or not same or self._step.num_tokens != count:
            positions, token_req, n_vis4, n_vis128 = self._fields[:, :count]
            step_layout(
                common.query_start_loc,
                common.seq_lens,
                count,
                positions=positions,
                token_req=token_req,
                n_vis4=n_vis4,
                n_vis128=n_vis128,
            )
            self._step = StepLayout(count, common.max_seq_len, positions, token_req, n_vis4, n_vis128)
            self._source = source
            self._planned.clear()
        return self._step


def rows_of(common: CommonAttentionMetadata) -> int:
    """Tokens that the model is given in this step. vLLM includes padding in its count, vllm-ascend counts it apart."""
    # vLLM counts tokens without those of rejected drafts in numpy.
    return max(int(common.num_actual_tokens), int(getattr(common, "num_input_tokens", 0)))


class DraftPlans:
    """Plans of the MTP block's cache where vllm-ascend drafts, which plans all drafts of a step before the first runs.

    Each draft has tensors of its own, at the same address in every step: a graph holds all drafts, and the block table
    comes in new memory every time. Launches are those of the longest sequences, of which the block, a window, has one
    kind. `draft` counts from 0.
    """

    def __init__(self, vllm_config: Any, device: torch.device, rows_per_block: int, ratio: int) -> None:
        self._max_tokens: int = vllm_config.scheduler_config.max_num_batched_tokens
        self._max_requests: int = vllm_config.scheduler_config.max_num_seqs
        self._max_context: int = vllm_config.model_config.max_model_len
        self._device = device
        self._geometry = (rows_per_block, ratio)
        self._one_each = torch.arange(self._max_requests + 1, dtype=torch.int32, device=device)
        self._planners: dict[int, StepPlanner] = {}
        self._tables: dict[int, torch.Tensor] = {}

    def plan(self, common: CommonAttentionMetadata, draft: int) -> CacheMetadata:
        """Metadata of a draft. The first has the target's tokens, and its sequences, so that positions follow from
        these; the others have one token a request, at the positions that vllm-ascend gives.

        Its lengths are no source of them: they still count the drafts that were rejected. A position of 0 stands for
        one beyond the longest sequence there, since no later draft begins a sequence; it is padding here.
        """
        own = self._own(common, draft)
        if draft:
            requests = int(common.num_actual_tokens)
            positions = common.positions[:requests].to(torch.int32)
            own.seq_lens = torch.where(positions > 0, positions + 1, 0)
            own.query_start_loc = self._one_each[: requests + 1]
        return self._planner(draft).plan(own, *self._geometry, again=True)

    def plan_idle(self, common: CommonAttentionMetadata, draft: int) -> CacheMetadata:
        """The same for a step of padding alone."""
        return self._planner(draft).plan_idle(self._own(common, draft), *self._geometry, max_seq_len=self._max_context)

    def _planner(self, draft: int) -> StepPlanner:
        return self._planners.setdefault(draft, StepPlanner(self._max_tokens, self._device))

    def _own(self, common: CommonAttentionMetadata, draft: int) -> Any:
        """`common` with this draft's block table. Rows beyond the largest batch are padding of a graph's shape."""
        given = common.block_table_tensor[: self._max_requests]
        if draft not in self._tables:
            self._tables[draft] = given.new_zeros(self._max_requests, given.shape[1])
        own = copy(common)
        own.block_table_tensor = self._tables[draft][: len(given)].copy_(given)
        own.max_seq_len = self._max_context
        return own


_idle = False


@contextmanager
def idle_steps() -> Iterator[None]:
    """Every step that is planned meanwhile belongs to no request, whatever its batch looks like.

    Inside vllm-ascend a rank without requests, and the steps ahead of a capture, are planned as if sequences began in
    the blocks that the block tables still name; its own kernels are kept from writing there by slots of -1, which it
    fills in after the metadata was built.
    """
    global _idle
    before, _idle = _idle, True
    try:
        yield
    finally:
        _idle = before


class DsaMetadataBuilder(AttentionMetadataBuilder[CacheMetadata]):
    """vLLM's builder of one cache group."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        cache = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self._planner: StepPlanner = cache.planner
        self._rows_per_block: int = cache.rows_per_block
        self._ratio: int = cache.ratio
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._drafts: DraftPlans | None = None
        if ascend.active() and ascend.only_drafts(layer_names):
            self._drafts = DraftPlans(vllm_config, device, self._rows_per_block, self._ratio)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        **_: Any,
    ) -> CacheMetadata:
        """Further arguments are vllm-ascend's, for kernels of its own; so in the methods below."""
        if _idle:
            return self.build_for_cudagraph_capture(common_attn_metadata)
        if self._drafts is not None:
            return self._drafts.plan(common_attn_metadata, 0)
        return self._planner.plan(common_attn_metadata, self._rows_per_block, self._ratio, again=False)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> CacheMetadata:
        """A step of padding with the launches of the longest sequences: vLLM calls this for captures and for idle steps
        that replay a graph, which belong to no request."""
        if self._drafts is not None:
            return self._drafts.plan_idle(common_attn_metadata, 0)
        return self._planner.plan_idle(
            common_attn_metadata, self._rows_per_block, self._ratio, max_seq_len=self._max_model_len
        )

    def build_for_graph_capture(
        self, common_attn_metadata: CommonAttentionMetadata, attn_state: Any = None, **_: Any
    ) -> CacheMetadata:
        """The same for the first draft of a step, where vllm-ascend asks."""
        return self.build_for_cudagraph_capture(common_attn_metadata)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int, **_: Any
    ) -> CacheMetadata:
        """Drafting begins with the batch of the target's step and changes its tensors in place between its steps, or
        in vllm-ascend gives all its steps in advance."""
        if self._drafts is not None:
            plan = self._drafts.plan_idle if _idle else self._drafts.plan
            return plan(common_attn_metadata, draft_index)
        again = draft_index > 0
        return self._planner.plan(common_attn_metadata, self._rows_per_block, self._ratio, again=again)
