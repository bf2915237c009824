"""Machines and options with which the own platform cannot serve: the start ends with one message, nothing is loaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from dsv4_triton.backend.plugin import PLATFORM_VARIABLE
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


COMMAND = "from vllm.engine.arg_utils import EngineArgs; EngineArgs('/no/such/checkpoint').create_engine_config()"


def test_two_platforms(simulated_npu: Path) -> None:
    """vLLM names the two; what to do is said before that."""
    environment = {**on_a2(simulated_npu), PLATFORM_VARIABLE: "npu"}
    environment["PYTHONPATH"] = os.pathsep.join([str(FAKE_ASCEND), environment["PYTHONPATH"]])
    found = run(environment, "-c", COMMAND)
    assert found.returncode and "Only one platform plugin can be activated" in found.stderr
    assert "set VLLM_PLUGINS=dsv4_triton to leave the other out" in found.stdout + found.stderr


def test_torch_npu_without_cann(tmp_path: Path) -> None:
    """torch itself ends with the loader's message; its advice to do without such extensions leads here."""
    package = tmp_path / "torch_npu"
    package.mkdir()
    library = "libhccl.so: cannot open shared object file: No such file or directory"
    (package / "__init__.py").write_text(f"raise ImportError({library!r})\n")
    environment = {**os.environ, **engine.ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
    found = run({**environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "-c", COMMAND)
    says = f"ConfigError: torch_npu is installed but does not load: {library}; is CANN in this shell"
    assert says in found.stderr.strip().splitlines()[-1], found.stderr[-4000:]
