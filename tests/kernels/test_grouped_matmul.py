"""grouped_matmul against its reference: empty experts, one row, all rows to one expert, rows in no tile, poison."""

import pytest
import torch

from dsv4_triton.kernels.grouped_matmul import grouped_matmul
from dsv4_triton.reference import grouped_matmul as reference
from dsv4_triton.reference.moe_plan import tile_capacity
from tests.numeric import Guarded, assert_close, assert_equal, poisoned

BF16, FP32 = torch.bfloat16, torch.float32


def tiles_of(counts, block_rows):
    """The tile list of row counts per expert, in a list as long as its capacity, with poison after its end."""
    tiles, first = [], 0
    for expert, count in enumerate(counts):
        tiles += [(expert, first + row, min(block_rows, count - row)) for row in range(0, count, block_rows)]
        first += count
    result = poisoned((3, max(1, tile_capacity(sum(counts), len(counts), block_rows))), torch.int32)
    if tiles:
        result[:, : len(tiles)] = torch.tensor(tiles, dtype=torch.int32).T
    return result, torch.tensor([len(tiles)], dtype=torch.int32)


def check(counts, N, K, dtype, out_dtype=FP32, block_rows=16, spare=0):
    rows = sum(counts) + spare
    x = torch.randn(rows, K).to(dtype)
    x[sum(counts) :] = float("nan")
    w = torch.randn(len(counts), N, K).to(dtype) * K**-0.5
    w[[e for e, count in enumerate(counts) if count == 0]] = float("nan")
    tiles, count = tiles_of(counts, block_rows)
    guarded = Guarded((rows, N), out_dtype)
    got = grouped_matmul(x, w, tiles, count, block_rows=block_rows, out=guarded.out)
    want = reference.grouped_matmul(x, w, tiles, count, block_rows=block_rows, out=poisoned((rows, N), out_dtype))
    # products are exact in fp32 for bf16 operands; sums of K terms of size about 1/sqrt(K) in another order
    assert_close(got, want, rtol=2**-7 if out_dtype == BF16 else 2e-6, atol=1e-5 if out_dtype == BF16 else 4e-6)
    guarded.assert_margins()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "counts",
    [[1, 0, 0, 0], [0, 0, 0, 1], [3, 0, 17, 5], [0, 33, 0, 0], [16, 16, 16, 16], [15, 1, 31, 0], [0, 0, 0, 0]],
    ids=str,
)
def test_spreads_of_rows(counts, dtype):
    check(counts, 48, 80, dtype, spare=2)


@pytest.mark.parametrize("block_rows", [4, 8, 16, 32, 64, 128, 256])
def test_tile_heights(block_rows):
    check([130, 0, 1, 63], 32, 64, BF16, block_rows=block_rows)


@pytest.mark.parametrize(("N", "K"), [(16, 16), (256, 128), (272, 48), (64, 768), (512, 256)])
def test_shapes_of_w(N, K):
    check([5, 18], N, K, BF16, out_dtype=BF16)


def test_no_rows_and_wrong_arguments():
    w = torch.zeros(2, 32, 16)
    tiles, count = tiles_of([0, 0], 16)
    assert grouped_matmul(torch.empty(0, 16), w, tiles, count, block_rows=16).shape == (0, 32)
    x = torch.zeros(4, 16)
    tiles, count = tiles_of([4, 0], 16)
    assert_equal(grouped_matmul(x, w, tiles, count, block_rows=16), torch.zeros(4, 32))
    for error, match, arguments in (
        (TypeError, "w has dtype", {"w": w.bfloat16()}),
        (ValueError, "w has shape", {"w": w.transpose(1, 2).contiguous()}),
        (ValueError, "24 x 16", {"w": torch.zeros(2, 24, 16)}),
        (ValueError, "block_rows is 2", {"block_rows": 2}),
        (ValueError, "tiles has shape", {"tiles": tiles[:2].contiguous()}),
        (TypeError, "num_tiles has dtype", {"num_tiles": count.long()}),
    ):
        with pytest.raises(error, match=match):
            grouped_matmul(**({"x": x, "w": w, "tiles": tiles, "num_tiles": count, "block_rows": 16} | arguments))
