"""Random schedules: hypothesis draws what arrives, is aborted and is computed in a step, as a list of plain events.

`Driver` runs events through vLLM's scheduler and compares whatever a step says with what a request says alone.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.model import engine
from tests.model.speculation import told_drafts
from tests.model.test_schedules import TOLERANCE
from tests.model.truths import CHUNK, TOKENS, Truths, chosen

SEQUENCES = 12
"""Requests that run at once."""


class Arrive(NamedTuple):
    """A request for `tokens` tokens after prompt number `prompt`; `scored` asks for those of the prompt, too."""

    prompt: int
    tokens: int
    scored: bool


class Abort(NamedTuple):
    """Of the living requests this one (modulo their number)."""

    which: int


class Preempt(NamedTuple):
    """So many of the requests that run, the last ones first, as the scheduler does where blocks run out."""

    count: int


class Room(NamedTuple):
    """So many cache blocks more than the longest request needs."""

    blocks: int


class Steps(NamedTuple):
    """So many steps of at most `tokens` tokens."""

    count: int
    tokens: int


Event = Arrive | Abort | Preempt | Room | Steps


def events(prompts: int) -> st.SearchStrategy[list[Event]]:
    """1 to 60 events; each shrinks to what is least of its kind."""
    arrive = st.builds(
        Arrive, st.integers(0, prompts - 1), st.integers(1, TOKENS), st.sampled_from([False, False, True])
    )
    steps = st.builds(Steps, st.integers(1, 4), st.integers(1, CHUNK))
    abort, room = st.builds(Abort, st.integers(0, SEQUENCES - 1)), st.builds(Room, st.integers(0, 10))
    preempt = st.builds(Preempt, st.integers(1, SEQUENCES))
    event = st.sampled_from([steps] * 4 + [arrive] * 6 + [abort, preempt, room, room]).flatmap(lambda kind: kind)
    return st.integers(1, 60).flatmap(lambda count: st.lists(event, min_size=count, max_size=count))


class Driver:
    """An engine to which events happen. `steps` and `seen` count, over all runs, its steps and what came to pass."""

    def __init__(self, llm: Any, truths: Truths, drafts: int) -> None:
        self.llm, self.truths, self.drafts = llm, truths, drafts
        self.steps = 0
        self.seen: Counter[str] = Counter()
        self._names = itertools.count()
        self._living: dict[str, Arrive] = {}
        self._taken: list[Any] = []
        self._dirty: set[int] = set()

    def explore(self, steps: int, *, shrink: bool = True) -> None:
        """Run lists of events until that made so many steps; a failure shows the shortest list found that fails."""
        enough, failed = self.steps + steps, False

        @settings(
            max_examples=max(steps // 10, 100),
            derandomize=True,
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        )
        @given(events(len(self.truths.all)))
        def holds(happening: list[Event]) -> None:
            nonlocal failed
            if self.steps >= enough and not failed:
                return
            try:
                self.run(happening)
            except BaseException:
                failed = True
                raise

        with contextlib.ExitStack() as stack:
            stack.enter_context(self._poisoned())
            stack.enter_context(self.counted())
            if self.drafts:
                truths = [(truth.prompt, truth.answer) for truth in self.truths.all]
                stack.enter_context(told_drafts(self.llm, truths, self.right))
            holds()

    def run(self, happening: Sequence[Event]) -> None:
        """From an empty engine and cache through these events and on until the last request has its answer."""
        pool = engine.block_pool(self.llm)
        engine.forget(self.llm)
        engine.shuffle_free_blocks(self.llm, 0)
        self._dirty = set(range(pool.num_gpu_blocks))
        free = pool.get_num_free_blocks()
        try:
            for event in happening:
                self._happens(event)
            self._happens(Room(free))
            self._happens(Steps(5000, CHUNK))
            assert not self._living, f"no answer for {self._living}"
            assert pool.get_num_free_blocks() == free, "blocks were lost"
        finally:
            self._clear()

    def _happens(self, event: Event) -> None:
        if isinstance(event, Arrive):
            self._arrive(event)
        elif isinstance(event, Abort):
            if self._living:
                name = list(self._living)[event.which % len(self._living)]
                del self._living[name]
                self.llm.llm_engine.abort_request([name])
                self.seen["aborted"] += 1
        elif isinstance(event, Preempt):
            inner = engine.scheduler(self.llm)
            for _ in range(min(event.count, len(inner.running))):
                inner._preempt_request(inner.running.pop(), 0.0)
            inner.prev_step_scheduled_req_ids.clear()  # as vLLM does for requests that may run again in the next step
        elif isinstance(event, Room):
            self._give_back()
            pool = engine.block_pool(self.llm)
            spare = pool.num_gpu_blocks - 1 - self.truths.most_blocks - 8 - event.blocks
            if (count := min(spare, pool.get_num_free_blocks())) > 0:
                self._taken = pool.get_new_blocks(count)
        else:
            with engine.chunks_of(self.llm, event.tokens):
                for _ in range(event.count):
                    if not self.llm.llm_engine.has_unfinished_requests():
                        break
                    self._step()

    def _arrive(self, event: Arrive) -> None:
        from vllm import SamplingParams

        name = f"request {next(self._names)}"
        self._living[name] = event
        parameters = SamplingParams(
            temperature=0,
            max_tokens=event.tokens,
            logprobs=0,
            prompt_logprobs=0 if event.scored else None,
            ignore_eos=True,
        )
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": self.truths.all[event.prompt].prompt}, parameters)

    def _step(self) -> None:
        self.steps += 1
        for output in self.llm.llm_engine.step():
            event = self._living[output.request_id]
            truth, answer = self.truths.all[event.prompt], output.outputs[0]
            count = len(answer.token_ids)
            assert list(answer.token_ids) == truth.answer[:count], f"{event}: other tokens"
            pairs = [(chosen(answer.token_ids, answer.logprobs), truth.scores[:count])]
            if event.scored:
                pairs.append((chosen(truth.prompt[1:], output.prompt_logprobs[1:]), truth.prompt_scores))
            difference = engine.worst(*zip(*pairs, strict=True))
            assert difference <= TOLERANCE, f"{event}: log-probabilities differ by {difference:.2g} at token {count}"
            if output.finished:
                assert count == event.tokens
                self.seen["hit"] += bool(output.num_cached_tokens)
                self.seen["finished"] += 1
                del self._living[output.request_id]

    def right(self, request: int, position: int) -> int:
        """How many drafts after this position of this request are right."""
        return random.Random(f"{request} {position}").randrange(self.drafts + 1)

    @contextlib.contextmanager
    def _poisoned(self) -> Iterator[None]:
        """Blocks hold 0xFF bytes, NaN in rows, from when they are given back and not kept for hits, and at the latest
        when they are handed out. So does the null block."""
        pool, memory = engine.block_pool(self.llm), engine.pages(self.llm)
        take, free = pool.get_new_blocks, pool.free_blocks
        memory[0].fill_(0xFF)

        def poison(blocks: Sequence[Any]) -> None:
            for block in blocks:
                if block.block_id in self._dirty:
                    memory[block.block_id].fill_(0xFF)
                    self._dirty.remove(block.block_id)

        def take_poisoned(count: int) -> list[Any]:
            blocks = take(count)
            poison(blocks)
            self._dirty.update(block.block_id for block in blocks)
            return blocks

        def free_poisoned(blocks: Any) -> None:
            given_back = list(blocks)
            free(given_back)
            poison([b for b in given_back if b.ref_cnt == 0 and b.block_hash is None and not b.is_null])

        pool.get_new_blocks, pool.free_blocks = take_poisoned, free_poisoned
        try:
            yield
        finally:
            del pool.get_new_blocks, pool.free_blocks
            memory[0].fill_(0)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Preemptions are."""
        inner = engine.scheduler(self.llm)
        preempt = inner._preempt_request

        def preempt_request(*request: Any, **named: Any) -> None:
            self.seen["preempted"] += 1
            preempt(*request, **named)

        inner._preempt_request = preempt_request
        try:
            yield
        finally:
            del inner._preempt_request

    def _give_back(self) -> None:
        engine.block_pool(self.llm).free_blocks(self._taken)
        self._taken = []

    def _clear(self) -> None:
        """Whatever a failure left."""
        self._give_back()
        engine.abort_all(self.llm)
        self._living.clear()
