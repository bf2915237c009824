"""One engine in a process of its own, driven through some cases: `python -m tests.npu.serve JSON` prints JSON.

The argument has `checkpoint`, `options` of the engine and the names of `cases` (below); the result has the answers of
each case as [tokens, log-probabilities, tokens from the prefix cache], and how many graphs were captured and replayed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from tests.model import engine

PROMPTS = [engine.prompt(length) for length in (7, 50, 300)]
TOKENS = 12
PREFIX = engine.prompt(300, seed=2)
CROWD = [engine.prompt(length, seed=5) for length in range(5, 13)]
CROWD_TOKENS = 40

Answers = list[tuple[list[int], list[float], int]]


def answers(llm: Any, prompts: list[list[int]], tokens: int) -> Answers:
    return [(ids, logprobs.tolist(), cached) for ids, logprobs, cached in engine.generate(llm, prompts, tokens)]


def plain(llm: Any) -> Answers:
    return answers(llm, PROMPTS, TOKENS)


def chunked(llm: Any) -> Answers:
    engine.forget(llm)
    with engine.chunks_of(llm, 77):
        return answers(llm, PROMPTS, TOKENS)


def prefix(llm: Any) -> Answers:
    """The same prompt, cold and warm."""
    engine.forget(llm)
    return [*answers(llm, [PREFIX], TOKENS), *answers(llm, [PREFIX], TOKENS)]


def crowd(llm: Any) -> Answers:
    """Eight requests at once."""
    return answers(llm, CROWD, CROWD_TOKENS)


def preempted(llm: Any) -> Answers:
    """The same with so few blocks that some are preempted."""
    inner, pool = engine.scheduler(llm), engine.block_pool(llm)
    engine.forget(llm)
    usual, count = inner._preempt_request, 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        return usual(*arguments, **named)

    inner._preempt_request = counted
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 90)
    try:
        found = answers(llm, CROWD, CROWD_TOKENS)
    finally:
        pool.free_blocks(taken)
        inner._preempt_request = usual
    assert count, "nothing was preempted"
    return found


CASES: dict[str, Callable[[Any], Answers]] = {
    case.__name__: case for case in (plain, chunked, prefix, crowd, preempted)
}


def run(checkpoint: str, options: dict[str, Any], cases: list[str]) -> dict[str, Any]:
    """The answers of the cases, in this process and on the platform that vLLM finds here."""
    with engine.engine(checkpoint, **options) as llm:
        result: dict[str, Any] = {name: CASES[name](llm) for name in cases}
        result["device"] = llm.llm_engine.vllm_config.device_config.device_type
        if result["device"] == "npu":
            result |= {"captures": torch.npu.NPUGraph.captures, "replays": torch.npu.NPUGraph.replays}
    return result


if __name__ == "__main__":
    print(json.dumps(run(**json.loads(sys.argv[1]))), flush=True)
