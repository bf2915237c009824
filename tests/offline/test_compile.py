"""`dsv4-triton compile`: what it compiles, prints and writes, and what it says to a request that makes no sense."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dsv4_triton import offline
from dsv4_triton.autotune import store
from dsv4_triton.cli import app
from dsv4_triton.compiler.ascend import tools
from dsv4_triton.compiler.ascend.facts import Facts, ScalarLoop, UnwrittenRead
from dsv4_triton.compiler.ascend.result import CompileResult
from dsv4_triton.compiler.ascend.tools import Diagnostics
from dsv4_triton.device import A2, A5, FAMILIES
from dsv4_triton.offline import report as reports

runner = CliRunner(env={"COLUMNS": "250"})
SMALL = ["compile", "--family", "a2", "--kernel", "muls_add", "--model", "demo"]


@pytest.fixture(autouse=True)
def _without_cann(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools.shutil, "which", lambda name: None)


def run(*arguments: str):
    return runner.invoke(app, list(arguments))


def test_help_names_the_families_and_models() -> None:
    result = run("compile", "--help")
    assert result.exit_code == 0 and "a2, a3 or a5" in result.output and "flash, pro" in result.output


@pytest.mark.parametrize("family", ["a2", "a3", "a5"])
def test_table_and_report(family: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = run("compile", "--family", family, "--kernel", "muls_add", "--kernel", "rope", "--model", "demo",
                 "--jobs", "2", "--json", str(file))  # fmt: skip
    assert result.exit_code == 0, result.output
    assert FAMILIES[family].target in result.output and "muls_add" in result.output and " ok " in result.output
    assert "hivmc (part of CANN) is not installed" in result.output and "Nothing ran on a device" in result.output
    report = json.loads(file.read_text())
    assert (report["family"], report["ok"], report["hivmc"]) == (family, True, False)
    assert "commit" in report["environment"]
    assert report["versions"]["triton-ascend"] and {entry["op"] for entry in report["kernels"]} == {"muls_add", "rope"}
    for entry in report["kernels"]:
        assert entry["status"] == "ok" and entry["cases"] and entry["types"] and entry["flags"]
        assert entry["facts"]["core"] == "vector" and entry["facts"]["plan"][0]["memory"] == "UB"


def test_a_report_takes_shipped_parameters_whatever_the_user_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a user tuned counts for a compile, which says so, and not for a report, which others compare with."""
    first, *_ = shipped = store.read(store.path(store.SHIPPED, "a2", "muls_add"), "a2", "muls_add")
    usual, own = first.config or {}, {**first.default, "BLOCK": 64}
    store.write(tmp_path, "a2", "muls_add", [replace(entry, config=own) for entry in shipped])
    monkeypatch.setenv(store.FOLDER, str(tmp_path))
    store.forget()
    result = run(*SMALL)
    assert result.exit_code == 0 and f"{tmp_path / 'a2'} hides shipped launch parameters" in result.output
    assert store.lookup("a2", "muls_add", first.key) == own

    found = []

    def compile_cases(*_, **__):
        found.append(store.lookup("a2", "muls_add", first.key))
        return []

    monkeypatch.setattr(offline, "compile_cases", compile_cases)
    monkeypatch.setattr(reports, "launch_table", lambda _: "")
    result = run(*SMALL, "--report", str(tmp_path / "report.md"))
    assert result.exit_code == 0 and "hides" not in result.output and found == [usual]
    assert store.lookup("a2", "muls_add", first.key) == own
    monkeypatch.undo()
    store.forget()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--family", "a4"], ["unknown family 'a4'", "a2, a3, a5"]),
        (["--family", "host"], ["unknown family 'host'", "a2, a3, a5"]),
        (["--family", "a2", "--kernel", "rop"], ["unknown kernel 'rop'", "did you mean 'rope'", "muls_add"]),
        (["--family", "a2", "--model", "v3"], ["unknown model 'v3'", "flash, pro"]),
        (["--family", "a2", "--kernel", "rope", "--case", "nonesuch"], ["unknown case 'nonesuch'", "flash/decode/b1"]),
        (["--family", "a2", "--jobs", "0"], ["--jobs"]),
        ([], ["--family"]),
    ],
    ids=str,
)
def test_bad_requests_list_what_exists(arguments: list[str], says: list[str]) -> None:
    result = run("compile", *arguments)
    assert result.exit_code == 2
    for text in says:
        assert text in result.output


def test_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(arch: str) -> None:
        raise tools.ToolMissingError("bishengir-compile is missing: pip install [this]")

    monkeypatch.setattr("dsv4_triton.compiler.ascend.tools_for", missing)
    result = run(*SMALL)
    assert result.exit_code == 2 and "bishengir-compile is missing: pip install [this]" in result.output


def test_report_that_cannot_be_written(tmp_path: Path) -> None:
    result = run(*SMALL, "--json", str(tmp_path))
    assert result.exit_code == 2 and str(tmp_path) in result.output


