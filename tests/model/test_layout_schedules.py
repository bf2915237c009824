"""`test_schedules` on other pages and kernels: geometry `vllm-ascend` with blocks of 32, the variants of A2 (fp32)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.model import engine

TOLERANCE = 1e-5
"""As in `test_schedules`."""
OPTIONS: dict[str, Any] = {
    "block_size": 32,
    "additional_config": {"dsv4_triton": {"device_family": "a2", "geometry": "vllm-ascend"}},
}
HIT = 4096
"""128 blocks of 32: 32 rows of a c128 page."""
LENGTHS = (1, 4, 129, 400)


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[[str], Path]) -> Iterator[Any]:
    limits = {"max_model_len": HIT + 256, "max_num_batched_tokens": HIT + 256}
    with engine.engine(checkpoint("float32"), **limits, **OPTIONS) as llm:
        yield llm


def test_chunks_and_placement(llm: Any) -> None:
    """Each prompt in one step alone; then all together in chunks, on shuffled blocks that are full of NaN at first."""
    prompts = [engine.prompt(length) for length in LENGTHS]
    alone = [engine.score(llm, [tokens])[0] for tokens in prompts]
    engine.forget(llm)
    with engine.poisoned_pages(llm):
        for seed, chunk in enumerate((77, 200)):
            engine.shuffle_free_blocks(llm, seed)
            with engine.chunks_of(llm, chunk):
                assert engine.worst(engine.score(llm, prompts), alone) <= TOLERANCE


def test_prefix_hit_at_a_whole_c128_page(llm: Any) -> None:
    """Hits come every 4096 tokens: one token short of it there is none."""
    tokens = engine.prompt(HIT + 5)
    engine.forget(llm)
    cold = engine.generate(llm, [tokens], 8)[0]
    warm = engine.generate(llm, [tokens], 8)[0]
    assert (cold[2], warm[2]) == (0, HIT)
    assert warm[0] == cold[0]
    assert engine.worst([warm[1]], [cold[1]]) <= TOLERANCE


def test_preempted_requests_resume(llm: Any, checkpoint: Callable[[str], Path], monkeypatch: Any) -> None:
    """A cache for about half of the requests at their ends; what is preempted ends with the same answer."""
    prompts = [engine.prompt(length, seed=5) for length in range(5, 13)]
    enough = engine.generate(llm, prompts, 60)
    small_cache = {"max_model_len": 128, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 100}
    with engine.engine(checkpoint("float32"), **small_cache, **OPTIONS) as small:
        inner, preempted = engine.scheduler(small), []
        usual = inner._preempt_request
        monkeypatch.setattr(
            inner, "_preempt_request", lambda request, *a, **k: (preempted.append(request), usual(request, *a, **k))
        )
        with engine.poisoned_pages(small):
            scarce = engine.generate(small, prompts, 60)
    assert preempted
    assert [tokens for tokens, *_ in scarce] == [tokens for tokens, *_ in enough]
    assert engine.worst([s[1] for s in scarce], [e[1] for e in enough]) <= TOLERANCE
