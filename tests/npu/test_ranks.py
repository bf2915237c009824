"""Tensor parallelism over two simulated NPUs, in processes of their own; the collectives are gloo's."""

from __future__ import annotations

import pytest

from tests.npu.conftest import Serve
from tests.npu.test_serving import EVERY_CASE, GRAPHS, REFERENCE, check_cases, check_graphs, drafts


@pytest.mark.parametrize(
    ("family", "count", "graphs"),
    [
        pytest.param("a2", 0, False, marks=pytest.mark.long),
        ("a2", 2, True),
        pytest.param("a5", 0, True, marks=pytest.mark.long),
    ],
)
def test_two_ranks(family: str, count: int, graphs: bool, on_npu: Serve, on_cpu: Serve) -> None:
    options = {"tensor_parallel_size": 2, **(GRAPHS if graphs else {}), **drafts(count)}
    found = on_npu(family, EVERY_CASE, devices=2, **options)
    check_cases(found, on_cpu("a2", REFERENCE), hit=0 if count else 256)
    assert len(found["ranks"]) == 2
    check_graphs(found, graphs)
