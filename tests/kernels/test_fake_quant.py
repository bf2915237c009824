"""fp8 simulation: the reference against exact arithmetic, and the device helpers bit for bit against the reference."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from dsv4_triton.kernels._fake_quant import fp8_sim64, round_to_e4m3
from dsv4_triton.reference import fake_quant
from tests.kernels import rotary
from tests.kernels.paging import clone, ints, pages, whole
from tests.numeric import assert_equal, poisoned

SUBNORMAL_STEP = 2.0**-9


@triton.jit
def _round_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + index, mask=index < n, other=0.0)
        tl.store(y_ptr + index, round_to_e4m3(x), mask=index < n)


@triton.jit
def _sim_kernel(x_ptr, y_ptr, n, ROWS: tl.constexpr):
    for start in range(tl.program_id(0) * ROWS, n, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        index = row * 64 + tl.arange(0, 64)[None, :]
        x = tl.load(x_ptr + index, mask=row < n, other=0.0).to(tl.float32)
        tl.store(y_ptr + index, fp8_sim64(x).to(y_ptr.dtype.element_ty), mask=row < n)


def e4m3_grid() -> torch.Tensor:
    codes = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return torch.cat((codes, -codes))


def neighbourhood(points: torch.Tensor) -> torch.Tensor:
    """Each point with the fp32 numbers just below and above it."""
    inf = torch.tensor(float("inf"))
    return torch.cat((points, torch.nextafter(points, inf), torch.nextafter(points, -inf)))


def test_rounding_equals_the_fp8_cast_everywhere_it_could_differ():
    grid = e4m3_grid().sort().values
    midpoints = (grid[1:] + grid[:-1]) / 2
    every_bf16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    x = torch.cat((neighbourhood(grid), neighbourhood(midpoints), every_bf16[every_bf16.abs() <= 448]))
    x = x[x.abs() <= 448].contiguous()
    y = poisoned(x.shape, torch.float32)
    _round_kernel[(2,)](x, y, len(x), BLOCK=1024)
    assert_equal(y + 0.0, x.to(torch.float8_e4m3fn).float() + 0.0)  # + 0.0: the sign of zero is not kept


def hard_blocks() -> torch.Tensor:
    """Rows of 64: powers of two around 448 scales, zeros, the floor, subnormals, every magnitude, ties."""
    noise = torch.randn(200, 64)
    magnitudes = noise * torch.logspace(-42, 36, 200)[:, None]
    steps = 448 * 2.0 ** torch.arange(-30, 100)
    edges = torch.zeros(3 * len(steps), 64)
    edges[:, 0] = neighbourhood(steps)
    edges[:, 1:9] = edges[:, :1] * torch.tensor([0.5, -1.0, 1 / 448, 2**-9 / 448, 17 / 448, 19 / 448, -25 / 448, 0.3])
    floor = torch.full((3, 64), 1e-4) * torch.tensor([[0.5], [1.0], [1.0001]])
    zeros = torch.zeros(1, 64)
    tiny = torch.full((1, 64), 2.0**-149)
    ties = torch.arange(64).float()[None, :] * SUBNORMAL_STEP / 2
    ties[0, 63] = 448.0
    return torch.cat((noise, magnitudes, edges, floor, zeros, -zeros, tiny, ties))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_simulation_is_bit_exact(dtype):
    x = hard_blocks().to(dtype)
    x = x[torch.isfinite(x).all(1)].contiguous()
    y = poisoned(x.shape, dtype)
    _sim_kernel[(2,)](x, y, len(x), ROWS=16)
    assert_equal(y + 0.0, fake_quant.fp8sim64(x) + 0.0)


def test_a_broken_value_does_not_become_finite():
    x = torch.randn(3, 64)
    x[0, 5], x[1, 6], x[2, 7] = float("nan"), float("inf"), float("-inf")
    y = torch.zeros_like(x)
    _sim_kernel[(1,)](x, y, 3, ROWS=16)
    assert not torch.isfinite(torch.stack((y[0, 5], y[1, 6], y[2, 7]))).any()
    assert torch.isnan(fake_quant.fp8sim64(x)).all()


def test_exponent_is_the_ceiling_of_the_logarithm():
    """The bit form against exact numbers: the smallest e with amax <= 448 * 2^e, up to the rounding of amax / 448."""
    amax = torch.cat((neighbourhood(448 * 2.0 ** torch.arange(-22, 60)), torch.rand(2000) * 1e3 + 1e-4)).clamp_min(1e-4)
    exponent = fake_quant.scale_exponent(amax)
    quotient = (amax.double() * float(torch.tensor(1 / 448, dtype=torch.float32))).float().double()
    assert (quotient <= 2.0 ** exponent.double()).all()
    assert (quotient > 2.0 ** (exponent.double() - 1)).all()


def test_relative_error_bound_and_bf16_exactness():
    x = torch.randn(500, 448)
    y = fake_quant.fp8sim64(x)
    blocks, error = x.unflatten(1, (7, 64)), (y - x).unflatten(1, (7, 64)).abs()
    step = fake_quant.power_of_two(fake_quant.quantise64(x)[1])[..., None] * SUBNORMAL_STEP
    assert (error <= torch.maximum(blocks.abs() / 16, step / 2)).all()
    assert_equal(y.to(torch.bfloat16).float(), y)


def test_the_axis_must_be_a_multiple_of_64():
    with pytest.raises(ValueError, match="blocks of 64"):
        fake_quant.fp8sim64(torch.zeros(3, 100))


def amounts(dtype: torch.dtype) -> torch.Tensor:
    """Largest values of a group at, just below and just above scale steps, powers of two and the floor: [n, 7]."""
    powers = 2.0 ** torch.tensor([-40.0, -13.0, -1.0, 0.0, 3.0, 20.0])
    points = torch.cat((448 * powers, powers, torch.tensor([1e-4, 2.0**-126]))).to(dtype)
    around = torch.stack((points, torch.nextafter(points, points * 2), torch.nextafter(points, points * 0)))
    return around.T.flatten().view(-1, 7)


def insert(side: str, op: str, signs: torch.Tensor, weight: torch.Tensor, cache: torch.Tensor) -> None:
    """Three rows `signs` [3, 512] times `weight` into `cache`: window rows, or entries of windows of equal rows.

    `side` is "kernels" or "reference".
    """
    run = getattr(importlib.import_module(f"dsv4_triton.{side}.{op}"), op)
    positions, slots, requests = ints(3, 7, 11), ints(4, 9, 6), ints(0, 0, 0)
    cos_sin = rotary.table(torch.arange(12))
    quantised: dict[str, Any] = {"eps": 0.0, "fake_quant": True}
    if op == "kv_norm_rope_insert":
        run(signs, weight, positions, cos_sin, cache, slots, **quantised)
    elif op == "latent_norm_insert":
        run(signs, weight, signs, weight, positions, cos_sin, cache, slots, **quantised)
    else:
        halves = torch.zeros(2, 16, 2, 2, 512)
        halves[1, :12, 0, 1] = signs.float().repeat_interleave(4, 0)  # own halves of the rows
        halves[1, :8, 0, 0] = signs[1:].float().repeat_interleave(4, 0)  # first halves, which the entry after folds
        state, table = halves.flatten(2), ints(1)[None]
        if op == "compressor_fold":
            run(state, table, requests, positions, slots, weight, cos_sin, ratio=4, cache=cache, **quantised)
        else:
            key_state, hadamard = torch.ones(2, 16, 512), torch.ones(128, 128, dtype=signs.dtype)
            keys = torch.zeros(3, 4, 128, dtype=signs.dtype)
            run(
                state, table, slots, weight, cache, key_state, table, slots, weight[:128], hadamard, keys, None,
                requests, positions, cos_sin, **quantised,
            )  # fmt: skip


@pytest.mark.parametrize("storage", ["plain", "record"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ["kv_norm_rope_insert", "latent_norm_insert", "compressor_fold", "compressor_fold_keys"])
def test_inserted_rows_are_bit_exact_next_to_powers_of_two(op: str, dtype: torch.dtype, storage: str) -> None:
    """Rows whose norm is a power of two are +-1 times the weight, so that the weight makes the amounts; the largest
    value of a group stands at a random place."""
    width, page_dtype = (512, dtype) if storage == "plain" else (640, torch.uint8)
    for largest in amounts(dtype):
        weight = torch.rand(8, 64).to(dtype) * torch.cat((largest, largest[:1])).unsqueeze(1)
        weight[torch.arange(7), torch.randint(64, (7,))] = largest
        signs = torch.where(torch.rand(3, 512) < 0.5, -1.0, 1.0).to(dtype)
        cache = pages(3, 4, width, page_dtype)
        expected = clone(cache)
        insert("kernels", op, signs, weight.flatten(), cache)
        insert("reference", op, signs, weight.flatten(), expected)
        if storage == "plain":
            assert_equal(whole(cache) + 0.0, whole(expected) + 0.0)  # + 0.0: the sign of zero is not kept
        else:
            assert_equal(without_signed_zeros(cache), without_signed_zeros(expected))


def without_signed_zeros(records: torch.Tensor) -> torch.Tensor:
    """Records with the e4m3 code of -0 as that of +0."""
    records = records.clone()
    codes = records[..., 128:576]
    codes[codes == 0x80] = 0
    return records
