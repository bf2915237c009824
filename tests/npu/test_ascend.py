"""DeepSeek-V4 inside vllm-ascend, of which `tests/fake_vllm_ascend` has what a model meets there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4_triton.backend import ascend
from dsv4_triton.backend.ascend import WORKER_CLASS
from dsv4_triton.backend.geometry import Pages
from dsv4_triton.backend.metadata import PlansAhead
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


DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}


def test_drafts(inside: Serve, on_cpu: Serve) -> None:
    check_same(inside("a2", ["plain"], **DRAFTS)["plain"], on_cpu("a2", ["plain"])["plain"])


SOURCE_VARIABLE = "DSV4_VLLM_ASCEND_SRC"
"""Environment variable that names a checkout of vllm-ascend."""


@pytest.fixture
def inside_the_real(simulated_npu: Path, checkpoint: Callable[[str], Path], tmp_path: Path) -> Serve:
    """Serve cases inside a checkout of vllm-ascend, whose entry points for platform and models are given here."""
    source = os.environ.get(SOURCE_VARIABLE)
    if not source:
        pytest.skip(f"{SOURCE_VARIABLE} names no checkout of vllm-ascend")
    shutil.copytree(next(FAKE_ASCEND.glob("*.dist-info")), tmp_path / "vllm_ascend-0.27.1.dist-info")

    def call(family: str, cases: list[str], dtype: str = "float32", **options: Any) -> dict[str, Any]:
        found = simnpu.environment(simulated_npu, SIMNPU_SOC=CHIPS[family], **engine.ENVIRONMENT)
        # Behind this project, because the checkout has a package named tests, too.
        found["PYTHONPATH"] = os.pathsep.join([found["PYTHONPATH"], str(tmp_path), source])
        options = {"dtype": dtype, **LIMITS, "block_size": 32, **options}
        options["additional_config"] = {"enable_cpu_binding": False}
        return serve(found, "tests.npu.real_ascend", checkpoint=str(checkpoint(dtype)), cases=cases, options=options)

    return call


@pytest.mark.long
def test_inside_the_real_vllm_ascend(inside_the_real: Serve, on_cpu: Serve) -> None:
    found, expected = inside_the_real("a2", ["plain", "chunked"]), on_cpu("a2", ["plain"])
    for name in ("plain", "chunked"):
        check_same(found[name], expected["plain"])


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


def test_drafts_planned_in_advance_keep_their_tensors(host_driver: None) -> None:
    """vllm-ascend plans all drafts of a step before it runs the first, and gives a new block table every time."""
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8, max_num_seqs=2),
        model_config=SimpleNamespace(max_model_len=64),
    )
    plans = PlansAhead(config, torch.device("cpu"))

    def batch(length: int, longest: int = 32) -> Any:
        return SimpleNamespace(
            query_start_loc=torch.tensor([0, 1, 2], dtype=torch.int32),
            seq_lens=torch.tensor([length, 0], dtype=torch.int32),
            block_table_tensor=torch.tensor([[5, 6], [0, 0]], dtype=torch.int32),
            num_actual_tokens=1,
            num_input_tokens=2,
            max_seq_len=longest,
        )

    drafts = [plans.plan(batch(20 + index), 16, 1, index) for index in (1, 2)]
    for draft, length in zip(drafts, (21, 22), strict=True):
        assert draft.step.positions.tolist() == [length - 1, -1] and draft.step.num_tokens == 2
        assert draft.slots.tolist() == [6 * 16 + length - 1 - 16, -1]
    again = plans.plan(batch(30), 16, 1, 1)
    assert again.step.positions.data_ptr() == drafts[0].step.positions.data_ptr()
    assert again.slots.data_ptr() == drafts[0].slots.data_ptr()
    assert again.block_table.data_ptr() == drafts[0].block_table.data_ptr()
    assert plans.plan(batch(30, longest=0), 16, 1, 1).slots.tolist() == [-1, -1], "a step of no request"
