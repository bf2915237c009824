"""Machines and options with which the own platform cannot serve: the start ends with one message, nothing is loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4_triton import doctor
from dsv4_triton.backend.plugin import PLATFORM_VARIABLE
from tests import simnpu
from tests.model import engine
from tests.npu.conftest import CHIPS, machine, serve
from tests.npu.starts import REFUSED, check_refused
from tests.npu.test_ascend import FAKE_ASCEND


def run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments and nothing else than this environment."""
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=simnpu.ROOT, capture_output=True, text=True, timeout=300
    )


def on_a2(library: Path) -> dict[str, str]:
    return machine(library, SIMNPU_SOC=CHIPS["a2"])


def test_starts(simulated_npu: Path, checkpoint: Callable[[str], Path]) -> None:
    results = serve(on_a2(simulated_npu), "tests.npu.starts", checkpoint=str(checkpoint("float32")))
    for name in ("default", "mode none", "no graphs"):
        assert results[name] == [256, "dsv4_triton.backend.worker_npu.NpuWorker"], name
    assert results["no model"] == "auto"
    own = {
        "piecewise graphs": "cudagraph_mode .* is PIECEWISE: .* FULL_DECODE_ONLY or NONE",
        "mode 3": "mode of --compilation-config is VLLM_COMPILE: .*; it takes NONE",
        "sleep mode": "Sleep mode is not supported",
        "torch_npu does not load": "torch_npu is installed but does not load: .*CANN.*doctor",
    }
    check_refused(results, REFUSED | own)


SERVE = ("-m", "vllm.entrypoints.cli.main", "serve", "/no/such/checkpoint")


def doctors(environment: dict[str, str], check: str) -> str:
    """What `dsv4-triton doctor` says in one of its lines, with what to do about it."""
    found = run(environment, "-c", f"from dsv4_triton import doctor; print(doctor.{check})")
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_two_platforms(simulated_npu: Path) -> None:
    """One message says what to do, and nothing else goes wrong."""
    environment = {**on_a2(simulated_npu), PLATFORM_VARIABLE: "npu"}
    environment["PYTHONPATH"] = os.pathsep.join([str(FAKE_ASCEND), environment["PYTHONPATH"]])
    found = run(environment, *SERVE)
    says = (
        "DSV4_TRITON_PLATFORM=npu asks for the platform of dsv4_triton, but platform plugin 'ascend' claims this "
        "machine, too, and vLLM takes one only"
    )
    do = "set VLLM_PLUGINS=dsv4_triton to leave the other out, or unset DSV4_TRITON_PLATFORM to serve inside it"
    assert found.returncode == 1 and found.stderr == f"{says}: {do}\n"
    assert doctors(environment, "_setting()") == f"{doctor.Check('setting', 'fail', says, do)}\n"


def test_platform_that_there_is_not() -> None:
    """The variable names none, or one for which torch_npu is missing: start and doctor say the same."""
    for asked, says, do in (
        ("NPU", "DSV4_TRITON_PLATFORM is NPU", "it takes npu or cpu; unset it to let what is installed decide"),
        (
            "npu",
            "DSV4_TRITON_PLATFORM is npu, but torch_npu is not installed",
            "install torch-npu or unset DSV4_TRITON_PLATFORM",
        ),
    ):
        environment = {**os.environ, **engine.ENVIRONMENT, PLATFORM_VARIABLE: asked}
        found = run(environment, *SERVE)
        assert found.returncode == 1 and found.stderr == f"{says}: {do}\n"
        assert doctors(environment, "_setting()") == f"{doctor.Check('setting', 'fail', says, do)}\n"
    assert f"(None, {doctor.Check('device', 'fail', says, do)})" in doctors(environment, "_device()")


@pytest.fixture
def broken_ascend(simulated_npu: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a process that has the simulated NPU, and a vllm-ascend which does not import."""
    package, metadata = tmp_path / "vllm_ascend", tmp_path / "vllm_ascend-0.20.0.dist-info"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('cannot import name X from vllm')\n")
    shutil.copytree(next(FAKE_ASCEND.glob("*.dist-info")), metadata)
    environment = on_a2(simulated_npu)
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    return environment


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({}, "its platform plugin fails with ImportError: cannot import name X from vllm"),
        ({"VLLM_PLUGINS": "dsv4_triton"}, "VLLM_PLUGINS leaves 'ascend' out"),
    ],
    ids=["does not import", "left out"],
)
def test_a_vllm_ascend_that_serves_nothing(broken_ascend: dict[str, str], variables: dict[str, str], says: str) -> None:
    """Where vLLM has no other platform, the reason ends the start."""
    found = run({**broken_ascend, **variables}, *SERVE)
    reason = f"no platform serves this machine: vllm-ascend is installed, but {says}"
    do = "install one that fits this vLLM and leave it in VLLM_PLUGINS, or set DSV4_TRITON_PLATFORM=npu"
    assert found.returncode == 1 and found.stderr.splitlines()[-1] == f"{reason}: {do}", found.stderr[-4000:]
    line = doctors({**broken_ascend, **variables}, "_setting()")
    assert line == f"{doctor.Check('setting', 'fail', reason, do)}\n"


LIBRARY = "libhccl.so: cannot open shared object file: No such file or directory"


@pytest.fixture
def without_cann(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which torch_npu fails as 2.13.0 does without CANN, whose extension needs it."""
    package, metadata = tmp_path / "torch_npu", tmp_path / "torch_npu-2.13.0.dist-info"
    package.mkdir()
    (package / "__init__.py").write_text(f"loader_says = {LIBRARY!r}\nraise ImportError(loader_says)\n")
    shutil.copytree(next(simnpu.FAKE.glob("*.dist-info")), metadata)
    return {**os.environ, **engine.ENVIRONMENT, "PYTHONPATH": str(tmp_path)}


def test_torch_npu_without_cann(without_cann: dict[str, str]) -> None:
    """torch loads its extensions while it is itself imported, before vLLM or anything else can look: its error names
    torch_npu and, as its cause, the library; the doctor says what to do."""
    found = run(without_cann, *SERVE)
    assert found.returncode == 1 and f"\nImportError: {LIBRARY}\n" in found.stderr
    assert found.stderr.splitlines()[-1].startswith("RuntimeError: Failed to load the backend extension: torch_npu. ")
    says = doctors(without_cann, "_device()")
    assert f"CANN is not in this shell: ImportError: {LIBRARY}" in says and "source CANN's set_env.sh" in says


def test_torch_npu_without_cann_and_autoload(without_cann: dict[str, str]) -> None:
    """The advice of torch's message, to do without such extensions, leads here."""
    found = run({**without_cann, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, *SERVE)
    says = f"ConfigError: torch_npu is installed but does not load: {LIBRARY}; is CANN in this shell"
    assert says in found.stderr.splitlines()[-1], found.stderr[-4000:]
