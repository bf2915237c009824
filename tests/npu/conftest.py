"""Engines on the simulated NPU, each in a process of its own, and the CPU platform's answers to compare with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests import simnpu
from tests.model import engine

CHIPS = {"a2": "Ascend910B2", "a5": "Ascend950PR_9589"}
Serve = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A demo checkpoint with a layer of every kind and an MTP block, in "float32" or "bfloat16"."""
    from dsv4_triton.demo.checkpoint import DemoSettings, default_ratios, write_checkpoint

    written: dict[str, Path] = {}

    def get(dtype: str) -> Path:
        if dtype not in written:
            written[dtype] = tmp_path_factory.mktemp(dtype) / "demo"
            write_checkpoint(written[dtype], DemoSettings(ratios=default_ratios(4), dtype=dtype))
        return written[dtype]

    return get


def machine(library: Path, **settings: str | int) -> dict[str, str]:
    """The environment of an engine's process on a simulated NPU, whatever vLLM has set in this one."""
    environment = simnpu.environment(library, **settings, **engine.ENVIRONMENT)
    environment.pop("VLLM_USE_BREAKABLE_CUDAGRAPH", None)  # vLLM sets it in a process that served DeepSeek-V4
    return environment


def serve(environment: dict[str, str], module: str = "tests.npu.serve", **what: Any) -> dict[str, Any]:
    """What `tests.npu.serve`, or another such module, prints in a process with this environment."""
    command = [sys.executable, "-m", module, json.dumps(what)]
    run = subprocess.run(command, env=environment, cwd=simnpu.ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-8000:]
    return json.loads(run.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def on_npu(simulated_npu: Path, checkpoint: Callable[[str], Path]) -> Serve:
    """Serve cases on simulated devices of a family; `options` are the engine's."""

    def call(
        family: str, cases: list[str], dtype: str = "float32", devices: int = 1, memory_mb: int = 4096, **options: Any
    ) -> dict[str, Any]:
        settings = {"SIMNPU_SOC": CHIPS[family], "SIMNPU_DEVICES": devices, "SIMNPU_MEMORY_MB": memory_mb}
        environment = machine(simulated_npu, **settings)
        return serve(
            environment, checkpoint=str(checkpoint(dtype)), cases=cases, options={"dtype": dtype, **LIMITS, **options}
        )

    return call


@pytest.fixture(scope="session")
def on_cpu(checkpoint: Callable[[str], Path]) -> Serve:
    """The same on the CPU platform, in this process, acting as the family; each set of cases is served once.

    Linear layers take torch's matrix products, as on an NPU, instead of vLLM's for CPUs, which round differently: bf16
    answers could not be compared otherwise.
    """
    from vllm.model_executor.layers import utils

    from tests.npu.serve import run

    def torch_products(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    known: dict[str, dict[str, Any]] = {}

    def call(family: str, cases: list[str], dtype: str = "float32", **options: Any) -> dict[str, Any]:
        key = json.dumps([family, dtype, cases, options])
        if key not in known:
            extra = {"dsv4_triton": {"device_family": family}}
            options = {"dtype": dtype, **LIMITS, "additional_config": extra, **options}
            with patch.object(utils, "dispatch_cpu_unquantized_gemm", torch_products):
                known[key] = run(str(checkpoint(dtype)), options, cases)
        return known[key]

    return call


LIMITS = {"max_model_len": 512, "max_num_batched_tokens": 512, "max_num_seqs": 8, "kv_cache_memory_bytes": 256 << 20}
