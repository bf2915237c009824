"""Every kernel gives the reference's results with other launch parameters than its default, too.

For each op one combination of candidates a kernel, drawn by its name, on the demo cases; as A2, and as the host.
All combinations that win in a tuning run are held to the reference by the run itself.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from dsv4_triton.autotune.search import spaces, targets
from dsv4_triton.autotune.space import trial
from dsv4_triton.autotune.trials import Target
from dsv4_triton.bench.registry import ops, select
from dsv4_triton.device import A2, A5, HOST, Family, acting_as


def drawn(target: Target) -> dict[str, Any] | None:
    """A configuration that fits and is not the default."""
    fitting = [c for c, problem in target.space.configs(target.family, target.key) if not problem]
    others = [c for c in fitting if c != target.default]
    return random.Random(target.space.name).choice(others) if others else None


@pytest.mark.usefixtures("host_driver")
@pytest.mark.parametrize("family", [A2, HOST], ids=lambda family: family.name)
@pytest.mark.parametrize("op", ops())
def test_other_parameters(op: str, family: Family) -> None:
    done = set()
    for target in targets(select(kernel=op, model="demo"), family, lambda *_: None):
        config = drawn(target)
        if config is None or target.space.name in done:
            continue
        done.add(target.space.name)
        inputs = target.case.build(family)
        with acting_as(family), trial({target.space.name: config}, target.bucketed) as tried:
            target.case.check(inputs, family)
        assert tried.used == {target.space.name}


@cache
def everything(family: Family) -> list[Target]:
    """All targets of the registry; what they have in common between families is looked at once."""
    return targets(select(), family, lambda *_: None)


@pytest.mark.parametrize("family", [A2, A5, HOST], ids=lambda family: family.name)
def test_defaults_fit_and_files_can_keep_them(family: Family) -> None:
    """A default that does not fit its own sizes could never be looked up again."""
    for target in everything(family):
        assert not target.space.fits(family, target.key, target.default), target
        assert all(v is None or isinstance(v, (int, str)) for v in target.default.values()), target


def test_every_kernel_has_a_space_that_some_case_asks() -> None:
    asked = {target.space.name for family in (A2, A5, HOST) for target in everything(family)}
    assert asked == set(spaces())
