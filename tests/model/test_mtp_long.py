"""Answers of 200 prompts with and without speculation, batched and alone (minutes)."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.model import engine
from tests.model.speculation import GAIN, edited_copy, guessing_well, speculation

PROMPTS = 200
TOKENS = 16
CLOSE = 1e-4
"""Greedy choices between log-probabilities that are closer may differ, since products of matrices round differently
with the number of rows."""


def lengths() -> list[int]:
    """From 1 to 600, most of them short, and all that lie next to the edge of a page or window."""
    rng = random.Random(0)
    edges = [edge + step for edge in (4, 64, 128, 256, 512) for step in (-1, 0, 1)]
    return edges + [int(600 ** rng.random()) for _ in range(PROMPTS - len(edges))]


def gap(plain: Any, prompt: list[int], expected: list[int], found: list[int]) -> float:
    """The difference of log-probability between the two tokens that come first where two answers part."""
    at = next(index for index, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b)
    before = prompt + expected[:at]
    one, other = (float(engine.score(plain, [[*before, tokens[at]]])[0][-1]) for tokens in (expected, found))
    return abs(one - other)


@pytest.mark.long
@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_200_prompts(checkpoint: Callable[[str], Path], tmp_path: Path, drafts: int) -> None:
    folder = edited_copy(checkpoint("float32"), tmp_path / "model", partial(guessing_well, gain=GAIN))
    prompts = [engine.prompt(length, seed) for seed, length in enumerate(lengths())]
    options = {"max_model_len": 1024, "max_num_seqs": 32}
    with (
        engine.engine(folder, **options) as plain,
        engine.engine(folder, **options, **speculation(drafts)) as drafting,
    ):
        expected = [tokens for tokens, *_ in engine.generate(plain, prompts, TOKENS)]
        batched = [tokens for tokens, *_ in engine.generate(drafting, prompts, TOKENS)]
        engine.forget(drafting)
        alone = [engine.generate(drafting, [prompt], TOKENS)[0][0] for prompt in prompts]
        parted = [
            gap(plain, prompt, e, f)
            for found in (batched, alone)
            for prompt, e, f in zip(prompts, expected, found, strict=True)
            if e != f
        ]
    print(f"{drafts} drafts: {len(parted)} of {2 * len(prompts)} answers part, at gaps {parted}")
    assert all(difference <= CLOSE for difference in parted) and len(parted) <= 4
