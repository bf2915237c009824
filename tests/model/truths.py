"""Requests computed alone, of which no choice is so close that rounding could change it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from dsv4_triton.backend import attention
from dsv4_triton.demo.checkpoint import DemoSettings
from dsv4_triton.model import moe
from tests.model import engine

TINY = DemoSettings(
    ratios=(4, 128),
    hash_layers=1,
    hidden=64,
    heads=2,
    q_lora=32,
    o_groups=1,
    o_lora=32,
    experts=8,
    experts_per_token=2,
    intermediate=32,
    context=2048,
    dtype="float32",
)
"""Every kind of cache, router and expert in two layers."""
TOKENS = 24
"""The longest answer."""
CHUNK = 128
"""Tokens of a step at most; solo runs take a prompt in one step."""
CLOSE = 2e-5
"""No choice of a truth is closer than this, as a share of the largest score: choices of entries and experts, and the
token. Rounding, which depends on the number of rows of a step, moves scores by a few 1e-6; where it could change a
choice, no tolerance would tell rounding from an error."""


class Truth(NamedTuple):
    """A prompt, its tokens' log-probabilities [n - 1], its greedy continuation and the log-probabilities of that."""

    prompt: list[int]
    prompt_scores: torch.Tensor
    answer: list[int]
    scores: torch.Tensor


@contextlib.contextmanager
def choices() -> Iterator[list[float]]:
    """How far apart what is chosen and what is not are, at least, in each call of indexer and router."""
    gaps: list[float] = []
    topk, router = attention.indexer_topk, moe.moe_router

    def gap(scores: torch.Tensor, k: int) -> None:
        best = scores.sort(dim=-1, descending=True).values
        largest = scores.abs().masked_fill(scores.isinf(), 0).amax(dim=-1)
        gaps.append(float(((best[:, k - 1] - best[:, k]) / largest).min()))

    def chosen_entries(scores: torch.Tensor, visible: torch.Tensor, k: int, **named: Any) -> torch.Tensor:
        many = visible > k
        if many.any():
            hidden = torch.arange(scores.shape[1], device=scores.device) >= visible[:, None]
            gap(scores.masked_fill(hidden, float("-inf"))[many], k)
        return topk(scores, visible, k, **named)

    def chosen_experts(logits: torch.Tensor, k: int, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if named["bias"] is not None:
            gap(torch.nn.functional.softplus(logits).sqrt() + named["bias"], k)
        return router(logits, k, **named)

    attention.indexer_topk, moe.moe_router = chosen_entries, chosen_experts
    try:
        yield gaps
    finally:
        attention.indexer_topk, moe.moe_router = topk, router


def alone(llm: Any, prompt: list[int], tokens: int = TOKENS) -> tuple[Truth, float, int]:
    """The truth of a request, by how much each token that was chosen is better than the next, at least, and how many
    cache blocks the request held at most."""
    from vllm import SamplingParams

    engine.forget(llm)
    free = engine.block_pool(llm).get_num_free_blocks
    total, least = free(), free()
    parameters = SamplingParams(temperature=0, max_tokens=tokens, logprobs=2, prompt_logprobs=0, ignore_eos=True)
    llm.llm_engine.add_request("alone", {"prompt_token_ids": prompt}, parameters)
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            answer = output.outputs[0]
        least = min(least, free())
    best = [sorted((entry.logprob for entry in place.values()), reverse=True) for place in answer.logprobs]
    scores = chosen(answer.token_ids, answer.logprobs)
    truth = Truth(prompt, chosen(prompt[1:], output.prompt_logprobs[1:]), list(answer.token_ids), scores)
    return truth, min(first - second for first, second, *_ in best), total - least


def clear_of_ties(llm: Any, start: list[int], tail: int, tokens: int = TOKENS) -> Truth:
    """The truth of `start` and `tail` more tokens, the first ones by seed that lead to no choice that is close."""
    for seed in itertools.count():
        with choices() as gaps:
            truth, margin, _ = alone(llm, start + engine.prompt(tail, seed), tokens)
        if min([margin, *gaps]) > CLOSE:
            return truth
        assert tail and seed < 50, "no tokens without a close choice"
    raise AssertionError


class Truths:
    """Requests of all kinds of lengths, several with a shared beginning, each computed alone by a plain engine.

    `most_blocks` is how many cache blocks any of them holds at once in steps of CHUNK tokens.
    """

    def __init__(self, llm: Any) -> None:
        shared = clear_of_ties(llm, [], 600).prompt
        starts = [0] * 8 + [256, 257, 300, 512, 520, 600]
        tails = [1, 3, 5, 60, 127, 128, 129, 260, 1, 0, 90, 1, 40, 0]
        self.all = [clear_of_ties(llm, shared[:start], tail) for start, tail in zip(starts, tails, strict=True)]
        with engine.chunks_of(llm, CHUNK):
            self.most_blocks = alone(llm, max((truth.prompt for truth in self.all), key=len))[2]


def chosen(tokens: Sequence[int], places: Sequence[Any]) -> torch.Tensor:
    """The log-probabilities of tokens, of what vLLM says of each place."""
    return torch.tensor([place[token].logprob for token, place in zip(tokens, places, strict=True)])
