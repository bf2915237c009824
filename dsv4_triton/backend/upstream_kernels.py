"""What vLLM 0.27.1 does with Triton kernels of its own, in torch operations without a copy to the host.

Names and arguments are those of vLLM's kernels (v1/worker/block_table.py, v1/spec_decode/utils.py,
v1/sample/rejection_sampler.py), after the launch's grid; entries that a kernel does not write stay as they are. Some of
those kernels do not compile with triton-ascend 3.2, and all are tuned for GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

Grid = tuple[int, ...]


def compute_slot_mapping_kernel(
    grid: Grid,
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    block_size: int,
    slot_mapping: torch.Tensor,
    KV_CACHE_BLOCK_SIZE: int,
    BLOCKS_PER_KV_BLOCK: int,
    TOTAL_CP_WORLD_SIZE: int,
    TOTAL_CP_RANK: int,
    CP_KV_CACHE_INTERLEAVE_SIZE: int,
    PAD_ID: int,
    BLOCK_SIZE: int,
) -> None:
    """`slot_mapping` [max_num_tokens] int64 of tokens at `positions` [num_tokens] int64, of the requests that
    `query_start_loc` [requests + 1] delimits; the rest is `PAD_ID`. Without context parallelism."""
    assert TOTAL_CP_WORLD_SIZE == 1, "context parallelism is refused at start-up"
    requests = grid[0] - 1
    slot_mapping[num_tokens:max_num_tokens] = PAD_ID
    tokens = torch.arange(num_tokens, dtype=query_start_loc.dtype, device=positions.device)
    ends = query_start_loc[1 : requests + 1]
    request = torch.searchsorted(ends, tokens, right=True).clamp_(max=requests - 1)
    within = (tokens >= query_start_loc[0]) & (tokens < ends[-1])
    block = torch.where(within, positions[:num_tokens] // block_size, 0)
    slots = block_table[request, block].to(torch.int64) * block_size + positions[:num_tokens] % block_size
    slot_mapping[:num_tokens] = torch.where(within, slots, slot_mapping[:num_tokens])


def eagle_step_slot_mapping_metadata_kernel(
    grid: Grid,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    seq_lens: torch.Tensor,
    out_clamped_positions: torch.Tensor,
    out_slot_mapping: torch.Tensor,
    block_size: int,
    max_model_len: int,
    n_blocks_per_req: int,
    PAD_ID: int,
    batch_size: int,
) -> None:
    """Positions [B], lengths and slots of the next drafted token; at the end of the context position 0, length 1 and no
    slot. Slots of padding up to the grid are `PAD_ID`."""
    moved = positions[:batch_size] + 1
    over = moved >= max_model_len
    moved = torch.where(over, 0, moved)
    block = (moved // block_size).clamp_(max=n_blocks_per_req - 1)
    slots = block_table[:batch_size].gather(1, block.to(torch.int64)[:, None])[:, 0] * block_size + moved % block_size
    out_slot_mapping[:batch_size] = torch.where(over, PAD_ID, slots)
    out_slot_mapping[batch_size : grid[0]] = PAD_ID
    out_clamped_positions[:batch_size] = moved
    lengths = torch.where(over, 1, seq_lens[:batch_size] + 1).clamp_(max=max_model_len)
    seq_lens[:batch_size] = lengths


def eagle_prepare_inputs_padded_kernel(
    grid: Grid,
    cu_num_draft_tokens: torch.Tensor,
    valid_sampled_tokens_count: torch.Tensor,
    query_start_loc_gpu: torch.Tensor,
    token_indices_to_sample: torch.Tensor,
    num_rejected_tokens_gpu: torch.Tensor,
    num_reqs: int,
) -> None:
    """How many drafts of each request [num_reqs] were rejected, and the index of its last token that counts."""
    drafts = _counts(cu_num_draft_tokens[:num_reqs])
    rejected = torch.where(drafts > 0, drafts + 1 - valid_sampled_tokens_count[:num_reqs], 0)
    num_rejected_tokens_gpu[:num_reqs] = rejected
    token_indices_to_sample[:num_reqs] = query_start_loc_gpu[1 : num_reqs + 1] - 1 - rejected


def eagle_prepare_next_token_padded_kernel(
    grid: Grid,
    sampled_token_ids: torch.Tensor,
    discard_request_mask: torch.Tensor,
    backup_next_token_ids: torch.Tensor,
    next_token_ids: torch.Tensor,
    valid_sampled_tokens_count: torch.Tensor,
    vocab_size: int,
    num_sampled_tokens_per_req: int,
    num_reqs: int,
    stride_sampled_token_ids: int,
    BLOCK_SIZE_TOKENS: int,
) -> None:
    """Of the sampled tokens [num_reqs, n], -1 where a draft was rejected: how many count, and the last of them; the
    backup where there is none or the request is discarded."""
    sampled = sampled_token_ids[:num_reqs, :num_sampled_tokens_per_req]
    valid = (sampled != -1) & (sampled < vocab_size) & ~discard_request_mask[:num_reqs, None]
    place = torch.arange(num_sampled_tokens_per_req, device=sampled.device)
    last = torch.where(valid, place, -1).amax(1)
    token = sampled.gather(1, last.clamp(min=0)[:, None])[:, 0]
    next_token_ids[:num_reqs] = torch.where(last >= 0, token, backup_next_token_ids[:num_reqs])
    valid_sampled_tokens_count[:num_reqs] = valid.sum(1)


def rejection_greedy_sample_kernel(
    grid: Grid,
    output_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_argmax: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    is_greedy: torch.Tensor | None,
    max_spec_len: int,
    uniform_probs: torch.Tensor | None,
    synthetic_conditional_rates: torch.Tensor | None,
    SYNTHETIC_MODE: bool,
) -> None:
    """Into `output_token_ids` [B, max_spec_len + 1] of greedy requests: the target's tokens up to the first that is not
    the draft, and the bonus token where all are."""
    assert not SYNTHETIC_MODE, "synthetic acceptance is refused at start-up"
    accepted = draft_token_ids == target_argmax
    asked = torch.ones_like(bonus_token_ids, dtype=torch.bool) if is_greedy is None else is_greedy
    _write(output_token_ids, cu_num_draft_tokens, accepted, target_argmax, bonus_token_ids, asked)


def rejection_random_sample_kernel(
    grid: Grid,
    output_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    recovered_token_ids: torch.Tensor,
    uniform_probs: torch.Tensor,
    is_greedy: torch.Tensor,
    max_spec_len: int,
    vocab_size: int,
    synthetic_conditional_rates: torch.Tensor | None,
    NO_DRAFT_PROBS: bool,
    SYNTHETIC_MODE: bool,
) -> None:
    """Into `output_token_ids` [B, max_spec_len + 1] of other requests: drafts up to the first that is rejected, there
    the recovered token, and the bonus token where all are accepted."""
    assert not SYNTHETIC_MODE, "synthetic acceptance is refused at start-up"
    draft = draft_token_ids.clamp(min=0).to(torch.int64)[:, None]
    target = target_probs.gather(1, draft)[:, 0]
    drafted = torch.ones_like(target) if draft_probs is None else draft_probs.gather(1, draft)[:, 0]
    accepted = (draft_token_ids >= 0) & (drafted > 0) & (target / drafted >= uniform_probs)
    tokens = torch.where(accepted, draft_token_ids, recovered_token_ids)
    _write(output_token_ids, cu_num_draft_tokens, accepted, tokens, bonus_token_ids, ~is_greedy)


def sample_recovered_tokens_kernel(
    grid: Grid,
    output_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    inv_q: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    NO_DRAFT_PROBS: bool,
    USE_FP64_GUMBEL: bool,
) -> None:
    """`output_token_ids` [T]: a token drawn from what the target's distribution [T, V] has over the draft's, with the
    request's inverse exponential variates `inv_q` [B, V]."""
    tokens, vocabulary = len(draft_token_ids), torch.arange(vocab_size, device=target_probs.device)
    if draft_probs is None:
        rest = target_probs.masked_fill(vocabulary == draft_token_ids[:, None], 0)
    else:
        rest = (target_probs - draft_probs).clamp_(min=0)
    counts = _counts(cu_num_draft_tokens)
    output_token_ids.copy_((rest * inv_q.repeat_interleave(counts, dim=0, output_size=tokens)).argmax(1))


