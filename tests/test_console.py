"""What the commands share: files are written last and each on its own, and options that nobody reads are refused."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dsv4_triton.cli import app
from dsv4_triton.console import ended_like_ctrl_c, refuse_unwritable, write_files

runner = CliRunner()


def test_each_file_is_written_whatever_becomes_of_the_others(tmp_path: Path) -> None:
    data, text = tmp_path / "a.json", tmp_path / "b.txt"
    with pytest.raises(OSError, match=r"^/dev/full could not be written: No space left on device; .*: Is a directory$"):
        write_files((Path("/dev/full"), "x"), (data, {"a": 1}), (None, "y"), (tmp_path, "z"), (text, "t"))
    assert json.loads(data.read_text()) == {"a": 1} and text.read_text() == "t"


def test_outputs_that_cannot_be_are_refused(tmp_path: Path) -> None:
    refuse_unwritable((tmp_path / "a", None, tmp_path / "b", Path("/dev/null"), Path("/dev/null")))
    (tmp_path / "link").symlink_to("a")
    for second in (tmp_path / "a", tmp_path / "." / "a", tmp_path / "link"):
        with pytest.raises(ValueError, match="is given for two outputs; each needs a file of its own"):
            refuse_unwritable((tmp_path / "a", None, second))
    with pytest.raises(OSError, match="cannot be written"):
        refuse_unwritable((tmp_path / "nowhere" / "a",))


def test_a_polite_end_is_ctrl_c_meanwhile() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), ended_like_ctrl_c():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("arguments", "option", "command"),
    [
        (["bench", "--kernel", "nope", "launches"], "--kernel", "launches"),
        (["bench", "--estimate", "step"], "--estimate", "step"),
        (["tune", "--family", "a2", "show"], "--family", "show"),
    ],
    ids=str,
)
def test_options_of_a_group_are_not_for_its_commands(arguments: list[str], option: str, command: str) -> None:
    result = runner.invoke(app, arguments)
    said = " ".join(result.output.replace("│", " ").split())
    assert result.exit_code == 2 and f"Invalid value for {option}: stands before '{command}'" in said, result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonesuch"], "No such command 'nonesuch'. There are: doctor, demo, compile, bench, tune"),
        (["tune", "shw"], "No such command 'shw'. Did you mean 'show'? There are: show, verify, export, import"),
    ],
    ids=str,
)
def test_an_unknown_command_is_told_what_there_is(arguments: list[str], says: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2 and says in " ".join(result.output.replace("│", " ").split()), result.output


def test_compile_prints_before_it_writes() -> None:
    """A full device is told of last, and named."""
    arguments = ["--family", "a2", "--kernel", "muls_add", "--case", "flash/decode/b1", "--json", "/dev/full"]
    result = runner.invoke(app, ["compile", *arguments])
    assert result.exit_code == 2, result.output
    assert "1 kernels of 1 cases: 1 compiled, 0 failed" in result.output
    assert result.output.endswith("error: /dev/full could not be written: No space left on device\n")
