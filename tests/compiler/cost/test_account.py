"""The cost model is held to account: more work never costs less, and every constant stands in docs/cost_model.md."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from dsv4_triton.compiler.cost import Facts, estimate
from dsv4_triton.compiler.cost.estimate import _INSTRUCTIONS, _SCALAR_LIBRARY, _SLOW, minimum_seconds
from dsv4_triton.compiler.cost.facts import Core
from dsv4_triton.device import A2, A3, A5, Family, Speed
from tests.compiler.cost import kernels as kernels
from tests.compiler.cost.launch import facts_of

NPUS = pytest.mark.parametrize("family", [A2, A3, A5], ids=lambda family: family.name)
DOCS = (Path(__file__).parents[3] / "docs" / "cost_model.md").read_text()
COSTLY = {"read", "write", "mac_padded", "l0a", "l0b", "moved", "bursts", "dma", "vinst", "vrep", "ave", "vf", "load",
          "store", "scalar"}  # fmt: skip
"""Kinds of counts that take time; the others are facts only."""


def flash(family: Family) -> Facts:
    """A mixed kernel: every resource is in it."""
    x = torch.empty(2, 1024, 64, dtype=torch.bfloat16)
    return facts_of(family, kernels.flash, (16, 2), x, x, x, x, 0.125, 1024, D=64, BM=64, BN=64)


def raised(facts: Facts, kind: str) -> Facts:
    """Every count of a kind a thousandfold, in all programs; arguments large enough to be read in full."""
    cores = {
        name: Core(core.keys, core.rows * [1000 if k == kind else 1 for k, _ in core.keys])
        for name, core in facts.cores.items()
    }
    return dataclasses.replace(facts, cores=cores, argument_bytes={})


@NPUS
def test_more_of_anything_never_costs_less(family: Family) -> None:
    facts = dataclasses.replace(flash(family), argument_bytes={})
    before = estimate(facts, family)
    kinds = {kind for core in facts.cores.values() for kind, _ in core.keys}
    assert {"read", "write", "mac_padded", "moved", "dma"} <= kinds
    for kind in sorted(kinds):
        after = estimate(raised(facts, kind), family)
        assert after.seconds >= before.seconds, kind
        assert all(after.resources[name] >= before.resources[name] for name in before.resources), kind
        grown = sum(after.resources.values()) > sum(before.resources.values())
        assert grown == (kind in COSTLY), f"{kind}: counted or not, it is not what this test and the docs say"


@NPUS
def test_more_programs_never_cost_less(family: Family) -> None:
    times = []
    for programs in (1, 2, 24, 25, 32, 48, 49, 64, 65, 200):
        x = torch.empty(programs * 2048)
        facts = facts_of(family, kernels.clamp, (programs,), x, x, B=2048, PROPAGATE=True)
        times.append(estimate(facts, family).rank)
    assert times == sorted(times)


@NPUS
def test_a_faster_chip_never_takes_longer(family: Family) -> None:
    facts, speed = flash(family), family.speed
    assert speed is not None
    before = estimate(facts, family).seconds
    for field in dataclasses.fields(Speed):
        value = getattr(speed, field.name)
        if isinstance(value, dict):
            faster = {name: number * 2 if field.name == "macs_per_cycle" else 0 for name, number in value.items()}
        else:
            faster = 0 if field.name in ("vector_issue", "transfer_issue", "run_issue") else value * 2
        quick = dataclasses.replace(family, speed=dataclasses.replace(speed, **{field.name: faster}))
        assert estimate(facts, quick).seconds <= before, field.name


@NPUS
def test_no_estimate_is_below_the_least_that_the_job_needs(family: Family) -> None:
    """Of a job whose bytes are read and written once, and whose products are those that are asked for."""

    @dataclasses.dataclass(frozen=True)
    class Job:
        bytes: int
        macs: int = 0
        operands: torch.dtype | None = None

    x = torch.empty(4096, 1024, dtype=torch.bfloat16)
    norm = facts_of(family, kernels.rmsnorm, (48,), x, x[0], x, 4096, D=1024)
    assert estimate(norm, family).seconds >= minimum_seconds(Job(2 * 4096 * 1024 * 2), family)
    job = Job(4 * 2 * 1024 * 64 * 2, 2 * 2 * 1024 * 1024 * 64, torch.bfloat16)
    assert estimate(flash(family), family).seconds >= minimum_seconds(job, family)


# The docs


def constants() -> dict[str, list[str]]:
    """Cells of the table of constants by their first one."""
    table = DOCS[DOCS.index("## Constants") :]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return {cells[0]: cells[1:] for cells in rows}


def values(text: str, otherwise: list[float]) -> list[float]:
    """The numbers of a cell, or those of the first column where it begins with `same`."""
    return otherwise if text.startswith("same") else [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]


@pytest.mark.parametrize(("column", "family"), [(0, A2), (1, A3), (2, A5)], ids=["a2", "a3", "a5"])
def test_every_rate_stands_in_the_docs_with_its_source(column: int, family: Family) -> None:
    speed, table = family.speed, constants()
    assert speed is not None
    macs = speed.macs_per_cycle
    stated = {
        "clock, GHz": [speed.clock_hz / 1e9],
        "multiply-accumulates per cycle, 16-bit / 8-bit": [macs["bf16"], macs["i8"]],
        "the same, fp32": [macs["f32"]],
        "HBM, TB/s": [speed.hbm_bytes_per_second / 1e12],
        "L2, TB/s": [speed.l2_bytes_per_second / 1e12],
        "L2, MiB": [speed.l2_bytes / 2**20],
        "into L1, bytes per cycle": [speed.gm_l1],
        "into vector memory": [speed.gm_ub],
        "out of vector memory": [speed.ub_gm],
        "out of L0C to global memory / to vector memory": [speed.l0c_gm, speed.l0c_ub],
        "vector memory to L1": [speed.ub_l1],
        "L1 to L0A / L0B": [speed.l1_l0a, speed.l1_l0b],
    }
    for name, expected in stated.items():
        *cells, source = table[name]
        assert source, f"{name} has no source"
        found = values(cells[column], values(cells[0], []))
        # A dash: there is no such path on the family.
        assert found == pytest.approx(expected[: len(found)], rel=5e-3), name
        assert len(found) == len(expected) or "-" in cells[column], name
    told = {"vector_issue", "transfer_issue", "run_issue", "scalar_cycles", "launch_seconds"}
    rest = {field.name for field in dataclasses.fields(Speed)} - told
    assert len(rest) == sum(map(len, stated.values())) - 2, "three rates of products are one field"


def test_every_assumed_cost_stands_in_the_docs() -> None:
    """Those that are the same for all families."""
    speed = A2.speed
    assert speed is not None and all(
        getattr(speed, name) == getattr(family.speed, name)
        for name in ("vector_issue", "transfer_issue", "run_issue", "scalar_cycles", "launch_seconds")
        for family in (A3, A5)
    )
    scalar = speed.scalar_cycles
    for words in (
        f"{speed.vector_issue} per operation, 1 per 256-byte step",
        f"{speed.vector_issue} per function",
        f"{speed.transfer_issue} per transfer",
        f"and {speed.run_issue} per contiguous run",
        f"{scalar['alu']} per operation, {scalar['div']} per division, {scalar['gm']} per load from global memory, "
        f"{scalar['ub']} per load from vector memory, {scalar['store']} per store",
        f"launch {speed.launch_seconds * 1e6:g} us",
        f"{_SLOW['vexp']} for exp, ln, sqrt, div",
        f"{min(_SLOW.values())} to {max(_SLOW.values())} for reductions, transposes, gathers, sorts",
        f"a reduction counts as {_INSTRUCTIONS['vreduce']} operations",
        f"{_SCALAR_LIBRARY['vcumsum']} per element of a prefix sum",
    ):
        assert words in " ".join(DOCS.split()), f"docs/cost_model.md does not say: {words}"
    for limit in ("Latency", "What is in L2", "Bank conflicts", "library calls", "instruction cache"):
        assert limit in DOCS[DOCS.index("## What it does not see") :]
