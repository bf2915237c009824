"""Tests of the simulated device, for a process that has it: `test_simnpu.py` starts one."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from dsv4_triton.device import A2, family_of
from dsv4_triton.kernels.muls_add import muls_add
from dsv4_triton.kernels.rope import rope
from dsv4_triton.reference import rope as reference

NPU = torch.device("npu", 0)


def test_new_memory_is_full_of_a_pattern() -> None:
    floats, numbers = torch.empty(1000, device=NPU), torch.empty(1000, dtype=torch.int64, device=NPU)
    assert floats.isnan().all() and (numbers == -1).all()
    with torch.inference_mode():
        assert torch.empty(3, dtype=torch.bfloat16, device=NPU).isnan().all()


def test_memory_has_a_limit() -> None:
    free, total = torch.npu.mem_get_info()
    torch.npu.reset_peak_memory_stats()
    held = torch.ones(1 << 20, device=NPU)
    assert torch.npu.mem_get_info() == (free - (4 << 20), total)
    with pytest.raises(torch.OutOfMemoryError, match="NPU out of memory"):
        torch.empty(total, dtype=torch.uint8, device=NPU)
    assert torch.npu.max_memory_allocated() == total - free + (4 << 20)
    torch.ops.simnpu.set_limit(0, total - free + (6 << 20))
    try:
        with pytest.raises(torch.OutOfMemoryError):  # results count like memory that is asked for
            held.nonzero()
    finally:
        torch.ops.simnpu.set_limit(0, total)
    del held
    assert torch.npu.mem_get_info() == (free, total)


def test_operators_work_on_the_devices_memory() -> None:
    x = torch.arange(12.0, device=NPU).view(3, 4)
    column = x[:, 1]
    column += 100
    assert x.tolist() == [[0, 101, 2, 3], [4, 105, 6, 7], [8, 109, 10, 11]]
    assert (x @ x.T).device == NPU and torch.equal((x @ x.T).cpu(), x.cpu() @ x.cpu().T)
    values, indices = x.topk(2)
    assert values.device == indices.device == NPU and indices.tolist() == [[1, 3]] * 3
    out = torch.empty(0, device=NPU)
    torch.add(x, 1, out=out)
    assert out.shape == x.shape and out[0, 0].item() == 1
    assert (x + torch.tensor(1.0)).device == NPU, "numbers on the host mix with tensors"


def test_tensors_of_host_and_device_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device=NPU) + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, 3, device=NPU) @ torch.ones(3, 3)


def test_work_is_on_the_device_of_its_operands() -> None:
    """Whatever device is the thread's: a new thread begins on the first."""
    other = torch.device("npu", 1)
    free = torch.npu.mem_get_info(other)[0]
    x = torch.ones(1 << 20, device=other)
    results = [x + 1, x.topk(2).values, torch.cat([x, x]), torch.arange(3, device=other), torch.ones(2).to(other)]
    assert {found.device for found in results} == {other} and torch.npu.current_device() == 0
    del results
    with pytest.raises(RuntimeError, match="npu:1 and of npu:0; all must be on the same device"):
        x.dot(torch.ones(1 << 20, device=NPU))
    with pytest.raises(RuntimeError, match="tensor on npu:1 while the device is npu:0"):
        muls_add(x[None], x[None], 2.0)
    with torch.npu.device(other):
        assert torch.empty(1, device="npu").device == other
        assert muls_add(x[None], x[None], 2.0).unique().tolist() == [3]
        x.resize_(2 << 20)
    assert torch.equal(torch.arange(3, device=NPU).to(other).cpu(), torch.arange(3))
    assert free - torch.npu.mem_get_info(other)[0] == 8 << 20
    devices: list[int] = []
    with torch.npu.device(other):
        thread = threading.Thread(target=lambda: devices.append(torch.npu.current_device()))
        thread.start()
        thread.join()
    assert devices == [0]


