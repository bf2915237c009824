"""Kernels on an NVIDIA GPU: what can be checked without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsv4_triton.bench import cuda
from dsv4_triton.bench.cuda import Mirror
from dsv4_triton.bench.registry import ops, select
from dsv4_triton.bench.run import NotHereError
from dsv4_triton.device import CUDA, UnsupportedDeviceError, acting_as, device_types, family_of

ROOT = Path(__file__).parents[2]


def test_mirrored_tensors_share_memory_as_theirs_do() -> None:
    whole = torch.arange(40.0)
    rows = whole.view(5, 8)[1:4, :6]
    mirror = Mirror(torch.device("cpu"))
    copy, flat, other = mirror.of(rows), mirror.of(whole), mirror.of(torch.ones(3))
    assert copy.data_ptr() != rows.data_ptr() and copy.stride() == (8, 1) and torch.equal(copy, rows)
    copy += 100
    assert float(flat[8]) == 108 and float(whole[8]) == 8, "the copies share memory, the tensor is untouched"
    assert torch.equal(other, torch.ones(3)) and mirror.of(7) == 7 and mirror.of(None) is None
    mirror.bring_back()
    assert float(whole[8]) == 108 and float(whole[14]) == 14


def test_a_tensor_too_large_for_a_copy_is_refused() -> None:
    large = torch.empty(1, dtype=torch.uint8).expand(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "LARGE", 0)
        with pytest.raises(NotHereError, match="are not copied"):
            Mirror(torch.device("cpu")).of(large)


def test_a_gpu_has_kernels_only_for_checks() -> None:
    assert "cuda" not in device_types()
    with acting_as(CUDA):
        assert "cuda" in device_types() and family_of("cuda") is CUDA
    with pytest.raises(UnsupportedDeviceError):
        family_of("cuda")


def test_cases_are_built_on_the_device_and_nowhere_else() -> None:
    for case in select(model="flash"):
        if case.runs_on(CUDA) and case.step.name in ("decode/b16", "prefill/t4096"):
            elsewhere = [n for n, t in case.build(CUDA, fill=False, device="meta").tensors.items() if not t.is_meta]
            assert not elsewhere, f"{case}: {elsewhere}"


def test_all_ops_import_with_triton_ascend() -> None:
    assert cuda.ops() == list(ops())


def test_the_script_refuses_what_it_cannot_use() -> None:
    """Here Triton is triton-ascend's."""
    environment = {**os.environ, "PYTHON": sys.executable}
    run = subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh"], capture_output=True, text=True, env=environment, timeout=120
    )
    assert run.returncode == 1 and "3.6 or newer is needed" in run.stderr and not run.stdout


def test_the_script_looks_for_all_that_it_needs(tmp_path: Path) -> None:
    (tmp_path / "safetensors.py").write_text("raise ImportError('safetensors is not here')")
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh"], capture_output=True, text=True, env=environment, timeout=120
    )
    assert run.returncode == 1 and run.stderr == "gpu_check: safetensors is not here\n"
