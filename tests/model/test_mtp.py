"""Speculation with the MTP block changes how many steps an answer takes and nothing else (fp32).

The checkpoint's block guesses most tokens right and some wrong, so that every number of drafts is accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model import engine
from tests.model.speculation import (
    GAIN,
    Answer,
    check_rows,
    check_same,
    edited_copy,
    guessing_well,
    scheduled,
    speculation,
    told_drafts,
)

Engines = Callable[[int], Any]
DRAFTS = 3
LENGTHS = (1, 3, 4, 5, 63, 65, 127, 128, 257, 300)
PROMPTS = [engine.prompt(length, seed=7) for length in LENGTHS]
TOKENS = 20


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """The engine with this many drafts a step, its prefix cache empty."""
    folder = tmp_path_factory.mktemp("guessing") / "model"
    edited_copy(checkpoint("float32"), folder, partial(guessing_well, gain=GAIN))
    started: dict[int, Any] = {}
    with ExitStack() as stack:

        def get(drafts: int) -> Any:
            if drafts not in started:
                options = {"max_num_seqs": 32, "max_model_len": 1024, **speculation(drafts)}
                started[drafts] = stack.enter_context(engine.engine(folder, **options))
            engine.forget(started[drafts])
            return started[drafts]

        yield get


@pytest.fixture(scope="module")
def without(llm: Engines) -> list[Answer]:
    return engine.generate(llm(0), PROMPTS, TOKENS)


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_verification_beside_chunks_of_prompts(llm: Engines, without: list[Answer], drafts: int) -> None:
    """97 tokens a step, every block full of NaN when it is handed out."""
    with engine.chunks_of(llm(drafts), 97), engine.poisoned_pages(llm(drafts)):
        check_same(engine.generate(llm(drafts), PROMPTS, TOKENS), without)


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_answers_alone_take_as_many_steps_fewer_as_drafts_are_accepted(
    llm: Engines, without: list[Answer], drafts: int
) -> None:
    """Of all drafts more than 0.6 are accepted; those that a step has past the end of an answer count as rejected."""
    taken = []
    for index in (0, 5, 9):
        with scheduled(llm(drafts)) as steps:
            check_same(engine.generate(llm(drafts), [PROMPTS[index]], TOKENS), [without[index]])
        taken.append(len(steps))
    accepted = (len(taken) * TOKENS - sum(taken)) / (drafts * sum(taken))
    assert accepted > 0.6, taken


def test_every_number_of_rejections_at_every_phase_of_a_window(llm: Engines) -> None:
    """From each of the 128 phases of a c128 window, hence from each of a c4 window and over the edges of all pages, 0,
    1, 2 and 3 drafts are accepted; each request goes at its own pace."""
    prompts = [engine.prompt(length, seed=1) for length in range(5, 5 + 128, 4)]
    expected = engine.generate(llm(0), prompts, 48)
    visits: Counter[tuple[int, int]] = Counter()

    def rarest(_request: int, position: int) -> int:
        phase = position % 128
        count = min(range(DRAFTS + 1), key=lambda accepted: visits[phase, accepted])
        visits[phase, count] += 1
        return count

    truths = [(p, answer[0]) for p, answer in zip(prompts, expected, strict=True)]
    with told_drafts(llm(DRAFTS), truths, rarest), engine.poisoned_pages(llm(DRAFTS)):
        check_same(engine.generate(llm(DRAFTS), prompts, 48), expected)
    assert set(visits) == {(phase, count) for phase in range(128) for count in range(DRAFTS + 1)}


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_cache_rows_are_byte_for_byte_those_without_speculation(llm: Engines, drafts: int) -> None:
    """Over the edges of windows and pages at 384."""
    check_rows(llm(0), llm(drafts), drafts)


def test_drafting_writes_rows_of_its_own_cache_and_requests_only(llm: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    drafting = llm(DRAFTS)
    runner, memory = engine.runner(drafting), engine.pages(drafting)
    own = runner.compilation_config.static_forward_context["mtp.layers.6.attn.window"]
    start = own.rows.storage_offset() * own.rows.element_size() % memory.shape[1]
    columns = slice(start, start + own.rows[0].nbytes)
    group = runner.drafter.kv_cache_gid
    usual, calls = runner.drafter.propose, []

    def sums() -> tuple[torch.Tensor, torch.Tensor]:
        words = memory.view(torch.int64)
        part = words[:, columns.start // 8 : columns.stop // 8].sum(1)
        return words.sum(1) - part, part

    def propose(**step: Any) -> torch.Tensor:
        others, drafts = sums()
        result = usual(**step)
        others_after, drafts_after = sums()
        assert torch.equal(others, others_after)
        changed = set((drafts != drafts_after).nonzero().flatten().tolist())
        table = runner.input_batch.block_table[group]
        ours = {
            int(block)
            for row in range(runner.input_batch.num_reqs)
            for block in table.get_numpy_array()[row, : table.num_blocks_per_row[row]]
        }
        assert changed and changed <= ours - {0}
        calls.append(len(changed))
        return result

    monkeypatch.setattr(runner.drafter, "propose", propose)
    with engine.chunks_of(drafting, 150):
        engine.generate(drafting, [PROMPTS[index] for index in (1, 5, 8)], 6)
    assert len(calls) >= 4


@pytest.mark.parametrize(("length", "hit"), [(320, 0), (321, 256), (600, 512)])
def test_prefix_cache_hit(llm: Engines, length: int, hit: int) -> None:
    """The block's row of a position depends on the next token: vLLM asks for a page of 64 rows more than it takes."""
    drafting, tokens = llm(DRAFTS), engine.prompt(length, seed=2)
    cold = engine.generate(drafting, [tokens], 8)[0]
    with scheduled(drafting) as steps:
        warm = engine.generate(drafting, [tokens], 8)[0]
    assert (cold[2], warm[2]) == (0, hit) and len(steps) < 8
    check_same([warm], [cold])


