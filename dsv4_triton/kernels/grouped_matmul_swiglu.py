"""Product of row groups with the gate and up matrices of one expert each, and the clamped SwiGLU of both.

    a = w_gate x,  b = w_up x                                     fp32
    out[r] = row_weight[r] * silu(min(a, limit)) * clamp(b, -limit, limit)

x [S, K] and w13 [E, 2I, K] bf16 or fp32 (one dtype), out [S, I] in x's dtype; fp32 from the products to the one
rounding at the end. In w13 runs of `gate_block(I)` gate rows and the up rows of the same features take turns: one
product then holds both, and the activation follows it on the tile that the matrix unit hands over. (Two products with
accumulators of their own do not link on A5.) Rows and tiles as in `grouped_matmul`.

Grid: cube cores; a persistent loop over (tile, block of features). L1: operand tiles [BM, BK] and [2 BN, BK] a
run, doubled; L0C: 2 BM BN fp32 a run; UB: about 6 BM BN fp32 a run. Source of the formula: `Expert` of the official
DeepSeek inference code.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton.autotune.space import Choices, Key, Space, mixing
from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels._checks import FLOATS, check_tensor, output
from dsv4_triton.kernels._lang import extract_slice
from dsv4_triton.kernels.grouped_matmul import BLOCK_ROWS, depth_block, operands_fit
from dsv4_triton.kernels.swiglu import clamped_swiglu

OP = "grouped_matmul_swiglu"
_MAX_GATE_BLOCK = 64
_RUNS_OF_LARGE_TILES = 2
"""Runs of w13 in a tile of 128 rows, whose operands would otherwise not reach the matrix unit in time."""


@triton.jit(do_not_specialize=["capacity"])
def _grouped_matmul_swiglu_kernel(
    x_ptr,
    w_ptr,
    weight_ptr,
    tiles_ptr,
    num_tiles_ptr,
    out_ptr,
    capacity,
    INNER: tl.constexpr,
    K: tl.constexpr,
    LIMIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    RUNS: tl.constexpr,
    BK: tl.constexpr,
):
    """A tile holds RUNS runs of BN gate rows, each with its up rows."""
    m = tl.arange(0, BM)
    n = tl.arange(0, 2 * RUNS * BN)
    FIRST: tl.constexpr = (K - 1) % BK + 1
    k = tl.arange(0, BK)[None, :]
    first = tl.arange(0, FIRST)[None, :]
    column_blocks: tl.constexpr = INNER // (RUNS * BN)
    for item in range(tl.program_id(0), tl.load(num_tiles_ptr) * column_blocks, tl.num_programs(0)):
        tile = item // column_blocks
        column = item % column_blocks * (RUNS * BN)
        expert = tl.load(tiles_ptr + tile).to(tl.int64)
        row = tl.load(tiles_ptr + capacity + tile).to(tl.int64)
        rows = tl.load(tiles_ptr + 2 * capacity + tile)
        live = (m < rows)[:, None]
        x_at = x_ptr + row * K + m[:, None] * K
        w_at = w_ptr + (expert * (2 * INNER) + 2 * column) * K + n[:, None] * K
        x_first = tl.load(x_at + first, mask=live, other=0.0)
        acc = tl.dot(x_first, tl.trans(tl.load(w_at + first)), input_precision="ieee")
        for step in range(FIRST, K, BK):
            x = tl.load(x_at + step + k, mask=live, other=0.0)
            acc = tl.dot(x, tl.trans(tl.load(w_at + step + k)), acc, input_precision="ieee")
        if weight_ptr is not None:
            row_weight = tl.load(weight_ptr + row + m, mask=m < rows, other=0.0)
        target = out_ptr + row * INNER + column + m[:, None] * INNER + tl.arange(0, BN)[None, :]
        for run in tl.static_range(RUNS):
            gate = extract_slice(acc, (0, 2 * run * BN), (BM, BN), (1, 1))
            up = extract_slice(acc, (0, (2 * run + 1) * BN), (BM, BN), (1, 1))
            h = clamped_swiglu(gate, up, LIMIT)
            if weight_ptr is not None:
                h = h * row_weight[:, None]
            tl.store(target + run * BN, h.to(out_ptr.dtype.element_ty), mask=live)


def gate_block(inner: int) -> int:
    """Gate rows in a run of w13 for experts of `inner` features (a multiple of 16)."""
    return math.gcd(inner, _MAX_GATE_BLOCK)


def gate_up_view(w13: torch.Tensor) -> torch.Tensor:
    """`w13 [E, 2I, K]` as [E, I / B, 2, B, K] with B = gate_block(I): index 0 of axis 2 are gate rows, 1 up rows."""
    return w13.unflatten(1, (-1, 2, gate_block(w13.shape[1] // 2)))


def _default(family: Family, key: Key) -> dict[str, Any]:
    """RUNS runs of w13 in a tile; K in steps of BK."""
    rows, inner = key["block_rows"], key["inner"]
    even = inner // gate_block(inner) % _RUNS_OF_LARGE_TILES == 0
    runs = _RUNS_OF_LARGE_TILES if rows == 128 and even else 1
    return {"RUNS": runs, "BK": depth_block(rows, key["width"], key["dtype"]), **dict.fromkeys(mixing(family))}


def _candidates(family: Family, key: Key) -> Choices:
    runs = [r for r in (1, 2, 3, 4) if key["inner"] // gate_block(key["inner"]) % r == 0]
    if not family.arch:
        return {"RUNS": runs}
    depths = (128, 256, 320, 336, 512, 1024)
    return {"RUNS": runs, "BK": depths, **mixing(family), "tile_mix_vector_loop": (None, 2)}


def _fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    block, runs = gate_block(key["inner"]), config["RUNS"]
    if key["inner"] % (block * runs):
        return f"RUNS {runs} does not divide {key['inner'] // block} runs"
    return operands_fit(family, key["block_rows"], 2 * block * runs, config["BK"], key["width"], key["dtype"])


SPACE = Space(OP, default=_default, candidates=_candidates, fits=_fits, buckets=("rows",))


def grouped_matmul_swiglu(
    x: torch.Tensor,
    w13: torch.Tensor,
    tiles: torch.Tensor,
    num_tiles: torch.Tensor,
    *,
    block_rows: int,
    limit: float | None,
    row_weights: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[S, I] in x's dtype: the activation of the rows of each tile by its expert, of `x [S, K]` and `w13 [E, 2I, K]`.

    `gate_up_view` says how w13 is laid out. `row_weights [S]` fp32 multiplies each row; `limit` None or 0 means no
    clamp. `tiles [3, C]` and `num_tiles [1]` come from `moe_plan` with the same `block_rows` (a power of two from 4 to
    256); rows in no tile are not written. I and K are multiples of 16.
    """
    check_tensor(OP, "x", x, (None, None), FLOATS)
    rows, K = x.shape
    check_tensor(OP, "w13", w13, (None, None, K), x.dtype, device=x.device)
    inner = w13.shape[1] // 2
    check_tensor(OP, "w13", w13, (None, 2 * inner, K), x.dtype, device=x.device)
    check_tensor(OP, "tiles", tiles, (3, None), torch.int32, device=x.device)
    check_tensor(OP, "num_tiles", num_tiles, (1,), torch.int32, device=x.device)
    if inner % 16 or K % 16:
        raise ValueError(f"{OP}: w13 is {2 * inner} x {K} per expert, expected multiples of 32 and 16")
    if block_rows not in BLOCK_ROWS:
        raise ValueError(f"{OP}: block_rows is {block_rows}, expected one of {BLOCK_ROWS}")
    if limit is not None and limit < 0:
        raise ValueError(f"{OP}: limit is {limit}, expected a positive number, or 0 or None for no clamp")
    if row_weights is not None:
        check_tensor(OP, "row_weights", row_weights, (rows,), torch.float32, device=x.device)
    out = output(OP, "out", out, (rows, inner), x.dtype, x.device)
    capacity = tiles.shape[1]
    if out.numel() == 0 or capacity == 0:
        return out
    family = family_of(x.device.type)
    weighted = row_weights is not None
    config = SPACE(family, rows=rows, block_rows=block_rows, inner=inner, width=K, dtype=x.dtype, weighted=weighted)
    block_n, runs = gate_block(inner), config["RUNS"]
    grid = (min(capacity * (inner // (block_n * runs)), family.cube_cores),)
    _grouped_matmul_swiglu_kernel[grid](
        x, w13, row_weights, tiles, num_tiles, out, capacity,
        INNER=inner, K=K, LIMIT=float(limit or 0), BM=block_rows, BN=block_n, RUNS=runs, BK=config["BK"],
        **config.options,
    )  # fmt: skip
    return out
