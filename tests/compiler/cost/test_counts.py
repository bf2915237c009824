"""Counts of three kernels against hand calculation, on all three families."""

from __future__ import annotations

import pytest
import torch

from dsv4_triton.compiler.cost import Counts, Facts
from dsv4_triton.device import A2, A3, A5, Family
from tests.compiler.cost import kernels as kernels
from tests.compiler.cost.launch import facts_of

bf16 = torch.bfloat16


def pick(counts: Counts, *kinds: str) -> dict[str, dict[str, int]]:
    """Counts of the given kinds, each without the names that count zero."""
    return {kind: counts.by(kind) for kind in kinds}


# C[1024, 1024] = A B in bf16, tile 128 x 256, K in 16 steps of 64, 8 x 4 programs. Per program and step A's tile has
# 128 * 64 * 2 = 16,384 bytes in 128 runs and B's 64 * 256 * 2 = 32,768 bytes: 49,152 together, 786,432 in 16 steps.
# 128 * 256 * 1024 = 33,554,432 multiply-accumulates in 16 matrix instructions.
STEPS = 16
OPERANDS = STEPS * (128 * 64 + 64 * 256) * 2
MACS = 128 * 256 * 1024


def matmul_with_strides_at_run_time(family: Family) -> Facts:
    x = torch.empty(1024, 1024, dtype=bf16)
    return facts_of(family, kernels.matmul, (8, 4), x, x, x, 1024, 1024, 1, 1024, 1, 1024, BM=128, BN=256, BK=64)


@pytest.mark.parametrize("family", [A2, A3], ids=lambda f: f.name)
def test_matmul_with_strides_at_run_time_goes_through_the_vector_cores(family: Family) -> None:
    facts = matmul_with_strides_at_run_time(family)
    cube = facts.program(31, "aic")
    assert pick(cube, "mmad", "mac", "mac_padded") == {
        "mmad": {"bf16": STEPS}, "mac": {"bf16": MACS}, "mac_padded": {"bf16": MACS},
    }  # fmt: skip
    # Both tiles come from the workspace; the result leaves rounded, by the cube core itself, in 128 rows.
    assert cube.by("bytes") == {"ws_l1": OPERANDS, "l0c_gm": 128 * 256 * 2}
    assert cube.by("dma") == {"ws_l1": 2 * STEPS, "l0c_gm": 1}
    assert cube.by("bursts") == {"ws_l1": 2 * STEPS, "l0c_gm": 128}
    # Operands of the cube's buffers: A's 16,384 and B's 32,768 bytes in each step.
    assert (cube["l0a", "bytes"], cube["l0b", "bytes"]) == (STEPS * 16384, STEPS * 32768)
    # Both vector cores load everything, 128 rows of A and 64 of B per step; only the first one stores.
    for core, stored in (("aiv0", {"gm_ub": OPERANDS, "ub_ws": OPERANDS}), ("aiv1", {"gm_ub": OPERANDS})):
        vector = facts.program(31, core)
        assert vector.by("bytes") == stored
        assert vector["bursts", "gm_ub"] == STEPS * (128 + 64)
        assert vector.by("read") == {"a": STEPS * 16384, "b": STEPS * 32768}
        assert vector.total("vinst") == 0
    # The workspace of one program holds four steps.
    assert facts.workspace_bytes == 4 * 49152
    assert facts.launch()["mac", "bf16"] == 1024**3
    assert facts.one_vector_core and facts.mixed and not facts.sampled


