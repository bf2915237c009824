"""DeepSeek-V4 served by vLLM's GPU worker on the simulated NPU: the answers are those of the CPU platform.

With fp32 all families keep the same rows and keys, so one reference serves them; their kernel variants differ. With
bf16 A2 keeps int8 keys, and A5 records and e4m3 keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from tests.npu.conftest import Serve

TOLERANCE = 1e-5
"""fp32 log-probabilities: matrix products round differently with the number of rows."""
EVERY_CASE = ["plain", "chunked", "full", "prefix", "crowd", "preempted"]
REFERENCE = ["plain", "full", "prefix", "crowd"]
PLANNED: dict[str, Any] = {"memory_mb": 512, "gpu_memory_utilization": 0.8, "kv_cache_memory_bytes": None}
"""A device whose memory vLLM divides by what its profiling run takes."""
GRAPHS: dict[str, Any] = {"enforce_eager": False}
IN_SHORT = {
    ("plain", "a5", 0, True),
    ("chunked", "a2", 1, False),
    ("full", "a5", 3, False),
    ("prefix", "a2", 0, True),
    ("crowd", "a5", 1, True),
    ("preempted", "a2", 3, True),
}
"""Case, family, drafts and graphs of what every run of the tests serves: each case, and each number of drafts that no
other test has."""


def drafts(count: int) -> dict[str, Any]:
    """The option for drafts of the MTP block; none for 0."""
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": count}} if count else {}


def check_same(found: Sequence[Any], expected: Sequence[Any], tolerance: float = TOLERANCE) -> None:
    """The same tokens, and log-probabilities within the tolerance."""
    assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in expected]
    for (_, some, _), (_, others, _) in zip(found, expected, strict=True):
        assert max(abs(a - b) for a, b in zip(some, others, strict=True)) <= tolerance


def check_cases(found: dict[str, Any], expected: dict[str, Any], hit: int = 256, tolerance: float = TOLERANCE) -> None:
    """The cases that were served: chunks, `hit` tokens from the prefix cache and preemption change no answer."""
    assert found["device"] == "npu" and expected["device"] == "cpu"
    for name in EVERY_CASE:
        if name in found:
            check_same(found[name], expected[{"chunked": "plain", "preempted": "crowd"}.get(name, name)], tolerance)
    if "prefix" in found:
        assert [cached for *_, cached in found["prefix"]] == [0, hit]


def check_graphs(found: dict[str, Any], graphs: bool) -> None:
    """Every rank captured and replayed graphs, or none."""
    assert found["ranks"]
    for rank in found["ranks"]:
        assert (rank["captures"] > 0) == (rank["replays"] > 0) == graphs


def check_memory(found: dict[str, Any], slack: float = 0.1) -> None:
    """Start and steps needed no more than was planned, and the plan was for at most `slack` more than they needed."""
    assert found["ranks"]
    for rank in found["ranks"]:
        planned = rank["planned"] + rank["caches"]
        needed = max(rank["start"], rank["steps"])
        assert needed <= planned <= needed + slack * rank["planned"], rank


def test_every_case(on_npu: Serve, on_cpu: Serve) -> None:
    found = on_npu("a2", EVERY_CASE, **PLANNED)
    check_cases(found, on_cpu("a2", REFERENCE))
    check_memory(found)
    assert [rank["zeroed"] for rank in found["ranks"]] == [0]


@pytest.mark.parametrize(
    ("family", "graphs"),
    [
        ("a2", False),
        ("a5", True),
        pytest.param("a2", True, marks=pytest.mark.long),
        pytest.param("a5", False, marks=pytest.mark.long),
    ],
)
def test_formats_of_bf16(family: str, graphs: bool, on_npu: Serve, on_cpu: Serve) -> None:
    """Bit for bit the answers of the CPU platform acting as the family, and not those of the other family's formats.

    No tolerance: both compute the same steps with the same library, and no graph of these cases has rows of padding,
    with which fp32 products round differently. With caches of several dtypes vLLM zeroes the pages of new blocks.
    """
    cases = ["prefix", "crowd"]
    found = on_npu(family, cases, "bfloat16", **(GRAPHS if graphs else {}))
    expected = {name: on_cpu(name, cases, "bfloat16") for name in ("a2", "a5")}
    check_cases(found, expected.pop(family), tolerance=0)
    (other,) = expected.values()
    for name in cases:
        with pytest.raises(AssertionError):
            check_same(found[name], other[name], tolerance=0)
    check_graphs(found, graphs)
    assert all(rank["zeroed"] > 0 for rank in found["ranks"])


def test_graphs_with_drafts(on_npu: Serve, on_cpu: Serve) -> None:
    """Decode steps with two drafts are replayed, among prefills that are not; what graphs hold is planned. As vLLM has
    it by itself, a step is scheduled before the number of drafts that the last one accepted is known on the host.
    Drafts are accepted and rejected by greedy requests and by those that sample."""
    found = on_npu("a5", ["plain", "sampled", "crowd"], **PLANNED, **GRAPHS, **drafts(2))
    assert found["ahead"]
    expected = on_cpu("a2", REFERENCE)
    check_cases(found, expected)
    assert found["sampled"] == [tokens for tokens, *_ in expected["plain"]]
    check_graphs(found, True)
    check_memory(found)


@pytest.mark.parametrize(
    ("case", "family", "count", "graphs"),
    [
        pytest.param(*one, marks=() if one in IN_SHORT else pytest.mark.long)
        for one in product(EVERY_CASE, ["a2", "a5"], range(4), [False, True])
    ],
)
def test_drafts_and_graphs(case: str, family: str, count: int, graphs: bool, on_npu: Serve, on_cpu: Serve) -> None:
    """Each case has a process of its own: nothing that another left in the engine can help it.

    With drafts a prompt of 300 tokens has no hit: vLLM asks for a page of the block's window beyond the 256.
    """
    found = on_npu(family, [case], **(GRAPHS if graphs else {}), **drafts(count))
    check_cases(found, on_cpu("a2", REFERENCE), hit=0 if count else 256)
    check_graphs(found, graphs)


@pytest.mark.parametrize("family", [pytest.param("a2", marks=pytest.mark.long), "a5"])
def test_warm_up_before_graphs(family: str, on_npu: Serve, on_cpu: Serve) -> None:
    """With the warm-up of all kernels, of which small limits leave few."""
    options = {"dsv4_triton": {"warm_up": "on"}}
    found = on_npu(family, ["plain"], **GRAPHS, max_num_batched_tokens=32, max_num_seqs=4, additional_config=options)
    check_cases(found, on_cpu("a2", REFERENCE))
    check_graphs(found, True)


@pytest.mark.long
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("family", ["a2", "a5"])
def test_planned_memory(family: str, count: int, dtype: str, graphs: bool, on_npu: Serve) -> None:
    options = {**PLANNED, **(GRAPHS if graphs else {}), **drafts(count)}
    check_memory(on_npu(family, ["full", "crowd"], dtype, **options))


@pytest.mark.parametrize(
    ("case", "limits", "says"),
    [
        ("plain", {"memory_mb": 16}, "NPU out of memory"),
        ("plain", {"memory_mb": 300}, "NPU out of memory"),
        ("plain", {**PLANNED, "gpu_memory_utilization": 0.2}, "[Nn]o available memory"),
        ("starved", {}, "NPU out of memory"),
    ],
    ids=["weights", "caches", "planned", "step"],
)
def test_too_little_memory(case: str, limits: dict[str, Any], says: str, on_npu: Serve) -> None:
    """The process ends with a message that says so."""
    with pytest.raises(AssertionError, match=says):
        on_npu("a2", [case], **limits)
