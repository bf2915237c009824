"""DeepSeek-V4 served by vLLM's GPU worker on the simulated NPU: the answers are those of the CPU platform.

With fp32 all families keep the same rows and keys, so one reference serves them; their kernel variants differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.npu.conftest import Serve

TOLERANCE = 1e-5
"""fp32 log-probabilities: matrix products round differently with the number of rows and with the library."""
EVERY_CASE = ["plain", "chunked", "prefix", "crowd", "preempted"]
REFERENCE = ["plain", "prefix", "crowd"]
GRAPHS: dict[str, Any] = {"enforce_eager": False}


def drafts(count: int) -> dict[str, Any]:
    """The option for drafts of the MTP block; none for 0."""
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": count}} if count else {}


def check_same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """The same tokens, and log-probabilities within the tolerance."""
    assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in expected]
    for (_, some, _), (_, others, _) in zip(found, expected, strict=True):
        assert max(abs(a - b) for a, b in zip(some, others, strict=True)) <= TOLERANCE


def check_cases(found: dict[str, Any], expected: dict[str, Any], hit: int = 256) -> None:
    """The cases that were served: chunks, `hit` tokens from the prefix cache and preemption change no answer."""
    assert found["device"] == "npu" and expected["device"] == "cpu"
    for name in EVERY_CASE:
        if name in found:
            check_same(found[name], expected[{"chunked": "plain", "preempted": "crowd"}.get(name, name)])
    if "prefix" in found:
        assert [cached for *_, cached in found["prefix"]] == [0, hit]


def test_every_case(on_npu: Serve, on_cpu: Serve) -> None:
    check_cases(on_npu("a2", EVERY_CASE), on_cpu("a2", REFERENCE))


def test_graphs_with_drafts(on_npu: Serve, on_cpu: Serve) -> None:
    """Decode steps with two drafts are replayed, among prefills that are not."""
    found = on_npu("a5", ["plain", "crowd"], **GRAPHS, **drafts(2))
    check_cases(found, on_cpu("a2", REFERENCE))
    assert found["captures"] > 0 and found["replays"] > 0


@pytest.mark.long
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("count", range(4))
@pytest.mark.parametrize("family", ["a2", "a5"])
def test_drafts_and_graphs(family: str, count: int, graphs: bool, on_npu: Serve, on_cpu: Serve) -> None:
    """With drafts a prompt of 300 tokens has no hit: vLLM asks for a page of the block's window beyond the 256."""
    found = on_npu(family, EVERY_CASE, **(GRAPHS if graphs else {}), **drafts(count))
    check_cases(found, on_cpu("a2", REFERENCE), hit=0 if count else 256)
    assert (found["captures"] > 0) == (found["replays"] > 0) == graphs


@pytest.mark.long
@pytest.mark.parametrize("family", ["a2", "a5"])
def test_warm_up_before_graphs(family: str, on_npu: Serve, on_cpu: Serve) -> None:
    """With the warm-up of all kernels, of which small limits leave few."""
    options = {"dsv4_triton": {"warm_up": "on"}}
    found = on_npu(family, ["plain"], **GRAPHS, max_num_batched_tokens=32, max_num_seqs=4, additional_config=options)
    check_cases(found, on_cpu("a2", REFERENCE))
    assert found["captures"] > 0 and found["replays"] > 0
