"""Machines and options with which the own platform cannot serve: the start ends with one message, nothing is loaded."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4_triton.backend.plugin import PLATFORM_VARIABLE, conflict_message
from tests import simnpu
from tests.model import engine
from tests.npu.conftest import CHIPS, serve
from tests.npu.test_ascend import FAKE_ASCEND


def run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments and nothing else than this environment."""
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=simnpu.ROOT, capture_output=True, text=True, timeout=300
    )


def on_a2(library: Path) -> dict[str, str]:
    return simnpu.environment(library, SIMNPU_SOC=CHIPS["a2"], **engine.ENVIRONMENT)


def test_starts(simulated_npu: Path, checkpoint: Callable[[str], Path]) -> None:
    results = serve(on_a2(simulated_npu), "tests.npu.starts", checkpoint=str(checkpoint("float32")))
    assert results["default"] == [256, "dsv4_triton.backend.worker_npu.NpuWorker"]
    assert results["no model"] == "auto"
    for name, says in {
        "e4m3 keys": "index_format is 'e4m3', which family 'a2' has no instructions for",
        "mxfp8 projection": "o_proj_format is 'mxfp8', but family 'a2' has no fp8",
        "another family": "device_family is 'a5' on a device of family 'a2'",
        "the host": "device_family is 'host' on a device of family 'a2'",
        "fp8 cache": "--kv-cache-dtype is 'fp8', but family 'a2' .* has no fp8",
        "piecewise graphs": "cudagraph_mode .* is PIECEWISE: .* FULL_DECODE_ONLY or NONE",
        "sleep mode": "Sleep mode is not supported",
        "another chip": r"chip 'Ascend310P3' is not supported; supported are Ascend910B\* \(a2\)",
        "no task queue": "TRITON_ENABLE_TASKQUEUE is 0: .*--enforce-eager",
        "second runner": "VLLM_USE_V2_MODEL_RUNNER is 1",
        "torch_npu does not load": "torch_npu is installed but does not load: .*CANN.*doctor",
    }.items():
        assert isinstance(results[name], str) and re.search(says, results[name], re.DOTALL), (name, results[name])


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
    assert found.returncode == 1 and found.stderr == f"{conflict_message('ascend')}\n"
    assert "two platforms are active, ascend and torch_npu alone" in doctors(environment, "_setting()")


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
