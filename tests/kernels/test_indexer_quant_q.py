"""`indexer_quant_q` against its reference, the Hadamard transform against its definition, and the storage formats."""

from __future__ import annotations

import pytest
import torch

from dsv4_triton.hadamard import sylvester
from dsv4_triton.kernels._index_quant import codes
from dsv4_triton.kernels.indexer_quant_q import heads_per_item, indexer_quant_q
from dsv4_triton.kernels.rope import rope
from dsv4_triton.reference.hadamard import hadamard
from dsv4_triton.reference.index_quant import quantise_rows
from dsv4_triton.reference.indexer_quant_q import indexer_quant_q as reference
from tests.kernels import rotary
from tests.kernels.paging import ints
from tests.numeric import assert_close, assert_equal, poisoned

FORMATS = [torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float32]


def compare(actual, expected, dtype: torch.dtype) -> None:
    """Sums of 128 terms in another order: one step of the format, and only where the fp32 values straddle a tie."""
    (values, scale), (expected_values, expected_scale) = actual, expected
    if scale is not None:
        assert_close(scale, expected_scale, rtol=2**-10 if dtype == torch.int8 else 0, atol=0, what="scale")
    if dtype == torch.int8:
        difference = (values.int() - expected_values.int()).abs()
    elif dtype == torch.float8_e4m3fn:
        difference = (order(values) - order(expected_values)).abs()
    else:
        step = 2**-7 if dtype == torch.bfloat16 else 1e-5
        assert_close(values, expected_values, rtol=step, atol=1e-5, what="values")
        return
    assert difference.max() <= 1, f"values differ by {difference.max()} steps"
    assert difference.float().mean() < 1e-3, f"{int((difference > 0).sum())} values differ"


def order(values: torch.Tensor) -> torch.Tensor:
    """The place of e4m3 values in their order, so that neighbours differ by one."""
    code = codes(values).int()
    return torch.where(code < 0, -(code & 127), code)


def case(tokens: int, heads: int, dtype: torch.dtype):
    positions = torch.randint(0, rotary.LAST_POSITION + 1, (tokens,), dtype=torch.int32)
    cos_sin = rotary.table(positions, size=rotary.LAST_POSITION + 1)
    return torch.randn(tokens, heads, 128).to(dtype), positions, cos_sin, sylvester(128, dtype=dtype)


@pytest.mark.parametrize(
    ("tokens", "heads", "dtype", "q_dtype"),
    [
        *((7, 8, dtype, q_dtype) for dtype in FORMATS for q_dtype in (torch.bfloat16, torch.float32)),
        *((tokens, 64, torch.int8, torch.bfloat16) for tokens in (1, 13)),
    ],
)
def test_against_reference(tokens: int, heads: int, dtype: torch.dtype, q_dtype: torch.dtype) -> None:
    q, positions, cos_sin, matrix = case(tokens, heads, q_dtype)
    scale_dtype = {torch.int8: torch.float16, torch.float8_e4m3fn: torch.float32}.get(dtype)
    q_out = poisoned(q.shape, dtype)
    scale_out = None if scale_dtype is None else poisoned((tokens, heads), scale_dtype)
    untouched = q.clone()
    actual = indexer_quant_q(q, positions, cos_sin, matrix, dtype=dtype, q_out=q_out, scale_out=scale_out)
    assert actual[0] is q_out and actual[1] is scale_out
    assert_equal(q, untouched, "input")
    compare(actual, reference(q, positions, cos_sin, matrix, dtype=dtype), dtype)


@pytest.mark.parametrize("dtype", FORMATS)
def test_exact_where_sums_are_exact(dtype: torch.dtype) -> None:
    """Small integers at position 0 (no rotation): every sum is exact, so the results must agree bit for bit."""
    q = torch.randint(-8, 9, (5, 8, 128)).float()
    q[1] = 0
    q[2, 0], q[2, 1, 5:] = 1.0, 0.0
    q[3] *= 2.0**-9
    positions, cos_sin, matrix = ints(0, 0, 0, 0, 0), rotary.table(ints(0)), sylvester(128)
    values, scale = indexer_quant_q(q, positions, cos_sin, matrix, dtype=dtype)
    expected, expected_scale = reference(q, positions, cos_sin, matrix, dtype=dtype)
    assert_equal(codes(values), codes(expected), "values")
    if scale is not None and expected_scale is not None:
        assert_equal(scale, expected_scale, "scale")
    assert not values[1].float().any()


