"""grouped_matmul_swiglu against its reference: empty experts, one row, clamps, weights, the turns of gate and up."""

import pytest
import torch

from dsv4_triton.kernels.grouped_matmul_swiglu import gate_block, gate_up_view, grouped_matmul_swiglu
from dsv4_triton.reference import grouped_matmul_swiglu as reference
from tests.kernels.test_grouped_matmul import tiles_of
from tests.numeric import Guarded, assert_close, assert_equal, poisoned

BF16, FP32 = torch.bfloat16, torch.float32
LIMIT = 1.5


def check(counts, inner, K, dtype, block_rows=16, spare=0, limit=LIMIT, weighted=True):
    rows = sum(counts) + spare
    x = torch.randn(rows, K).to(dtype)
    x[sum(counts) :] = float("nan")
    w = torch.randn(len(counts), 2 * inner, K).to(dtype) * K**-0.5
    w[[e for e, count in enumerate(counts) if count == 0]] = float("nan")
    tiles, count = tiles_of(counts, block_rows)
    options = {"block_rows": block_rows, "limit": limit, "row_weights": torch.rand(rows) if weighted else None}
    guarded = Guarded((rows, inner), dtype)
    got = grouped_matmul_swiglu(x, w, tiles, count, **options, out=guarded.out)
    want = reference.grouped_matmul_swiglu(x, w, tiles, count, **options, out=poisoned((rows, inner), dtype))
    # sums of K terms of size about 1/sqrt(K) in another order; bf16 may round to the neighbour
    assert_close(got, want, rtol=2**-7 if dtype == BF16 else 4e-6, atol=1e-5 if dtype == BF16 else 8e-6)
    guarded.assert_margins()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("counts", [[1, 0, 0, 0], [3, 0, 17, 5], [0, 33, 0, 0], [15, 1, 31, 0], [0, 0, 0, 0]], ids=str)
def test_spreads_of_rows(counts, dtype):
    check(counts, 48, 80, dtype, spare=2)


@pytest.mark.parametrize("block_rows", [4, 8, 32, 64, 128])
def test_tile_heights(block_rows):
    check([130, 0, 1, 63], 64, 64, BF16, block_rows=block_rows)


@pytest.mark.parametrize(("inner", "K", "block"), [(16, 16, 16), (32, 48, 32), (272, 128, 16), (192, 512, 64)])
def test_shapes_of_w(inner, K, block):
    assert gate_block(inner) == block
    check([5, 18], inner, K, FP32)


@pytest.mark.parametrize("limit", [None, 0, 0.1, 10.0])
def test_limits_and_no_weights(limit):
    check([5, 18], 32, 64, FP32, limit=limit, weighted=False)


def test_gate_and_up_rows_take_turns():
    """Gate rows of ones give silu(K); up row i of i ones gives i: the result counts 0..I-1 in order."""
    inner, K = 128, 128
    w = torch.zeros(1, 2 * inner, K)
    view = gate_up_view(w)
    assert view.shape == (1, 2, 2, 64, K) and view.data_ptr() == w.data_ptr()
    view[0, :, 0] = 1.0
    view[0, :, 1] = torch.tril(torch.ones(K, K), -1).view(2, 64, K)
    tiles, count = tiles_of([1], 4)
    got = grouped_matmul_swiglu(torch.ones(1, K), w, tiles, count, block_rows=4, limit=None)
    assert_close(
        got[0], torch.nn.functional.silu(torch.tensor(float(K))) * torch.arange(inner).float(), rtol=1e-6, atol=0
    )
    gate, up = reference.gate_up(w)
    assert_equal(gate, torch.ones(1, inner, K))
    assert_equal(up.sum(-1), torch.arange(inner).float()[None])


def test_no_rows_and_wrong_arguments():
    w = torch.zeros(2, 64, 16)
    tiles, count = tiles_of([0, 0], 16)
    options = {"block_rows": 16, "limit": LIMIT}
    assert grouped_matmul_swiglu(torch.empty(0, 16), w, tiles, count, **options).shape == (0, 32)
    x = torch.zeros(4, 16)
    tiles, count = tiles_of([4, 0], 16)
    assert_equal(grouped_matmul_swiglu(x, w, tiles, count, **options), torch.zeros(4, 32))
    for error, match, arguments in (
        (TypeError, "w13 has dtype", {"w13": w.bfloat16()}),
        (ValueError, "w13 has shape", {"w13": w[:, :63].contiguous()}),
        (ValueError, "48 x 16", {"w13": torch.zeros(2, 48, 16)}),
        (ValueError, "block_rows is 2", {"block_rows": 2}),
        (ValueError, "limit is -1", {"limit": -1.0}),
        (ValueError, "tiles has shape", {"tiles": tiles[:2].contiguous()}),
        (ValueError, r"row_weights has shape \(3,\)", {"row_weights": torch.ones(3)}),
        (TypeError, "out has dtype", {"out": torch.empty(4, 32, dtype=BF16)}),
    ):
        with pytest.raises(error, match=match):
            grouped_matmul_swiglu(**({"x": x, "w13": w, "tiles": tiles, "num_tiles": count} | options | arguments))
