"""Launches and what they keep to while a graph is captured, for a process that has the simulated device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from dsv4_triton.backend import capture_rules
from dsv4_triton.backend.compat import UpstreamChangedError
from dsv4_triton.backend.metadata import StepPlanner
from dsv4_triton.backend.upstream_npu import _weak_ref_tensor
from dsv4_triton.device import CaptureError
from dsv4_triton.kernels._workspace import carve
from dsv4_triton.kernels.muls_add import _muls_add_kernel, muls_add
from tests.simnpu import ROOT

NPU = torch.device("npu", 0)


@pytest.fixture
def graph() -> torch.npu.NPUGraph:
    return torch.npu.NPUGraph()


@pytest.fixture
def _enforced() -> Iterator[None]:
    before = JITFunction.run, JITFunction.cache_hook, Autotuner.__getattribute__
    with capture_rules.enforced(NPU):
        yield
    assert (JITFunction.run, JITFunction.cache_hook, Autotuner.__getattribute__) == before


def test_triton_ascend_launches_on_the_current_stream() -> None:
    from triton.backends.ascend.driver import NPUDriver

    side = torch.npu.Stream()
    usual = NPUDriver.get_current_stream(None, 0)
    assert usual == torch.npu.default_stream().native_handle
    with torch.npu.stream(side):
        assert NPUDriver.get_current_stream(None, 0) == side.native_handle != usual


@pytest.mark.usefixtures("_enforced")
def test_nothing_is_compiled(graph: torch.npu.NPUGraph) -> None:
    x = torch.ones(7, dtype=torch.bfloat16, device=NPU)
    out = torch.empty_like(x)
    message = "kernel _muls_add_kernel had to be compiled while a graph is captured"
    with torch.npu.graph(graph), pytest.raises(CaptureError, match=message):
        muls_add(x, x, 2.0, out=out)
    muls_add(x, x, 2.0, out=out)
    with torch.npu.graph(graph):
        muls_add(x, out, 2.0, out=out)
    graph.replay()
    assert out.tolist() == [5] * 7


@pytest.fixture
def core_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the module of AutoTilingTuner asks the driver when it is loaded."""
    properties = SimpleNamespace(get_device_properties=lambda device: {"num_aicore": 24})
    monkeypatch.setattr(driver.active, "utils", properties, raising=False)