def test_failures_are_shown_and_decide_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(launches, family, **_):
        return [
            CompileResult(launch.kernel.__name__, family.name, "crash", "hivm", "it crashed") for launch in launches
        ]

    monkeypatch.setattr(offline, "compile_all", fail)
    result = run(*SMALL)
    assert result.exit_code == 1 and "crash" in result.output and "it crashed" in result.output
    assert "0 compiled, 2 failed" in result.output or "0 compiled, 1 failed" in result.output


def test_an_op_that_refuses_a_case_is_one_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    real = offline.record

    def record(case, family):
        if case.op == "rope":
            raise ValueError("no such rotation")
        return real(case, family)

    monkeypatch.setattr(offline, "record", record)
    compiled = offline.compile_cases(offline.choose(["muls_add", "rope"], ["demo"], []), A2, jobs=1)
    refused = [one for one in compiled if one.launch is None]
    assert refused and all(one.case.op == "rope" and one.result.stage == "launch" for one in refused)
    assert "ValueError: no such rotation" in refused[0].result.message
    assert all(one.result.ok for one in compiled if one.launch is not None)
    assert not offline.succeeded(compiled)


def facts(**changes) -> Facts:
    values = {
        "core": "mixed", "plan": (), "both_vector_cores": True, "one_core_stores": 0, "pipelined": 0,
        "workspace_bytes": 0, "loads": {}, "stores": {}, "unwritten": (), "lost_loads": (), "scalar_loops": (),
        "scalar_library": (),
    }  # fmt: skip
    return Facts(**{**values, **changes})


def test_what_is_a_fault_and_what_a_loss() -> None:
    case = offline.choose(["muls_add"], ["demo"], [])[0]

    def judged(result: CompileResult) -> tuple[bool, bool]:
        compiled = [offline.Compiled(case, None, result)]
        return offline.succeeded(compiled), offline.succeeded(compiled, strict=True)

    good = CompileResult("k", "a2", "ok", facts=facts(), flags=("--enable-auto-bind-sub-block=True",))
    assert judged(good) == (True, True)
    read = UnwrittenRead("aiv", "vcast", "UB", 0, 8192, False)
    loop = ScalarLoop("aiv", 1, 64, 1, 1, 1, 0)
    for changed in (
        {"facts": facts(unwritten=(read,))}, {"facts": facts(lost_loads=("x",))},
        {"missing": ("vadd_1d_float",)}, {"status": "failed"},
    ):  # fmt: skip
        assert judged(CompileResult(**{**vars(good), **changed})) == (False, False)
    for changed in (
        {"facts": facts(scalar_loops=(loop,))}, {"facts": facts(both_vector_cores=False)},
        {"said": Diagnostics(notes=("multi-buffer off",))}, {"facts": facts(scalar_library=("hivm.hir.vcumsum",))},
    ):  # fmt: skip
        assert judged(CompileResult(**{**vars(good), **changed})) == (True, False)
    unasked = CompileResult("k", "a5", "ok", facts=facts(both_vector_cores=False), flags=())
    assert judged(unasked) == (True, True)


def test_default_models_are_the_real_ones() -> None:
    assert {case.model for case in offline.choose(["rope"], [], [])} == {"flash", "pro"}
    assert {case.model for case in offline.choose([], ["pro"], ["pro/decode/*"])} == {"pro"}


def test_a_launch_is_recorded_as_the_family_makes_it() -> None:
    case = offline.choose(["muls_add"], ["pro"], ["pro/prefill/*"])[0]
    for family in (A2, A5):
        (found,) = offline.record(case, family)
        assert found.launch.grid == (family.vector_cores, 1, 1) and not found.scratch


def test_scratch_is_what_only_the_launches_of_an_op_see() -> None:
    case = offline.choose(["hc_head"], ["demo"], [])[0]
    recorded = offline.record(case, A2)
    assert len(recorded) == 2
    assert all(one.scratch and one.scratch < set(one.launch.arguments) for one in recorded)
    assert all(one.unwritten == one.scratch for one in recorded)


@pytest.mark.parametrize("step", ["flash/decode/b16", "flash/prefill/t4096"])
def test_plans_that_decide_later_launches_are_made(step: str) -> None:
    (case,) = offline.choose(["moe_experts"], ["flash"], [step])
    recorded = offline.record(case, A2)
    reading = [one for one in recorded if "tiles_ptr" in one.launch.arguments]
    assert reading and not any({"tiles_ptr", "num_tiles_ptr"} & one.unwritten for one in reading)
    ids = case.build(A2, fill=False).arguments["ids"]
    tiles, count = (reading[-1].launch.arguments[name] for name in ("tiles_ptr", "num_tiles_ptr"))
    assert int(tiles[2, : int(count)].sum()) == int((ids >= 0).sum())
