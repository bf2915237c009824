"""The simulated NPU does what tests of the NPU path rely on; the tests run in a process that has it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests import simnpu


def test_on_device(simulated_npu: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"tests/simnpu/{name}on_device.py" for name in ("", "order_", "rules_", "upstream_")]
    environment = simnpu.environment(simulated_npu, SIMNPU_DEVICES=2)
    run = subprocess.run(command, env=environment, cwd=simnpu.ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
