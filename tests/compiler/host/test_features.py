"""The host driver against PyTorch, one language feature at a time."""

from __future__ import annotations

import pytest
import torch
import triton

from dsv4_triton.compiler import host
from tests.compiler.host import feature_kernels as k
from tests.numeric import assert_close, assert_equal

pytestmark = pytest.mark.usefixtures("host_driver")

POINTERS = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip


def test_driver_is_installed():
    assert host.is_installed()


@pytest.mark.parametrize("dtype", POINTERS, ids=str)
def test_pointer_dtypes(dtype):
    x = torch.randint(0, 2, (64,)).to(dtype)
    same, wide = torch.zeros_like(x), torch.full((64,), -1.0)
    k.copy[(1,)](x, same, 64, 64)
    k.copy[(1,)](x, wide, 61, 64)
    assert_equal(same, x)
    assert_equal(wide[:61], x[:61].float())
    assert (wide[61:] == -1).all(), "wrote outside the mask"


@pytest.mark.parametrize("n", [1, 2, 1023, 1024, 3000])
def test_masked_grid(n):
    x, y, o = torch.randn(n), torch.randn(n), torch.full((n + 1,), float("nan"))
    k.add[(triton.cdiv(n, 1024),)](x, y, o, n, B=1024)
    assert_equal(o[:n], x + y)
    assert o[n].isnan()


def test_output_may_be_input():
    x = torch.randn(64)
    expected = x * 2 + 1
    k.in_place[(1,)](x, x, 64)
    assert_equal(x, expected)


def test_integer_scalars_take_the_width_they_need():
    o = torch.zeros(6, dtype=torch.int64)
    k.scalars[(1,)](o, 5, 2**40, True, -7, 1, 3.7)
    assert o.tolist() == [5, 2**40, 1, -7, 1, 3]


def test_annotated_scalars():
    o = torch.zeros(8, dtype=torch.int64)
    k.annotated[(1,)](o, -5, 200, -300, 60000, -70000, 4_000_000_000, -(2**40), 2**63 + 5)
    assert o.tolist() == [-5, 200, -300, 60000, -70000, 4_000_000_000, -(2**40), (2**63 + 5) >> 1]


def test_none_argument():
    x, y = torch.randn(16), torch.randn(16)
    o = torch.empty(16)
    k.optional[(1,)](x, None, o, 16)
    assert_equal(o, x)
    k.optional[(1,)](x, y, o, 16)
    assert_equal(o, x + y)


def test_three_dimensional_grid():
    o = torch.zeros(2, 3, 4, dtype=torch.int32)
    k.grid3[(2, 3, 4)](o)
    expected = torch.arange(2)[:, None, None] * 100 + torch.arange(3)[:, None] * 10 + torch.arange(4)
    assert_equal(o, expected.int())


def test_early_return_and_persistent_loop():
    x = torch.zeros(8)
    k.early_return[(8,)](x, 5)
    assert x.tolist() == [1.0] * 5 + [0.0] * 3
    y = torch.zeros(37)
    k.persistent[(4,)](y, 37)
    assert_equal(y, torch.arange(37.0))


@pytest.mark.parametrize("n", [1, 5, 50])
def test_branches(n):
    x, o = torch.randn(16), torch.empty(16)
    k.branches[(1,)](x, o, n, 16)
    expected = {1: -x, 50: x * 2}.get(n)
    if expected is None:
        expected = x + 1
        for j in range(n):
            expected = expected + j
    assert_equal(o, expected)


@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_loop_carried_tensors_swap(n):
    x, o = torch.randn(32), torch.empty(32)
    k.carried_swap[(1,)](x, o, n, 16)
    a, b = x[:16], x[16:]
    for _ in range(n):
        a, b = b, a + 1
    assert_equal(o, torch.cat([a, b]))


