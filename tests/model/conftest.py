"""Fixtures of the model tests: demo checkpoints and transformers' implementation as the oracle."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.model import engine

os.environ.update(engine.ENVIRONMENT)


@pytest.fixture(autouse=True)
def _no_requests_left() -> None:
    """A test that failed has left no request in an engine that it shared."""
    for llm in engine.OPEN:
        engine.abort_all(llm)


class TopK(NamedTuple):
    values: torch.Tensor
    indices: torch.Tensor


@contextlib.contextmanager
def ties_by_lower_index() -> Iterator[None]:
    """`torch.topk` with the tie rule of this project.

    With relu in the indexer, whole sets of entries score exactly zero, and torch leaves open which of them it takes.
    """

    def topk(scores: torch.Tensor, k: int, dim: int = -1, **_: object) -> TopK:
        values, indices = torch.sort(scores, dim=dim, descending=True, stable=True)
        return TopK(values.narrow(dim, 0, k), indices.narrow(dim, 0, k))

    usual = torch.topk, torch.Tensor.topk
    torch.topk = torch.Tensor.topk = topk  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.topk, torch.Tensor.topk = usual  # type: ignore[method-assign]


class Oracle:
    """transformers' model in fp32 on the weights of a checkpoint; with `tokens` a whole sequence."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Indexer

        # Named classes: vLLM registers a config class of its own with transformers' automatic ones.
        config = DeepseekV4Config.from_pretrained(checkpoint)
        self.model = DeepseekV4ForCausalLM.from_pretrained(checkpoint, config=config, dtype=torch.float32).eval()
        self._selections: list[torch.Tensor] = []
        self._known: dict[tuple[int, ...], tuple[torch.Tensor, list[torch.Tensor]]] = {}
        for module in self.model.modules():
            if isinstance(module, DeepseekV4Indexer):
                module.register_forward_hook(lambda _module, _inputs, chosen: self._selections.append(chosen[0]))

    def __call__(self, tokens: Sequence[int]) -> torch.Tensor:
        """Log-probabilities [T, V]."""
        return self.with_selections(tokens)[0]

    def with_selections(self, tokens: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Log-probabilities, and for each c4 layer the entries [T, k] its indexer chose, -1 for none."""
        key = tuple(tokens)
        if key not in self._known:
            self._selections.clear()
            with torch.no_grad(), ties_by_lower_index():
                logprobs = self.model(torch.tensor([key])).logits[0].log_softmax(-1)
            self._known[key] = logprobs, list(self._selections)
        return self._known[key]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The demo checkpoint in "float32" or "bfloat16"."""
    from dsv4_triton.demo.checkpoint import DemoSettings, write_checkpoint

    written: dict[str, Path] = {}

    def get(dtype: str) -> Path:
        if dtype not in written:
            written[dtype] = tmp_path_factory.mktemp(dtype) / "demo"
            write_checkpoint(written[dtype], DemoSettings(dtype=dtype))
        return written[dtype]

    return get


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with which a step is quick."""
    from dsv4_triton.demo.checkpoint import write_checkpoint
    from tests.model.truths import TINY

    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_checkpoint(folder, TINY)
    return folder


@pytest.fixture(scope="session")
def oracle(checkpoint: Callable[[str], Path]) -> Callable[[str], Oracle]:
    """The oracle of the weights of either checkpoint."""
    known: dict[str, Oracle] = {}

    def of(dtype: str) -> Oracle:
        if dtype not in known:
            known[dtype] = Oracle(checkpoint(dtype))
        return known[dtype]

    return of


def teacher_forced(tokens: Sequence[int], logprobs: torch.Tensor) -> torch.Tensor:
    """Of log-probabilities [T, V] those of the sequence's own tokens, as `engine.score` gives them."""
    return logprobs[torch.arange(len(tokens) - 1), list(tokens[1:])]
