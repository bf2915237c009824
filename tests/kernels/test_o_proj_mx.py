"""o_proj with MXFP8 operands: the quantisation against exact arithmetic, kernels bit for bit, products, refusals."""

from __future__ import annotations

import math

import pytest
import torch

from dsv4_triton.compiler.ascend import compile_all
from dsv4_triton.compiler.launches import recording
from dsv4_triton.device import A2, A3, A5, UnsupportedDeviceError, acting_as
from dsv4_triton.kernels.o_proj import o_proj, o_proj_workspace, quantise_wo_a
from dsv4_triton.reference import mx
from dsv4_triton.reference.o_proj import o_proj as reference_o_proj
from tests.kernels.rotary import table
from tests.numeric import assert_close, assert_equal, poisoned

GRID = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
"""The magnitudes that e4m3 has, by code: even codes have an even last place."""
E4M3_STEPS = 2.0**-9


def neighbourhood(points: torch.Tensor) -> torch.Tensor:
    """Each point with the numbers of its dtype just below and above it."""
    inf = torch.tensor(float("inf"), dtype=points.dtype)
    return torch.cat((points, torch.nextafter(points, inf), torch.nextafter(points, -inf)))


def blocks(dtype: torch.dtype) -> torch.Tensor:
    """Blocks of 32: amounts at and next to powers of two and saturation, ties, zeros, subnormals, every magnitude."""
    exponents = torch.cat((torch.arange(-149, -110), torch.arange(-12, 12), torch.arange(118, 128))).double()
    powers = (2.0**exponents).to(dtype)
    largest = torch.cat([neighbourhood(powers * factor) for factor in (1.0, 1.75, 1.8125, 1.9375)])
    largest = largest[torch.isfinite(largest) & (largest >= 0)]
    edges = torch.zeros(len(largest), 32, dtype=dtype)
    edges[:, 3] = -largest
    ratios = torch.tensor([0.5, 0.9375, 17 / 256, 19 / 256, -25 / 512, 2**-14, 2**-15, 3 * 2**-18, 2**-18, 2**-19])
    edges[:, 4:14] = (largest.float()[:, None] * ratios).to(dtype)
    noise = (torch.randn(200, 32) * torch.logspace(-42, 36, 200)[:, None]).to(dtype)
    ties = (torch.arange(32).float()[None] * E4M3_STEPS / 2).to(dtype)
    ties[0, 31] = 256.0
    zeros = torch.zeros(2, 32, dtype=dtype)
    zeros[1] = -0.0
    return torch.cat((edges, noise, ties, zeros))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantisation_is_that_of_the_specification(dtype):
    """Exponents by exact logarithms, elements by search among all that e4m3 has."""
    x = blocks(dtype)
    elements, exponent = mx.quantise(x)
    amax = x.double().abs().amax(-1)
    wanted = [max(math.frexp(a)[1] - 1 - 8, -127) if a else -127 for a in amax.tolist()]
    assert exponent[:, 0].tolist() == wanted
    scaled = (x.double() * 2.0 ** -exponent.double()).clamp(-448, 448)
    distance = (scaled.abs()[..., None] - GRID).abs()
    nearest = distance.amin(-1, keepdim=True)
    code = torch.arange(127)
    best = torch.where(distance == nearest, code + 1000 * (code % 2), 10**6).argmin(-1)
    assert_equal(elements.double().abs(), GRID[best], "magnitudes")
    negative = elements.double() < 0
    assert (negative <= (x < 0)).all() and ((elements.double() > 0) <= (x > 0)).all()


def test_zero_blocks_and_broken_values():
    x = torch.zeros(4, 64)
    x[1, 5], x[2, 6], x[3, 7] = float("nan"), float("inf"), float("-inf")
    x[1:, 40] = 3.0
    elements, exponent = mx.quantise(x)
    assert (elements[0].float() == 0).all() and (exponent[0] == -127).all()
    assert (exponent[1:, 0] == mx.NAN_EXPONENT).all() and (exponent[1:, 1] == 1 - 8).all()
    values = mx.dequantise(elements, exponent)
    assert torch.isnan(values[1:, :32]).all() and (values[1:, 40] == 3.0).all()
    assert torch.isnan(mx.quantise_rows(x)[1][1:]).all() and mx.quantise_rows(x)[1][0] == 2.0**-126


