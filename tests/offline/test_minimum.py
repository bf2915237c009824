"""The least bytes of a job are held to what its launches move: the demo cases have padding, and closing windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dsv4_triton import offline
from dsv4_triton.bench.registry import Case, Minimum, ops, select
from dsv4_triton.compiler.cost.estimate import minimum_seconds
from dsv4_triton.device import A2, A5, Family
from dsv4_triton.offline import Compiled
from dsv4_triton.offline.counting import counted

SCALAR = 4
"""Bytes of an access of the scalar unit to global memory; the estimate counts its cycles and no bytes."""


def check(cases: Sequence[Case], family: Family) -> None:
    def count(case: Case, launches: Sequence[Compiled]) -> Any:
        costs = [one.cost(family) for one in launches]
        totals = [cost.facts.launch() for cost in costs]
        tiles = sum(n for total in totals for path, n in total.by("bytes").items() if "gm" in path.split("_"))
        scalars = sum(total[kind, "gm"] for total in totals for kind in ("load", "store"))
        return tiles, scalars * SCALAR, sum(cost.estimate.seconds for cost in costs)

    problems = []
    for one in counted(offline.compile_cases(cases, family), count):
        assert not one.problem, f"{one.case}: {one.problem}"
        tiles, scalars, seconds = one.found
        least = one.case.minimum(family)
        if least.bytes > tiles + scalars:
            problems.append(f"{one.case}: needs {least.bytes} bytes and moves {tiles + scalars}")
        if seconds < minimum_seconds(Minimum(least.bytes - scalars, least.macs, least.operands), family):
            problems.append(f"{one.case}: the estimate of {seconds * 1e6:g} us is below the limit")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("family", [A2, A5], ids=lambda family: family.name)
def test_padding_is_no_work(family: Family) -> None:
    check(select(kernel=["rope", "q_norm_rope", "compressor_state_insert", "gather_rows"], case="demo/*"), family)


@pytest.mark.gates
@pytest.mark.parametrize("family", offline.families(), ids=lambda family: family.name)
def test_no_job_needs_more_than_its_launches_move(family: Family) -> None:
    check(select(kernel=ops(), model="demo"), family)
