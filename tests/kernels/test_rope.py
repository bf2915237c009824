"""rope: both layouts and directions, in place and not, padding, the far end of the table."""

from __future__ import annotations

import pytest
import torch

from dsv4_triton.kernels.rope import rope
from dsv4_triton.reference.rope import rope as reference_rope
from tests.kernels.rotary import LAST_POSITION, frequencies, table, to_half
from tests.numeric import assert_close, assert_equal, poisoned

CASES = [
    ((1, 6, 512), torch.bfloat16, True),
    ((7, 6, 512), torch.bfloat16, True),
    ((7, 6, 512), torch.float32, False),
    ((5, 8, 128), torch.bfloat16, False),
    ((3, 1, 64), torch.float32, True),
]


def positions_of(tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, 5000, (tokens,), generator=generator, dtype=torch.int32)
    positions[-1] = 0
    if tokens > 2:
        positions[1] = -1
    return positions


@pytest.mark.parametrize("shape, dtype, inverse", CASES)
def test_equals_reference(shape, dtype, inverse):
    """Bit equality: three fp32 operations in a fixed order and one rounding leave no room for another answer."""
    x, positions = torch.randn(shape).to(dtype), positions_of(shape[0])
    cos_sin = table(positions)
    expected = reference_rope(x, positions, cos_sin, inverse=inverse)
    guarded = poisoned((shape[0] + 1, *shape[1:]), dtype)
    rope(x, positions, cos_sin, inverse=inverse, out=guarded[:-1])
    assert_equal(guarded[:-1], expected)
    assert_equal(guarded[-1:], poisoned((1, *shape[1:]), dtype), "the row after the output")
    assert rope(x, positions, cos_sin, inverse=inverse, out=x) is x
    assert_equal(x, expected, "in place")


@pytest.mark.parametrize("inverse", [False, True])
def test_interleaved_equals_half_layout_under_the_permutation(inverse):
    x, positions = torch.randn(5, 6, 512), positions_of(5)
    cos_sin = table(positions)
    pairs = rope(x, positions, cos_sin, inverse=inverse, interleaved=True)
    halves = rope(to_half(x), positions, cos_sin, inverse=inverse)
    assert_close(to_half(pairs), halves, rtol=1e-6, atol=1e-6)
    assert_close(pairs, reference_rope(x, positions, cos_sin, inverse=inverse, interleaved=True), rtol=1e-6, atol=1e-6)


def test_reference_is_the_complex_rotation_of_the_last_64_features():
    x, positions = torch.randn(9, 2, 192), torch.arange(9, dtype=torch.int32) * 7
    angles = positions[:, None].float() * frequencies()
    turned = torch.view_as_complex(x[..., -64:].unflatten(-1, (32, 2)).contiguous()) * torch.polar(
        torch.ones(9, 1, 32), angles[:, None, :]
    )
    expected = torch.cat((x[..., :-64], torch.view_as_real(turned).flatten(-2)), dim=-1)
    got = reference_rope(x, positions, table(positions), interleaved=True)
    assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_only_the_last_64_features_change():
    x, positions = torch.randn(4, 6, 512), torch.full((4,), 3, dtype=torch.int32)
    x[0, 0, 17] = float("nan")
    y = rope(x, positions, table(positions))
    assert_equal(y[..., :448].contiguous(), x[..., :448].contiguous())
    assert (y[..., 448:] != x[..., 448:]).float().mean() > 0.9


def test_inverse_undoes_forward_and_is_the_conjugate():
    x, positions = torch.randn(5, 6, 512), torch.tensor([1, 2, 900, 4000, 77], dtype=torch.int32)
    cos_sin = table(positions)
    assert_close(
        rope(rope(x, positions, cos_sin), positions, cos_sin, inverse=True), x, rtol=1e-6, atol=1e-6, what="round trip"
    )
    conjugate = torch.cat((cos_sin[:, :32], -cos_sin[:, 32:]), dim=1)
    assert_equal(rope(x, positions, cos_sin, inverse=True), rope(x, positions, conjugate))


def test_far_positions_take_their_own_row_with_fp32_angles():
    """One fp32 step of the largest angle is 0.06 rad there: only the fp32 product gives the model's table."""
    positions = torch.tensor([LAST_POSITION, LAST_POSITION - 1, 524_288, 0], dtype=torch.int32)
    x = torch.randn(4, 6, 512)
    cos_sin = table(positions, size=LAST_POSITION + 1, base=160000.0)
    y = rope(x, positions, cos_sin)
    angles = positions.float()[:, None] * frequencies(160000.0)
    a, b = x[..., 448:480], x[..., 480:]
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    assert_equal(y[..., 448:].contiguous(), torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))


def test_padding_rows_are_zero_whatever_they_held():
    x, positions = poisoned((3, 6, 512), torch.float32), torch.full((3,), -1, dtype=torch.int32)
    assert_equal(rope(x, positions, table(positions)), torch.zeros(3, 6, 512))


def test_more_rows_than_a_grid_may_have():
    """Launch grids end at 65,535 programs on the device; work beyond that is looped over."""
    x, positions = torch.randn(70_000, 1, 64), torch.randint(0, 50, (70_000,), dtype=torch.int32)
    cos_sin = table(positions)
    assert_equal(rope(x, positions, cos_sin, inverse=True), reference_rope(x, positions, cos_sin, inverse=True))


def test_no_tokens():
    x, positions = torch.empty(0, 8, 128), torch.empty(0, dtype=torch.int32)
    assert rope(x, positions, torch.empty(0, 64)).shape == (0, 8, 128)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"x": torch.zeros(2, 8, 32)}, "32 features"),
        ({"x": torch.zeros(2, 8, 128, dtype=torch.float16)}, "float16"),
        ({"x": torch.zeros(2, 8, 256)[..., ::2]}, "strides"),
        ({"positions": torch.zeros(3, dtype=torch.int32)}, "positions has shape"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, "positions has dtype"),
        ({"cos_sin": torch.zeros(4, 32)}, "cos_sin has shape"),
        ({"out": torch.zeros(2, 8, 128, dtype=torch.bfloat16)}, "out has dtype"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    arguments = {
        "x": torch.zeros(2, 8, 128),
        "positions": torch.zeros(2, dtype=torch.int32),
        "cos_sin": torch.zeros(4, 64),
    } | changes
    with pytest.raises((ValueError, TypeError), match=message):
        rope(arguments.pop("x"), arguments.pop("positions"), arguments.pop("cos_sin"), **arguments)
