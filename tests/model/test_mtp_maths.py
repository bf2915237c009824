"""Logits of the MTP block against a calculation from the maths alone (fp32)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model import engine
from tests.model.conftest import Oracle
from tests.model.draft_reference import DraftBlock
from tests.model.speculation import read_tensors, speculation

LENGTHS = (1, 5, 140)
"""The last one is longer than the window."""
TOLERANCE = 5e-5
"""Logits are a few units large, a product of 256 terms; the streams of seven layers come with 1e-5 of their own."""


def target_streams(oracle: Oracle, tokens: list[int]) -> torch.Tensor:
    """S [T, 4, D] of transformers' model."""
    seen: list[torch.Tensor] = []
    hook = oracle.model.model.hc_head.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0]))
    with torch.no_grad():
        oracle.model(torch.tensor([tokens]))
    hook.remove()
    return seen[0][0]


def test_logits_of_first_and_second_drafts(
    checkpoint: Callable[[str], Path], oracle: Callable[[str], Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("float32")
    block = DraftBlock(read_tensors(folder), json.loads((folder / "config.json").read_text()))
    with engine.engine(folder, **speculation(2)) as llm:
        drafter: Any = engine.runner(llm).drafter.model
        assert set(drafter.slots()) == {name for name in read_tensors(folder) if name.startswith("mtp.")}
        passes: list[tuple[torch.Tensor, torch.Tensor]] = []
        usual = drafter.forward

        def forward(input_ids: torch.Tensor, **named: Any) -> torch.Tensor:
            streams = usual(input_ids=input_ids, **named)
            passes.append((input_ids.clone(), streams.clone()))
            return streams

        monkeypatch.setattr(drafter, "forward", forward)
        for length in LENGTHS:
            tokens = engine.prompt(length)
            passes.clear()
            (answer, *_) = engine.generate(llm, [tokens], 1)[0]
            (following, first), (drafted, second) = passes
            assert following.tolist() == [*tokens[1:], *answer]
            previous = target_streams(oracle("float32"), tokens)
            expected = block.streams(previous, following.long())
            logits = drafter.compute_logits(first)
            torch.testing.assert_close(logits, block.logits(expected), atol=TOLERANCE, rtol=0)
            # The second draft continues the block's own last stream at the next position.
            assert drafted.tolist() == [int(logits[-1].argmax())]
            further = block.streams(torch.cat((previous, expected[-1:])), torch.cat((following, drafted)).long())
            torch.testing.assert_close(
                drafter.compute_logits(second), block.logits(further)[-1:], atol=TOLERANCE, rtol=0
            )