def test_rows_hold_the_elements_of_their_blocks():
    """On the row's grid a value is that of its block, unless it is small: then it is within half a step of the row."""
    x = torch.randn(300, 2048) * torch.exp2(torch.randint(-9, 1, (300, 64))).repeat_interleave(32, 1)
    values = mx.dequantise(*mx.quantise(x))
    elements, scale = mx.quantise_rows(x)
    found = elements.float() * scale[:, None]
    large = x.abs() >= 2.0**-6 * scale[:, None]
    assert large.float().mean() > 0.8
    assert_equal(found[large], values[large])
    step = E4M3_STEPS * scale[:, None].expand_as(x)
    assert ((found - x).abs()[~large] <= step[~large] / 2).all()
    assert (scale == torch.exp2(torch.floor(torch.log2(x.abs().amax(-1))) - 8)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_bit_exact(dtype):
    """Rows of 1536 values from all blocks, sorted and mixed, so that large and small ones share a row."""
    hard = blocks(dtype)
    hard = hard[: len(hard) // 48 * 48]
    rows = torch.cat((hard, hard[torch.randperm(len(hard))])).view(1, -1, 48 * 32)
    elements, scale = quantise_wo_a(rows)
    wanted, wanted_scale = mx.quantise_rows(rows)
    assert_equal(scale, wanted_scale, "scales")
    assert_equal(elements.float() + 0.0, wanted.float() + 0.0, "elements")  # + 0.0: the sign of zero is not kept


def problem(tokens: int, heads: int, groups: int, rank: int, dtype: torch.dtype):
    """o as rows of a poisoned buffer with a padding token, quantised weights, positions, table."""
    o = poisoned((tokens + 1, heads, 512), dtype)[:tokens]
    o.copy_(torch.randn(tokens, heads, 512) * torch.exp2(torch.randint(-6, 3, (tokens, heads, 1))))
    width = heads // groups * 512
    wo_a = (torch.randn(groups, rank, width) * width**-0.5).to(dtype)
    positions = torch.randint(0, 2000, (tokens,), dtype=torch.int32)
    if tokens > 2:
        positions[1] = -1
        o[1] = float("nan")
    return o, wo_a, positions, table(positions)


# The kernel adds the same exact products in another order: fp32 sums of values up to 2^17 of a row's scale.
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 2e-5}, torch.bfloat16: {"rtol": 2**-7, "atol": 1e-4}}


@pytest.mark.parametrize(
    ("tokens", "heads", "groups", "rank", "dtype"),
    [
        (1, 6, 2, 64, torch.bfloat16),
        (17, 6, 2, 64, torch.float32),
        (130, 4, 2, 48, torch.bfloat16),
        (65, 16, 2, 64, torch.bfloat16),
    ],
)
def test_equals_reference(tokens, heads, groups, rank, dtype):
    o, wo_a, positions, cos_sin = problem(tokens, heads, groups, rank, dtype)
    elements, scale = quantise_wo_a(wo_a)
    expected = reference_o_proj(o, elements, positions, cos_sin, wo_scale=scale)
    out = poisoned((tokens + 1, groups * rank), dtype)
    workspace = torch.full((o_proj_workspace(tokens, groups, wo_a.shape[2]),), 0x7F, dtype=torch.uint8)
    o_proj(o.clone(), elements, positions, cos_sin, wo_scale=scale, out=out[:tokens], workspace=workspace)
    assert_close(out[:tokens], expected, **TOLERANCE[dtype])
    assert_equal(out[tokens:], poisoned((1, groups * rank), dtype), "the row after the output")
    if tokens > 2:
        assert (out[1] == 0).all()
    # 2^-4 of a value is half an e4m3 step at its lower end; both operands have it, independent from term to term.
    exact = reference_o_proj(o, wo_a, positions, cos_sin).float()
    error = (out[:tokens].float() - exact).norm() / exact.norm()
    assert 0.01 < error < 0.06


def test_operands_are_quantised_as_the_reference_says():
    """Unit weights make the product show the operand: each output is one element times its scale."""
    tokens, width = 5, 512
    o, _, positions, cos_sin = problem(tokens, 2, 2, 64, torch.float32)
    positions[1], o[1] = 7, 1.0
    positions[2:4] = 0  # no rotation: the row's largest value stays in one half of the rotated features
    o[2, :, 448:480] *= 256
    o[3, :, 480:] *= 256
    cos_sin = table(positions)
    chosen = torch.arange(0, 512, 8)  # of each head, the last of them rotated
    wo_a = torch.zeros(2, 64, width)
    wo_a[:, torch.arange(64), chosen] = 1.0
    elements, scale = quantise_wo_a(wo_a)
    z = o_proj(o.clone(), elements, positions, cos_sin, wo_scale=scale).view(tokens, 2, 64)
    identity = torch.eye(width).expand(2, width, width).contiguous()
    rotated = reference_o_proj(o, identity, positions, cos_sin).view(tokens, 2, width)
    wanted, row = mx.quantise_rows(rotated)
    assert_equal(z + 0.0, (wanted.float() * row[..., None])[..., chosen] + 0.0)