@pytest.mark.parametrize("n", [0, 1, 6])
def test_loop_carried_tensors_in_while(n):
    x, o = torch.rand(96), torch.empty(32)
    k.carried_while[(1,)](x, o, n, 16)
    a, b = torch.zeros(16), torch.ones(16)
    for j in range(n):
        a, b = b, a + b * x[j * 16 : j * 16 + 16]
    assert_close(o, torch.cat([a, b]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("n", [1, 3])
def test_loop_carried_tensors_in_nested_loops(n):
    x, o = torch.randn(n * n * 16), torch.empty(16)
    k.carried_nested[(1,)](x, o, n, 16)
    best, total = torch.full((16,), -float("inf")), torch.zeros(16)
    for r in range(n):
        previous = best
        for c in range(n):
            best = torch.maximum(best, x.view(-1, 16)[r * n + c])
        total = torch.where(previous == -float("inf"), best, total * 0.5 + (best - previous + x[:16]))
    assert_close(o, total, rtol=1e-6, atol=1e-6)


def test_strided_view_with_offset():
    base = torch.randn(64, 64)
    view = base[3:35:2, 5:37:2].t()
    o = torch.empty(16, 16)
    k.strided[(1,)](view, o, view.stride(0), view.stride(1), 16)
    assert_equal(o, view.contiguous())


def test_offsets_beyond_32_bits():
    page = 2**30 + 64
    memory = torch.empty(2 * page + 16, dtype=torch.int8)  # untouched memory costs nothing
    memory[2 * page :] = torch.arange(16, dtype=torch.int8)
    o = torch.zeros(16, dtype=torch.int8)
    k.block_offset[(1,)](memory, o, 2, page, 16)
    assert_equal(o, torch.arange(16, dtype=torch.int8))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_gather_rows(index_dtype):
    x = torch.randn(50, 32)
    index = torch.randint(0, 50, (16,), dtype=index_dtype)
    o = torch.empty(16, 32)
    k.gather_rows[(1,)](x, index, o, 13, 32, 16)
    assert_equal(o[:13], x[index[:13].long()])
    assert (o[13:] == -1).all()


def test_block_pointers():
    x, o = torch.randn(20, 30), torch.zeros(20, 30)
    k.block_pointer[(2, 2)](x, o, 20, 30)
    assert_equal(o, x)


@pytest.mark.parametrize("shape", [(8, 64), (2, 16), (16, 4), (1, 1024)], ids=str)
def test_reductions(shape):
    m, n = shape
    x = torch.randn(m, n)
    o, s = torch.empty(3, m), torch.empty(2 * n + 1)
    k.reductions[(1,)](x, o, s, m, n)
    # Sums may be reassociated: n terms of size 1.
    assert_close(o[0], x.double().sum(1).float(), rtol=1e-6, atol=1e-6 * n**0.5)
    assert_equal(o[1], x.max(1)[0])
    assert_equal(o[2], x.min(1)[0])
    assert_close(s[:n], x.double().sum(0).float(), rtol=1e-6, atol=1e-5)
    assert_equal(s[n : 2 * n], x.max(0)[0])
    assert_close(s[2 * n], x.double().sum().float(), rtol=1e-5, atol=1e-5 * n**0.5)


def test_reductions_of_what_is_the_same_everywhere():
    m, n = 8, 4
    x, o = torch.randn(m), torch.empty(2 * m + n)
    k.reductions_of_broadcasts[(1,)](x, o, m, n)
    assert_equal(o[:m], x * n)
    assert_equal(o[m : 2 * m], x * 2 + n - 1)
    assert_equal(o[2 * m :], torch.full((n,), m * 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32], ids=str)
def test_arg_reductions_take_the_first_of_ties(dtype):
    x = (torch.randn(8, 64) * 30).to(dtype)
    x[3, 5] = x[3, 9] = 120
    x[4, 7] = x[4, 8] = -120
    o, p = torch.empty(8, dtype=torch.int32), torch.empty(8, dtype=torch.int32)
    k.arg_reductions[(1,)](x, o, p, 8, 64)
    first = [int((row == row.max()).nonzero()[0]) for row in x]
    last = [int((row == row.min()).nonzero()[0]) for row in x]
    assert o.tolist() == first and p.tolist() == last


def test_arg_reduction_of_a_row_without_finite_values():
    x = torch.full((8, 64), -float("inf"))
    o, p = torch.empty(8, dtype=torch.int32), torch.empty(8, dtype=torch.int32)
    k.arg_reductions[(1,)](x, o, p, 8, 64)
    assert o.tolist() == [0] * 8 and p.tolist() == [0] * 8


def test_custom_combine_functions():
    x, o, p = torch.rand(16) + 0.5, torch.empty(16), torch.empty(1)
    k.custom_reductions[(1,)](x, o, p, 16)
    expected = [float(x[0])]
    for v in x[1:].tolist():
        expected.append(expected[-1] * v + 1)
    assert_close(o, torch.tensor(expected), rtol=1e-5, atol=0)
    assert_close(p, x.prod()[None], rtol=1e-5, atol=0)


def test_scans_and_flip():
    x = torch.rand(8, 16)
    outputs = [torch.empty_like(x) for _ in range(4)]
    k.scans[(1,)](x, *outputs, 8, 16)
    expected = [x.cumsum(1), x.flip(0).cumsum(0).flip(0), x.cumprod(1), x.flip(1)]
    for got, want in zip(outputs, expected, strict=True):
        assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.int32, torch.int64], ids=str)
