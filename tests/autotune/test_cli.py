"""`dsv4-triton tune`: requests that make no sense, a small run to its end, and carrying results to another machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from dsv4_triton.autotune import report, shipped, store
from dsv4_triton.autotune import run as runs
from dsv4_triton.autotune.store import Entry, Found
from dsv4_triton.autotune.trials import Target, Verdict, try_all
from dsv4_triton.bench.measure import Machine
from dsv4_triton.bench.registry import select
from dsv4_triton.cli import app
from dsv4_triton.compiler.ascend import tools
from dsv4_triton.console import progress_bar
from dsv4_triton.device import HOST
from tests.autotune.conftest import without_home

ENTRY = Entry(
    {"elements": 4096, "x": "float32", "y": "bfloat16"},
    {"BLOCK": 1024, "multibuffer": None},
    {"BLOCK": 512, "multibuffer": None},
    Found("estimate", 1.0, 2.0, "muls_add flash/decode/b1", "Ascend910B2", "2026-01-31", {"triton-ascend": "0.1"}),
)
LARGE = replace(
    ENTRY,
    key=ENTRY.key | {"elements": 1 << 18},
    default={"BLOCK": 8192, "multibuffer": None},
    found=replace(ENTRY.found, case="muls_add flash/decode/b64"),
)


def tune(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["tune", *arguments], env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "a2, a3, a5 or host"),
        (["--family", "a9"], "There are: a2, a3, a5, host"),
        (["--famly", "a2"], "--budget, --case, --family"),
        (["show", "--nope"], "--family, --gains, --json, --kernel"),
        (["--family", "a2", "--kernel", "mul_add"], "did you mean 'muls_add'?"),
        (["--family", "a2", "--kernel", "muls_add", "--case", "nope"], "There are: flash/decode/b1"),
        (["--family", "a2", "--kernel", "muls_add", "--mode", "fast"], "neither 'offline' nor 'device'"),
        (["--family", "a2", "--kernel", "muls_add", "--mode", "device"], "--mode offline"),
        (["--family", "a2", "--kernel", "muls_add", "--json", "/nowhere/x.json"], "cannot be written"),
        (["--family", "a2", "--kernel", "muls_add", "--out", "/dev/null/x"], "choose a folder with --out"),
        (["--family", "a2", "--kernel", "muls_add", "--out", "/proc/x"], "written to /proc/x/a2: No such file or"),
        (["show", "--family", "a9"], "There are: a2, a3, a5, host"),
        (["show", "--kernel", "nope"], "muls_add"),
        (["verify", "--family", "host"], "nothing to verify"),
        (["import", "/nowhere/x.json"], "cannot be read"),
        (["export", "/nowhere/x.json"], "cannot be written"),
        (["export", "/dev/null"], "nothing to export"),
        (["--family", "a2", "--kernel", "nope"], "hc_mix, "),
        (["--family", "host", "--kernel", "attend_scores", "--case", "demo/*/c4"], "launches attend_scores on"),
        (["--family", "a2", "--kernel", "muls_add", "--seconds", "inf"], "inf is no length of time"),
        (["--family", "a2", "--kernel", "muls_add", "--budget", "inf"], "inf is no length of time"),
        (["verify", "--seconds", "inf"], "inf is no length of time"),
    ],
)
def test_bad_requests_say_what_there_is(arguments: list[str], says: str, folder: Path) -> None:
    result = tune(*arguments)
    assert result.exit_code == 2 and says in " ".join(result.output.split())
    assert not folder.exists(), "nothing is left behind"


def test_a_run_writes_files_and_reports(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, page = tmp_path / "run.json", tmp_path / "run.html"
    run = ["--family", "a2", "--kernel", "muls_add", "--case", "flash/decode/b16"]
    result = tune(*run, "--json", str(data), "--html", str(page))
    assert result.exit_code == 0, result.output
    assert "by the estimate of docs/cost_model.md" in " ".join(result.output.split())
    found = json.loads(data.read_text())
    assert "commit" in found["environment"]
    tries = found["results"][0]["tries"]
    assert found["kind"] == "estimate" and found["family"] == "a2" and len(tries) == 12
    assert found["rejected"] == {"fallback": 1} and tries[0]["config"] == found["results"][0]["default"]
    assert found["results"][0]["roofline_microseconds"] <= min(t["microseconds"] for t in tries if t["fate"] == "ok")
    assert "config files: " in result.output
    text = page.read_text()
    assert text.count("data:image/png;base64,") == 1 and "http" not in text
    (entry,) = store.read(store.path(folder, "a2", "muls_add"), "a2", "muls_add")
    assert entry.found.case == "muls_add flash/decode/b16" and entry.found.versions["triton-ascend"] != "0.1"
    assert tune("verify", "--family", "a2", "--kernel", "muls_add").exit_code == 0


def test_a_run_on_the_host_has_this_machines_limit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the table, the JSON and the picture; measured once, and not before there is something to report."""
    tried, measured, drawn = list[object](), list[object](), list[float]()

    def try_all(tries: Any, mode: str, *, done: Any, **_: Any) -> None:
        assert not measured
        tried.extend(tries)
        for index, (_, config) in enumerate(tries):
            done(index, Verdict(dict(config), "ok", "", 50.0))

    def measure(device: torch.device) -> Machine:
        measured.append(device)
        return Machine(1e9, {"float32": 1e12})

    monkeypatch.setattr(runs, "try_all", try_all)
    monkeypatch.setattr(report, "measure_machine", measure)
    monkeypatch.setattr("matplotlib.axes.Axes.hlines", lambda self, y, *_, **__: drawn.append(y))
    report.machine.cache_clear()
    data, page = tmp_path / "run.json", tmp_path / "run.html"
    run = ["--family", "host", "--kernel", "muls_add", "--case", "demo/decode/b5", "--tries", "2"]
    result = tune(*run, "--json", str(data), "--html", str(page))
    report.machine.cache_clear()
    (case,) = select(kernel="muls_add", case="demo/decode/b5")
    least = case.minimum(HOST).bytes / 1e9 * 1e6
    assert result.exit_code == 0 and tried and measured == [torch.device("cpu")]
    (one,) = json.loads(data.read_text())["results"]
    assert one["roofline_microseconds"] == pytest.approx(least) and drawn == [pytest.approx(least)]
    assert f"{least:.4g}" in result.output.split()


