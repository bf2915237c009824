"""IndexCache: shared c4 layers attend to what the nearest full layer before them selected in the same step (fp32).

The selections' buffer is full of garbage before each step, and no garbage may reach the attention.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4_triton.backend import attention, prologue
from dsv4_triton.demo.checkpoint import write_checkpoint
from tests.model import engine
from tests.model.conftest import Oracle, teacher_forced
from tests.model.index_sharing import FREQ, LETTERS, SETTINGS, SharingOracle, poisoned_selection, sharing
from tests.model.speculation import Answer, check_same, speculation, told_drafts
from tests.model.test_parity import FP32_TOLERANCE

LENGTHS = (1, 5, 129, 131, 140, 400)
"""Up to 131 tokens nothing is selected: there are 32 entries at most."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("c4") / "model"
    write_checkpoint(path, SETTINGS)
    return path


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[tuple[Any, Any]]:
    """Without and with speculation."""
    options = {"max_model_len": 1024, "kv_cache_memory_bytes": 1 << 29, **sharing(FREQ)}
    with ExitStack() as stack:
        yield tuple(stack.enter_context(engine.engine(folder, **options, **speculation(drafts))) for drafts in (0, 3))


@pytest.fixture(scope="module")
def llm(engines: tuple[Any, Any]) -> Any:
    return engines[0]


@pytest.fixture(scope="module")
def expected(folder: Path) -> SharingOracle:
    return SharingOracle(folder, LETTERS)


def test_logprobs(llm: Any, expected: SharingOracle, folder: Path) -> None:
    """And that it matters: with indexers of their own the answers are others."""
    prompts = [engine.prompt(length) for length in LENGTHS]
    with poisoned_selection(llm) as attended:
        scores = engine.score(llm, prompts)
    assert len(attended) == 5
    assert engine.worst(scores, [teacher_forced(p, expected(p)) for p in prompts]) <= FP32_TOLERANCE
    other = Oracle(folder)
    assert engine.worst(scores[-2:], [teacher_forced(p, other(p)) for p in prompts[-2:]]) > 1e-2


@pytest.mark.parametrize("length", [4, 118, 250])
def test_decoding(llm: Any, expected: SharingOracle, length: int) -> None:
    """Over the point from which on entries are selected, at 132 tokens."""
    tokens = engine.prompt(length)
    with poisoned_selection(llm) as attended:
        answer, logprobs, _ = engine.generate(llm, [tokens], 24)[0]
    assert len(attended) == 5 * sum(length + step >= 132 for step in range(24))
    reference = expected(tokens + answer)[length - 1 : -1]
    assert answer == reference.argmax(-1).tolist()
    assert engine.worst([logprobs], [reference.amax(-1)]) <= FP32_TOLERANCE


