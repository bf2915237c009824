"""The gates of the offline compile.

Each kernel compiles, stays inside the memories without a fallback, reads nothing that nothing wrote, calls only what
the device library has, runs no inner loop over single elements and uses both vector cores where they share work; and
no case costs more than docs/static_report.md says. Here for decode steps of Flash; `make gates` holds every shape of
Flash and Pro on every family to the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from dsv4_triton import offline
from dsv4_triton.bench.registry import ops
from dsv4_triton.device import A2, A5, Family
from dsv4_triton.offline import Compiled, report

REPORT = Path(__file__).parents[2] / "docs" / "static_report.md"


def problems_of(compiled: Iterable[Compiled], family: Family, *, but: frozenset[tuple[str, str, str]]) -> list[str]:
    """What the gates refuse, leaving out what the report lists as not ok."""
    limits = {"UB": family.ub_bytes, "L1": family.l1_bytes, "L0C": family.l0c_bytes}
    found = []
    for one in compiled:
        result, name = one.result, f"{one.case} {one.result.kernel}"
        if (family.name, one.case.op, one.case.name) in but:
            continue
        if not result.ok or result.facts is None:
            found.append(f"{name}: {result.message}")
        else:
            found += [f"{name}: {problem}" for problem in (*result.faults, *result.losses)]
            found += [f"{name}: {memory}" for memory, limit in limits.items() if result.facts.used(memory) > limit]
    return found


def check(family: Family, compiled: list[Compiled], *, part: bool) -> None:
    earlier = report.parse(REPORT.read_text())
    known = frozenset(key for key, line in earlier.items() if line.status != "ok")
    assert not problems_of(compiled, family, but=known)
    worse = report.regressions(report.lines(compiled, family), earlier)
    worse = [problem for problem in worse if not (part and problem.endswith("no longer in the report"))]
    assert not worse, "\n".join([*worse, "if that is meant: dsv4-triton compile --report docs/static_report.md"])


@pytest.mark.parametrize("family", [A2, A5], ids=lambda family: family.name)
def test_decode_steps_of_flash(family: Family) -> None:
    check(family, offline.compile_cases(offline.choose((), ["flash"], ["flash/decode/b16*"]), family), part=True)


@pytest.mark.gates
@pytest.mark.parametrize("family", offline.families(), ids=lambda family: family.name)
def test_every_shape(family: Family) -> None:
    compiled = offline.compile_cases(offline.choose((), (), ()), family)
    assert {one.case.op for one in compiled} == set(ops())
    check(family, compiled, part=False)


def test_launches_of_a_step_are_those_of_the_report() -> None:
    rows = report.launch_table(["a2"]).splitlines()[2:]
    assert rows and rows == [row for row in REPORT.read_text().splitlines() if row.startswith("| a2 |")]