def test_sort(dtype, descending):
    x = (torch.randn(4, 64) * 50).to(dtype)
    x[1, ::3] = 7  # ties
    o = torch.empty_like(x)
    k.sort[(1,)](x, o, 4, 64, descending)
    assert_equal(o, x.sort(1, descending=descending)[0])


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_sort_of_any_length(dtype, descending):
    x = (torch.randn(3, 48) * 50).to(dtype)
    extremes = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    x[0, 1], x[0, 5], x[1] = extremes.max, extremes.min, extremes.min
    o = torch.empty_like(x)
    k.sort[(1,)](x, o, 3, 48, descending)
    assert_equal(o, x.sort(1, descending=descending)[0])


def test_sort_puts_nan_last():
    x = torch.randn(1, 16)
    x[0, 3], x[0, 5] = float("nan"), -float("inf")
    o = torch.empty_like(x)
    k.sort[(1,)](x, o, 1, 16, False)
    assert_equal(o[:, :15], x.sort(1)[0][:, :15])
    assert o[0, 15].isnan()


def test_gather_reads_a_value_that_nothing_overwrote():
    """The value's buffer is free for what is computed from it only after the gather."""
    x, o = torch.randn(64), torch.empty(64)
    k.gather_of_a_value_used_before[(1,)](x, o, 64)
    positive = x[x > 0]
    assert_equal(o, torch.cat((positive, torch.zeros(64 - len(positive)))))


def test_gather_within_a_tile_and_histogram():
    x, index = torch.rand(8, 16), torch.randint(0, 16, (8, 16), dtype=torch.int32)
    o = torch.empty_like(x)
    k.gather[(1,)](x, index, o, 8, 16)
    assert_equal(o, x.gather(1, index.long()))
    values, counts = torch.randint(0, 16, (64,), dtype=torch.int32), torch.empty(16, dtype=torch.int32)
    k.histogram[(1,)](values, counts, 64, 16)
    assert_equal(counts, torch.bincount(values, minlength=16).int())


def test_split_join_reshape_and_permute():
    x, o = torch.randn(8, 16), torch.empty(8, 16)
    k.rearrange[(1,)](x, o, 8, 16)
    assert_equal(o, x.view(8, 8, 2).flip(2).reshape(8, 16))
    y, p = torch.randn(4, 8, 16), torch.empty(16, 4, 8)
    k.permute[(1,)](y, p)
    assert_equal(p, y.permute(2, 0, 1).contiguous())


def test_nan_in_extrema():
    x, y = torch.randn(64), torch.randn(64)
    x[3], y[5] = float("nan"), float("nan")
    o, r = torch.empty(4, 64), torch.empty(2)
    k.extrema[(1,)](x, y, o, r, 64)
    for row, expected in enumerate([torch.maximum(x, y), torch.fmax(x, y), torch.minimum(x, y)]):
        assert_close(o[row], expected, rtol=0, atol=0)
    assert_equal(o[3][torch.arange(64) != 3], x.clamp(-0.5, 0.5)[torch.arange(64) != 3])
    assert r[0] == x.nan_to_num(-9).max() and r[1].isnan()


def test_integer_division_truncates():
    x = torch.randint(-50, 50, (64,), dtype=torch.int32)
    y = torch.randint(1, 9, (64,), dtype=torch.int32)
    o = torch.empty(2, 64, dtype=torch.int32)
    k.division[(1,)](x, y, o, 64)
    assert_equal(o[0], torch.div(x, y, rounding_mode="trunc"))
    assert_equal(o[1], torch.fmod(x, y))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_arithmetic_rounds_after_every_operation(dtype):
    x, o = torch.randn(256).to(dtype), torch.empty(256, dtype=dtype)
    k.round_each_step[(1,)](x, o, 256)
    assert_equal(o, torch.relu(x * x + x))


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_casts(dtype, source):
    largest = torch.finfo(dtype).max
    x = torch.cat([torch.randn(1000) * 20, torch.randn(1000) * 0.01, torch.randn(40) * 1e-4]).to(source)
    x = torch.cat([x, torch.tensor([0.0, -0.0, 1e9, -1e9, float("inf"), 448.0, 464.0, 1e-7]).to(source)])
    o = torch.empty(2048, dtype=dtype)
    k.cast[(1,)](x, o, 2048)
    assert_equal(o.view(torch.uint8), x.float().clamp(-largest, largest).to(dtype).view(torch.uint8))
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    back = torch.empty(256, dtype=source)
    k.cast[(1,)](codes, back, 256)
    expected = codes.to(source)
    assert torch.equal(back.isnan(), expected.isnan())
    assert_equal(back[~back.isnan()], expected[~expected.isnan()])
