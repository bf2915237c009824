"""Speculation at length: answers of 200 prompts, batched and alone, and cache rows in the formats of an NPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.model import engine
from tests.model.speculation import GAIN, check_rows, edited_copy, guessing_well, speculation

TOKENS = 12
OPTIONS = {"max_model_len": 1024, "max_num_seqs": 32}
CLOSE = 1e-4
"""Greedy choices between log-probabilities that are closer may differ, since products of matrices round differently
with the number of rows."""


def lengths() -> list[int]:
    """From 1 to 600, most of them short, and all that lie next to the edge of a page or window."""
    rng = random.Random(0)
    edges = [edge + step for edge in (4, 64, 128, 256, 512) for step in (-1, 0, 1)]
    return edges + [int(600 ** rng.random()) for _ in range(200 - len(edges))]


PROMPTS = [engine.prompt(length, seed) for seed, length in enumerate(lengths())]


def gap(plain: Any, prompt: list[int], expected: list[int], found: list[int]) -> float:
    """The difference of log-probability between the two tokens that come first where two answers part."""
    at = next(index for index, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b)
    before = prompt + expected[:at]
    one, other = (float(engine.score(plain, [[*before, tokens[at]]])[0][-1]) for tokens in (expected, found))
    return abs(one - other)


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    guessing = partial(guessing_well, gain=GAIN)
    return edited_copy(checkpoint("float32"), tmp_path_factory.mktemp("guessing") / "model", guessing)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Any]:
    with engine.engine(folder, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(plain: Any) -> list[list[int]]:
    return [tokens for tokens, *_ in engine.generate(plain, PROMPTS, TOKENS)]


@pytest.mark.long
@pytest.mark.parametrize("drafts", [1, 2, 3])
@pytest.mark.parametrize("together", [32, 1], ids=["batched", "alone"])
def test_200_prompts(folder: Path, plain: Any, expected: list[list[int]], drafts: int, together: int) -> None:
    with engine.engine(folder, **OPTIONS, **speculation(drafts)) as llm:
        found = [
            tokens
            for start in range(0, len(PROMPTS), together)
            for tokens, *_ in engine.generate(llm, PROMPTS[start : start + together], TOKENS)
        ]
    parted = [gap(plain, p, e, f) for p, e, f in zip(PROMPTS, expected, found, strict=True) if e != f]
    print(f"{drafts} drafts: {len(parted)} of {len(PROMPTS)} answers part, at gaps {parted}")
    assert all(difference <= CLOSE for difference in parted) and len(parted) <= 2


@pytest.mark.long
def test_cache_rows_in_the_formats_and_pages_of_an_npu(checkpoint: Callable[[str], Path]) -> None:
    """Records of fp8 and fp8 keys in the page tables of vllm-ascend (bf16)."""
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "additional_config": {"dsv4_triton": {"device_family": "a5", "geometry": "vllm-ascend"}},
    }
    folder = checkpoint("bfloat16")
    with engine.engine(folder, **options) as plain, engine.engine(folder, **options, **speculation(3)) as drafting:
        check_rows(plain, drafting, 3)
