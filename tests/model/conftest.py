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


Oracle = Callable[[Sequence[int]], torch.Tensor]


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
def oracle(checkpoint: Callable[[str], Path]) -> Callable[[str], Oracle]:
    """Log-probabilities [T, V] of a whole sequence by transformers in fp32, for the weights of either checkpoint."""
    from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM

    models: dict[str, torch.nn.Module] = {}

    def of(dtype: str) -> Oracle:
        if dtype not in models:
            path = checkpoint(dtype)
            # Named classes: vLLM registers a config class of its own with transformers' automatic ones.
            config = DeepseekV4Config.from_pretrained(path)
            models[dtype] = DeepseekV4ForCausalLM.from_pretrained(path, config=config, dtype=torch.float32).eval()

        def logprobs(tokens: Sequence[int]) -> torch.Tensor:
            with torch.no_grad(), ties_by_lower_index():
                return models[dtype](torch.tensor([list(tokens)])).logits[0].log_softmax(-1)

        return logprobs

    return of
