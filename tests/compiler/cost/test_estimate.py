"""Counting follows the launch's real arguments; the estimate is arithmetic on the counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from dsv4_triton.compiler import cost
from dsv4_triton.compiler.cost import Facts, arguments_of, count, estimate, scratch_of
from dsv4_triton.compiler.cost.estimate import minimum_seconds
from dsv4_triton.compiler.cost.facts import Core
from dsv4_triton.compiler.cost.ops import product, steps, transfer
from dsv4_triton.compiler.hivm import CostError
from dsv4_triton.device import A2, A5, HOST, Family
from tests.compiler.cost import kernels as kernels
from tests.compiler.cost.launch import facts_of, hivm_of, record

both = pytest.mark.parametrize("family", [A2, A5], ids=lambda f: f.name)


# Control flow


@both
@pytest.mark.parametrize("negative", [0, 1, 5, 16])
def test_branches_that_vectors_decide(family: Family, negative: int) -> None:
    index = torch.arange(64, dtype=torch.int32)
    index[16 : 16 + negative] = -1
    x = torch.empty(64, 64)
    facts = facts_of(family, kernels.chosen_rows, (2,), x, index, x, 64, R=16, D=64)
    # Four tiles: three, or all, move whole; one row by row, with its 16 indices read again.
    slow = int(negative > 0)
    rows = (16 - negative) * slow
    launch = facts.launch()
    assert launch["read", "x"] == launch["write", "o"] == ((4 - slow) * 16 + rows) * 64 * 4
    assert launch["dma", "ub_gm"] == 4 - slow + rows
    assert launch["loop_load", "gm"] == 16 * slow
    assert facts.assumed == {}


@both
def test_loops_and_extents_that_tensors_decide(family: Family) -> None:
    lengths = torch.tensor([3, 0, 1, 7], dtype=torch.int32)
    x = torch.empty(4, 1024, 128)
    facts = facts_of(family, kernels.ragged, (4,), x, lengths, x, D=128)
    for program, n in enumerate(lengths.tolist()):
        counts = facts.program(program, "aiv")
        # The last row is 16 values shorter.
        assert counts["bytes", "gm_ub"] == counts["bytes", "ub_gm"] == (n * 128 - 16 * (n > 0)) * 4
        assert counts["dma", "ub_gm"] == n
    assert facts.launch()["dma", "ub_gm"] == 11
    assert facts.argument_bytes == {"x": 4 * 1024 * 128 * 4, "lengths": 16, "o": 4 * 1024 * 128 * 4}


@both
def test_a_tensor_that_nobody_wrote_is_not_read(family: Family) -> None:
    lengths = torch.full((4,), 1 << 30, dtype=torch.int32)
    x = torch.empty(4, 1024, 128)
    launch = record(family, kernels.ragged, (4,), x, lengths, x, D=128)
    text, arguments = hivm_of(family, launch), arguments_of(launch)
    facts = count(text, family, launch.grid, arguments, unwritten=["lengths"])
    assert facts.assumed and facts.launch()["dma", "ub_gm"] == 4
    with pytest.raises(CostError, match="nobody wrote"):
        count(text, family, launch.grid, arguments)


@both
def test_a_loop_that_floats_end_counts_once_and_says_so(family: Family) -> None:
    x = torch.ones(256)
    facts = facts_of(family, kernels.search, (1,), x, x, D=256)
    assert sum(facts.assumed.values()) == 2
    assert all("while" in what for what in facts.assumed)


def test_programs_that_do_not_differ_are_counted_once() -> None:
    x = torch.empty(64 * 2048)
    facts = facts_of(A2, kernels.clamp, (64,), x, x, B=2048, PROPAGATE=True)
    assert facts.uniform and facts.blocks == (0,)
    assert facts.program(63, "aiv") == facts.program(0, "aiv")
    assert facts.launch()["read", "x"] == 64 * 2048 * 4


def test_a_large_grid_is_sampled_and_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "_EVALUATION_BUDGET", 20_000)
    programs = 60000
    lengths = torch.full((programs,), 40, dtype=torch.int32)
    lengths[::2] = 20
    x = torch.empty(1, dtype=torch.float32).expand(programs * 1024 * 128)
    facts = facts_of(A2, kernels.ragged, (programs,), x, lengths, x, D=128)
    assert facts.sampled and len(facts.blocks) < programs
    assert facts.launch()["dma", "ub_gm"] == pytest.approx(30 * programs, rel=0.1)
    with pytest.raises(KeyError):
        facts.program(next(b for b in range(programs) if b not in facts.blocks), "aiv")


def test_arguments_that_are_not_the_kernels() -> None:
    x = torch.empty(48 * 2048)
    launch = record(A2, kernels.clamp, (48,), x, x, B=2048, PROPAGATE=True)
    text = hivm_of(A2, launch)
    with pytest.raises(CostError, match=r"clamp has 2 run-time arguments, got 3: x, o, n"):
        count(text, A2, (48,), {"x": x, "o": x, "n": 4})
    with pytest.raises(CostError, match="argument o is int"):
        count(text, A2, (48,), {"x": x, "o": 4})
    with pytest.raises(CostError, match="for 24 cube cores, family a5 has 32"):
        count(text, A5, (48,), {"x": x, "o": x})
    with pytest.raises(CostError, match="generic form"):
        count("module {}", A2, (1,), {})


# Monotone


@both
def test_more_rows_never_cost_less(family: Family) -> None:
    times = []
    for tokens in (1, 7, 48, 49, 64, 97, 500, 4096):
        x = torch.empty(tokens, 1024, dtype=torch.bfloat16)
        facts = facts_of(family, kernels.rmsnorm, (48,), x, x[0], x, tokens, D=1024)
        times.append(estimate(facts, family).rank)
    assert times == sorted(times)
    assert times[0][0] < times[-1][0] / 10


@both
def test_a_longer_product_never_costs_less(family: Family) -> None:
    times = []
    for depth in (256, 512, 1024, 4096):
        x, out = torch.empty(256, depth, dtype=torch.bfloat16), torch.empty(256, 256)
        facts = facts_of(
            family, kernels.product, (4, 4), x, x, out, 256, K=depth, N=256, BM=64, BN=64, BK=64, FORM="good"
        )
        times.append(estimate(facts, family).rank)
    assert times == sorted(times)


# One operation


@pytest.mark.parametrize(
    ("sizes", "strides", "bits", "expected"),
    [
        ((4096,), (1,), 32, (1, 1, 16384, 16384, 0)),
        ((64, 64), (64, 1), 16, (1, 1, 8192, 8192, 0)),  # contiguous rows are one run
        ((64, 64), (512, 1), 16, (1, 64, 8192, 8192, 0)),  # one strided transfer
        ((3, 5), (512, 1), 32, (1, 3, 60, 96, 0)),  # runs filled up to 32 bytes
        ((128,), (2,), 32, (1, 128, 512, 4096, 0)),  # every element a run
        ((1,), (1,), 32, (1, 1, 4, 32, 1)),
        ((4, 8, 16), (4096, 64, 1), 32, (4, 32, 2048, 2048, 0)),  # a transfer per outer row
        ((0, 64), (64, 1), 32, (0, 0, 0, 0, 0)),
        ((1, 1, 64), (9999, 77, 1), 16, (1, 1, 128, 128, 0)),  # axes of one do not matter
    ],
)
def test_transfers(sizes: tuple[int, ...], strides: tuple[int, ...], bits: int, expected: tuple[int, ...]) -> None:
    assert transfer(sizes, strides, bits) == expected


def test_vector_steps_do_not_cross_rows() -> None:
    assert steps((16, 64), (64, 1), 32) == (1024, 16)
    assert steps((16, 8), (8, 1), 32) == (128, 2)
    assert steps((16, 8), (64, 1), 32) == (128, 16)
    assert steps((1000,), (1,), 16) == (1000, 8)


def test_products_fill_fractals() -> None:
    assert product((16, 128, 256), 16) == (524288, 524288, 4096, 65536)
    assert product((4, 100, 20), 16) == (8000, 16 * 112 * 32, 16 * 112 * 2, 112 * 32 * 2)
    assert product((16, 40, 16), 8)[1] == 16 * 64 * 16
    assert product((0, 64, 64), 16) == (0, 0, 0, 0)


# The estimate


@dataclass(frozen=True)
class Job:
    bytes: int
    macs: int = 0
    operands: torch.dtype | None = None


def facts_from(cores: dict[str, list[dict[tuple[str, str], int]]], **more: object) -> Facts:
    """Facts with given counts of each program."""
    made = {}
    for name, rows in cores.items():
        keys = tuple(dict.fromkeys(key for row in rows for key in row))
        made[name] = Core(keys, np.array([[row.get(key, 0) for key in keys] for row in rows], dtype=np.int64))
    programs = len(next(iter(cores.values())))
    values: dict[str, object] = {
        "programs": programs, "blocks": tuple(range(programs)), "cores": made, "argument_bytes": {},
        "workspace_bytes": 0, "unrolled": 0, "one_vector_core": False, "uniform": False,
    }  # fmt: skip
    return Facts(**{**values, **more})  # type: ignore[arg-type]


def test_the_busiest_core_counts() -> None:
    # 1,000 steps of 256 bytes and one operation on each of 49 programs: two of them share core 0.
    work = {("vinst", "vadd"): 1, ("vrep", "vadd"): 1000}
    result = estimate(facts_from({"aiv": [work] * 49}), A2)
    assert result.resource == "vector"
    assert result.seconds == pytest.approx(2 * (1000 + 20) / 1.8e9)
    assert estimate(facts_from({"aiv": [work] * 48}), A2).seconds == pytest.approx(1020 / 1.8e9)


def test_expensive_vector_operations() -> None:
    def seconds(name: str) -> float:
        return estimate(facts_from({"aiv": [{("vrep", name): 1000}]}), A2).seconds

    assert seconds("vexp") == 4 * seconds("vadd")


def test_memory_traffic_counts_what_is_read_again_once() -> None:
    rows = [{("bytes", "gm_l1"): 1 << 20, ("moved", "gm_l1"): 1 << 20, ("read", "w"): 1 << 20}] * 24
    result = estimate(facts_from({"aic": rows}, argument_bytes={"w": 1 << 20}), A2)
    assert result.hbm_bytes == 1 << 20
    assert result.resource in ("transfer_in", "l2")  # 24 cores at their full rate are the rate of the cache
    assert result.seconds == pytest.approx((1 << 20) / 110 / 1.8e9)
    assert result.resources["l2"] == pytest.approx(24 * (1 << 20) / (24 * 110 * 1.8e9))
    unbounded = estimate(facts_from({"aic": rows}), A2)
    assert unbounded.hbm_bytes == 24 << 20 and unbounded.resource == "hbm"


def test_what_a_launch_can_touch_bounds_its_traffic() -> None:
    """Pages that a step attends are read by several tiles, and are a small part of a cache."""
    rows = [{("read", "cache"): 1 << 20, ("write", "out"): 1 << 10}] * 24
    facts = facts_from({"aic": rows}, argument_bytes={"cache": 1 << 30, "out": 24 << 10})
    assert estimate(facts, A2).hbm_bytes == (24 << 20) + (24 << 10)
    assert estimate(facts, A2, touched={"cache": 3 << 20}).hbm_bytes == (3 << 20) + (24 << 10)
    assert estimate(facts, A2, touched={"cache": 1 << 40}).hbm_bytes == (24 << 20) + (24 << 10)


def test_scratch_that_fits_stays_in_the_cache() -> None:
    rows = [{("read", "scratch"): 1 << 20, ("read", "x"): 1 << 10, ("write", "scratch"): 1 << 20}] * 8
    facts = facts_from({"aiv": rows}, argument_bytes={"scratch": 8 << 20, "x": 8 << 10})
    assert estimate(facts, A2).hbm_bytes == (16 << 20) + (8 << 10)
    assert estimate(facts, A2, resident={"scratch"}).hbm_bytes == 8 << 10
    large = facts_from({"aiv": rows}, argument_bytes={"scratch": 200 << 20, "x": 8 << 10})
    assert estimate(large, A2, resident={"scratch"}).hbm_bytes == (16 << 20) + (8 << 10)


def test_scratch_is_what_the_op_does_not_own() -> None:
    x, scratch = torch.empty(48 * 2048), torch.empty(48 * 2048)
    launch = record(A2, kernels.clamp, (48,), x[:], scratch, B=2048, PROPAGATE=True)
    assert scratch_of(launch, [x]) == {"o"}


def test_cube_and_vector_cores_take_turns_without_a_pipeline() -> None:
    cube = [{("mac_padded", "bf16"): 4096 * 1000}]
    vector = [{("vrep", "vadd"): 700}]
    cores = {"aic": cube, "aiv0": vector, "aiv1": vector}
    serial = estimate(facts_from(cores), A2)
    assert serial.serial and serial.seconds == pytest.approx(1700 / 1.8e9)
    piped = estimate(facts_from(cores, unrolled=4), A2)
    assert not piped.serial and piped.seconds == pytest.approx(1000 / 1.8e9)
    assert serial.resource == piped.resource == "cube"


def test_ratio_to_the_minimum_of_the_job() -> None:
    rows = [{("moved", "gm_ub"): 64 * 3600, ("read", "x"): 64 * 3600}] * 48
    job = Job(bytes=48 * 64 * 1800)
    result = estimate(facts_from({"aiv": rows}), A2, job)
    assert result.minimum_seconds == pytest.approx(48 * 64 * 1800 / 1.6e12)
    assert result.ratio == pytest.approx(result.seconds / result.minimum_seconds)
    assert result.ratio == pytest.approx(2.0)
    assert minimum_seconds(Job(0, 24 * 4096 * 1800, torch.bfloat16), A2) == pytest.approx(1e-6)
    assert minimum_seconds(Job(0, 24 * 8192 * 1800, torch.int8), A2) == pytest.approx(1e-6)
    assert minimum_seconds(Job(0, 32 * 8192 * 1650, torch.float8_e4m3fn), A5) == pytest.approx(1e-6)


def test_a_family_without_rates() -> None:
    with pytest.raises(ValueError, match="family host has no rates"):
        estimate(facts_from({"aiv": [{}]}), HOST)
