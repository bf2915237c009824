"""Product of row groups with one weight matrix each: `out[r] = x[r] @ w[expert of r]^T`.

x [S, K] and w [E, N, K] bf16 or fp32 (one dtype), out [S, N] bf16 or fp32; fp32 accumulation, one rounding. The rows
are grouped by expert and cut into tiles by `moe_plan`; the list stays on the device, and the loop bound is read
there. Grid: cube cores; a persistent loop over (tile, block of N) with N fastest, so that a tile's rows are read from
L2. L1: operand tiles [BM, BK] and [BN, BK], doubled; L0C: BM BN fp32.
"""

import torch
import triton
import triton.language as tl

from dsv4_triton.device import family_of
from dsv4_triton.kernels._checks import FLOATS, check_tensor
from dsv4_triton.kernels._tiling import even_block

BLOCK_ROWS = (4, 8, 16, 32, 64, 128)


@triton.jit(do_not_specialize=["capacity"])
def _grouped_matmul_kernel(
    x_ptr,
    w_ptr,
    tiles_ptr,
    num_tiles_ptr,
    out_ptr,
    capacity,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    m = tl.arange(0, BM)
    n = tl.arange(0, BN)
    k = tl.arange(0, BK)
    column_blocks: tl.constexpr = N // BN
    for item in range(tl.program_id(0), tl.load(num_tiles_ptr) * column_blocks, tl.num_programs(0)):
        tile = item // column_blocks
        column = item % column_blocks * BN
        expert = tl.load(tiles_ptr + tile).to(tl.int64)
        row = tl.load(tiles_ptr + capacity + tile).to(tl.int64)
        live = (m < tl.load(tiles_ptr + 2 * capacity + tile))[:, None]
        x_at = x_ptr + row * K + m[:, None] * K + k[None, :]
        w_at = w_ptr + (expert * N + column) * K + n[:, None] * K + k[None, :]
        acc = tl.dot(tl.load(x_at, mask=live, other=0.0), tl.trans(tl.load(w_at)), input_precision="ieee")
        for step in range(BK, K, BK):
            x = tl.load(x_at + step, mask=live, other=0.0)
            acc = tl.dot(x, tl.trans(tl.load(w_at + step)), acc, input_precision="ieee")
        target = out_ptr + row * N + column + m[:, None] * N + n[None, :]
        tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=live)


def grouped_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    tiles: torch.Tensor,
    num_tiles: torch.Tensor,
    *,
    block_rows: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x[r] @ w[e]^T` for the rows r of each tile, e its expert: [S, N] from `x [S, K]` and `w [E, N, K]`.

    `tiles [3, C]` and `num_tiles [1]` come from `moe_plan` with the same `block_rows` (a power of two from 4 to
    128); rows in no tile are not written. N and K are multiples of 16. `out` is bf16 or fp32 and decides the
    rounding; without it the result is fp32.
    """
    check_tensor("grouped_matmul", "x", x, (None, None), FLOATS)
    rows, K = x.shape
    check_tensor("grouped_matmul", "w", w, (None, None, K), x.dtype, device=x.device)
    N = w.shape[1]
    check_tensor("grouped_matmul", "tiles", tiles, (3, None), torch.int32, device=x.device)
    check_tensor("grouped_matmul", "num_tiles", num_tiles, (1,), torch.int32, device=x.device)
    if N % 16 or K % 16:
        raise ValueError(f"grouped_matmul: w is {N} x {K} per expert, expected multiples of 16")
    if block_rows not in BLOCK_ROWS:
        raise ValueError(f"grouped_matmul: block_rows is {block_rows}, expected one of {BLOCK_ROWS}")
    if out is None:
        out = torch.empty(rows, N, dtype=torch.float32, device=x.device)
    else:
        check_tensor("grouped_matmul", "out", out, (rows, N), FLOATS, device=x.device)
    capacity = tiles.shape[1]
    if out.numel() == 0 or capacity == 0:
        return out
    block_n = even_block(N, 256)
    block_k = even_block(K, 256 if x.dtype == torch.bfloat16 and block_rows <= 64 else 128)
    grid = (min(capacity * (N // block_n), family_of(x.device.type).cube_cores),)
    _grouped_matmul_kernel[grid](x, w, tiles, num_tiles, out, capacity, N=N, K=K, BM=block_rows, BN=block_n, BK=block_k)
    return out
