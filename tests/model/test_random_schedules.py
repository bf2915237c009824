"""No schedule of vLLM changes an answer: random arrivals, lengths, chunks, aborts, preemptions, prefix hits (fp32)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.model import engine
from tests.model.random_schedules import SEQUENCES, Driver
from tests.model.speculation import speculation, told_drafts
from tests.model.truths import Truths

OPTIONS: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": SEQUENCES,
    "num_gpu_blocks_override": 700,
}
Drivers = Callable[[int], Driver]


@pytest.fixture(scope="module")
def driver(tiny: Path) -> Iterator[Drivers]:
    """The driver of an engine with this many drafts a step."""
    known: dict[int, Driver] = {}
    with ExitStack() as stack:

        def get(drafts: int) -> Driver:
            if drafts not in known:
                llm = stack.enter_context(engine.engine(tiny, **OPTIONS, **speculation(drafts)))
                known[drafts] = Driver(llm, known[0].truths if known else Truths(llm), drafts)
            return known[drafts]

        get(0)
        yield get


def explore(found: Driver, steps: int) -> None:
    """So many steps, in which what is meant to happen did."""
    found.explore(steps)
    print(f"{found.drafts} drafts: {found.steps} steps, {dict(found.seen)}")
    assert found.steps >= steps
    assert all(found.seen[what] for what in ("finished", "aborted", "hit", "preempted")), found.seen


@pytest.mark.parametrize(("drafts", "steps"), [(0, 1400), (3, 600)])
def test_answers_do_not_depend_on_the_schedule(driver: Drivers, drafts: int, steps: int) -> None:
    explore(driver(drafts), steps)


@pytest.mark.long
@pytest.mark.parametrize("drafts", [0, 1, 2, 3])
def test_answers_do_not_depend_on_any_of_many_schedules(driver: Drivers, drafts: int) -> None:
    explore(driver(drafts), 20_000)


def test_a_block_given_back_too_early_is_found(driver: Drivers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that slides 64 tokens ahead of what attention reads."""
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    usual = SlidingWindowManager.get_num_skipped_tokens
    monkeypatch.setattr(SlidingWindowManager, "get_num_skipped_tokens", lambda self, n: usual(self, n + 64))
    with pytest.raises(AssertionError, match=r"other tokens|differ by"):
        driver(0).explore(1000, shrink=False)


FORM = "([a-f]{3}|[0-9]{5}|(one|two|three) more)(, [a-z]{2,9}){6,12}"
LONGEST = 40
PROMPTS = [engine.prompt(length, seed=3) for length in range(5, 14)]


def structured(llm: Any) -> list[tuple[list[int], str]]:
    """Tokens and text of the answers to PROMPTS, held to FORM."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    form = StructuredOutputsParams(regex=FORM)
    parameters = SamplingParams(temperature=0, max_tokens=LONGEST, structured_outputs=form)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], parameters, use_tqdm=False)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    return [(tokens, llm.get_tokenizer().decode(tokens, skip_special_tokens=True)) for tokens in answers]


def test_a_form_follows_rejections_and_preemptions(driver: Drivers) -> None:
    """Any number of drafts is right, more requests run than the cache holds, and the answers are those without."""
    expected, drafting = structured(driver(0).llm), driver(3)
    ended = [text for tokens, text in expected if len(tokens) < LONGEST]
    assert ended and all(re.fullmatch(FORM, text) for text in ended)
    truths = [(prompt, tokens) for prompt, (tokens, _) in zip(PROMPTS, expected, strict=True)]
    pool, before = engine.block_pool(drafting.llm), drafting.seen["preempted"]
    engine.forget(drafting.llm)
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 70)
    with drafting.counted(), told_drafts(drafting.llm, truths, drafting.right), engine.poisoned_pages(drafting.llm):
        found = structured(drafting.llm)
    pool.free_blocks(taken)
    assert drafting.seen["preempted"] > before
    assert found == expected
