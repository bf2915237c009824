"""`bench load` without a server: how an answer is judged, and what makes the report a failure."""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from dsv4_triton.bench import load
from dsv4_triton.bench.load import (
    ALLOCATOR,
    ALONE,
    HEADS,
    LEAK,
    TAILS,
    Alone,
    Plan,
    Report,
    Sample,
    judge,
    metrics,
    prompts,
    resident,
    scheduling,
    table,
    unless_interrupted,
)
from dsv4_triton.cli import app
from dsv4_triton.demo.serve import Interrupts, Server, ServerFailedError, free_port

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


def loaded(leak: int, rate: float = 2.0, minutes: float = 10.0) -> Report:
    """A load whose memory settles in its first half and then grows by `leak` bytes an answer, under what the steps that
    samples fall into hold: up to 60 MiB."""
    chance = random.Random(0)
    memory = []
    for second in range(0, round(60 * minutes), 5):
        ended = round(rate * second)
        settled = min(second, 30 * minutes) * (1 << 20)
        memory.append(Sample(second, ended, {"a": round(settled + leak * ended), "b": chance.randrange(60 << 20)}))
    return Report(Plan(), seconds=60 * minutes, memory=memory)


def test_what_is_a_problem() -> None:
    report = loaded(100 << 10)
    report.metrics |= {"running at the end": 1.0, "cache in use at the end": 0.5}
    report.errors.append("gone")
    assert [re.split(r":| by ", problem)[0] for problem in report.problems] == [
        "gone", "memory grew", "running at the end", "cache in use at the end"
    ]  # fmt: skip
    assert report.as_dict()["problems"] == report.problems


class Fake:
    """A server that was ready and has ended."""

    url = "http://127.0.0.1:1"
    process = SimpleNamespace(pid=1)

    def __init__(self, command: list[str], *, port: int, log: Path, **_: Any) -> None:
        self.log = log
        log.write_text("asynchronous scheduling on\n")

    def ready(self) -> bool:
        raise ServerFailedError("the server ended with status -11")

    def last_lines(self, count: int) -> list[str]:
        return ["worker died"]

    def stop(self) -> None:
        pass


def test_a_server_that_dies_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was found before is reported, with the death and the last lines of the log."""

    async def drive(url: str, pid: int, report: Report, vocab: int, progress: Any) -> None:
        report.answers = 400
        report.errors.append("prompt 3: gone")
        metrics(f"http://127.0.0.1:{free_port()}")

    for name, value in (("Server", Fake), ("write_checkpoint", lambda *_: True), ("drive", drive)):
        monkeypatch.setattr(load, name, value)
    monkeypatch.setattr(load, "wait_until_ready", lambda *_: 0.0)
    file = tmp_path / "r.json"
    result = CliRunner().invoke(app, ["bench", "load", "--minutes", "0", "--json", str(file)])
    assert result.exit_code == 1, result.output
    assert "error: the server ended with status -11; URLError: " in result.output and "\nworker died\n" in result.output
    assert "400" in result.output and "problem: prompt 3: gone" in result.output
    content = json.loads(file.read_text())
    assert content["answers"] == 400 and content["ended"].startswith("the server ended with status -11")
    assert content["environment"]["device"] == "cpu" and content["environment"]["chip"]


def test_a_dead_server_ends_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, not after all its minutes."""

    async def alone(*_: Any) -> Alone:
        return EXPECTED

    async def ask(*_: Any) -> list[int]:
        await asyncio.sleep(0.01)
        raise ConnectionError("connection refused")

    monkeypatch.setattr(load, "alone", alone)
    monkeypatch.setattr(load, "ask", ask)
    ended = subprocess.Popen([sys.executable, "-c", ""])  # not waited for: a zombie, as a server's process is
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    report = Report(Plan(minutes=10))
    with pytest.raises(ServerFailedError, match="the server is gone"):
        asyncio.run(load.drive("http://127.0.0.1:1", ended.pid, report, 400, lambda *_: None))
    assert 0 < report.seconds < 60
    ended.wait()


@pytest.mark.parametrize(
    ("leak", "rate", "fails"), [(0, 2.0, False), (0, 1.0, False), (100 << 10, 2.0, True), (100 << 10, 1.0, True)]
)
def test_memory_that_grows_with_answers(leak: int, rate: float, fails: bool) -> None:
    """On a quick and on a slow machine; what grows in the first half is no leak, and noise is none."""
    report = loaded(leak, rate)
    assert report.growth is not None and abs(report.growth - leak) < LEAK
    assert bool(report.problems) is fails


def test_few_answers_are_not_judged() -> None:
    report = loaded(100 << 10, minutes=1.0)
    assert report.growth is None and report.problems == [] and "too few answers" in str(table(report).columns[1]._cells)


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


def test_a_servers_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A variable is left out wherever it comes from; a default gives way to this process's own."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    monkeypatch.setenv("THEIRS", "theirs")
    show = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    defaults = {"THEIRS": "ours", "OURS": "ours"}
    server = Server(show, port=1, log=tmp_path / "log", defaults=defaults, unset=("VLLM_CPU_KVCACHE_SPACE",))
    server.process.wait(60)
    found = json.loads(server.log.read_text())
    assert (found["THEIRS"], found["OURS"]) == ("theirs", "ours")
    assert "HF_HUB_OFFLINE" in found and "VLLM_CPU_KVCACHE_SPACE" not in found


STEPS = """
import random, sys, torch
torch.set_num_threads(1)
chance, kept = random.Random(0), []
print("ready", flush=True)
sys.stdin.readline()
for step in range(20):
    tokens = chance.randint(1, 512)
    for layer in range(3):  # each tensor lives until the next layer's is there; something small stays for longer
        x = torch.zeros(tokens, 4096)
        x = [torch.zeros(tokens, chance.choice((128, 512, 1024))) for _ in range(8)]
        kept.append(torch.zeros(chance.randint(100, 1000)))
    del x, kept[:-192]
print("done", flush=True)
sys.stdin.readline()
"""


def test_the_allocator_gives_back_what_is_freed() -> None:
    """What steps of all sizes leave behind is less than one of them held: 8 MiB on average. With the heap of glibc 2.36
    as it is by default it is 46 MiB after these 20 steps, and 200 MiB after 300 twice as long."""
    with subprocess.Popen(
        [sys.executable, "-c", STEPS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, **ALLOCATOR},
    ) as process:  # fmt: skip
        assert process.stdin and process.stdout
        sizes = []
        for word in ("ready", "done"):
            assert process.stdout.readline() == f"{word}\n"
            sizes.append(sum(resident(process.pid).values()))
            process.stdin.write("\n")
            process.stdin.flush()
    assert sizes[1] - sizes[0] < 16 << 20
