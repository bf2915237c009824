"""DeepSeek-V4 served with prologues on two streams, on a simulated NPU whose streams run out of order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.npu.conftest import CHIPS, LIMITS, Serve, machine, serve
from tests.npu.test_serving import GRAPHS, check_same, drafts

ORDERS = ["side", "default"]
OVERLAP = {"dsv4_triton": {"prologue_overlap": "on"}}


@pytest.fixture
def overlapped(simulated_npu: Path, checkpoint: Callable[[str], Path]) -> Serve:
    """Serve cases in several orders of work; `options` are the engine's."""

    def call(family: str, cases: list[str], orders: list[str] = ORDERS, **options: Any) -> dict[str, Any]:
        settings = {"SIMNPU_SOC": CHIPS[family], "SIMNPU_LATE": orders[0]}
        environment = machine(simulated_npu, **settings)
        options = {"dtype": "float32", **LIMITS, "additional_config": OVERLAP, **options}
        folder = str(checkpoint("float32"))
        return serve(environment, "tests.npu.streams", checkpoint=folder, cases=cases, orders=orders, options=options)

    return call


def check(found: dict[str, Any], expected: dict[str, Any], orders: list[str] = ORDERS) -> None:
    """Every order gives the answers of the CPU platform, and one stream the same ones bit for bit; a missing event is
    seen."""
    for order in orders:
        for name, answers in found[order].items():
            check_same(answers, expected[{"chunked": "plain"}.get(name, name)])
            assert answers == found["one stream"][name]
    for name, cases in found["without"].items():
        for case, answers in cases.items():
            assert answers != found[orders[0]][case], f"nothing shows that the events of {name} are missing"


def test_graphs_in_any_order(overlapped: Serve, on_cpu: Serve) -> None:
    """Prefills as they come and decode steps in graphs, both forked and joined by events."""
    found = overlapped("a2", ["plain"], **GRAPHS, max_num_seqs=4)
    check(found, on_cpu("a2", ["plain"]))
    assert found["captures"] > 0 and found["replays"] > 0


@pytest.mark.long
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("family", ["a2", "a5"])
def test_drafts_in_any_order(family: str, graphs: bool, overlapped: Serve, on_cpu: Serve) -> None:
    orders = [*ORDERS, "7"]
    found = overlapped(family, ["plain", "chunked", "crowd"], orders, **(GRAPHS if graphs else {}), **drafts(2))
    check(found, on_cpu("a2", ["plain", "crowd"]), orders)
