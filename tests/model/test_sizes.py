"""Very many requests at once, and requests at the end of the context (fp32)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.model import engine
from tests.model.speculation import scheduled
from tests.model.test_schedules import TOLERANCE
from tests.model.truths import Truth, clear_of_ties

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


def test_decode_past_the_window_after_a_prefix_hit(llm: Any) -> None:
    """Window and state are those of the hit at first, and of none of its tokens at last."""
    cold = clear_of_ties(llm, [], 300, 132)
    warm = engine.generate(llm, [cold.prompt], 132)[0]
    assert warm[2] == 256 and warm[0] == cold.answer
    assert engine.worst([warm[1]], [cold.scores]) <= TOLERANCE


@pytest.mark.parametrize("chunk", [4096, 100])
def test_the_longest_request_in_the_smallest_cache(llm: Any, chunk: int) -> None:
    """With the blocks that vLLM wants to see at the start, it neither waits for ever nor is preempted."""
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    plan = engine.scheduler(llm).kv_cache_config
    needed = math.ceil(plan.num_blocks / get_max_concurrency_for_kv_cache_config(llm.llm_engine.vllm_config, plan))
    engine.forget(llm)
    pool = engine.block_pool(llm)
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - needed)
    with scheduled(llm) as steps, engine.chunks_of(llm, chunk):
        answer, *_ = engine.generate(llm, [engine.prompt(CONTEXT - 4, seed=1)], 50)[0]
    pool.free_blocks(taken)
    assert len(answer) == 4 and len(steps) == math.ceil((CONTEXT - 4) / chunk) + 3


@pytest.mark.parametrize(
    ("prompt", "says"), [([5] * CONTEXT, "maximum model length"), ([5, 512], "vocabulary"), ([5, -1], "vocabulary")]
)
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
