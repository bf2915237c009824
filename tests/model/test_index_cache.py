"""IndexCache: shared c4 layers attend to what the nearest full layer before them selected in the same step (fp32).

The selections' buffer is full of garbage before each step, and no garbage may reach the attention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4_triton.backend import attention
from dsv4_triton.demo.checkpoint import DemoSettings, write_checkpoint
from tests.model import engine
from tests.model.conftest import Oracle, teacher_forced
from tests.model.test_parity import FP32_TOLERANCE

SETTINGS = DemoSettings(ratios=(4, 0, 4, 128, 4, 4, 4), experts=8, intermediate=64, dtype="float32")
FREQ = {"freq": 2}
LETTERS = "FFSFS"
"""What a frequency of two comes to with five c4 layers."""
LENGTHS = (1, 5, 129, 131, 140, 300, 700)
"""Up to 131 tokens nothing is selected: there are 32 entries at most."""
POISON = 2**31 - 1


class SharingOracle(Oracle):
    """transformers' model, the indexers of whose shared layers return what the last full layer's did."""

    def __init__(self, checkpoint: Path, letters: str) -> None:
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Indexer

        super().__init__(checkpoint)
        indexers = [module for module in self.model.modules() if isinstance(module, DeepseekV4Indexer)]
        for module, letter in zip(indexers, letters, strict=True):
            module.forward = self._shared if letter == "S" else self._kept(module.forward)

    def _shared(self, *_: Any, **__: Any) -> torch.Tensor:
        return self._last

    def _kept(self, usual: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def forward(*arguments: Any, **named: Any) -> torch.Tensor:
            self._last = usual(*arguments, **named)
            return self._last

        return forward


def sharing(option: dict[str, Any]) -> dict[str, Any]:
    return {"additional_config": {"dsv4_triton": {"index_cache": option}}}


@contextlib.contextmanager
def poisoned_selection(llm: Any) -> Iterator[list[torch.Tensor]]:
    """Fill the buffer before each step; yields what attention is given to attend to."""
    model, given = engine.model(llm), []
    usual, attend = model.forward, attention.sparse_attention

    def forward(*arguments: Any, **named: Any) -> Any:
        model.model.layers[0].attn.selection.fill_(POISON)
        return usual(*arguments, **named)

    def sparse_attention(*arguments: Any, **named: Any) -> torch.Tensor:
        indices = named.get("indices")
        if indices is not None:
            assert (indices < POISON).all()
            given.append(indices)
        return attend(*arguments, **named)

    model.forward, attention.sparse_attention = forward, sparse_attention
    try:
        yield given
    finally:
        del model.forward
        attention.sparse_attention = attend


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("c4") / "model"
    write_checkpoint(path, SETTINGS)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    with engine.engine(folder, **sharing(FREQ)) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(folder: Path) -> SharingOracle:
    return SharingOracle(folder, LETTERS)


def test_logprobs(llm: Any, expected: SharingOracle, folder: Path) -> None:
    """And that it matters: with indexers of their own the answers are others."""
    prompts = [engine.prompt(length) for length in LENGTHS]
    with poisoned_selection(llm) as given:
        scores = engine.score(llm, prompts)
    assert len(given) == 5 * 1
    assert engine.worst(scores, [teacher_forced(p, expected(p)) for p in prompts]) <= FP32_TOLERANCE
    other = Oracle(folder)
    assert engine.worst(scores[-2:], [teacher_forced(p, other(p)) for p in prompts[-2:]]) > 1e-2