def test_unknown_operators_have_no_kernel() -> None:
    library = torch.library.Library("simnpu_test", "DEF")
    library.define("only_cpu(Tensor x) -> Tensor")
    library.impl("only_cpu", lambda x: x + 1, "CPU")
    with pytest.raises(NotImplementedError, match="simnpu_test::only_cpu"):
        torch.ops.simnpu_test.only_cpu(torch.ones(3, device=NPU))


def test_the_stand_in_names_what_it_lacks() -> None:
    import torch_npu

    with pytest.raises(NotImplementedError, match=r"torch_npu\.npu_rms_norm"):
        torch_npu.npu_rms_norm(torch.ones(3, device=NPU))
    with pytest.raises(AttributeError, match=r"torch_npu\.nothing"):
        torch_npu.nothing  # noqa: B018
    with pytest.raises(AttributeError, match=r"torch\.npu\.nothing"):
        torch.npu.nothing()


def test_seeds_and_generators() -> None:
    def drawn(seed: Callable[[], object]) -> list[float]:
        seed()
        return torch.rand(3, device=NPU).tolist()

    assert drawn(lambda: torch.manual_seed(1)) == drawn(lambda: torch.npu.manual_seed_all(1))
    assert drawn(lambda: torch.manual_seed(1)) != drawn(lambda: torch.manual_seed(2))
    one, two = (torch.Generator(NPU).manual_seed(5) for _ in range(2))
    x = torch.empty(4, device=NPU)
    assert x.exponential_(generator=one).tolist() == x.exponential_(generator=two).tolist()
    state = torch.npu.get_rng_state()
    first = torch.rand(3, device=NPU).tolist()
    torch.npu.set_rng_state(state)
    assert torch.rand(3, device=NPU).tolist() == first


def test_streams_and_events() -> None:
    stream, begin, end = torch.npu.Stream(), torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    usual = torch.npu.current_stream()
    assert usual == torch.npu.default_stream() and stream != usual
    with torch.npu.stream(stream):
        assert torch.npu.current_stream() == stream
        begin.record()
        end.record()
        seen = []
        thread = threading.Thread(target=lambda: seen.append(torch.npu.current_stream()))
        thread.start()
        thread.join()
        assert seen == [usual], "a thread has its own current stream"
    usual.wait_event(end)
    end.synchronize()
    assert torch.npu.current_stream() == usual and end.query() and begin.elapsed_time(end) >= 0


def test_pinned_memory() -> None:
    pinned = torch.empty(4, pin_memory=True)
    assert pinned.is_pinned() and pinned[2:].is_pinned() and not torch.empty(4).is_pinned()
    assert torch.empty(4).pin_memory().is_pinned()


# Graphs


@pytest.fixture
def graph() -> torch.npu.NPUGraph:
    return torch.npu.NPUGraph()


def test_replay_with_new_inputs(graph: torch.npu.NPUGraph) -> None:
    x, kept = torch.zeros(4, device=NPU), torch.empty(4, device=NPU)
    staging, target = torch.zeros(4, pin_memory=True), torch.empty(4, device=NPU)
    before = torch.npu.NPUGraph.captures, torch.npu.NPUGraph.replays
    with torch.npu.graph(graph):
        assert torch.npu.is_current_stream_capturing()
        out = (x * 2 + 1).cumsum(0)
        order = out.sort(descending=True)
        kept.copy_(out)
        kept[0].zero_()
        target.copy_(staging, non_blocking=True)
    assert not torch.npu.is_current_stream_capturing()
    for scale in (1.0, -3.0):
        x.copy_(torch.arange(4.0) * scale)
        staging.fill_(scale)
        graph.replay()
        expected = (torch.arange(4.0) * scale * 2 + 1).cumsum(0)
        assert torch.equal(out.cpu(), expected)
        assert torch.equal(order.values.cpu(), expected.sort(descending=True).values)
        assert kept.tolist() == [0, *expected[1:].tolist()] and target.tolist() == [scale] * 4
    assert (torch.npu.NPUGraph.captures, torch.npu.NPUGraph.replays) == (before[0] + 1, before[1] + 2)