@pytest.mark.usefixtures("_enforced", "core_count")
@pytest.mark.parametrize("tuner", ["Autotuner", "AutoTilingTuner", "LibTuner"])
def test_nothing_is_tuned(
    tuner: str, graph: torch.npu.NPUGraph, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By none of triton-ascend's tuners; those with a `run` of their own may be loaded while the rules are in force."""
    configs = [triton.Config({"BLOCK": size}) for size in (8, 16)]
    if tuner == "LibTuner":
        from triton.runtime import libentry

        monkeypatch.setattr(libentry, "config_cache_dir", lambda: tmp_path)
        tuned = libentry.libtuner(configs=configs, key=["N"])(_muls_add_kernel)
    else:
        hints = {"enable_ascend_autotune": tuner == "AutoTilingTuner"}
        tuned = triton.autotune(configs=configs, key=["N"], hints=hints)(_muls_add_kernel)
    assert type(tuned).__name__ == tuner
    x = torch.ones(8, device=NPU)
    with (
        torch.npu.graph(graph),
        pytest.raises(CaptureError, match="kernel _muls_add_kernel was to be tuned while a graph is captured"),
    ):
        tuned[(1,)](x, x, x, 8, 2.0)


@pytest.mark.parametrize("worker", ["worker_npu.NpuWorker", "worker_ascend.AscendWorker"])
def test_workers_begin_with_the_check(worker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They say what triton-ascend lacks before they have a device, hence before weights."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "fake_vllm_ascend")
    init_device = resolve_name(f"dsv4_triton.backend.{worker}").init_device
    monkeypatch.delattr(JITFunction, "cache_hook")
    with pytest.raises(UpstreamChangedError, match=r"^JITFunction has no cache_hook: .* triton-ascend is not known"):
        init_device(SimpleNamespace())


def test_outside_of_captures_kernels_are_tuned() -> None:
    """By what Triton has for it, with what it is called with."""
    configs = [triton.Config({"BLOCK": size}) for size in (8, 16)]
    tuned = triton.autotune(configs=configs, key=["N"])(_muls_add_kernel)
    tuned._bench = lambda *args, config, **named: [config.kwargs["BLOCK"]] * 3
    x, out = torch.full((8,), 3.0, device=NPU), torch.empty(8, device=NPU)
    with capture_rules.enforced(NPU):
        tuned[(1,)](x, x, out, 8, 2.0)
    assert tuned.best_config is configs[0] and out.tolist() == [9] * 8


def test_another_hook_of_the_compiler_is_asked(graph: torch.npu.NPUGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer says whether the kernel is to be compiled; while a graph is captured none is, and it is not asked."""
    asked: list[dict[str, Any]] = []
    kernel = SimpleNamespace(name="some_kernel")
    for answer in (True, False):
        monkeypatch.setattr(JITFunction, "cache_hook", lambda answer=answer, **what: asked.append(what) or answer)
        with capture_rules.enforced(NPU):
            assert JITFunction.cache_hook(key="a key", fn=kernel) is answer
            with torch.npu.graph(graph), pytest.raises(CaptureError, match="some_kernel had to be compiled"):
                JITFunction.cache_hook(key="another", fn=kernel)
    assert asked == [{"key": "a key", "fn": kernel}] * 2


def test_no_kernel_has_a_lock(graph: torch.npu.NPUGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []

    def launch(kernel: Any, *args: Any, warmup: bool, **named: Any) -> Any:
        launches.append(warmup)
        return SimpleNamespace(metadata=SimpleNamespace(lock_num=2))

    monkeypatch.setattr(JITFunction, "run", launch)
    x = torch.ones(8, device=NPU)
    with capture_rules.enforced(NPU):
        muls_add(x, x, 2.0)
        assert launches == [False]
        with torch.npu.graph(graph), pytest.raises(CaptureError, match="kernel _muls_add_kernel has a lock"):
            muls_add(x, x, 2.0)
    assert launches == [False, True]


def test_scratch_is_not_allocated(graph: torch.npu.NPUGraph) -> None:
    parts = [((4,), torch.float32)]
    carve("op", None, NPU, parts)
    with torch.npu.graph(graph), pytest.raises(CaptureError, match="op: scratch was to be allocated"):
        carve("op", None, NPU, parts)


def test_what_later_steps_write_is_not_allocated(graph: torch.npu.NPUGraph) -> None:
    table = torch.zeros(2, 4, dtype=torch.int32, device=NPU)
    planner, step = StepPlanner(2, NPU), SimpleNamespace(block_table_tensor=table, num_actual_tokens=2)
    with torch.npu.graph(graph), pytest.raises(CaptureError, match="slots that later steps write"):
        planner.plan_idle(step, 64, 1, 512)
    slots = planner.plan_idle(step, 64, 1, 512).slots
    with torch.npu.graph(graph):
        assert planner.plan_idle(step, 64, 1, 512).slots.data_ptr() == slots.data_ptr()


def test_what_a_graph_gives_is_held_weakly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors with memory are; vLLM asks for what may stand among them, too."""
    import torch_npu

    monkeypatch.setattr(torch_npu._C, "_weak_ref_tensor", lambda tensor: ("weak", tensor))
    x, empty = torch.ones(2, device=NPU), torch.ones(0, 4, device=NPU)
    assert _weak_ref_tensor(x) == ("weak", x)
    assert _weak_ref_tensor(empty) is empty and _weak_ref_tensor(None) is None
