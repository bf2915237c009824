"""The simulated NPU does what tests of the NPU path rely on; the tests run in a process that has it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests import simnpu


def test_on_device(simulated_npu: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/simnpu/on_device.py"]
    run = subprocess.run(
        command, env=simnpu.environment(simulated_npu), cwd=simnpu.ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
