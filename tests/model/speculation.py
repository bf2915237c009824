"""Speculation in tests: an MTP block that guesses well, a drafter that is told what to guess, and what caches hold."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.model import engine
from tests.model.test_schedules import TOLERANCE

Answer = tuple[list[int], torch.Tensor, int]
"""What `engine.generate` gives of a prompt."""
GAIN = 0.1
"""What `guessing_well` takes for drafts that are right nine times out of ten."""
DRAFT_CACHE = "mtp."
"""Prefix of the MTP block's cache."""


def speculation(tokens: int, **more: Any) -> dict[str, Any]:
    """The option for `tokens` drafts a step; none for 0."""
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": tokens, **more}} if tokens else {}


def check_same(found: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """The same tokens, with log-probabilities that differ by rounding."""
    assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in expected]
    assert engine.worst([f[1] for f in found], [e[1] for e in expected]) <= TOLERANCE


def read_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()}


def edited_copy(checkpoint: Path, folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """`checkpoint` in `folder` with its tensors changed in place, or replaced, by `edit`."""
    shutil.copytree(checkpoint, folder)
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = read_tensors(folder)
    edit(tensors)
    for file in set(files.values()):
        save_file({name: t for name, t in tensors.items() if files[name] == file}, folder / file, {"format": "pt"})
    return folder


def guessing_well(tensors: dict[str, torch.Tensor], gain: float) -> None:
    """Make the MTP block of a demo checkpoint guess well.

    With the outputs of attention and experts scaled by `gain`, the next token depends mostly on the last one. The block
    sees that one as its embedding, which is passed on as it is, and has the head of the model: for gain 0 it is right.
    """
    for name, tensor in tensors.items():
        if name.endswith((".wo_b.weight", ".w2.weight")):
            tensor *= gain
    tensors["mtp.0.enorm.weight"].fill_(1)
    tensors["mtp.0.e_proj.weight"].copy_(torch.eye(len(tensors["mtp.0.e_proj.weight"])))
    tensors["mtp.0.h_proj.weight"].zero_()
    for name in ("norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale"):
        tensors[f"mtp.0.{name}"] = tensors[name].clone()


Truth = tuple[list[int], list[int]]
"""A prompt and what follows it."""


@contextlib.contextmanager
def told_drafts(llm: Any, truths: Sequence[Truth], right: Callable[[int, int], int]) -> Iterator[list[tuple[int, int]]]:
    """Let the MTP block run, and replace its drafts: of those after position p of request r (its index in `truths`) the
    first `right(r, p)` are what follows, the others are wrong. Yields the calls (p, right) that led to a step."""
    drafter, runner = engine.runner(llm).drafter, engine.runner(llm)
    known = {tuple(prompt): (index, prompt + answer) for index, (prompt, answer) in enumerate(truths)}
    asked: list[tuple[int, int]] = []
    usual = drafter.propose

    def propose(num_speculative_tokens: int, **step: Any) -> torch.Tensor:
        rejected = step["num_rejected_tokens_gpu"]
        lengths = step["common_attn_metadata"].seq_lens - (0 if rejected is None else rejected)
        drafts = usual(num_speculative_tokens=num_speculative_tokens, **step)
        for row, (request, length) in enumerate(zip(runner.input_batch.req_ids, lengths.tolist(), strict=True)):
            index, tokens = known[tuple(runner.requests[request].prompt_token_ids)]
            following = tokens[length + 1 : length + 1 + num_speculative_tokens]
            following += [0] * (num_speculative_tokens - len(following))
            count = right(index, length) if length >= len(truths[index][0]) else 0
            asked.append((length, count))
            drafts[row] = torch.tensor(
                [token if place < count else (token + 1) % engine.VOCAB for place, token in enumerate(following)]
            )
        return drafts

    drafter.propose = propose
    try:
        yield asked
    finally:
        drafter.propose = usual


@contextlib.contextmanager
def scheduled(llm: Any) -> Iterator[list[dict[str, int]]]:
    """What each step that has any tokens computes, by request."""
    inner = engine.scheduler(llm)
    steps: list[dict[str, int]] = []
    usual = inner.schedule

    def schedule(*arguments: Any, **named: Any) -> Any:
        output = usual(*arguments, **named)
        if output.total_num_scheduled_tokens:
            steps.append(dict(output.num_scheduled_tokens))
        return output

    inner.schedule = schedule
    try:
        yield steps
    finally:
        inner.schedule = usual


def rows_that_count(llm: Any, length: int) -> dict[str, torch.Tensor]:
    """The rows, as bytes, that a sequence of `length` computed tokens needs to go on, by cache of the target model.

    For the request in the first row of the batch, which may have ended with the last step.
    """
    runner, found = engine.runner(llm), {}
    for group, described in enumerate(runner.kv_cache_config.kv_cache_groups):
        table = torch.from_numpy(runner.input_batch.block_table[group].get_numpy_array()[0].copy()).long()
        for name in described.layer_names:
            if name.startswith(DRAFT_CACHE):
                continue
            cache = runner.compilation_config.static_forward_context[name]
            window = cache.spec.sliding_window or length
            index = torch.arange(max(0, length - window) // cache.ratio, length // cache.ratio)
            blocks, rows = table[index // cache.rows_per_block], index % cache.rows_per_block
            parts = [cache.rows] if getattr(cache, "scales", None) is None else [cache.keys, cache.scales[..., None]]
            found[name] = torch.cat([part[blocks, rows].contiguous().view(torch.uint8) for part in parts], dim=1)
    return found


def generate_in_chunks(llm: Any, tokens: list[int], sizes: Sequence[int]) -> None:
    """Compute a sequence in steps of these sizes, without drafts."""
    from vllm import SamplingParams

    assert sum(sizes) == len(tokens)
    inner = llm.llm_engine
    inner.add_request("chunks", {"prompt_token_ids": tokens}, SamplingParams(temperature=0, max_tokens=1))
    for size in sizes:
        with engine.chunks_of(llm, size):
            inner.step()
    assert not inner.has_unfinished_requests()


def check_rows(plain: Any, drafting: Any, drafts: int) -> None:
    """The rows that count are the same bytes in an engine that drafts, a random number of drafts rejected in each step,
    as in one without speculation.

    There the same tokens are computed in steps of as many rows, because products of matrices round differently with
    that number, but of these rows each is right at once.
    """
    tokens, steps = engine.prompt(371, seed=2), 12
    answer = engine.generate(plain, [tokens], steps * (drafts + 1) + 1)[0][0]
    computed, rng = tokens + answer[:-1], random.Random(drafts)
    with told_drafts(drafting, [(tokens, answer)], lambda *_: rng.randrange(drafts + 1)), scheduled(drafting) as taken:
        assert engine.generate(drafting, [tokens], len(answer))[0][0] == answer
    assert len(taken) > steps + 1
    found = rows_that_count(drafting, len(computed))
    engine.forget(plain)
    generate_in_chunks(plain, computed, [len(tokens), *[drafts + 1] * steps])
    expected = rows_that_count(plain, len(computed))
    assert found.keys() == expected.keys()
    assert not [name for name, rows in expected.items() if not torch.equal(rows, found[name])]
