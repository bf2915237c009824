"""Tensor parallelism over two simulated NPUs, in processes of their own; the collectives are gloo's."""

from __future__ import annotations

import pytest

from tests.npu.conftest import Serve
from tests.npu.test_serving import EVERY_CASE, GRAPHS, REFERENCE, check_cases, check_graphs, drafts


def test_two_ranks_in_short(on_npu: Serve, on_cpu: Serve) -> None:
    found = on_npu("a2", ["plain"], devices=2, tensor_parallel_size=2)
    check_cases(found, on_cpu("a2", ["plain"]))
    assert len(found["ranks"]) == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "count", "graphs"), [("a2", 0, False), ("a2", 2, True), ("a5", 0, True)], ids=["a2", "a2-drafts", "a5"]
)
def test_two_ranks(family: str, count: int, graphs: bool, on_npu: Serve, on_cpu: Serve) -> None:
    options = {"tensor_parallel_size": 2, **(GRAPHS if graphs else {}), **drafts(count)}
    found = on_npu(family, EVERY_CASE, devices=2, **options)
    check_cases(found, on_cpu("a2", REFERENCE), hit=0 if count else 256)
    assert len(found["ranks"]) == 2
    check_graphs(found, graphs)
