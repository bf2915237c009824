"""DeepSeek-V4 inside vllm-ascend, of which `tests/fake_vllm_ascend` has what a model meets there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from dsv4_triton.backend import ascend
from dsv4_triton.backend.ascend import WORKER_CLASS
from dsv4_triton.backend.attention_backend import TritonDsaBackend
from dsv4_triton.backend.geometry import Pages
from dsv4_triton.backend.metadata import DraftPlans, DsaMetadataBuilder, StepPlanner, idle_steps
from dsv4_triton.config import ConfigError
from tests import simnpu
from tests.npu.conftest import CHIPS, LIMITS, Serve, machine, serve
from tests.npu.starts import REFUSED, check_refused
from tests.npu.test_serving import GRAPHS, check_graphs, check_same, drafts

FAKE_ASCEND = simnpu.ROOT / "tests" / "fake_vllm_ascend"


def environment(library: Path, ascend: Path = FAKE_ASCEND, family: str = "a2", **more: str) -> dict[str, str]:
    """Of a process that has the simulated NPU and vllm-ascend."""
    found = machine(library, SIMNPU_SOC=CHIPS[family], **more)
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


def check_served(serve: Serve, family: str, on_cpu: Serve, count: int, graphs: bool) -> None:
    """Answers with and without chunks, of 0 or more drafts, are those of the CPU platform; so are all drafts, which no
    answer shows."""
    cases, options = ["plain", "chunked", *(["drafted"] if count else [])], drafts(count)
    found = serve(family, cases, **options, **(GRAPHS if graphs else {}))
    expected = on_cpu("a2", ["plain"])["plain"]
    for name in ("plain", "chunked"):
        check_same(found[name], expected)
    if count:
        assert found["drafted"] == on_cpu("a2", ["drafted"], **options)["drafted"]
    check_graphs(found, graphs)


@pytest.mark.parametrize(("family", "count", "graphs"), [("a2", 0, False), ("a5", 3, False), ("a2", 2, True)])
def test_served(family: str, count: int, graphs: bool, inside: Serve, on_cpu: Serve) -> None:
    check_served(inside, family, on_cpu, count, graphs)


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
        found = machine(simulated_npu, SIMNPU_SOC=CHIPS[family])
        # Behind this project, because the checkout has a package named tests, too.
        found["PYTHONPATH"] = os.pathsep.join([found["PYTHONPATH"], str(tmp_path), source])
        options = {"dtype": dtype, **LIMITS, "block_size": 32, **options}
        options["additional_config"] = {"enable_cpu_binding": False}
        return serve(found, "tests.npu.real_ascend", checkpoint=str(checkpoint(dtype)), cases=cases, options=options)

    return call


@pytest.mark.long
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("count", range(4))
@pytest.mark.parametrize("family", ["a2", "a5"])
def test_inside_the_real_vllm_ascend(
    family: str, count: int, graphs: bool, inside_the_real: Serve, on_cpu: Serve
) -> None:
    check_served(inside_the_real, family, on_cpu, count, graphs)


def test_starts(simulated_npu: Path, checkpoint: Callable[[str], Path]) -> None:
    """Options and versions that cannot be served there end the start with their reason; the rest is settled."""
    found = serve(environment(simulated_npu), "tests.npu.ascend_starts", checkpoint=str(checkpoint("float32")))
    assert found["default"] == found["not set"] == [128, WORKER_CLASS] and found["blocks of 32"] == [32, WORKER_CLASS]
    assert found["graphs"] == "FULL_DECODE_ONLY" and found["eager"] == "NONE"
    known = (
        "It was made for, and has served on a simulated NPU inside, vllm-ascend main of 22 August 2026 "
        "\\(commit 182b75ea\\) with vLLM 0.27.1"
    )
    assert found["no graphs"] == [128, WORKER_CLASS]
    inside = {
        "blocks of 256": "--block-size is 256, .*geometry 'vllm-ascend' has no page tables",
        "fine": "geometry is 'fine', but vllm-ascend plans the caches here",
        "context parallel": "enable_dsa_cp of --additional-config is set: .*leave it out",
        "head apart": "finegrained_tp_config.lmhead_tensor_parallel_size of --additional-config is set: .*all ranks",
        "no c128 layer": "config.json: no layer has compress ratio 128; vllm-ascend plans caches for",
        "second runner": "VLLM_USE_V2_MODEL_RUNNER is 1, but inside vllm-ascend the first model runner",
        "pieces": "cudagraph_mode of --compilation-config is FULL_AND_PIECEWISE: .*takes FULL_DECODE_ONLY or NONE",
        "no scale_dim": f"WithoutScales has no scale_dim.*{known}",
        "other rows": f"storage_block_size of OtherRows is 128 where 32 was expected.*{known}",
        "not replaced": f"group_and_unify_kv_cache_specs is not replaced by vllm-ascend.*{known}",
        "other signature": rf"enable_dsa_cp takes \(config\), not \(\).*{known}",
        "nothing to replace": f"kv_cache_utils has no group_and_unify_kv_cache_specs.*{known}",
        "no function": f"vllm_ascend.utils has no enable_dsa_cp.*{known}",
        "no specs": rf"(vllm_ascend.core.kv_cache_interface cannot be imported \(.*){{2}}{known}",
        "start": f"vllm-ascend 0.27.1 is not what .* is not replaced by vllm-ascend.*{known}",
        "another config": f"no compress_ratios.*'deepseek_v5'.*{known}",
        "not compressed": f"use_compress of its model runner is False.*{known}",
        "no attention": f"no AscendDSAMetadataBuilder; .*no AscendCommonAttentionMetadata.*{known}",
        "other calls": f"AscendDSAMetadataBuilder.build takes .self, common_attn.*no .*build_for_drafting.*{known}",
        "other shape": rf"gives a cache of \(5, 32, 1, 512\) the shape \(2, 5, 32, 1, 512\).*{known}",
        "other drafter": f"its drafter object has no build_draft_attn_metadata.*{known}",
    }
    check_refused(found, REFUSED | inside)
    assert found["kept"] is None and found["idle"] == [True, False]


def test_a_cache_of_another_shape_is_an_error() -> None:
    pages = Pages(rows=32, ratio=4, width=8, dtype=torch.float32)
    cache = torch.empty(5, 32, 1, 8)
    assert ascend.bound_cache([[cache]], pages).shape == (5, 32, 8)
    for bound in ([[cache, cache]], [[cache[:, :16]]], [[cache.bfloat16()]]):
        with pytest.raises(ConfigError, match="it binds a cache of shape"):
            ascend.bound_cache(bound, pages)


def batch(lengths: list[int], positions: list[int], table: list[list[int]], **more: Any) -> Any:
    """One token each of requests, as vllm-ascend tells of drafts, in new tensors."""
    return SimpleNamespace(
        query_start_loc=torch.arange(len(lengths) + 1, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        positions=torch.tensor(positions),
        block_table_tensor=torch.tensor(table, dtype=torch.int32),
        **{"num_actual_tokens": 2, "num_input_tokens": 3, "max_seq_len": 0, **more},
    )


@pytest.fixture
def plans(host_driver: None) -> DraftPlans:
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8, max_num_seqs=2),
        model_config=SimpleNamespace(max_model_len=64),
    )
    return DraftPlans(config, torch.device("cpu"), 16, 1)


def test_drafts_are_at_the_positions_that_are_given(plans: DraftPlans) -> None:
    """Of two requests in a graph of three rows: lengths count rejected drafts, and position 0 is past the end."""
    table = [[5, 6], [7, 0], [0, 0]]
    first = plans.plan(batch([21, 9, 0], [20, 8, 8], table), 0)
    second = plans.plan(batch([25, 9, 0], [21, 9, 8], table), 1)
    third = plans.plan(batch([26, 1, 0], [22, 0, 8], table), 2)
    for draft, positions, slots in (
        (first, [20, 8, -1], [6 * 16 + 4, 7 * 16 + 8, -1]),
        (second, [21, 9, -1], [6 * 16 + 5, 7 * 16 + 9, -1]),
        (third, [22, -1, -1], [6 * 16 + 6, -1, -1]),
    ):
        assert draft.step.positions.tolist() == positions and draft.slots.tolist() == slots
        assert draft.step.num_tokens == 3 and draft.block_table.tolist() == table[:2]


def test_drafts_keep_their_tensors(plans: DraftPlans) -> None:
    """All are planned before the first runs, and a graph reads what was planned."""

    def tensors(draft: Any) -> list[torch.Tensor]:
        step = draft.step
        return [step.positions, step.token_req, step.n_vis4, step.n_vis128, draft.block_table, draft.slots]

    captured = [plans.plan_idle(batch([1, 1], [7, 7], [[5, 6], [7, 0]]), draft) for draft in range(3)]
    for draft in captured:
        assert draft.slots.tolist() == draft.step.positions.tolist() == [-1] * 3
    planned = [plans.plan(batch([21, 9], [20 + draft, 8], [[5, 6], [7, 0]]), draft) for draft in range(3)]
    addresses = [[tensor.data_ptr() for tensor in tensors(draft)] for draft in captured]
    assert addresses == [[tensor.data_ptr() for tensor in tensors(draft)] for draft in planned]
    assert len({address for draft in addresses for address in draft}) == 18
    assert [draft.step.positions[0].item() for draft in planned] == [20, 21, 22]


@pytest.mark.parametrize("name", ["model.layers.0.attn.window", "mtp.layers.4.attn.window"])
def test_idle_steps_look_like_others(name: str, monkeypatch: pytest.MonkeyPatch, host_driver: None) -> None:
    """Inside vllm-ascend, where the worker knows of them: nothing is written and nothing read."""
    monkeypatch.setattr(ascend, "active", lambda: True)
    cache = SimpleNamespace(planner=StepPlanner(8, torch.device("cpu")), rows_per_block=16, ratio=1)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={name: cache}),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8, max_num_seqs=2),
        model_config=SimpleNamespace(max_model_len=64),
    )
    builder = DsaMetadataBuilder(None, [name], config, torch.device("cpu"))
    common = batch([21, 9], [20, 8], [[5, 6], [7, 0]])
    plans = [partial(builder.build, 0, common)]
    if "mtp" in name:
        plans.append(partial(builder.build_for_drafting, common, 1))
    for plan in plans:
        assert plan().slots.tolist() == [6 * 16 + 4, 7 * 16 + 8, -1]
        with idle_steps():
            idle = plan()
        for found in (idle, builder.build_for_graph_capture(common)):
            assert found.slots.tolist() == found.step.positions.tolist() == [-1] * 3 and found.step.max_seq_len == 64


def test_graphs_of_drafts_renew_nothing(plans: DraftPlans) -> None:
    """vllm-ascend asks the attention backend's implementation to renew what a graph of drafts reads, in the order of
    its own arguments: what was planned stays, and neither the stream nor a config is used."""
    planned = plans.plan(batch([21, 9], [20, 8], [[5, 6], [7, 0]]), 1)
    tensors = [*vars(planned.step).values(), *vars(planned).values()]
    tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    before = [tensor.clone() for tensor in tensors]
    stream, context, config, drafts = MagicMock(), MagicMock(), MagicMock(), MagicMock()
    metadata = {"mtp.layers.4.attn.window": planned}
    renew = TritonDsaBackend.get_impl_cls().update_graph_params
    assert renew(stream, context, 8, config, drafts, draft_attn_metadatas=[metadata]) is None
    assert len(tensors) >= 6 and all(map(torch.equal, tensors, before))
    assert metadata == {"mtp.layers.4.attn.window": planned}
    assert not any(given.mock_calls for given in (stream, context, config, drafts))