def test_a_broken_value_breaks_its_token_and_group_alone():
    o, wo_a, positions, cos_sin = problem(4, 6, 2, 64, torch.float32)
    elements, scale = quantise_wo_a(wo_a)
    o[3, 4, 17], o[2, 0, 500] = float("inf"), float("nan")
    z = o_proj(o, elements, positions, cos_sin, wo_scale=scale)
    broken = torch.isnan(z).view(4, 2, 64)
    assert broken[3, 1].all() and broken[2, 0].all() and broken.sum() == 128


def test_outputs_do_not_depend_on_the_other_tokens():
    o, wo_a, positions, cos_sin = problem(70, 6, 2, 64, torch.bfloat16)
    elements, scale = quantise_wo_a(wo_a)
    together = o_proj(o.clone(), elements, positions, cos_sin, wo_scale=scale)
    for t in (0, 40, 69):
        alone = o_proj(o[t : t + 1].clone(), elements, positions[t : t + 1], cos_sin, wo_scale=scale)
        assert_close(together[t : t + 1], alone, **TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("family", [A2, A3], ids=lambda family: family.name)
def test_refused_without_fp8(family):
    o, wo_a, positions, cos_sin = problem(2, 6, 2, 64, torch.bfloat16)
    elements, scale = quantise_wo_a(wo_a)
    with acting_as(family), recording() as launches:
        for call in (
            lambda: quantise_wo_a(wo_a),
            lambda: o_proj(o, elements, positions, cos_sin, wo_scale=scale),
        ):
            with pytest.raises(UnsupportedDeviceError, match=rf"o_proj: .*family '{family.name}' has no fp8; use bf16"):
                call()
    assert not launches


def test_two_launches_without_other_memory():
    o, wo_a, positions, cos_sin = problem(2, 6, 2, 64, torch.bfloat16)
    elements, scale = quantise_wo_a(wo_a)
    with acting_as(A5), recording() as launches:
        o_proj(o, elements, positions, cos_sin, wo_scale=scale)
    assert [launch.kernel.__name__ for launch in launches] == ["_quantise_kernel", "_grouped_product_kernel"]


def test_quantisation_of_weights_compiles_for_a5():
    """It runs once, at loading; what every step runs is among the cases of the registry."""
    wo_a = torch.empty(8, 1024, 4096, dtype=torch.bfloat16)
    with acting_as(A5), recording() as launches:
        quantise_wo_a(wo_a)
    (result,) = compile_all(launches, A5, jobs=1)
    assert result.ok and not result.faults and not result.losses, result.message


def test_bad_arguments():
    o, wo_a, positions, cos_sin = problem(2, 6, 2, 64, torch.float32)
    elements, scale = quantise_wo_a(wo_a)
    assert o_proj(o[:0], elements, positions[:0], cos_sin, wo_scale=scale).shape == (0, 128)
    with pytest.raises(ValueError, match=r"wo_scale is missing for wo_a of dtype torch\.float8_e4m3fn"):
        o_proj(o, elements, positions, cos_sin)
    with pytest.raises(ValueError, match=r"wo_scale is given for wo_a of dtype torch\.float32"):
        o_proj(o, wo_a, positions, cos_sin, wo_scale=scale)
    with pytest.raises(ValueError, match="wo_a has 40 outputs a group, MXFP8 takes a multiple of 16"):
        o_proj(o, elements[:, :40].contiguous(), positions, cos_sin, wo_scale=scale[:, :40].contiguous())
    with pytest.raises(ValueError, match=r"workspace has 100 bytes, this call needs \d+"):
        space = torch.empty(100, dtype=torch.uint8)
        o_proj(o, elements, positions, cos_sin, wo_scale=scale, workspace=space)
    with pytest.raises(ValueError, match="wo_a has 500 columns, expected a multiple of 512"):
        quantise_wo_a(torch.zeros(2, 16, 500))
    with pytest.raises(ValueError, match="blocks of 32"):
        mx.quantise(torch.zeros(2, 40))