@pytest.mark.parametrize("dtype", FORMATS)
def test_padding_tokens_are_zero(dtype: torch.dtype) -> None:
    q, positions, cos_sin, matrix = case(5, 8, torch.bfloat16)
    positions[[0, 3]] = -1
    q[[0, 3]] = float("nan")
    values, scale = indexer_quant_q(q, positions, cos_sin, matrix, dtype=dtype)
    compare((values, scale), reference(q, positions, cos_sin, matrix, dtype=dtype), dtype)
    assert not values[[0, 3]].float().any()


@pytest.mark.parametrize("dtype", FORMATS)
def test_queries_that_are_rotated_already(dtype: torch.dtype) -> None:
    q, positions, cos_sin, matrix = case(5, 8, torch.bfloat16)
    whole = indexer_quant_q(q, positions, cos_sin, matrix, dtype=dtype)
    turned = rope(q, positions, cos_sin)
    got = indexer_quant_q(turned, positions, cos_sin, matrix, dtype=dtype, rotated=True)
    compare(got, reference(turned, positions, cos_sin, matrix, dtype=dtype, rotated=True), dtype)
    assert_equal(codes(got[0]), codes(whole[0]))


def test_heads_of_an_item() -> None:
    """Few tokens are spread over the cores; a second round costs more than larger items."""
    sizes = [heads_per_item(tokens, 64, 24) for tokens in (1, 12, 16, 64, 4096)]
    assert sizes == [16, 32, 64, 64, 64]
    assert heads_per_item(16, 64, 32) == 32 and heads_per_item(3, 6, 24) == 2 and heads_per_item(3, 8, 24) == 8


def test_rotated_queries_and_keys_keep_their_products() -> None:
    q, k = torch.randn(3, 128), torch.randn(4, 128)
    matrix = sylvester(128)
    assert_close(hadamard(q, matrix) @ hadamard(k, matrix).T, q @ k.T, rtol=1e-5, atol=1e-4)


def test_sylvester_order() -> None:
    rows = [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    assert sylvester(4).tolist() == rows
    assert_equal(sylvester(128) @ sylvester(128).T, 128 * torch.eye(128))
    for wrong in (0, 3, 96):
        with pytest.raises(ValueError, match="power of two"):
            sylvester(wrong)


def test_int8_scales() -> None:
    """A zero row, a row whose scale underflows fp16, the largest row, and a value that rounds to even."""
    x = torch.zeros(4, 128)
    x[1, 0], x[2, :2], x[3, :3] = 1e-7, torch.tensor([127.0 * 256, -127.0 * 256]), torch.tensor([127.0, 0.5, 1.5])
    values, scale = quantise_rows(x, torch.int8)
    assert scale is not None and scale.tolist() == [0.0, 0.0, 256.0, 1.0]
    assert not values[:2].any()
    assert values[2, :2].tolist() == [127, -127]
    assert values[3, :3].tolist() == [127, 0, 2]


def e4m3_scales(x: torch.Tensor) -> list[float]:
    scale = quantise_rows(x, torch.float8_e4m3fn)[1]
    assert scale is not None
    return scale.tolist()


def test_e4m3_scales_step_at_powers_of_two() -> None:
    """amax 448 * 2^n needs the scale 2^n exactly; the next fp32 value needs 2^(n + 1). Tiny rows use the floor 1e-4."""
    amax = torch.tensor([448.0, 1.75, 7.0])
    x = torch.zeros(4, 128)
    x[:3, 0] = amax
    assert e4m3_scales(x) == [1.0, 2**-8, 2**-6, 2**-22]
    x[:3, 0] = torch.nextafter(amax, torch.tensor(1e9))
    assert e4m3_scales(x) == [2.0, 2**-7, 2**-5, 2**-22]


def test_no_tokens() -> None:
    values, scale = indexer_quant_q(
        torch.empty(0, 8, 128), ints(), torch.empty(4, 64), sylvester(128), dtype=torch.int8
    )
    assert values.shape == (0, 8, 128) and scale is not None and scale.shape == (0, 8)


def test_errors_name_the_argument() -> None:
    q, positions, cos_sin, matrix = torch.randn(2, 8, 128), ints(0, 1), torch.randn(4, 64), sylvester(128)
    with pytest.raises(TypeError, match="dtype must be one of"):
        indexer_quant_q(q, positions, cos_sin, matrix, dtype=torch.float16)
    with pytest.raises(TypeError, match="hadamard has dtype"):
        indexer_quant_q(q.bfloat16(), positions, cos_sin, matrix, dtype=torch.int8)
    with pytest.raises(ValueError, match="scale_out must be None"):
        indexer_quant_q(q, positions, cos_sin, matrix, dtype=torch.float32, scale_out=torch.empty(2, 8))
    with pytest.raises(ValueError, match="q has shape"):
        indexer_quant_q(q[..., :64], positions, cos_sin, matrix, dtype=torch.int8)
