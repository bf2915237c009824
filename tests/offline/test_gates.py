"""The gates of the offline compile.

Each kernel compiles, stays inside the memories without a fallback, reads nothing that nothing wrote and calls only what
the device library has. On A2 and A3, whose mixed kernels can use both vector cores, it also loses nothing: no inner
loop over single elements, no idle vector core. Here for decode steps of Flash; `make gates` holds every shape of Flash
and Pro on every family to the same, and its estimate to the static report.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4_triton import offline
from dsv4_triton.bench.registry import ops
from dsv4_triton.device import A2, A5, Family
from dsv4_triton.offline import Compiled, report

REPORT = Path(__file__).parents[2] / "docs" / "static_report.md"


def check(family: Family, compiled: list[Compiled]) -> None:
    limits = {"UB": family.ub_bytes, "L1": family.l1_bytes, "L0C": family.l0c_bytes}
    problems = []
    for result, group in offline.by_code(compiled):
        name = f"{group[0].case} {result.kernel}"
        if not result.ok or result.facts is None:
            problems.append(f"{name}: {result.message}")
            continue
        problems += [f"{name}: {problem}" for problem in result.faults]
        if family.mixed_kernels:
            problems += [f"{name}: {problem}" for problem in result.losses]
        problems += [f"{name}: {memory}" for memory, limit in limits.items() if result.facts.used(memory) > limit]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("family", [A2, A5], ids=lambda family: family.name)
def test_decode_steps_of_flash(family: Family) -> None:
    check(family, offline.compile_cases(offline.choose((), ["flash"], ["flash/decode/b16*"]), family))


@pytest.fixture(scope="module", params=offline.families(), ids=lambda family: family.name)
def everything(request: pytest.FixtureRequest) -> tuple[Family, list[Compiled]]:
    """All cases of Flash and Pro on a family."""
    return request.param, offline.compile_cases(offline.choose((), (), ()), request.param)


@pytest.mark.gates
def test_every_shape(everything: tuple[Family, list[Compiled]]) -> None:
    family, compiled = everything
    assert {one.case.op for one in compiled} == set(ops())
    check(family, compiled)


@pytest.mark.gates
def test_no_case_is_worse_than_in_the_static_report(everything: tuple[Family, list[Compiled]]) -> None:
    """Where this fails for a good reason, `dsv4-triton compile --report docs/static_report.md` writes it anew."""
    family, compiled = everything
    worse = report.regressions(report.lines(compiled, family), report.parse(REPORT.read_text()))
    assert not worse, "\n".join(worse)
