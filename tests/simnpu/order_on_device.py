"""Tests of the order of work on the simulated device's streams, for a process that has it: `test_simnpu.py` starts one.

Work that nothing orders must be able to change places, or a missing event would not be found; work that events order
must not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from dsv4_triton.kernels.muls_add import muls_add
from tests.backend.test_upstream_kernels import check_page_zeroer

NPU = torch.device("npu", 0)
SEEDS = [str(seed) for seed in range(8)]
ORDERS = ["", "side", "default", *SEEDS]


@pytest.fixture(autouse=True)
def _in_order_again() -> Iterator[None]:
    yield
    torch.ops.simnpu.set_order("")


@pytest.fixture
def side() -> torch.npu.Stream:
    return torch.npu.Stream()


Race = Callable[[torch.npu.Stream, bool], list[float]]
"""Work on the default stream and on another one: the result, with or without what orders it."""


def wait(waiting: torch.npu.Stream, ordered: bool) -> None:
    """Let a stream wait for the current one."""
    if ordered:
        waiting.wait_event(torch.npu.current_stream().record_event())


def main() -> torch.npu.Stream:
    return torch.npu.default_stream()


def made_beside(side: torch.npu.Stream, ordered: bool) -> list[float]:
    x = torch.zeros(3, device=NPU)
    wait(side, True)
    with torch.npu.stream(side):
        x += 1
        wait(main(), ordered)
    return (x * 10).tolist()


def made_before(side: torch.npu.Stream, ordered: bool) -> list[float]:
    x, y = torch.zeros(3, device=NPU), torch.zeros(3, device=NPU)
    torch.npu.synchronize()
    x += 1
    wait(side, ordered)
    with torch.npu.stream(side):
        y.copy_(x * 10)
    side.synchronize()
    torch.npu.synchronize()
    return y.tolist()


def overwritten(side: torch.npu.Stream, ordered: bool) -> list[float]:
    """What another stream still reads must stay."""
    x, y = torch.ones(3, device=NPU), torch.zeros(3, device=NPU)
    wait(side, True)
    with torch.npu.stream(side):
        y.copy_(x * 10)
        wait(main(), ordered)
    x.zero_()
    torch.npu.synchronize()
    return y.tolist()


def launched(side: torch.npu.Stream, ordered: bool) -> list[float]:
    """A kernel on the current stream, which is not the default one."""
    x, out = torch.full((3,), 2.0, device=NPU), torch.zeros(3, device=NPU)
    wait(side, True)
    with torch.npu.stream(side):
        muls_add(x, x, 4.0, out=out)
        wait(main(), ordered)
    return (out + 0).tolist()


def freed_beside(side: torch.npu.Stream, ordered: bool) -> list[float]:
    """The memory of a tensor that is gone is used again on the stream that it was made on: `ordered` keeps it until the
    stream that reads it has been waited for."""
    out = torch.zeros(3, device=NPU)
    wait(side, True)
    with torch.npu.stream(side):
        x = torch.ones(3, device=NPU)
        wait(main(), True)
    out.copy_(x * 10)
    if not ordered:
        del x
    with torch.npu.stream(side):
        torch.ones(3, device=NPU)
    torch.npu.synchronize()
    return out.tolist()


def freed_here(side: torch.npu.Stream, ordered: bool) -> list[float]:
    x, out = torch.ones(3, device=NPU), torch.zeros(3, device=NPU)
    wait(side, True)
    with torch.npu.stream(side):
        out.copy_(x * 10)
    if ordered:
        x.record_stream(side)
    del x
    torch.ones(3, device=NPU)
    torch.npu.synchronize()
    return out.tolist()


def pinned(side: torch.npu.Stream, ordered: bool) -> list[float]:
    """The host must not change what is still to be copied."""
    x, out = torch.ones(3, pin_memory=True), torch.zeros(3, device=NPU)
    wait(side, True)
    with torch.npu.stream(side):
        out.copy_(x, non_blocking=True)
        event = side.record_event()
    if ordered:
        event.synchronize()
    x.zero_()
    torch.npu.synchronize()
    return (out * 10).tolist()


RACES: dict[Race, str] = {
    made_beside: "side", made_before: "default", overwritten: "side", launched: "side", freed_beside: "default",
    freed_here: "side", pinned: "side",
}  # fmt: skip
"""Each with the order in which what is missing shows."""


@pytest.mark.parametrize("race", RACES, ids=lambda race: race.__name__)
def test_a_missing_event_shows(race: Race, side: torch.npu.Stream) -> None:
    assert race(side, False) == [10] * 3, "in the order in which it is given it always works"
    for order in (RACES[race], *SEEDS):
        torch.ops.simnpu.set_order(order)
        found = race(side, False)
        if found != [10] * 3:
            break
        assert order in SEEDS
    assert found != [10] * 3
    for order in ORDERS:
        torch.ops.simnpu.set_order(order)
        assert race(side, True) == [10] * 3, order


@pytest.mark.parametrize("order", ORDERS)
def test_what_the_host_reads_is_there(order: str, side: torch.npu.Stream) -> None:
    torch.ops.simnpu.set_order(order)
    x = torch.zeros(3, device=NPU)
    for read in (torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.nonzero, torch.Tensor.max, torch.equal):
        x += 1
        found = read(x, x) if read is torch.equal else read(x)
        assert found is not False and len(x.tolist()) == 3
    event, answer = torch.npu.Event(), torch.empty(3, pin_memory=True)
    with torch.npu.stream(side):
        side.wait_stream(main())
        answer.copy_(x, non_blocking=True)
        event.record()
    event.synchronize()
    assert event.query() and answer.tolist() == [5] * 3 and x.cumsum(0)[-1].item() == 15
    values, places = x.sort()
    assert values.tolist() == [5] * 3 and places.dtype == torch.int64
    assert torch.cat([x, x]).view(2, 3).unfold(1, 2, 1)[1, 0].tolist() == [5, 5]
    out = torch.empty(0, device=NPU)
    torch.add(x, 1, out=out)
    assert out.tolist() == [6] * 3


@pytest.mark.parametrize("order", ORDERS)
def test_new_pages_are_zeroed(order: str) -> None:
    """Their numbers are copied without a wait, from memory that the host holds no longer."""
    torch.ops.simnpu.set_order(order)
    check_page_zeroer(NPU)


def test_a_failure_is_raised_where_work_is_done(side: torch.npu.Stream, capfd: pytest.CaptureFixture[str]) -> None:
    torch.ops.simnpu.set_order("side")

    def fail() -> None:
        raise ValueError("wrong")

    with torch.npu.stream(side):
        torch.npu.submit(fail)
    with pytest.raises(RuntimeError, match="work of the device failed"):
        side.synchronize()
    assert "ValueError: wrong" in capfd.readouterr().err


# Graphs


def forked(side: torch.npu.Stream, x: torch.Tensor, missing: str = "") -> torch.Tensor:
    """3 x + 1, of which 2 x + 1 is computed beside; the first or the last event may be missing."""
    y, z = torch.zeros_like(x), torch.zeros_like(x)
    y.copy_(x + 1)
    wait(side, missing != "first")
    with torch.npu.stream(side):
        z.copy_(y)
        muls_add(z, x, 1.0, out=z)
    if missing != "last":
        torch.npu.current_stream().wait_stream(side)
    result = z + x
    torch.npu.current_stream().wait_stream(side)
    return result


@pytest.mark.parametrize("order", ORDERS)
def test_a_graph_keeps_its_order(order: str, side: torch.npu.Stream) -> None:
    torch.ops.simnpu.set_order(order)
    x = torch.zeros(3, device=NPU)
    forked(side, x)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, stream=torch.npu.Stream()):
        result = forked(side, x)
        assert torch.npu.is_current_stream_capturing()
    for value in (1.0, 2.0, 3.0):
        x.fill_(value)
        graph.replay()
        total = result + 0
        graph.replay()
        assert total.tolist() == result.tolist() == [3 * value + 1] * 3
    graph.reset()


def test_a_missing_event_in_a_graph_shows(side: torch.npu.Stream) -> None:
    x = torch.ones(3, device=NPU)
    forked(side, x)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        result = forked(side, x, missing="last")
    graph.replay()
    assert result.tolist() == [4] * 3
    torch.ops.simnpu.set_order("side")
    graph.replay()
    assert result.tolist() != [4] * 3


def test_a_capture_takes_streams_that_wait_for_it(side: torch.npu.Stream) -> None:
    x = torch.ones(3, device=NPU)
    graph, outside = torch.npu.NPUGraph(), torch.npu.current_stream().record_event()
    with pytest.raises(RuntimeError, match="takes no part in the capture"), torch.npu.graph(graph):
        forked(side, x, missing="first")
    with pytest.raises(RuntimeError, match="ends before work of stream"), torch.npu.graph(graph):
        wait(side, True)
        with torch.npu.stream(side):
            x + 1
    with pytest.raises(RuntimeError, match="from outside of the graph"), torch.npu.graph(graph):
        torch.npu.current_stream().wait_event(outside)
    with torch.npu.graph(graph):
        inside = torch.npu.current_stream().record_event()
    with pytest.raises(RuntimeError, match="means nothing outside"):
        inside.synchronize()