def test_preempted_requests_resume(llm: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [engine.prompt(length, seed=5) for length in range(5, 13)]
    expected = engine.generate(llm(0), prompts, 40)
    drafting = llm(DRAFTS)
    inner, pool, preempted = engine.scheduler(drafting), engine.block_pool(drafting), []
    usual = inner._preempt_request
    monkeypatch.setattr(inner, "_preempt_request", lambda *a, **k: (preempted.append(a), usual(*a, **k)))
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 90)
    with engine.poisoned_pages(drafting):
        found = engine.generate(drafting, prompts, 40)
    pool.free_blocks(taken)
    assert preempted
    check_same(found, expected)


def test_aborted_requests_leave_the_others_alone(llm: Engines, without: list[Answer]) -> None:
    """Every third request is aborted after a few steps; the others' answers stay, and all blocks come back."""
    from vllm import SamplingParams

    drafting = llm(DRAFTS)
    free = engine.block_pool(drafting).get_num_free_blocks()
    parameters = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    inner, answers = drafting.llm_engine, {}
    with engine.chunks_of(drafting, 97):
        for index, tokens in enumerate(PROMPTS):
            inner.add_request(f"request {index}", {"prompt_token_ids": tokens}, parameters)
        for step in range(200):
            if step % 3 == 2 and step // 3 * 3 < len(PROMPTS):
                inner.abort_request([f"request {step // 3 * 3}"])
            for output in inner.step():
                answers[output.request_id] = list(output.outputs[0].token_ids)
            if not inner.has_unfinished_requests():
                break
    for index, (tokens, *_) in enumerate(without):
        if index % 3:
            assert answers[f"request {index}"] == tokens
    assert engine.block_pool(drafting).get_num_free_blocks() == free


def test_the_end_of_the_context(llm: Engines) -> None:
    """No draft is made where it would not fit, and none is accepted past the end."""
    tokens = engine.prompt(1013)
    expected = engine.generate(llm(0), [tokens], 100)
    assert len(expected[0][0]) == 1024 - len(tokens)
    check_same(engine.generate(llm(DRAFTS), [tokens], 100), expected)


def test_sampled_answers(llm: Engines, without: list[Answer]) -> None:
    """Among one token, by top-k or by top-p: the greedy ones."""
    from vllm import SamplingParams

    choices: list[dict[str, float]] = [{"top_k": 1}, {"top_p": 1e-6}]
    parameters = [
        SamplingParams(max_tokens=TOKENS, ignore_eos=True, **choices[index % 2])  # type: ignore[arg-type]
        for index in range(len(PROMPTS))
    ]
    outputs = llm(DRAFTS).generate([{"prompt_token_ids": p} for p in PROMPTS], parameters, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == [tokens for tokens, *_ in without]


def test_a_token_after_drafts_is_drawn_from_the_same_distribution(llm: Engines) -> None:
    """The third and fourth token of 128 answers, which follow drafts, with and without speculation: the frequencies of
    the commonest tokens are within five standard deviations of their difference."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0.5, top_k=3, max_tokens=4, ignore_eos=True, n=128)
    counts = []
    for drafts in (0, DRAFTS):
        (output,) = llm(drafts).generate([{"prompt_token_ids": PROMPTS[3]}], parameters, use_tqdm=False)
        counts.append(Counter(tuple(answer.token_ids[2:]) for answer in output.outputs))
    for pair, count in counts[0].most_common(4):
        assert abs(count - counts[1][pair]) <= 5 * (2 * count) ** 0.5, counts


def test_the_streams_are_kept_with_speculation_only(llm: Engines) -> None:
    """In a buffer that does not move; without speculation there is no buffer, no cache and no weight of the block."""
    plain, drafting = engine.runner(llm(0)), engine.runner(llm(DRAFTS))
    assert plain.model.model.streams is None and plain.model.get_mtp_target_hidden_states() is None
    assert not [name for name in plain.compilation_config.static_forward_context if name.startswith("mtp.")]
    assert not [name for name, _ in plain.model.named_parameters() if "mtp" in name]
    before = drafting.model.get_mtp_target_hidden_states()
    engine.generate(llm(DRAFTS), [PROMPTS[0]], 2)
    after = drafting.model.get_mtp_target_hidden_states()
    assert before.data_ptr() == after.data_ptr() == drafting.model.model.streams.data_ptr()
    assert after.shape == (2048, 4 * 256)
