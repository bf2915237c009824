"""DeepSeek-V4 served by vLLM's GPU worker on the simulated NPU: the answers are those of the CPU platform."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.npu.conftest import Serve

TOLERANCE = 1e-5
"""fp32 log-probabilities: matrix products round differently with the number of rows and with the library."""
GRAPHS: dict[str, Any] = {"enforce_eager": False, "max_num_batched_tokens": 32, "max_num_seqs": 4}
"""Graphs, with few and small steps: every kernel that they launch is compiled before the first capture."""
EVERY_CASE = ["plain", "chunked", "prefix", "crowd", "preempted"]


def check_same(found: Sequence[Any], expected: Sequence[Any], tolerance: float = TOLERANCE) -> None:
    """The same tokens, and log-probabilities within `tolerance`."""
    assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in expected]
    for (_, some, _), (_, others, _) in zip(found, expected, strict=True):
        assert max(abs(a - b) for a, b in zip(some, others, strict=True)) <= tolerance


def check_cases(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The cases that were served: chunks, a warm prefix cache and preemption change no answer."""
    assert found["device"] == "npu:0" and expected["device"] == "cpu"
    for name in EVERY_CASE:
        if name in found:
            check_same(found[name], expected[{"chunked": "plain", "preempted": "crowd"}.get(name, name)])
    if "prefix" in found:
        assert [cached for *_, cached in found["prefix"]] == [0, 256]


def test_every_case(on_npu: Serve, on_cpu: Serve) -> None:
    check_cases(on_npu("a2", EVERY_CASE), on_cpu("a2", ["plain", "prefix", "crowd"]))


def test_graphs_with_drafts(on_npu: Serve, on_cpu: Serve) -> None:
    """Decode steps of two drafts each are replayed, among prefills that are not."""
    found = on_npu(
        "a2", ["plain", "crowd"], **GRAPHS, speculative_config={"method": "mtp", "num_speculative_tokens": 2}
    )
    check_cases(found, on_cpu("a2", ["plain", "prefix", "crowd"]))
    assert found["captures"] > 0 and found["replays"] > 0
