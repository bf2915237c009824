"""NaN and infinity in one request's activations become no index and reach no other request (fp32)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4_triton.backend import attention
from dsv4_triton.model import moe
from tests.model import engine
from tests.model.speculation import edited_copy, speculation
from tests.model.test_schedules import TOLERANCE
from tests.model.truths import TINY, Truth, clear_of_ties

BAD = {510: float("nan"), 511: float("inf"), 509: float("-inf")}
"""Token ids whose embeddings hold this in one place, or in all; no prompt of `engine.prompt` has them."""
TOKENS = 8
OPTIONS: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "num_gpu_blocks_override": 700,
    "enable_prefix_caching": True,
}
Engines = Callable[[int], Any]


def spoil(tensors: dict[str, torch.Tensor], everywhere: bool) -> None:
    for token, value in BAD.items():
        tensors["embed.weight"][token, slice(None) if everywhere else 7] = value


@pytest.fixture(scope="module")
def llm(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """The engine with this many drafts a step; one place of an embedding is bad, with drafts all of them."""
    started: dict[int, Any] = {}
    with ExitStack() as stack:

        def get(drafts: int) -> Any:
            if drafts not in started:
                folder = tmp_path_factory.mktemp("bad") / "model"
                edited_copy(tiny, folder, partial(spoil, everywhere=bool(drafts)))
                started[drafts] = stack.enter_context(engine.engine(folder, **OPTIONS, **speculation(drafts)))
            return started[drafts]

        yield get


@pytest.fixture(scope="module")
def clean(llm: Engines) -> list[Truth]:
    """The first two share 300 tokens, of which other requests can have 256 from the prefix cache."""
    shared = clear_of_ties(llm(0), [], 330, TOKENS).prompt[:300]
    return [
        clear_of_ties(llm(0), start, tail, TOKENS) for start, tail in ((shared, 5), (shared, 40), ([], 3), ([], 129))
    ]


@contextlib.contextmanager
def watched() -> Iterator[list[int]]:
    """What indexer and router choose is an entry that the token sees, or -1, and an expert; yields how many tokens had
    a score that is no number."""
    strange: list[int] = []
    topk, router = attention.indexer_topk, moe.moe_router

    def chosen_entries(scores: torch.Tensor, visible: torch.Tensor, k: int, **named: Any) -> torch.Tensor:
        result = topk(scores, visible, k, **named)
        assert ((result >= -1) & (result < visible[:, None].clamp_min(0))).all()
        return result

    def chosen_experts(logits: torch.Tensor, k: int, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = router(logits, k, **named)
        assert ((ids >= 0) & (ids <= TINY.experts)).all()
        strange.append(int((~logits.isfinite()).any(dim=1).sum()))
        return weights, ids

    attention.indexer_topk, moe.moe_router = chosen_entries, chosen_experts
    try:
        yield strange
    finally:
        attention.indexer_topk, moe.moe_router = topk, router


def check(found: list[tuple[list[int], torch.Tensor, int]], expected: list[Truth]) -> None:
    assert [tokens for tokens, *_ in found] == [truth.answer for truth in expected]
    assert engine.worst([scores for _, scores, _ in found], [truth.scores for truth in expected]) <= TOLERANCE


def spoiled(prompt: list[int], at: int, token: int) -> list[int]:
    return [*prompt[:at], token, *prompt[at + 1 :]]


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("token", BAD)
def test_others_answer_as_if_alone(llm: Engines, clean: list[Truth], drafts: int, token: int) -> None:
    """Bad tokens after pages that are shared, in the first and the last place, beside requests without any, in chunks.
    Then requests on the blocks that the bad ones gave back, which nothing has overwritten."""
    prompts = [truth.prompt for truth in clean]
    bad = [spoiled(prompts[0], at, token) for at in (0, 260, 304)] + [[token], [token] * 150]
    mixed = [prompts[0], bad[0], prompts[1], bad[1], bad[2], prompts[2], bad[3], bad[4], prompts[3]]
    free = engine.block_pool(llm(drafts)).get_num_free_blocks()
    engine.forget(llm(drafts))
    with watched() as strange, engine.chunks_of(llm(drafts), 150):
        engine.generate(llm(drafts), prompts[:1], 1)
        found = generate(llm(drafts), mixed)
        check([found[place] for place in (0, 2, 5, 8)], clean)
        assert sum(strange) > 300
        assert all(0 <= token < TINY.vocab for tokens, *_ in found for token in tokens)
        check(generate(llm(drafts), prompts), clean)
    assert engine.block_pool(llm(drafts)).get_num_free_blocks() == free


def generate(llm: Any, prompts: list[list[int]]) -> list[tuple[list[int], torch.Tensor, int]]:
    return engine.generate(llm, prompts, TOKENS)
