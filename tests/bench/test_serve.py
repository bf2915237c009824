"""`bench serve` without a server: the client's command and result, and that the server is stopped whatever happens."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dsv4_triton.bench import serve
from dsv4_triton.bench.serve import FIGURES, Load, Report, client_command, client_run, explained, measure
from dsv4_triton.cli import app
from dsv4_triton.demo.serve import Interrupts, Server, ServerFailedError, free_port

LOAD = Load(requests=3, prompt_tokens=20, new_tokens=5)
RESULT = {"completed": 3, "total_output_tokens": 15, "unrelated": 1, **dict.fromkeys(FIGURES, 7.5)}


class Fake:
    """A server that is ready at once."""

    stopped = 0

    def __init__(self, command: list[str], *, port: int, log: Path) -> None:
        assert command[command.index("--host") + 1] == "127.0.0.1"
        self.url = f"http://127.0.0.1:{port}"

    def ready(self) -> bool:
        return True

    def message(self) -> str:
        return ""

    def last_lines(self, count: int) -> list[str]:
        return ["the server's last word"]

    def stop(self) -> None:
        Fake.stopped += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    Fake.stopped = 0
    monkeypatch.setattr(serve, "Server", Fake)
    monkeypatch.setattr(serve, "write_checkpoint", lambda *_: True)
    return Fake


def client(monkeypatch: pytest.MonkeyPatch, *, status: int = 0, **changes: Any) -> None:
    """vLLM's client ends with a status and leaves a result."""

    def run(command: list[str], **_: Any) -> Any:
        folder, name = (command[command.index(option) + 1] for option in ("--result-dir", "--result-filename"))
        Path(folder, name).write_text(json.dumps({**RESULT, **changes}))
        return SimpleNamespace(returncode=status, stdout="a line\n", stderr="the last word\n")

    monkeypatch.setattr(subprocess, "run", run)


def test_the_client_is_vllms_own(tmp_path: Path) -> None:
    command = client_command("http://127.0.0.1:1", tmp_path, LOAD, tmp_path / "r.json", 3)
    assert command[1:5] == ["-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    options = dict(pairwise(command))
    assert (options["--num-prompts"], options["--random-input-len"], options["--random-output-len"]) == ("3", "20", "5")
    assert options["--tokenizer"] == str(tmp_path) and options["--base-url"] == "http://127.0.0.1:1"


def test_a_run_of_the_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server: Any = Fake(["--host", "127.0.0.1"], port=1, log=tmp_path)
    client(monkeypatch)
    assert client_run(server, tmp_path / "model", LOAD, 0) == dict.fromkeys(FIGURES, 7.5)
    client(monkeypatch, completed=2)
    with pytest.raises(ServerFailedError, match="2 of 3 requests came back, with 15 of 15 tokens"):
        client_run(server, tmp_path / "model", LOAD, 0)
    client(monkeypatch, status=1)
    with pytest.raises(ServerFailedError, match="status 1:\na line\nthe last word"):
        client_run(server, tmp_path / "model", LOAD, 0)
    monkeypatch.undo()
    monkeypatch.setattr(serve, "CLIENT_SECONDS", 0.01)
    monkeypatch.setattr(serve, "client_command", lambda *_: ["sleep", "60"])
    with pytest.raises(ServerFailedError, match=r"vLLM's client was not done after 0\.01 s"):
        client_run(server, tmp_path / "model", LOAD, 0)


def test_sides_take_turns_and_the_first_run_does_not_count(monkeypatch: pytest.MonkeyPatch, fake: type[Fake]) -> None:
    turns: list[str] = []

    def ours(server: Any, directory: Path, load: Load, seed: int) -> dict[str, float]:
        turns.append(f"server {seed}")
        return dict.fromkeys(FIGURES, 10.0 * seed)

    monkeypatch.setattr(serve, "client_run", ours)
    monkeypatch.setattr(serve, "transformers_run", lambda *_: lambda: turns.append("transformers") or 10.0)
    report = Report("float32", LOAD)
    measure(report, 2, True, Console(quiet=True), Interrupts())
    assert turns == ["server 0", "transformers", "server 1", "transformers", "server 2", "transformers"]
    assert report.median("output_throughput") == 15 and report.transformers == [10.0, 10.0] and report.ratio == 1.5
    content = report.as_dict()
    assert content["medians"]["mean_ttft_ms"] == 15 and content["load"]["requests"] == 3
    assert fake.stopped == 1


@pytest.mark.parametrize(
    ("event", "becomes", "says"),
    [
        (ServerFailedError("lost"), ServerFailedError, "lost\nthe server's last word"),
        (KeyboardInterrupt(), KeyboardInterrupt, ""),
        (ValueError("other"), ServerFailedError, "ValueError: other\nthe server's last word"),
    ],
    ids=["failed", "interrupted", "other"],
)
def test_the_server_is_stopped_whatever_happens(
    monkeypatch: pytest.MonkeyPatch, fake: type[Fake], event: BaseException, becomes: type[BaseException], says: str
) -> None:
    def broken(server: Any, directory: Path, load: Load, seed: int) -> dict[str, float]:
        if seed == 2:
            raise event
        return dict.fromkeys(FIGURES, 1.0)

    monkeypatch.setattr(serve, "client_run", broken)
    report = Report("float32", LOAD)
    with pytest.raises(becomes, match=f"^{says}$"):
        measure(report, 3, False, Console(quiet=True), Interrupts())
    assert fake.stopped == 1 and len(report.runs) == 1, "what was done is kept"
    assert report.ratio is None and report.as_dict()["medians"]["output_throughput"] == 1.0


def test_what_is_done_is_printed_and_written_when_transformers_fails(
    monkeypatch: pytest.MonkeyPatch, fake: type[Fake], tmp_path: Path
) -> None:
    turns: list[int] = []

    def other() -> float:
        turns.append(0)
        if len(turns) == 3:
            raise RuntimeError("transformers returned (1, 2)")
        return 10.0

    monkeypatch.setattr(serve, "client_run", lambda *_: dict.fromkeys(FIGURES, 20.0))
    monkeypatch.setattr(serve, "transformers_run", lambda *_: other)
    file = tmp_path / "r.json"
    result = CliRunner().invoke(app, ["bench", "serve", "--json", str(file)])
    assert result.exit_code == 1 and fake.stopped == 1
    assert "error: RuntimeError: transformers returned (1, 2)" in result.output
    assert "ratio 2.00" in result.output and "20.0 20.0" in result.output, "the server's second run had ended"
    content = json.loads(file.read_text())
    assert content["ended"].startswith("RuntimeError: transformers returned")
    assert (len(content["runs"]), len(content["transformers"])) == (2, 1)
    assert content["environment"]["chip"] and content["environment"]["versions"]["torch"]


def test_a_server_that_ended_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its clients learn of it before it can be waited for, and know only that the connection is gone."""
    log = tmp_path / "log"
    command = [sys.executable, "-c", "import time; time.sleep(1); print('XError: gone'); raise SystemExit(7)"]
    server = Server(command, port=free_port(), log=log)
    with pytest.raises(ServerFailedError) as caught, explained(server):
        raise ConnectionError("connection refused")
    expected = "the server ended with status 7; XError: gone; ConnectionError: connection refused\nXError: gone"
    assert str(caught.value) == expected
    with pytest.raises(ServerFailedError) as caught, explained(server):
        server.ready()
    assert str(caught.value) == "the server ended with status 7; XError: gone\nXError: gone", "said once"