def _counts(cumulative: torch.Tensor) -> torch.Tensor:
    return torch.diff(cumulative, prepend=cumulative.new_zeros(1))


def _write(
    output: torch.Tensor,
    cumulative: torch.Tensor,
    accepted: torch.Tensor,
    tokens: torch.Tensor,
    bonus: torch.Tensor,
    asked: torch.Tensor,
) -> None:
    """Of each request that is asked for: its `tokens` up to the first that is not accepted, with it; or all and the
    bonus token."""
    batch, width = output.shape
    counts = _counts(cumulative)
    place = torch.arange(width, device=output.device)
    inside = place < counts[:, None]
    if len(tokens):
        token = ((cumulative - counts)[:, None] + place).clamp_(max=len(tokens) - 1)
        taken, written = accepted[token] & inside, tokens[token]
    else:
        taken, written = inside, output
    run = taken.to(torch.int32).cumprod(1).sum(1)  # accepted drafts before the first rejected one
    keep = inside & (place <= run[:, None]) & asked.view(batch, 1)
    result = torch.where(keep, written.to(output.dtype), output)
    ends = (place == counts[:, None]) & (run == counts)[:, None] & asked.view(batch, 1)
    output.copy_(torch.where(ends, bonus.view(batch, 1).to(output.dtype), result))


class PageZeroer:
    """vLLM's KVBlockZeroer: zeroes the rows of new blocks in the caches of full attention."""

    def __init__(
        self,
        device: torch.device,
        attn_groups_iter: Iterable[Any],
        kernel_block_sizes: list[int],
        cache_dtype: str,
        static_forward_context: dict[str, Any],
        runner_only_attn_layers: set[str] | None = None,
    ) -> None:
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        self._device = device
        caches: dict[int, torch.Tensor] = {}
        for group in attn_groups_iter:
            if not isinstance(group.kv_cache_spec, FullAttentionSpec):
                continue
            for name in group.layer_names:
                cache = static_forward_context[name].kv_cache
                if name not in (runner_only_attn_layers or ()) and isinstance(cache, torch.Tensor):
                    caches.setdefault(cache.data_ptr(), cache)
        self._caches = list(caches.values())

    def zero_block_ids(self, block_ids: list[int]) -> None:
        """Zero what each cache keeps in these blocks; the first axis of a cache is its blocks."""
        if not block_ids or not self._caches:
            return
        staged = torch.tensor(block_ids, dtype=torch.int64, pin_memory=self._device.type != "cpu")
        ids = staged.to(self._device, non_blocking=True)
        for cache in self._caches:
            cache.index_fill_(0, ids, 0)
