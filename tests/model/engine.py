"""In-process vLLM engines over the demo checkpoint, and access to what tests must steer inside them."""

from __future__ import annotations

import contextlib
import gc
import os
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in this process, where tests can reach it
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the default pins the worker to one core
    "TORCHDYNAMO_DISABLE": "1",
}
"""Read by vLLM when it is first used."""

OPEN: list[Any] = []
"""The engines of this process."""
VOCAB = 500
"""Token ids of random prompts stay below the demo tokenizer's special tokens."""


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids; the first id tells lengths apart, so that no prompt is a prefix of another."""
    rng = random.Random(1000 * length + seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


@contextlib.contextmanager
def engine(checkpoint: os.PathLike[str], **options: Any) -> Iterator[Any]:
    """An `LLM` that is shut down on leaving; small by default, and kernels compile when they are first used."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    settings = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 1 << 30,
        "attention_backend": "CUSTOM",
        "disable_log_stats": True,
    }
    extra = dict(options.pop("additional_config", None) or {})
    extra["dsv4_triton"] = {"warm_up": "off", **extra.get("dsv4_triton", {})}
    llm = LLM(str(checkpoint), **(settings | options), additional_config=extra)
    OPEN.append(llm)
    try:
        yield llm
    finally:
        OPEN.remove(llm)
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def abort_all(llm: Any) -> None:
    """End the requests that a failure has left. After one inside a step, its requests wait for the step's tokens, and
    the next call of `generate` would wait with them for ever."""
    inner = llm.llm_engine
    inner.abort_request(list(inner.output_processor.request_states), internal=True)
    runner(llm).execute_model_state = None
    while inner.has_unfinished_requests():
        inner.step()


def scheduler(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def block_pool(llm: Any) -> Any:
    return scheduler(llm).kv_cache_manager.block_pool


def runner(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def model(llm: Any) -> Any:
    return runner(llm).model


@contextlib.contextmanager
def chunks_of(llm: Any, tokens: int) -> Iterator[None]:
    """Schedule at most `tokens` tokens a step."""
    inner = scheduler(llm)
    usual, inner.max_num_scheduled_tokens = inner.max_num_scheduled_tokens, tokens
    try:
        yield
    finally:
        inner.max_num_scheduled_tokens = usual


def forget(llm: Any) -> None:
    """Empty the prefix cache."""
    assert llm.reset_prefix_cache()


def shuffle_free_blocks(llm: Any, seed: int) -> None:
    """Hand out cache blocks in random order from now on; the order depends on which are free and the seed alone."""
    pool = block_pool(llm)
    free = sorted(pool.free_block_queue.get_all_free_blocks(), key=lambda block: block.block_id)
    random.Random(seed).shuffle(free)
    pool.free_block_queue = type(pool.free_block_queue)(free)


def pages(llm: Any) -> torch.Tensor:
    """The bytes of all cache blocks [blocks, bytes]; all caches are views of it."""
    cache = model(llm).model.layers[0].attn.caches.window.rows
    stride = cache.stride(0) * cache.element_size()
    raw = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
    return raw.view(-1, stride)


@contextlib.contextmanager
def poisoned_pages(llm: Any) -> Iterator[None]:
    """Fill the null block now and every block when it is handed out with 0xFF bytes: NaN in fp32 and bf16 rows."""
    pool, memory = block_pool(llm), pages(llm)
    memory[0] = 0xFF
    take = pool.get_new_blocks

    def take_poisoned(count: int) -> list[Any]:
        blocks = take(count)
        for block in blocks:
            memory[block.block_id].fill_(0xFF)
        return blocks

    pool.get_new_blocks = take_poisoned
    try:
        yield
    finally:
        del pool.get_new_blocks
        memory[0] = 0


def score(llm: Any, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Teacher-forced log-probabilities: entry i - 1 of a prompt's result is that of its token i."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], parameters, use_tqdm=False)
    return [
        torch.tensor([entry[token].logprob for token, entry in zip(p[1:], output.prompt_logprobs[1:], strict=True)])
        for p, output in zip(prompts, outputs, strict=True)
    ]


def generate(llm: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[tuple[list[int], torch.Tensor, int]]:
    """Greedy continuations: token ids, their log-probabilities, and how many prompt tokens the prefix cache gave."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=tokens, logprobs=0, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], parameters, use_tqdm=False)
    results = []
    for output in outputs:
        answer = output.outputs[0]
        chosen = [entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)]
        results.append((list(answer.token_ids), torch.tensor(chosen), output.num_cached_tokens or 0))
    return results


def worst(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest absolute difference over all prompts; NaN counts as infinite."""
    differences = [
        torch.nan_to_num((a - e).abs(), nan=float("inf")).max().item()
        for a, e in zip(actual, expected, strict=True)
        if len(e)
    ]
    return max(differences, default=0.0)
