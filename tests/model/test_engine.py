"""The engines of these tests: what a failed test leaves in one is gone before the next test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model import engine

PROMPTS = [engine.prompt(length) for length in (3, 40, 130)]
TOKENS = 6


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[Any]:
    with engine.engine(tiny, max_model_len=512, max_num_batched_tokens=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: Any) -> list[tuple[list[int], torch.Tensor, int]]:
    return engine.generate(llm, PROMPTS, TOKENS)


class BrokenError(Exception):
    """What a step ends with here."""


def fails(*_: Any, **__: Any) -> None:
    raise BrokenError


@pytest.mark.parametrize("place", ["forward", "sampled", "scheduler", None])
def test_requests_that_a_failure_left_are_gone(
    llm: Any, expected: Any, place: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each case fails in another place of a step and leaves its requests to the next case."""
    assert not llm.llm_engine.has_unfinished_requests()
    engine.forget(llm)
    found = engine.generate(llm, PROMPTS, TOKENS)
    assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in expected]
    if place is not None:
        where = {
            "forward": (engine.runner(llm), "_model_forward"),
            "sampled": (engine.runner(llm), "_bookkeeping_sync"),
            "scheduler": (engine.scheduler(llm), "update_from_output"),
        }
        monkeypatch.setattr(*where[place], fails)
        with pytest.raises(BrokenError):
            engine.generate(llm, PROMPTS, TOKENS)
        assert llm.llm_engine.has_unfinished_requests()