def test_matmul_with_strides_at_run_time_on_a5_goes_from_vector_memory_to_l1() -> None:
    facts = matmul_with_strides_at_run_time(A5)
    cube, first, second = (facts.program(0, core) for core in ("aic", "aiv0", "aiv1"))
    assert pick(cube, "mmad", "mac") == {"mmad": {"bf16": STEPS}, "mac": {"bf16": MACS}}
    # The fp32 result goes to vector memory, where 128 * 256 / 64 vectors are rounded, loaded and stored.
    assert cube.by("bytes") == {"l0c_ub": 128 * 256 * 4}
    assert first.by("bytes") == {"gm_ub": OPERANDS, "ub_l1": OPERANDS, "ub_gm": 128 * 256 * 2}
    assert second.by("bytes") == {"gm_ub": OPERANDS}
    for core in (first, second):
        assert {op: core["ave", op] for op in ("vload", "vtruncf", "masked_store")} == dict.fromkeys(
            ("vload", "vtruncf", "masked_store"), 512
        )
        # Each operand tile is brought into the cube's layout by the vector core.
        assert core["velem", "vtranspose"] == OPERANDS // 2


@pytest.mark.parametrize("family", [A2, A3, A5], ids=lambda f: f.name)
def test_matmul_with_known_strides_needs_the_cube_core_only(family: Family) -> None:
    x, out = torch.empty(1024, 1024, dtype=bf16), torch.empty(1024, 1024)
    facts = facts_of(
        family, kernels.product, (8, 4), x, x, out, 1024, K=1024, N=1024, BM=128, BN=256, BK=64, FORM="good"
    )
    cube = facts.program(0, "aic")
    assert pick(cube, "mmad", "mac") == {"mmad": {"bf16": STEPS}, "mac": {"bf16": MACS}}
    # Rows of 64 values of both operands, which are stored [M, K] and [N, K]: 128 + 256 runs in each step.
    assert cube.by("bytes") == {"gm_l1": OPERANDS, "l0c_gm": 128 * 256 * 4}
    assert cube.by("bursts") == {"gm_l1": STEPS * (128 + 256), "l0c_gm": 128}
    assert cube.by("dma") == {"gm_l1": 2 * STEPS, "l0c_gm": 1}
    assert all(facts.launch(core).total("bytes") == 0 for core in facts.cores if core != "aic")


# Flash attention: 2 heads, S = 1024, D = 64, tiles of 64 queries and 64 keys, so 16 steps. Per program and step two
# products of 64 * 64 * 64, and 64 * 64 * 2 = 8,192 bytes for each of K and V; Q once.
TILE = 64 * 64


def flash(family: Family) -> Facts:
    x = torch.empty(2, 1024, 64, dtype=bf16)
    return facts_of(family, kernels.flash, (16, 2), x, x, x, x, 0.125, 1024, D=64, BM=64, BN=64)


@pytest.mark.parametrize("family", [A2, A3], ids=lambda f: f.name)
def test_flash_attention(family: Family) -> None:
    facts = flash(family)
    cube = facts.program(0, "aic")
    assert pick(cube, "mmad", "mac") == {"mmad": {"bf16": 32}, "mac": {"bf16": 32 * 64**3}}
    # Scores and partial outputs leave as fp32 through the workspace, P comes back as bf16.
    assert cube.by("bytes") == {
        "gm_l1": (1 + 16 * 2) * TILE * 2, "ws_l1": 16 * TILE * 2, "l0c_ws": 32 * TILE * 4,
    }  # fmt: skip
    assert cube.by("read") == {"q": TILE * 2, "k": 16 * TILE * 2, "v": 16 * TILE * 2}
    half = TILE // 2
    for core in ("aiv0", "aiv1"):
        vector = facts.program(0, core)
        # Each vector core has 32 of the 64 queries.
        assert vector.by("bytes") == {"ws_ub": 32 * half * 4, "ub_ws": 16 * half * 2, "ub_gm": half * 2}
        elements = vector.by("velem")
        del elements["copy"], elements["vbrc"]  # initial values, and sums kept for the next step
        assert elements == {
            "vexp": 16 * (half + 32),  # P, and the factor of older sums
            "vsub": 16 * (half + 32),
            "vmul": 16 * (2 * half + 32),  # scale, older output, older denominator
            "vadd": 16 * (half + 32),
            "vmax": 16 * 32,
            "vreduce": 16 * 2 * half,  # maximum and sum
            "vcast": 16 * half + half,  # P, and the output
            "vdiv": half,
        }  # fmt: skip
    assert facts.unrolled == 4 and not facts.one_vector_core


