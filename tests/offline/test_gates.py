"""The gates of the offline compile.

Each kernel compiles, stays inside the memories without a fallback, reads nothing that nothing wrote and calls only what
the device library has. On A2 and A3, whose mixed kernels can use both vector cores, it also loses nothing: no inner
loop over single elements, no idle vector core. Here for decode steps of Flash; `make gates` holds every shape of Flash
and Pro on every family to the same.
"""

from __future__ import annotations

import pytest

from dsv4_triton import offline
from dsv4_triton.bench.registry import ops
from dsv4_triton.device import A2, A5, Family
from dsv4_triton.offline import Compiled


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


@pytest.mark.gates
@pytest.mark.parametrize("family", offline.families(), ids=lambda family: family.name)
def test_every_shape(family: Family) -> None:
    compiled = offline.compile_cases(offline.choose((), (), ()), family)
    assert {one.case.op for one in compiled} == set(ops())
    check(family, compiled)
