"""Product of row groups with one weight matrix each: `out[r] = x[r] @ w[expert of r]^T`.

x [S, K] and w [E, N, K] bf16 or fp32 (one dtype), out [S, N] bf16 or fp32; fp32 accumulation, one rounding. The rows
are grouped by expert and cut into tiles by `moe_plan`; the list stays on the device, and the loop bound is read
there. Grid: cube cores; a persistent loop over (tile, block of N) with N fastest, so that a tile's rows are read from
L2. L1: operand tiles [BM, BK] and [BN, BK], doubled; L0C: BM BN fp32. The first product takes the part of K that leaves
whole steps of BK.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton.autotune.space import Choices, Key, Space, products
from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels._checks import FLOATS, check_tensor
from dsv4_triton.kernels._tiling import even_block

BLOCK_ROWS = (4, 8, 16, 32, 64, 128, 256)


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
    FIRST: tl.constexpr = (K - 1) % BK + 1
    k = tl.arange(0, BK)[None, :]
    first = tl.arange(0, FIRST)[None, :]
    column_blocks: tl.constexpr = N // BN
    for item in range(tl.program_id(0), tl.load(num_tiles_ptr) * column_blocks, tl.num_programs(0)):
        tile = item // column_blocks
        column = item % column_blocks * BN
        expert = tl.load(tiles_ptr + tile).to(tl.int64)
        row = tl.load(tiles_ptr + capacity + tile).to(tl.int64)
        live = (m < tl.load(tiles_ptr + 2 * capacity + tile))[:, None]
        x_at = x_ptr + row * K + m[:, None] * K
        w_at = w_ptr + (expert * N + column) * K + n[:, None] * K
        x_first = tl.load(x_at + first, mask=live, other=0.0)
        acc = tl.dot(x_first, tl.trans(tl.load(w_at + first)), input_precision="ieee")
        for step in range(FIRST, K, BK):
            x = tl.load(x_at + step + k, mask=live, other=0.0)
            acc = tl.dot(x, tl.trans(tl.load(w_at + step + k)), acc, input_precision="ieee")
        target = out_ptr + row * N + column + m[:, None] * N + n[None, :]
        tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=live)


def depth_block(block_rows: int, width: int, dtype: torch.dtype) -> int:
    """Step of K where nobody tuned: 512 bytes, or half of that for the widest tiles."""
    return even_block(width, 256 if dtype == torch.bfloat16 and block_rows != 128 else 128)


def operands_fit(family: Family, rows: int, columns: int, depth: int, width: int, dtype: torch.dtype) -> str:
    """ "" or why a tile of `rows` x `columns` results in steps of `depth` of K, `width`, cannot be.

    Steps are multiples of 16, results fit L0C, and two buffers of each operand L1: one would leave the cube waiting,
    which the cost model does not see.
    """
    if depth > width or width % depth % 16:
        return f"BK {depth} does not cut {width} columns"
    if rows * columns * 4 > family.l0c_bytes or 2 * (rows + columns) * depth * dtype.itemsize > family.l1_bytes:
        return f"tile {rows} x {columns} x {depth} does not fit L0C, or not twice into L1"
    return ""


def _default(family: Family, key: Key) -> dict[str, Any]:
    depth = depth_block(key["block_rows"], key["width"], key["dtype"])
    columns = 256 if key["block_rows"] <= 128 else 128
    return {"BN": even_block(key["outputs"], columns), "BK": depth, **dict.fromkeys(products(family))}


def _candidates(family: Family, key: Key) -> Choices:
    blocks = [b for b in (64, 128, 192, 224, 256, 384, 448, 512, 1024) if key["outputs"] % b == 0]
    if not family.arch:
        return {"BN": blocks}
    return {"BN": blocks, "BK": (128, 256, 320, 336, 512, 1024), **products(family)}


def _fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    if key["outputs"] % config["BN"]:
        return f"BN {config['BN']} does not divide {key['outputs']} outputs"
    return operands_fit(family, key["block_rows"], config["BN"], config["BK"], key["width"], key["dtype"])


SPACE = Space("grouped_matmul", default=_default, candidates=_candidates, fits=_fits, buckets=("rows",))


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
    256); rows in no tile are not written. N and K are multiples of 16. `out` is bf16 or fp32 and decides the
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
    family = family_of(x.device.type)
    config = SPACE(family, rows=rows, block_rows=block_rows, outputs=N, width=K, dtype=x.dtype, result=out.dtype)
    block_n = config["BN"]
    grid = (min(capacity * (N // block_n), family.cube_cores),)
    _grouped_matmul_kernel[grid](
        x, w, tiles, num_tiles, out, capacity, N=N, K=K, BM=block_rows, BN=block_n, BK=config["BK"], **config.options
    )
    return out
