"""One engine in a process of its own, driven through some cases: `python -m tests.npu.serve JSON` prints JSON.

The argument has `checkpoint`, `options` of the engine and the names of `cases` (below); the result has the answers of
each case as [tokens, log-probabilities, tokens from the prefix cache], whether steps are scheduled `ahead` of the one
that is computed, and of every rank how many graphs it captured and replayed, how many pages of new blocks it `zeroed`,
and bytes of its device's memory: `planned` for all but the caches, where vLLM planned it, `caches`, and the most that
was allocated in the `start` and in the `steps` after it.
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
FULL = [engine.prompt(64, seed=seed) for seed in range(8)]

Answers = list[tuple[list[int], list[float], int]]


def answers(llm: Any, prompts: list[list[int]], tokens: int) -> Answers:
    return [(ids, logprobs.tolist(), cached) for ids, logprobs, cached in engine.generate(llm, prompts, tokens)]


def plain(llm: Any) -> Answers:
    return answers(llm, PROMPTS, TOKENS)


def chunked(llm: Any) -> Answers:
    engine.forget(llm)
    with engine.chunks_of(llm, 77):
        return answers(llm, PROMPTS, TOKENS)


def full(llm: Any) -> Answers:
    """A step of as many tokens as there may be, with sampling of as many requests."""
    return answers(llm, FULL, 2)


def prefix(llm: Any) -> Answers:
    """The same prompt, cold and warm, and between the two a step of no request, as where other engines have some."""
    engine.forget(llm)
    cold = answers(llm, [PREFIX], TOKENS)
    llm.collective_rpc("execute_dummy_batch")
    return [*cold, *answers(llm, [PREFIX], TOKENS)]


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


def sampled(llm: Any) -> list[list[int]]:
    """The tokens of `plain`, drawn among one token, by top-k or by top-p: the same ones."""
    from vllm import SamplingParams

    choices: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 1e-6}]
    parameters = [
        SamplingParams(max_tokens=TOKENS, ignore_eos=True, **choices[index % 2]) for index in range(len(PROMPTS))
    ]
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], parameters, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def drafted(llm: Any) -> list[list[int]]:
    """The drafts of all steps of `plain`, request by request; answers are the same whatever is drafted."""
    drafter = engine.runner(llm).drafter
    name = "_propose" if hasattr(drafter, "_propose") else "propose"  # vllm-ascend's, and vLLM's
    usual, found = getattr(drafter, name), list[list[int]]()

    def recorded(**step: Any) -> torch.Tensor:
        drafts = usual(**step)
        found.extend(drafts[: len(step["next_token_ids"])].tolist())
        return drafts

    setattr(drafter, name, recorded)
    try:
        engine.forget(llm)
        plain(llm)
    finally:
        delattr(drafter, name)
    return found


def starved(llm: Any) -> Answers:
    """A step for which the device has too little memory left."""

    def take(worker: Any) -> None:
        free, total = torch.npu.mem_get_info(worker.device)
        torch.ops.simnpu.set_limit(worker.device.index, total - free + (1 << 20))

    llm.collective_rpc(take)
    return answers(llm, FULL, 2)


CASES: dict[str, Callable[[Any], Any]] = {
    case.__name__: case for case in (plain, chunked, full, prefix, crowd, preempted, sampled, drafted, starved)
}


def after_start(worker: Any) -> dict[str, int]:
    """Memory of a rank's device; the counts of the most that is allocated and of zeroed pages start again."""
    from dsv4_triton.backend.caches import CacheLayer
    from dsv4_triton.backend.upstream_kernels import PageZeroer

    usual, worker.zeroed = PageZeroer.zero_block_ids, 0

    def counted(zeroer: Any, block_ids: list[int]) -> None:
        worker.zeroed += len(block_ids) * len(zeroer._caches)
        usual(zeroer, block_ids)

    PageZeroer.zero_block_ids = counted  # type: ignore[method-assign]
    found = {"start": torch.npu.max_memory_allocated(worker.device)}
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    storages = [layer.rows.untyped_storage() for layer in layers if isinstance(layer, CacheLayer)]
    found["caches"] = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    if not worker.cache_config.kv_cache_memory_bytes:
        found["planned"] = worker.requested_memory - worker.available_kv_cache_memory_bytes
    torch.npu.reset_peak_memory_stats(worker.device)
    return found


def after_steps(worker: Any) -> dict[str, int]:
    graphs = torch.npu.NPUGraph
    steps = torch.npu.max_memory_allocated(worker.device)
    return {"steps": steps, "captures": graphs.captures, "replays": graphs.replays, "zeroed": worker.zeroed}


def run(checkpoint: str, options: dict[str, Any], cases: list[str]) -> dict[str, Any]:
    """The answers of the cases, in this process and on the platform that vLLM finds here."""
    with engine.engine(checkpoint, **options) as llm:
        device = llm.llm_engine.vllm_config.device_config.device_type
        started = llm.collective_rpc(after_start) if device == "npu" else []
        result: dict[str, Any] = {name: CASES[name](llm) for name in cases}
        result["device"] = device
        result["ahead"] = llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        if device == "npu":
            ended = llm.collective_rpc(after_steps)
            result["ranks"] = [start | end for start, end in zip(started, ended, strict=True)]
    return result


if __name__ == "__main__":
    print(json.dumps(run(**json.loads(sys.argv[1]))), flush=True)
