"""DeepSeek-V4 inside vllm-ascend, of which `tests/fake_vllm_ascend` has what a model meets there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4_triton.backend import ascend
from dsv4_triton.backend.ascend import WORKER_CLASS
from dsv4_triton.backend.geometry import Pages
from dsv4_triton.config import ConfigError
from tests import simnpu
from tests.model import engine
from tests.npu.conftest import CHIPS, LIMITS, Serve, serve
from tests.npu.test_serving import check_same

FAKE_ASCEND = simnpu.ROOT / "tests" / "fake_vllm_ascend"


def environment(library: Path, ascend: Path = FAKE_ASCEND, family: str = "a2", **more: str) -> dict[str, str]:
    """Of a process that has the simulated NPU and vllm-ascend."""
    found = simnpu.environment(library, SIMNPU_SOC=CHIPS[family], **engine.ENVIRONMENT, **more)
    found["PYTHONPATH"] = os.pathsep.join([str(ascend), found["PYTHONPATH"]])
    return found


@pytest.fixture
def inside(simulated_npu: Path, checkpoint: Callable[[str], Path]) -> Serve:
    """Serve cases inside vllm-ascend's stand-in; `options` are the engine's."""

    def call(family: str, cases: list[str], dtype: str = "float32", **options: Any) -> dict[str, Any]:
        options = {"dtype": dtype, **LIMITS, "block_size": 32, **options}
        found = environment(simulated_npu, family=family)
        return serve(found, checkpoint=str(checkpoint(dtype)), cases=cases, options=options)

    return call


def test_plain_and_chunked(inside: Serve, on_cpu: Serve) -> None:
    found, expected = inside("a2", ["plain", "chunked"]), on_cpu("a2", ["plain"])
    check_same(found["plain"], expected["plain"])
    check_same(found["chunked"], expected["plain"])


def test_starts(simulated_npu: Path, checkpoint: Callable[[str], Path]) -> None:
    """Options and versions that cannot be served there end the start with their reason; the rest is settled."""
    command = [sys.executable, "-m", "tests.npu.ascend_starts", str(checkpoint("float32"))]
    run = subprocess.run(command, env=environment(simulated_npu), cwd=simnpu.ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout.strip().splitlines()[-1])
    assert found["default"] == [128, WORKER_CLASS] and found["blocks of 32"] == [32, WORKER_CLASS]
    known = "Known to work: vllm-ascend main of 22 August 2026 \\(commit 182b75ea\\) with vLLM 0.27.1"
    for name, says in {
        "blocks of 256": "--block-size is 256, .*geometry 'vllm-ascend' has no page tables",
        "fine": "geometry is 'fine', but vllm-ascend plans the caches here",
        "context parallel": "enable_dsa_cp of --additional-config is set: .*leave it out",
        "no scale_dim": f"WithoutScales has no scale_dim.*{known}",
        "other rows": f"storage_block_size of OtherRows is 128 where 32 was expected.*{known}",
        "not replaced": f"group_and_unify_kv_cache_specs is not replaced by vllm-ascend.*{known}",
        "other signature": rf"enable_dsa_cp takes \(config\), not \(\).*{known}",
        "start": f"vllm-ascend 0.27.1 is not what .* is not replaced by vllm-ascend.*{known}",
        "another config": f"no compress_ratios.*'deepseek_v5'.*{known}",
        "not compressed": f"use_compress of its model runner is False.*{known}",
    }.items():
        assert re.search(says, found[name], re.DOTALL), (name, found[name])
    assert found["kept"] is None


def test_a_cache_of_another_shape_is_an_error() -> None:
    pages = Pages(rows=32, ratio=4, width=8, dtype=torch.float32)
    cache = torch.empty(5, 32, 1, 8)
    assert ascend.bound_cache([[cache]], pages).shape == (5, 32, 8)
    for bound in ([[cache, cache]], [[cache[:, :16]]], [[cache.bfloat16()]]):
        with pytest.raises(ConfigError, match="it binds a cache of shape"):
            ascend.bound_cache(bound, pages)