def test_captures_are_not_on_the_default_stream(graph: torch.npu.NPUGraph) -> None:
    """Where no stream is given, all are on one."""
    usual, side, x = torch.npu.default_stream(), torch.npu.Stream(), torch.ones(4, device=NPU)
    for refused in (graph.capture_begin, torch.npu.graph(graph, stream=usual).__enter__):
        with pytest.raises(RuntimeError, match="must be captured on a non-default stream"):
            refused()
        assert torch.npu.current_stream() == usual and not torch.npu.is_current_stream_capturing()
    used = []
    for given in (None, None, side):
        with torch.npu.graph(graph, stream=given):
            used.append(torch.npu.current_stream())
            y = x + 1
        graph.replay()
        assert torch.npu.current_stream() == usual and y.tolist() == [2] * 4
    assert used[0] == used[1] != usual and used[2] == side != used[0]


X = torch.ones(4)
FORBIDDEN: dict[str, Callable[[torch.Tensor], object]] = {
    "a value": lambda x: x.sum().item(),
    "a branch": lambda x: bool(x[0] > 0),
    "a copy to the host": lambda x: x.cpu(),
    "an asynchronous copy to the host": lambda x: X.copy_(x, non_blocking=True),
    "a copy from the host": lambda x: x.copy_(X),
    "a list": lambda x: torch.tensor([1, 2], device=NPU),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "repeats of unknown number": lambda x: x.repeat_interleave(x.to(torch.int64)),
    "indices on the host": lambda x: x[torch.tensor([1, 2])],
    "the device": lambda x: torch.npu.synchronize(),
    "a stream": lambda x: torch.npu.current_stream().synchronize(),
    "the cache": lambda x: torch.npu.empty_cache(),
    "a capture": lambda x: torch.npu.NPUGraph().capture_begin(),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_capture_refuses(name: str, graph: torch.npu.NPUGraph) -> None:
    x = torch.ones(4, device=NPU)
    FORBIDDEN[name](x) if name != "a capture" else None
    with torch.npu.graph(graph), pytest.raises(RuntimeError, match="not permitted while a graph is captured"):
        FORBIDDEN[name](x)


# Triton kernels of this project


def test_the_chip_decides_the_family() -> None:
    assert family_of("npu") is A2


def rope_case(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    angles = torch.randn(32, 32)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    return torch.randn(tokens, 4, 512), torch.arange(tokens, dtype=torch.int32), table


def test_a_kernel_on_the_device() -> None:
    x, positions, table = rope_case(7)
    out = rope(x.to(NPU), positions.to(NPU), table.to(NPU))
    assert out.device == NPU
    torch.testing.assert_close(out.cpu(), reference.rope(x, positions, table), atol=1e-6, rtol=1e-6)


def test_a_kernel_takes_no_tensor_of_the_host() -> None:
    from dsv4_triton.kernels.muls_add import _muls_add_kernel

    with pytest.raises(RuntimeError, match="an NPU cannot address it"):
        _muls_add_kernel[(1,)](*[torch.ones(4)] * 3, 4, 1.0)


def test_a_kernel_in_a_graph(graph: torch.npu.NPUGraph) -> None:
    x, y = torch.zeros(100, device=NPU), torch.zeros(100, device=NPU)
    out = torch.empty(100, device=NPU)
    muls_add(x, y, 2.0, out=out)
    with torch.npu.graph(graph):
        z = x + 1
        muls_add(z, y, 2.0, out=out)
        result = out * 10
    for value in (1.0, 5.0):
        x.fill_(value)
        y.fill_(-value)
        graph.replay()
        assert result.tolist() == [((value + 1) * 2 - value) * 10] * 100


def test_a_kernel_is_not_compiled_in_a_capture(graph: torch.npu.NPUGraph) -> None:
    x = torch.zeros(100, dtype=torch.bfloat16, device=NPU)
    with torch.npu.graph(graph), pytest.raises(RuntimeError, match="had to be compiled while a graph is captured"):
        muls_add(x, x, 2.0, out=torch.empty_like(x))
