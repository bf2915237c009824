"""The gates of the offline compile: every public op at every shape of Flash and Pro, for every family.

Each kernel compiles, stays inside the memories without a fallback, reads nothing that nothing wrote, calls only what
the device library has, runs no inner loop over single elements and uses both vector cores where they share work; and
no case costs more than docs/static_report.md says.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4_triton import offline
from dsv4_triton.bench.registry import ops
from dsv4_triton.device import Family
from dsv4_triton.offline import Compiled, report

REPORT = Path(__file__).parents[2] / "docs" / "static_report.md"
_families = offline.families()


@pytest.fixture(scope="module", params=_families, ids=[family.name for family in _families])
def compiled(request: pytest.FixtureRequest) -> tuple[Family, list[Compiled]]:
    family = request.param
    return family, offline.compile_cases(offline.choose((), (), ()), family)


def test_every_kernel_compiles_without_a_loss(compiled: tuple[Family, list[Compiled]]) -> None:
    family, found = compiled
    assert {one.case.op for one in found} == set(ops()) and {one.case.model for one in found} == {"flash", "pro"}
    problems = {
        f"{group[0].case} {result.kernel}": result.message or [*result.faults, *result.losses]
        for result, group in offline.by_code(found)
        if not result.ok or result.faults or result.losses
    }
    assert not problems
    limits = {"UB": family.ub_bytes, "L1": family.l1_bytes, "L0C": family.l0c_bytes}
    for one in found:
        facts = one.result.facts
        assert facts is not None and all(facts.used(memory) <= limit for memory, limit in limits.items())


def test_no_case_costs_more_than_the_report_says(compiled: tuple[Family, list[Compiled]]) -> None:
    family, found = compiled
    problems = report.regressions(report.lines(found, family), report.parse(REPORT.read_text()))
    assert not problems, "\n".join([*problems, f"if that is meant: dsv4-triton compile --report {REPORT.name}"])


def test_report_lists_the_launches_of_a_step(compiled: tuple[Family, list[Compiled]]) -> None:
    family, _ = compiled
    assert report.launch_table([family.name]).splitlines()[2:] == [
        row for row in REPORT.read_text().splitlines() if row.startswith(f"| {family.name} |")
    ]
