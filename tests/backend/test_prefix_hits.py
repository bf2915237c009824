"""How much of a prompt vLLM's cache manager finds again in the caches of this model; no model runs."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest

from dsv4_triton.options import Geometry
from tests.backend.layouts import layout_of, server_config
from tests.backend.test_geometry import packed

GEOMETRIES: list[tuple[Geometry, int | None, int]] = [
    ("fine", None, 256), ("vllm-ascend", 32, 4096), ("vllm-ascend", 128, 16384)
]  # fmt: skip
"""With the tokens from one possible hit to the next."""
CHUNK = 2048
NUMBERS = itertools.count()


class Server:
    """Computes requests as a scheduler would have it done: in chunks, one request after another."""

    def __init__(self, geometry: Geometry, block_size: int | None) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import (
            generate_scheduler_kv_cache_config,
            get_request_block_hasher,
            init_none_hash,
            resolve_kv_cache_block_sizes,
        )

        layout, config = layout_of(geometry=geometry, block_size=block_size), server_config()
        config.cache_config.block_size = layout.block_size
        plan = generate_scheduler_kv_cache_config([packed(layout, 12_000)])
        step, unit = resolve_kv_cache_block_sizes(plan, config)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(unit, sha256)
        self.manager = KVCacheManager(plan, 1 << 20, step, unit, max_in_flight_tokens=CHUNK)

    def compute(self, tokens: list[int], answer: int = 0) -> tuple[Any, int]:
        """The request, its answer of so many tokens included, and how many of its tokens were there already."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        request = Request(str(next(NUMBERS)), tokens, SamplingParams(max_tokens=1), None, block_hasher=self.hasher)
        blocks, hit, _ = self.manager.get_computed_blocks(request)
        found: dict[str, Any] = {"num_new_computed_tokens": hit, "new_computed_blocks": blocks}
        while request.num_computed_tokens < len(tokens):
            start = max(hit, request.num_computed_tokens)
            count = min(CHUNK, len(tokens) - start)
            assert self.manager.allocate_slots(request, count, **found) is not None
            request.num_computed_tokens, found = start + count, {}
        for token in range(answer):
            request.append_output_token_ids(token % 7)
            assert self.manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
        return request, hit

    def end(self, *requests: Any) -> None:
        for request in requests:
            self.manager.free(request)


server = functools.cache(Server)


def words(length: int) -> list[int]:
    """Tokens that say where they stand, after one that nothing else begins with."""
    return [1_000_000 + next(NUMBERS), *range(1000, 999 + length)]


@pytest.mark.parametrize(("geometry", "block_size", "unit"), GEOMETRIES)
@pytest.mark.parametrize("length", [255, 256, 257, 2049, 4096, 4097, 8193, 16384, 16385])
def test_the_same_prompt_again(geometry: Geometry, block_size: int | None, unit: int, length: int) -> None:
    """All whole units but for the last token, which gives the logits; during the first request and after its end, by
    when its window has left the prompt behind."""
    here, tokens = server(geometry, block_size), words(length)
    first, nothing = here.compute(tokens, answer=300)
    during, hit_during = here.compute(tokens)
    here.end(first, during)
    after, hit_after = here.compute(tokens)
    here.end(after)
    assert (nothing, hit_during, hit_after) == (0, *[(length - 1) // unit * unit] * 2)


@pytest.mark.parametrize(("geometry", "block_size", "unit"), GEOMETRIES)
def test_half_of_a_long_prompt(geometry: Geometry, block_size: int | None, unit: int) -> None:
    """The search steps down to the last unit that both prompts have."""
    here, tokens, common = server(geometry, block_size), words(64_530), 32_274
    here.end(here.compute(tokens)[0])
    other, hit = here.compute([*tokens[:common], *[7] * (64_530 - common)])
    here.end(other)
    assert hit == common // unit * unit > 0


@pytest.mark.parametrize(("geometry", "block_size", "unit"), GEOMETRIES)
@pytest.mark.parametrize("index", [33, 129, 4095, 4096, 4097])
def test_one_token_differs(geometry: Geometry, block_size: int | None, unit: int, index: int) -> None:
    """Nothing from there on is taken for known, and both prompts are found whole afterwards."""
    here, tokens = server(geometry, block_size), words(9000)
    other = [*tokens[:index], 7, *tokens[index + 1 :]]
    found = []
    for prompt in (tokens, other, other, tokens):
        request, hit = here.compute(prompt)
        here.end(request)
        found.append(hit)
    assert found == [0, index // unit * unit, *[8999 // unit * unit] * 2]
