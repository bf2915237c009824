"""A prompt far longer than a step: its tokens find what stands chunks before them (fp32).

The model has two c4 layers and nothing else that reaches further than the window of 128 tokens, and few of its entries
are selected. Where rounding decides between entries, which with 6,000 tokens happens, those of transformers are taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4_triton.backend import attention
from dsv4_triton.demo.checkpoint import write_checkpoint
from tests.model import engine
from tests.model.conftest import Oracle, teacher_forced
from tests.model.test_parity import FP32_TOLERANCE
from tests.model.truths import CLOSE, TINY

LENGTH, CHUNK, NEEDLE = 6042, 2048, 3000
PROMPT = engine.prompt(LENGTH)
ENTRY = NEEDLE // 4
TOPK = 16
SETTINGS = replace(TINY, ratios=(4, 4), hash_layers=2, mtp_layers=0, index_topk=TOPK, context=8192)
"""Experts are chosen by token id, never by a score."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("c4") / "model"
    write_checkpoint(folder, SETTINGS)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-probabilities of the prompt's own tokens, and of each layer the entries that its tokens select, in order."""
    logprobs, selections = Oracle(folder).with_selections(PROMPT)
    return teacher_forced(PROMPT, logprobs), [in_order(chosen) for chosen in selections]


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    with engine.engine(folder, max_model_len=LENGTH + 8, max_num_batched_tokens=LENGTH + 8) as llm:
        yield llm


def in_order(entries: torch.Tensor) -> torch.Tensor:
    """Rows of entries, ascending and -1 for none after the last."""
    none = SETTINGS.context
    ordered = entries.int().masked_fill(entries < 0, none).sort(dim=1).values
    return ordered.masked_fill(ordered == none, -1)


@contextlib.contextmanager
def selecting(llm: Any, given: list[torch.Tensor]) -> Iterator[list[int]]:
    """Tokens attend to the entries that are `given` for each layer. The layers must have selected the same, but for
    entries whose scores differ by rounding; yields in how many rows some did."""
    usual_select, usual_topk = attention._select, attention.indexer_topk
    layers = [layer.attn for layer in engine.model(llm).model.layers]
    edges: list[torch.Tensor] = []
    close: list[int] = []

    def topk(scores: torch.Tensor, visible: torch.Tensor, k: int, **named: Any) -> torch.Tensor:
        hidden = torch.arange(scores.shape[1]) >= visible[:, None]
        best = scores.masked_fill(hidden, float("-inf")).topk(k + 1).values
        largest = scores.masked_fill(hidden, 0).abs().amax(dim=1)
        edges.append((best[:, k - 1] - best[:, k]) / largest)
        return usual_topk(scores, visible, k, **named)

    def select(layer: Any, *arguments: Any) -> torch.Tensor:
        edges.clear()
        found = usual_select(layer, *arguments)
        step = arguments[-1][layer.caches.window.prefix].step
        wanted = given[layers.index(layer)][step.positions]
        other = (in_order(found) != wanted).any(dim=1)
        assert (torch.cat(edges)[other] < CLOSE).all(), step.positions[other]
        close.append(int(other.sum()))
        return wanted

    attention._select, attention.indexer_topk = select, topk  # type: ignore[assignment]
    try:
        yield close
    finally:
        attention._select, attention.indexer_topk = usual_select, usual_topk


@pytest.mark.parametrize("chunk", [CHUNK, LENGTH])
def test_a_chunked_prompt_selects_among_all_entries_before_it(
    llm: Any, expected: tuple[torch.Tensor, list[torch.Tensor]], chunk: int
) -> None:
    """As transformers does, which computes the prompt at once. Tokens of the last chunk select the needle's entry."""
    scores, selections = expected
    for chosen in selections:
        assert (chosen[2 * CHUNK :] == ENTRY).any()
    engine.forget(llm)
    with selecting(llm, selections) as close, engine.chunks_of(llm, chunk):
        (found,) = engine.score(llm, [PROMPT])
    assert engine.worst([found], [scores]) <= FP32_TOLERANCE
    assert sum(close) < LENGTH // 100


def test_the_last_chunk_depends_on_the_needle(llm: Any, expected: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    """Another token there changes what tokens two chunks later predict, which no window reaches."""
    other = [*PROMPT[:NEEDLE], PROMPT[NEEDLE] - 1, *PROMPT[NEEDLE + 1 :]]
    engine.forget(llm)
    with engine.chunks_of(llm, CHUNK):
        (found,) = engine.score(llm, [other])
    assert (
        engine.worst([found[: NEEDLE - 1]], [expected[0][: NEEDLE - 1]])
        < 1e-2
        < engine.worst([found[2 * CHUNK :]], [expected[0][2 * CHUNK :]])
    )