def test_flash_attention_on_a5() -> None:
    facts = flash(A5)
    cube, first, second = (facts.program(0, core) for core in ("aic", "aiv0", "aiv1"))
    assert pick(cube, "mmad", "mac") == {"mmad": {"bf16": 32}, "mac": {"bf16": 32 * 64**3}}
    assert cube.by("bytes") == {"gm_l1": (1 + 16 * 2) * TILE * 2, "l0c_ub": 32 * TILE * 4}
    assert first.by("bytes") == {"ub_l1": 16 * TILE * 2, "ub_gm": TILE * 2}
    assert second.total("bytes") == 0
    for core in (first, second):
        # Both vector cores do all 64 queries: a vector is one query's row of 64.
        assert core["ave", "vexpdif"] == 16 * (64 + 1)
        assert core["ave", "vtruncf"] == 16 * 64 + 64
        assert core["ave", "reduction"] == 16 * 2 * 64
        assert core["ave", "vmuls"] == 16 * 64
        assert core["ave", "vmul"] == 16 * (64 + 1)
        assert core["ave", "vdiv"] == 64
    assert facts.workspace_bytes == 0 and facts.one_vector_core


# RMSNorm of 4096 rows of 4096 bf16 values on 48 programs: 4096 = 85 * 48 + 16, so the first 16 programs have 86 rows.
WIDTH = 4096


def rms(family: Family) -> Facts:
    x = torch.empty(4096, WIDTH, dtype=bf16)
    return facts_of(family, kernels.rmsnorm, (48,), x, x[0], x, 4096, D=WIDTH)


@pytest.mark.parametrize("family", [A2, A3], ids=lambda f: f.name)
@pytest.mark.parametrize(("program", "rows"), [(0, 86), (15, 86), (16, 85), (47, 85)])
def test_rmsnorm(family: Family, program: int, rows: int) -> None:
    counts = rms(family).program(program, "aiv")
    # The weight is read once, each row in and out once.
    assert counts.by("bytes") == {"gm_ub": (rows + 1) * WIDTH * 2, "ub_gm": rows * WIDTH * 2}
    assert counts.by("dma") == {"gm_ub": rows + 1, "ub_gm": rows}
    assert counts.by("velem") == {
        "vcast": WIDTH + rows * 2 * WIDTH,  # weight; row in, row out
        "vmul": rows * 3 * WIDTH,  # square, times 1 / rms, times weight
        "vreduce": rows * WIDTH,
        "vdiv": rows * 2,  # mean, 1 / sqrt
    }
    # A step is 64 fp32 values.
    assert counts["vrep", "vmul"] == rows * 3 * WIDTH // 64
    # Sum, mean and 1 / rms pass through scalar registers.
    assert counts["loop_load", "ub"] == rows * 3


@pytest.mark.parametrize(("program", "rows"), [(0, 86), (47, 85)])
def test_rmsnorm_on_a5(program: int, rows: int) -> None:
    facts = rms(A5)
    counts = facts.program(program, "aiv")
    vectors = WIDTH // 64
    assert counts.by("bytes") == {"gm_ub": (rows + 1) * WIDTH * 2, "ub_gm": rows * WIDTH * 2}
    assert counts["ave", "vextf"] == vectors + rows * vectors
    assert counts["ave", "vtruncf"] == rows * vectors
    assert counts["ave", "vmul"] == rows * 3 * vectors
    assert counts["ave", "reduction"] == rows * vectors
    # 1 / rms is computed again for each vector of the row.
    assert counts["ave", "vsqrt"] == rows * vectors
    assert counts["ave", "vdiv"] == rows * 2 * vectors


def test_launch_totals_are_the_sum_over_different_programs() -> None:
    launch = rms(A2).launch()
    assert launch["read", "x"] == launch["write", "o"] == 4096 * WIDTH * 2
    assert launch["read", "w"] == 48 * WIDTH * 2
    assert launch["velem", "vreduce"] == 4096 * WIDTH
