"""`bench load` without a server: how an answer is judged, and what makes the report a failure."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import urllib.request
from pathlib import Path

import pytest

from dsv4_triton.bench import load
from dsv4_triton.bench.load import (
    ALONE,
    HEADS,
    TAILS,
    Alone,
    Plan,
    Report,
    judge,
    metrics,
    prompts,
    scheduling,
    unless_interrupted,
)
from dsv4_triton.demo.serve import Interrupts, Server

EXPECTED = Alone([5, 6, 7, 8], [1.0, 1e-5, 1.0, 1.0])


@pytest.mark.parametrize(
    ("got", "wanted", "whole", "counts"),
    [
        ([5, 6, 7, 8], 4, True, (1, 0, 0, 0, 0)),
        ([5, 6], 2, True, (1, 0, 0, 0, 0)),
        ([5], 4, False, (0, 1, 0, 0, 0)),
        ([], 4, False, (0, 1, 0, 0, 0)),
        ([5, 9, 1, 1], 4, True, (1, 0, 1, 0, 0)),
        ([5, 6, 9, 8], 4, True, (1, 0, 0, 1, 0)),
        ([9], 4, False, (0, 1, 0, 1, 0)),
        ([5, 6, 7], 4, True, (1, 0, 0, 0, 1)),
    ],
)
def test_an_answer_is_held_to_the_one_alone(
    got: list[int], wanted: int, whole: bool, counts: tuple[int, int, int, int, int]
) -> None:
    """Counted are answers, those whose client left, ties, wrong ones and errors."""
    report = Report(Plan())
    judge(report, EXPECTED, got, wanted, whole, "one")
    assert (report.answers, report.left, report.ties, len(report.wrong), len(report.errors)) == counts


def test_prompts_share_heads_and_fit() -> None:
    found = prompts(0, 400)
    assert len(found) == len(HEADS) * len(TAILS) + len(ALONE) == len({tuple(p) for p in found})
    assert found == prompts(0, 400) != prompts(1, 400)
    assert found[0][: HEADS[0]] == found[1][: HEADS[0]]
    assert max(map(len, found)) + Plan().new_tokens <= load.CONTEXT and max(map(max, found)) < 400


def test_what_is_a_problem() -> None:
    sizes = [50, 70, 90, 100, 100, 100, 101, 101]
    report = Report(Plan(), memory=[(5.0 * i, {"a": size - 9, "b": 9}) for i, size in enumerate(sizes)])
    report.metrics["running at the end"] = 0.0
    assert report.problems == [] and report.growth == pytest.approx(0.01)
    report.memory[-1] = (35.0, {"a": 120})
    report.metrics |= {"running at the end": 1.0, "cache in use at the end": 0.5}
    report.errors.append("gone")
    assert [problem.split(":")[0] for problem in report.problems] == [
        "gone", "memory grew by 10.5% in the last quarter", "running at the end", "cache in use at the end"
    ]  # fmt: skip
    assert json.loads(report.as_json())["problems"] == report.problems


def test_metrics_are_summed_over_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '# HELP x\nvllm:num_requests_running{engine="0"} 1.0\nvllm:num_requests_running{engine="1"} 2.0\nother 5\n'
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.BytesIO(text.encode()))
    assert metrics("http://127.0.0.1:1") == {"running at the end": 3.0}


def test_the_servers_scheduling_is_in_its_log() -> None:
    log = "INFO [a.py:1] DeepSeek-V4\nINFO [causal_lm.py:110] asynchronous scheduling on, 2 drafts a step\nINFO b\n"
    assert scheduling(log) == "asynchronous scheduling on, 2 drafts a step"
    assert scheduling("") == ""


def test_an_interrupt_ends_the_load() -> None:
    """At its next wait, quietly; errors come through."""
    interrupts, done = Interrupts(), []

    async def client() -> None:
        interrupts.pending = True
        await asyncio.sleep(60)
        done.append("never")

    async def broken() -> None:
        raise ValueError("no answer")

    asyncio.run(unless_interrupted(client(), interrupts))
    assert not done
    with pytest.raises(ValueError, match="no answer"):
        asyncio.run(unless_interrupted(broken(), Interrupts()))


def test_a_server_without_a_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither from this process nor from what servers get by default."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    show = [sys.executable, "-c", "import os; print(*os.environ)"]
    server = Server(show, port=1, log=tmp_path / "log", unset=("VLLM_CPU_KVCACHE_SPACE",))
    server.process.wait(60)
    names = server.log.read_text().split()
    assert "HF_HUB_OFFLINE" in names and "VLLM_CPU_KVCACHE_SPACE" not in names
