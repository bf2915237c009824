"""The served model against transformers' DeepseekV4ForCausalLM, on the same demo checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model import engine
from tests.model.conftest import Oracle, teacher_forced

LENGTHS = (1, 2, 3, 4, 5, 7, 8, 127, 128, 129, 255, 257, 300, 1100)
FP32_TOLERANCE = 1e-4
"""Log-probabilities of two fp32 implementations of this network differ by a few 1e-6: sums round in another order,
amplified about tenfold by the layers. A window of 127 instead of 128 tokens already differs by 0.1."""


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[[str], Path]) -> Iterator[Any]:
    with engine.engine(checkpoint("float32")) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(oracle: Callable[[str], Oracle]) -> Oracle:
    return oracle("float32")


def test_prompt_logprobs_in_fp32(llm: Any, expected: Oracle) -> None:
    prompts = [engine.prompt(length) for length in LENGTHS]
    scores = engine.score(llm, prompts)
    assert engine.worst(scores, [teacher_forced(p, expected(p)) for p in prompts]) <= FP32_TOLERANCE


def test_next_token_logprob_in_fp32(llm: Any, expected: Oracle) -> None:
    """The last position, which the prompt's own log-probabilities do not cover; alone and all in one batch."""
    prompts = [engine.prompt(length) for length in LENGTHS]
    for tokens, (answer, logprobs, _) in zip(prompts, engine.generate(llm, prompts, 1), strict=True):
        last = expected(tokens)[-1]
        assert answer == [int(last.argmax())]
        assert abs(logprobs.item() - last.max().item()) <= FP32_TOLERANCE


@pytest.mark.parametrize("length", [1, 6, 126, 250, 321])
def test_greedy_continuation_of_64_tokens(llm: Any, expected: Oracle, length: int) -> None:
    """Decoding crosses c4 and c128 windows, the window's edge and the point where the indexer starts to choose."""
    tokens = engine.prompt(length)
    answer, logprobs, _ = engine.generate(llm, [tokens], 64)[0]
    reference = expected(tokens + answer)[length - 1 : -1]
    assert answer == reference.argmax(-1).tolist()
    assert engine.worst([logprobs], [reference.amax(-1)]) <= FP32_TOLERANCE


def test_bf16_stays_close(checkpoint: Callable[[str], Path], oracle: Callable[[str], Oracle]) -> None:
    """bf16 with int8 indexer keys against fp32 maths on the same (bf16) weights."""
    expected = oracle("bfloat16")
    prompts = [engine.prompt(length) for length in LENGTHS]
    with engine.engine(checkpoint("bfloat16"), dtype="bfloat16") as llm:
        scores = engine.score(llm, prompts)
    differences = torch.cat([(s - teacher_forced(p, expected(p))).abs() for p, s in zip(prompts, scores, strict=True)])
    assert differences.mean() <= 0.02
