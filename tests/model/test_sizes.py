"""Very many requests at once, and requests at the end of the context (fp32)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.model import engine
from tests.model.random_schedules import Truth, clear_of_ties
from tests.model.speculation import scheduled
from tests.model.test_schedules import TOLERANCE

TOKENS = 4
CONTEXT = 1024


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[Any]:
    limits = {"max_model_len": CONTEXT, "max_num_batched_tokens": 4096, "max_num_seqs": 512}
    with engine.engine(tiny, num_gpu_blocks_override=6000, **limits) as llm:
        yield llm


@pytest.fixture(scope="module")
def short(llm: Any) -> list[Truth]:
    return [clear_of_ties(llm, [], length, TOKENS) for length in (1, 2, 3, 4, 5, 7, 8, 9)]


@pytest.mark.parametrize("count", [1, 255, 256, 257, 512])
def test_decode_of_many_requests(llm: Any, short: list[Truth], count: int) -> None:
    """All in one step, which has one token of each."""
    expected = [short[index % len(short)] for index in range(count)]
    with scheduled(llm) as steps:
        found = engine.generate(llm, [truth.prompt for truth in expected], TOKENS)
    assert [tokens for tokens, *_ in found] == [truth.answer for truth in expected]
    assert engine.worst([scores for _, scores, _ in found], [truth.scores for truth in expected]) <= TOLERANCE
    assert [sorted(step.values()) for step in steps[1:]] == [[1] * count] * (TOKENS - 1)


@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT - 2, CONTEXT - 5])
def test_the_last_token_of_the_context(llm: Any, length: int) -> None:
    """An answer ends there, whatever was asked for; its tokens score the same in one step."""
    tokens = engine.prompt(length)
    found, scores, _ = engine.generate(llm, [tokens], 50)[0]
    assert len(found) == CONTEXT - length
    (rescored,) = engine.score(llm, [[*tokens, *found][: CONTEXT - 1]])
    assert engine.worst([rescored[length - 1 :]], [scores[: len(found) - 1]]) <= TOLERANCE


@pytest.mark.parametrize(("prompt", "says"), [([5] * CONTEXT, "maximum model length"), ([5, 512], "vocabulary")])
def test_a_request_that_does_not_fit_is_refused_alone(
    llm: Any, short: list[Truth], prompt: list[int], says: str
) -> None:
    """While others run; token ids at both ends of the vocabulary are served."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    parameters = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    inner, answers = llm.llm_engine, {}
    inner.add_request("edge", {"prompt_token_ids": [0, 511, 0, 511]}, parameters)
    inner.add_request("good", {"prompt_token_ids": short[4].prompt}, parameters)
    inner.step()
    with pytest.raises(VLLMValidationError, match=says):
        inner.add_request("bad", {"prompt_token_ids": prompt}, parameters)
    while inner.has_unfinished_requests():
        answers |= {output.request_id: list(output.outputs[0].token_ids) for output in inner.step()}
    assert answers["good"] == short[4].answer and len(answers["edge"]) == TOKENS
