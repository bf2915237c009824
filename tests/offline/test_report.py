"""The static report: its lines, what counts as a regression, and the command that writes it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dsv4_triton import offline
from dsv4_triton.bench.registry import ops, select
from dsv4_triton.cli import app
from dsv4_triton.device import A2
from dsv4_triton.offline import estimates, peers, report
from dsv4_triton.offline.report import Line, ReportError, markdown, parse, regressions

runner = CliRunner(env={"COLUMNS": "250"})
LINE = Line("a2", "rope", "flash/decode/b1", "ok", 1, 34, 0, 0, 0.31, 0.01, 29.38, "vector", "0.5 somebody")
OTHER = replace(LINE, family="a5", case="flash/decode/b16", ratio=2.0, peer="")
LAUNCHES = "| family | all |\n| --- | --- |\n| a2 | 19 |"


def test_what_is_written_is_read_back() -> None:
    text = markdown([LINE, OTHER], LAUNCHES)
    assert parse(text) == {line.key: line for line in (LINE, OTHER)}
    assert "| a2 | 19 |" in text and text.count("1 of 1 cases are ok.") == 2


@pytest.mark.parametrize("text", ["", "# A page\n\n| a | b |\n", "## Atlas A2 (910B), compiled for X\n\n| r | 1 |\n"])
def test_a_file_that_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(ReportError):
        parse(text)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, ""),
        ({"ratio": 29.38 * 1.04}, ""),
        ({"ratio": 1.0}, ""),
        ({"ratio": 29.38 * 1.06}, "estimate / minimum"),
        ({"ratio": float("nan")}, "estimate / minimum"),
        ({"launches": 2}, "2 launches, were 1"),
        ({"status": "failed"}, "failed"),
        ({"case": "flash/decode/b64"}, "no longer in the report"),
    ],
    ids=str,
)
def test_regressions(change: dict[str, object], says: str) -> None:
    found = regressions([replace(LINE, **change)], {line.key: line for line in (LINE, OTHER)})
    assert (says in found[0]) if says else not found


def test_a_case_that_ends_its_process_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = offline.compile_cases(select("muls_add", ["demo"]) + select("hc_post", ["demo"]), A2)
    line = report._line
    monkeypatch.setattr(report, "_line", lambda case, *rest: os._exit(3) if case.op == "hc_post" else line(case, *rest))
    found = report.lines(compiled, A2)
    assert {one.op: one.status for one in found} == {"muls_add": "ok", "hc_post": "not counted: ended by exit status 3"}


def test_an_estimate_that_ends_its_process_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    count = estimates._launches
    monkeypatch.setattr(
        estimates, "_launches",
        lambda group, *rest: os._exit(3) if group[0].case.op == "hc_post" else count(group, *rest),
    )  # fmt: skip
    found = estimates.estimates(select(["muls_add", "hc_post"], ["demo"]), A2, progress=lambda *_: None)
    problems = {one.op: one.problem for one in found}
    assert problems == {"muls_add": "", "hc_post": "not counted: ended by exit status 3"}
    assert all(one.seconds > 0 for one in found if not one.problem)


def test_command_writes_and_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "launch_table", lambda families: LAUNCHES)
    file = tmp_path / "report.md"
    arguments = ["compile", "--family", "a2", "--kernel", "muls_add", "--model", "demo", "--report", str(file)]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    text = file.read_text()
    lines = parse(text)
    assert lines and all(line.status == "ok" and line.estimate > 0 for line in lines.values())
    assert runner.invoke(app, [*arguments, "--against", str(file)]).exit_code == 0 and file.read_text() == text
    better = tmp_path / "better.md"
    better.write_text(markdown([replace(line, ratio=line.ratio / 2) for line in lines.values()], LAUNCHES))
    result = runner.invoke(app, [*arguments, "--against", str(better)])
    assert result.exit_code == 1 and "estimate / minimum" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--family", "a2", "--against", "x.md"], "needs --report"),
        (["--report", "x.md", "--json", "x.json"], "needs --family"),
        (["--report", "/nonexistent/x.md"], "cannot be written"),
        (["--report", "x.md", "--against", "/nonexistent/x.md"], "No such file"),
    ],
    ids=str,
)
def test_bad_requests(arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, ["compile", "--kernel", "muls_add", "--model", "demo", *arguments])
    assert result.exit_code == 2 and says in result.output and not list(tmp_path.iterdir())


def test_every_peer_belongs_to_a_case() -> None:
    for op, pattern in peers.PEERS:
        assert op in ops() and select(kernel=op, case=pattern)
        assert peers.peer_of(op, select(kernel=op, case=pattern)[0].name, "a2") is peers.PEERS[op, pattern]
    assert peers.peer_of("rope", "flash/decode/b1", "a2") is None
    assert peers.peer_of("hc_post", "flash/decode/b1", "a5") is None