def test_shared_layers_have_no_indexer_and_no_keys(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No projection, no score, no selection and no cache of theirs is written; the buffer stays where it is."""
    model, calls = engine.model(llm).model, Counter()
    layers = [layer.attn for layer in model.layers]
    shared = [layer for layer in layers if layer.ratio == 4 and layer.indexer is None]
    assert [layer.prefix for layer in shared] == ["model.layers.4.attn", "model.layers.6.attn"]
    assert all(layer.caches.index_keys is None for layer in shared)
    assert {len(layer.wide_rows.output_sizes) for layer in shared} == {2}
    names = ("indexer_quant_q", "indexer_score", "indexer_topk", "compressor_fold_keys", "compressor_fold")
    for name in names:
        module = attention if hasattr(attention, name) else prologue
        usual = getattr(module, name)

        def counted(*arguments: Any, _name: str = name, _usual: Any = usual, **named: Any) -> Any:
            calls[_name] += 1
            return _usual(*arguments, **named)

        monkeypatch.setattr(module, name, counted)
    unused = [layer.caches.index_state.rows for layer in shared]
    buffers = {layer.selection.data_ptr() for layer in layers}
    for rows in unused:
        rows.fill_(7.0)
    engine.forget(llm)
    with poisoned_selection(llm) as attended:
        engine.generate(llm, [engine.prompt(200)], 1)
    assert calls == dict.fromkeys(names[:4], 3) | {"compressor_fold": 3}
    assert all((rows == 7.0).any() for rows in unused)
    assert len(buffers) == 1 and {indices.data_ptr() for indices in attended} == buffers
    assert [tuple(indices.shape) for indices in attended] == [(200, 32)] * 5


PREFIX = engine.prompt(270, seed=3)
POOL = [*(engine.prompt(length, seed=7) for length in (2, 90, 125, 133, 200, 410)), PREFIX, [*PREFIX, 7, 8, 9]]
TOKENS = 6


@pytest.fixture(scope="module")
def alone(llm: Any) -> list[Answer]:
    """Answers to POOL, each computed by itself in one step for the prompt."""
    answers = []
    for tokens in POOL:
        engine.forget(llm)
        answers += engine.generate(llm, [tokens], TOKENS)
    return answers


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    chosen=st.lists(st.integers(0, len(POOL) - 1), min_size=1, max_size=6),
    chunk=st.integers(16, 700),
    seed=st.integers(0, 1 << 16),
    cached=st.booleans(),
    blocks=st.sampled_from([0, 0, 150]),
)
def test_any_schedule(
    llm: Any, alone: list[Answer], chosen: list[int], chunk: int, seed: int, cached: bool, blocks: int
) -> None:
    """Chunks beside decodes, pages that were someone else's, prefix-cache hits, and few blocks, so that requests are
    preempted: the answers are those of each prompt by itself."""
    if not cached:
        engine.forget(llm)
    engine.shuffle_free_blocks(llm, seed)
    pool = engine.block_pool(llm)
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - blocks) if blocks else []
    try:
        with poisoned_selection(llm), engine.poisoned_pages(llm), engine.chunks_of(llm, chunk):
            check_same(engine.generate(llm, [POOL[i] for i in chosen], TOKENS), [alone[i] for i in chosen])
    finally:
        pool.free_blocks(taken)


def test_preempted_requests_resume(llm: Any, alone: list[Answer]) -> None:
    """All that run are preempted twice, among prompts and among answers; their blocks are full of NaN the next time."""
    engine.forget(llm)
    steps, inner = 0, engine.scheduler(llm)
    usual = inner.schedule

    def schedule(*arguments: Any, **named: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps in (4, 12):
            assert inner.running and inner.reset_prefix_cache(reset_running_requests=True)
        return usual(*arguments, **named)

    inner.schedule = schedule
    try:
        with poisoned_selection(llm), engine.poisoned_pages(llm), engine.chunks_of(llm, 150):
            found = engine.generate(llm, POOL, TOKENS)
    finally:
        del inner.schedule
    assert steps > 12
    check_same(found, alone)


def test_prefix_cache_hit(llm: Any, alone: list[Answer]) -> None:
    """What a hit brings lacks only what nobody reads: the keys of shared layers."""
    engine.forget(llm)
    cold, warm = (engine.generate(llm, [POOL[-1]], TOKENS)[0] for _ in range(2))
    assert (cold[2], warm[2]) == (0, 256)
    check_same([warm], [alone[-1]])


def test_speculation(engines: tuple[Any, Any], alone: list[Answer]) -> None:
    """Any number of drafts accepted; the MTP block has no compressed rows and takes no part."""
    truths, rng = [(tokens, answer[0]) for tokens, answer in zip(POOL, alone, strict=True)], random.Random(0)
    drafting = engines[1]
    block = engine.runner(drafting).drafter.model.model.layer.attn
    assert block.ratio == 0 and block.indexer is None and block.caches.index_state is None
    for chunk in (2048, 97):
        engine.forget(drafting)
        with (
            told_drafts(drafting, truths, lambda *_: rng.randrange(4)),
            poisoned_selection(drafting),
            engine.poisoned_pages(drafting),
            engine.chunks_of(drafting, chunk),
        ):
            check_same(engine.generate(drafting, POOL, TOKENS), alone)


class OneAfterTheOther:
    """In the place of a second stream on the host, where work is done when it is given."""

    def beside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self) -> None: ...

    def wait_for(self, event: None) -> None: ...


def test_a_prologue_on_two_streams_gives_the_same_bits(
    llm: Any, alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    for layer in engine.model(llm).model.layers:
        monkeypatch.setattr(layer.attn, "side", OneAfterTheOther())
    for tokens, (ids, logprobs, _) in zip(POOL, alone, strict=True):
        engine.forget(llm)
        ((found, others, _),) = engine.generate(llm, [tokens], TOKENS)
        assert found == ids and torch.equal(others, logprobs)
