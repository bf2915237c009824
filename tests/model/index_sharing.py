"""Index sharing in tests: a checkpoint with five c4 layers, transformers' model with shared selections, and garbage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dsv4_triton.backend import attention
from tests.model import engine
from tests.model.conftest import Oracle
from tests.model.truths import TINY

SETTINGS = replace(TINY, ratios=(4, 0, 4, 128, 4, 4, 4))
FREQ = {"freq": 2}
LETTERS = "FFSFS"
"""What a frequency of two comes to with five c4 layers."""
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