def test_no_time_at_all_leaves_everything_for_later(folder: Path) -> None:
    result = tune("--family", "a2", "--kernel", "muls_add", "--case", "flash/decode/b16", "--budget", "0")
    assert "1 of 1 are left" in result.output and not folder.exists() and "config files: " not in result.output


def test_a_folder_is_tried_before_anything_else(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its permissions alone a link to nowhere could be written to."""
    monkeypatch.setattr(runs, "try_all", lambda *_, **__: pytest.fail("it began"))
    place, taken = tmp_path / "place", tmp_path / "taken"
    place.symlink_to(tmp_path / "nowhere")
    taken.mkdir()
    (taken / "a2").write_text("")
    for out, names in ((place, "place/a2"), (taken, "taken/a2")):
        result = tune("--family", "a2", "--kernel", "muls_add", "--case", "flash/decode/b16", "--out", str(out))
        says = f"error: config files cannot be written to {tmp_path / names}: "
        assert result.exit_code == 2 and says in result.output
        assert result.output.endswith("; choose a folder with --out\n")
    assert not (tmp_path / "nowhere").exists() and (taken / "a2").read_text() == ""


def test_pictures_need_matplotlib(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = tmp_path / "run.html"
    result = tune("--family", "a2", "--kernel", "muls_add", "--case", "flash/decode/b16", "--html", str(page))
    assert result.exit_code == 2 and "--html needs matplotlib; pip install matplotlib" in result.output


def test_a_broken_file_is_found_before_anything_is_tried(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "try_all", lambda *_, **__: pytest.fail("it began"))
    file = store.path(folder, "a2", "muls_add")
    file.parent.mkdir(parents=True)
    file.write_text("{")
    result = tune("--family", "a2", "--kernel", "muls_add", "--case", "flash/decode/b16")
    assert result.exit_code == 2 and f"error: {file}: cannot be read" in result.output


def test_a_file_that_breaks_meanwhile_leaves_the_report(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, data = store.path(folder, "a2", "muls_add"), tmp_path / "run.json"

    def breaks(*arguments: Any, **named: Any) -> None:
        try_all(*arguments, **named)
        if file.exists():
            file.write_text("{")

    monkeypatch.setattr(runs, "try_all", breaks)
    cases = ["--case", "flash/decode/b1", "--case", "flash/decode/b16"]
    result = tune("--family", "a2", "--kernel", "muls_add", *cases, "--tries", "1", "--json", str(data))
    assert result.exit_code == 2 and f"error: {file}: cannot be read" in result.output
    results = json.loads(data.read_text())["results"]
    assert "1 of 2 are left" in result.output and [one["finished"] for one in results] == [True, False]


@pytest.mark.parametrize(("seconds", "left"), [(inf, "left -:--:--"), (90.5, "left 0:01:30")])
def test_the_time_left_is_no_longer_than_the_budget(seconds: float, left: str) -> None:
    """Before anything is done nobody knows how long the work takes."""
    stream = StringIO()
    console = Console(file=stream, force_terminal=True, width=200, color_system=None)
    with progress_bar(console, seconds) as progress:
        progress(0, 8, "muls_add flash/decode/b16: BLOCK=1024")
    assert left in stream.getvalue() and "BLOCK=1024" in stream.getvalue()


def test_an_interrupted_run_reports_and_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "try_all", interrupted)
    result = tune("--family", "a2", "--kernel", "muls_add", "--case", "flash/decode/b16")
    assert result.exit_code == 130 and "1 of 1 are left" in result.output and not folder.exists()
    assert "0 kernels and sizes, 0 tries" in result.output and "config files: " not in result.output


def test_an_interrupted_kernel_is_reported_with_its_tries(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that ended, and that it is not finished; nothing is written for it."""
    began: list[int] = []

    def interrupted(tries: Any, mode: str, *, done: Any, **_: Any) -> None:
        for index, (one, config) in enumerate(tries):
            began.append(index)
            if len(began) == 4:
                raise KeyboardInterrupt
            fate = "ok" if config == one.default else "memory"
            done(index, Verdict(dict(config), fate, "UB", 8.0))

    monkeypatch.setattr(runs, "try_all", interrupted)
    data, page = tmp_path / "run.json", tmp_path / "run.html"
    run = ["--family", "a2", "--kernel", "muls_add", "--case", "flash/decode/b16"]
    result = tune(*run, "--json", str(data), "--html", str(page))
    said = " ".join(result.output.split())
    assert result.exit_code == 130 and "1 kernels and sizes, 1 of them not finished, 3 tries" in said
    assert "not finished, nothing was written" in said and "2 did not fit the memories" in said
    assert "1 of 1 are left" in said and "config files: " not in said and not folder.exists()
    (one,) = json.loads(data.read_text())["results"]
    assert [verdict["fate"] for verdict in one["tries"]] == ["ok", "memory", "memory"]
    assert one["finished"] is False and one["winner"] is None and one["configurations"] is None
    assert "not finished, nothing was written" in page.read_text()


def test_a_lost_device_leaves_files_and_report_of_what_was_found(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def gone(tries: list[object], mode: str, **arguments: Any) -> None:
        calls.append(tries)
        if len(calls) > 1:
            raise runs.DeviceLostError("muls_add flash/decode/b16 does not run with its default: no device")
        try_all(tries, mode, **arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(runs, "try_all", gone)
    data = tmp_path / "run.json"
    cases = ["--case", "flash/decode/b1", "--case", "flash/decode/b16"]
    result = tune("--family", "a2", "--kernel", "muls_add", *cases, "--tries", "1", "--json", str(data))
    assert result.exit_code == 1 and "no device. What was found before is kept; go on with --resume" in result.output
    assert "1 of 2 are left" in result.output and len(json.loads(data.read_text())["results"]) == 1
    (entry,) = store.read(store.path(folder, "a2", "muls_add"), "a2", "muls_add")
    assert entry.found.case == "muls_add flash/decode/b1"


def test_show_says_what_is_outdated_and_what_is_broken(folder: Path, tmp_path: Path) -> None:
    store.write(folder, "a2", "muls_add", [ENTRY])
    result = tune("show", "--family", "a2")
    assert result.exit_code == 0 and "triton-ascend 0.1 ->" in result.output and "BLOCK=1024" in result.output
    assert "a2: no entry for attend_merge, " in result.output and " moe_router, o_proj, " in result.output
    odd = replace(ENTRY, found=replace(ENTRY.found, case="muls_add [/x]"))
    file, target = tmp_path / "link.json", tmp_path / "target.json"
    file.symlink_to(target)
    store.write(folder, "a2", "muls_add", [odd])
    result = tune("show", "--family", "a2", "--json", str(file))
    assert result.exit_code == 0 and "muls_add [/x]" in result.output, "what files say is no markup"
    assert file.is_symlink() and json.loads(target.read_text())["entries"][0]["kernel"] == "muls_add"
    store.path(folder, "a2", "muls_add").write_text("{")
    result = tune("show", "--family", "a2")
    assert result.exit_code == 1 and "muls_add.json" in result.output


def test_show_names_the_file_with_an_impossible_time(folder: Path) -> None:
    store.write(store.SHIPPED, "a2", "muls_add", [ENTRY])
    file = store.write(folder, "a2", "muls_add", [ENTRY])
    file.write_text(file.read_text().replace('"microseconds": 1.0', '"microseconds": 0'))
    for gains in ([], ["--gains"]):
        result = tune("show", "--family", "a2", *gains)
        assert result.exit_code == 1 and "1 entries" in result.output
        assert f"{file}: entries[0].found.microseconds is 0, expected from" in " ".join(result.output.split())


def test_a_user_without_a_home_has_no_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write(store.SHIPPED, "a2", "muls_add", [ENTRY])
    without_home(monkeypatch)
    result = tune("show", "--family", "a2")
    assert result.exit_code == 0 and "1 entries" in result.output and "this user has no home" in result.output
    result = tune("--family", "a2", "--kernel", "muls_add")
    assert (
        result.exit_code == 2 and "error: this user has no home: name a folder for config files with" in result.output
    )
    monkeypatch.delenv("DSV4_TRITON_CACHE_DIR", raising=False)
    result = tune("--family", "a2", "--kernel", "muls_add", "--out", str(folder))
    assert result.exit_code == 2 and "error: this user has no home: name a folder for compiled" in result.output


def test_show_sums_up_what_was_gained(folder: Path, tmp_path: Path) -> None:
    """By kernel and kind, and over all kernels, whose ops' times have no sum; hidden entries do not count."""
    nothing = replace(ENTRY, key={"elements": 8192}, config=None, found=replace(ENTRY.found, microseconds=2.0))
    hidden = replace(ENTRY, found=replace(ENTRY.found, default_microseconds=100.0))
    timed = replace(ENTRY, key={"tokens": 1}, found=replace(ENTRY.found, kind="measured", default_microseconds=3.0))
    store.write(folder, "a2", "muls_add", [ENTRY, nothing])
    store.write(store.SHIPPED, "a2", "muls_add", [hidden])
    store.write(folder, "a2", "step_layout", [ENTRY, timed])
    file = tmp_path / "gains.json"
    result = tune("show", "--family", "a2", "--gains", "--json", str(file))
    assert result.exit_code == 0 and "op us, default" in result.output and "what changed" not in result.output
    rows = [
        (one["kernel"], one["kind"], one["entries"], one["winners"], one["default_microseconds"], one["microseconds"],
         round(one["gain"], 3))
        for one in json.loads(file.read_text())["gains"]
    ]  # fmt: skip
    assert rows == [
        ("muls_add", "estimate", 2, 1, 4.0, 3.0, 1.414), ("step_layout", "estimate", 1, 1, 2.0, 1.0, 2.0),
        ("all listed", "estimate", 3, 2, None, None, 1.587), ("step_layout", "measured", 1, 1, 3.0, 1.0, 3.0),
        ("all listed", "measured", 1, 1, None, None, 3.0),
    ]  # fmt: skip


def test_verify_fails_for_what_no_longer_works(folder: Path) -> None:
    config = {"BLOCK": 16384, "multibuffer": None}
    found = replace(ENTRY.found, case="muls_add flash/decode/b16")
    key = ENTRY.key | {"elements": 1 << 16}
    store.write(folder, "a2", "muls_add", [Entry(key, config, ENTRY.default | {"BLOCK": 2048}, found)])
    result = tune("verify", "--family", "a2", "--kernel", "muls_add")
    assert result.exit_code == 1 and "fallback: " in result.output and "1 problems" in result.output


def test_a_default_that_has_changed_since_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compile: the entry without parameters stands for another configuration than the one that was timed."""
    monkeypatch.setattr(shipped, "verify", lambda *_, **__: ())
    current = replace(ENTRY, config=None)
    store.write(folder, "a2", "muls_add", [current, replace(LARGE, config=None, default=ENTRY.default)])
    says = "its default is now BLOCK=8192"
    result = tune("show", "--family", "a2")
    assert result.exit_code == 0 and " ".join(result.output.split()).count("its default is now") == 1
    result = tune("verify", "--family", "a2", "--kernel", "muls_add")
    assert result.exit_code == 1 and f"{LARGE.key}: {says}" in result.output and "1 problems" in result.output


def test_verify_fails_for_what_no_launch_takes(folder: Path) -> None:
    config = {"BLOCK": 4096 + 1024, "multibuffer": None}
    store.write(folder, "a2", "muls_add", [Entry(ENTRY.key, config, ENTRY.default, ENTRY.found)])
    result = tune("verify", "--family", "a2", "--kernel", "muls_add")
    assert result.exit_code == 1 and "it has BLOCK 5120, expected one of" in result.output


def test_verify_holds_defaults_to_the_reference_too_what_sizes_share_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[dict[str, object]] = []

    def differs(target: Target, config: dict[str, object], *_: object) -> Verdict:
        held.append(config)
        return Verdict(config, "wrong", "result 0 differs")

    monkeypatch.setattr(shipped, "check_on_host", differs)
    default = {"BLOCK": 8192, "multibuffer": None}
    sizes = {"flash/decode/b64": 1 << 18, "flash/prefill/t4096": 1 << 24, "pro/decode/b64": 1 << 19}
    found = (replace(ENTRY.found, case=f"muls_add {case}") for case in sizes)
    keys = (ENTRY.key | {"elements": elements} for elements in sizes.values())
    store.write(folder, "a2", "muls_add", [Entry(key, None, default, one) for key, one in zip(keys, found)])
    result = tune("verify", "--family", "a2", "--kernel", "muls_add")
    assert result.exit_code == 1 and "3 entries checked, 3 problems" in result.output
    assert held == [default, default], "once for Flash, once for Pro"


def test_verify_says_what_it_found_before_ctrl_c(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(checked: list[Any], **_: Any) -> Iterator[Any]:
        yield checked[0][1], Verdict({}, "wrong", "result 0 differs")
        raise KeyboardInterrupt

    monkeypatch.setattr(shipped, "verify", interrupted)
    store.write(folder, "a2", "muls_add", [ENTRY, LARGE])
    result = tune("verify", "--family", "a2", "--kernel", "muls_add")
    assert result.exit_code == 130 and "result 0 differs" in result.output
    assert "1 entries checked, 1 problems" in result.output and "1 of 2 are left" in result.output


def test_verify_without_a_compiler_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(arch: str) -> None:
        raise tools.ToolMissingError(f"the compiler of {arch} is missing")

    monkeypatch.setattr(tools, "tools_for", missing)
    store.write(folder, "a2", "muls_add", [ENTRY])
    result = tune("verify", "--family", "a2", "--kernel", "muls_add")
    assert result.exit_code == 2 and result.output.strip() == "error: the compiler of c220 is missing"


def test_export_and_import(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write(folder, "a2", "muls_add", [ENTRY])
    carried = tmp_path / "carried.json"
    assert tune("export", str(carried)).exit_code == 0
    other = tmp_path / "other"
    assert tune("import", str(carried), "--out", str(other)).exit_code == 0
    assert store.read(store.path(other, "a2", "muls_add"), "a2", "muls_add") == [ENTRY]
    text = carried.read_text()
    result = tune("export", str(carried), "--family", "a5")
    assert result.exit_code == 2 and f"no config file of {folder} (FAMILY/KERNEL.json) has an" in result.output
    assert carried.read_text() == text, "an earlier export stays"
    store.path(folder, "a2", "muls_add").unlink()
    again = tmp_path / "again.json"
    again.symlink_to(tmp_path / "elsewhere.json")
    assert tune("export", str(again), "--from", str(other)).exit_code == 0
    assert again.is_symlink() and again.read_text() == text
    content = json.loads(text)
    untouched = tmp_path / "untouched"
    for kernel in ("nope", ["muls_add"]):
        foreign = content | {"entries": [*content["entries"], content["entries"][0] | {"kernel": kernel}]}
        carried.write_text(json.dumps(foreign))
        result = tune("import", str(carried), "--out", str(untouched))
        assert result.exit_code == 2 and f"entries[1].kernel is {kernel!r}" in result.output
        assert not untouched.exists()
    for name, where in ("key", "entries[0]."), ("kernel", "entries[0]."), ("entries", ""):
        lacking = json.loads(text)
        del (lacking["entries"][0] if where else lacking)[name]
        carried.write_text(json.dumps(lacking))
        result = tune("import", str(carried), "--out", str(untouched))
        assert result.exit_code == 2 and f"{carried}: {where}{name} is missing" in result.output
    carried.write_text("[" * 100_000)
    result = tune("import", str(carried), "--out", str(untouched))
    assert result.exit_code == 2 and "cannot be read" in result.output


def test_an_imported_estimate_does_not_replace_what_was_measured(folder: Path, tmp_path: Path) -> None:
    timed = replace(ENTRY, found=replace(ENTRY.found, kind="measured"))
    other = replace(ENTRY, key=ENTRY.key | {"elements": 8192})
    carried, there = tmp_path / "carried.json", tmp_path / "there"
    store.write(folder, "a2", "muls_add", [ENTRY, other])
    assert tune("export", str(carried)).exit_code == 0
    store.write(there, "a2", "muls_add", [timed])
    result = tune("import", str(carried), "--out", str(there))
    assert result.exit_code == 0 and "a2 muls_add: 1 entries, 1 left out: what is there was measured" in result.output
    assert store.read(store.path(there, "a2", "muls_add"), "a2", "muls_add") == [timed, other]
    store.write(folder, "a2", "muls_add", [timed])
    assert tune("export", str(carried)).exit_code == 0
    store.write(there, "a2", "muls_add", [replace(timed, found=replace(timed.found, microseconds=1.5)), ENTRY])
    assert "a2 muls_add: 2 entries\n" in tune("import", str(carried), "--out", str(there)).output
    assert store.read(store.path(there, "a2", "muls_add"), "a2", "muls_add") == [timed, other]


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "dsv4_triton.autotune", "show", "--family", "nope"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "unknown family 'nope'" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("family", ["a2", "a3", "a5"])
def test_every_shipped_entry_passes_all_gates(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of an hour for each family with compiled kernels in the cache."""
    monkeypatch.setenv(store.FOLDER, str(tmp_path))
    result = tune("verify", "--family", family)
    assert result.exit_code == 0, result.output
