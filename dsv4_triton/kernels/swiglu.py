"""Clamped SwiGLU with optional row weights.

    gate = min(x[:, :I], limit);  up = clamp(x[:, I:], -limit, limit);  out = row_weight * silu(gate) * up

The gate is clamped before silu and has no lower bound. Inputs bf16 or fp32, fp32 arithmetic, one rounding to the
output's dtype. Grid: vector cores; a persistent loop over tiles [BM, BI] of the output, so small that every
core has one. UB per tile: 3 fp32 tiles and the input and output tiles, doubled. Source of the formula: `Expert` of the
official DeepSeek inference code.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton.autotune.space import Choices, Key, Space, buffering
from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels._checks import FLOATS, check_tensor
from dsv4_triton.kernels._tiling import even_block, next_power_of_2

_MIN_TILE = 256
_MAX_TILE = 4096
_MAX_COLUMNS = 2048


@triton.jit
def clamped_swiglu(gate, up, LIMIT: tl.constexpr):
    """`silu(min(gate, LIMIT)) * clamp(up, -LIMIT, LIMIT)` in fp32; LIMIT 0 is no clamp."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["M"])
def _swiglu_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    M,
    INNER: tl.constexpr,
    LIMIT: tl.constexpr,
    BM: tl.constexpr,
    BI: tl.constexpr,
):
    row_lane = tl.arange(0, BM)
    col_lane = tl.arange(0, BI)
    column_blocks: tl.constexpr = INNER // BI
    for tile in range(tl.program_id(0), tl.cdiv(M, BM) * column_blocks, tl.num_programs(0)):
        first = tile // column_blocks * BM
        column = tile % column_blocks * BI
        live = (row_lane < M - first)[:, None]
        source = x_ptr + first.to(tl.int64) * (2 * INNER) + column
        offset = row_lane[:, None] * (2 * INNER) + col_lane[None, :]
        gate = tl.load(source + offset, mask=live, other=0.0).to(tl.float32)
        up = tl.load(source + INNER + offset, mask=live, other=0.0).to(tl.float32)
        result = clamped_swiglu(gate, up, LIMIT)
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + first + row_lane, mask=row_lane < M - first, other=0.0)
            result = result * weight[:, None]
        target = out_ptr + first.to(tl.int64) * INNER + column + row_lane[:, None] * INNER + col_lane[None, :]
        tl.store(target, result.to(out_ptr.dtype.element_ty), mask=live)


def _default(family: Family, key: Key) -> dict[str, Any]:
    """Tiles of BM rows and BI features."""
    rows, inner = key["rows"], key["inner"]
    tile = min(_MAX_TILE, max(_MIN_TILE, next_power_of_2(triton.cdiv(rows * inner, family.vector_cores))))
    block_i = even_block(inner, min(tile, _MAX_COLUMNS))
    block_m = min(max(1, tile // next_power_of_2(block_i)), next_power_of_2(rows))
    return {"BM": block_m, "BI": block_i, **dict.fromkeys(buffering(family))}


def _candidates(family: Family, key: Key) -> Choices:
    blocks = [b for b in (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096) if key["inner"] % b == 0]
    return {"BM": (1, 2, 4, 8, 16, 32), "BI": blocks, **buffering(family)}


def _fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    """BI divides the features; two fp32 tiles and those that are read."""
    if key["inner"] % config["BI"]:
        return f"BI {config['BI']} does not divide {key['inner']} features"
    tile = config["BM"] * config["BI"]
    fits = tile * (8 + 2 * key["dtype"].itemsize) <= family.ub_bytes
    return "" if fits else f"tile {config['BM']} x {config['BI']} does not fit"


SPACE = Space("swiglu", default=_default, candidates=_candidates, fits=_fits, buckets=("rows",))


def swiglu(
    x: torch.Tensor,
    *,
    limit: float | None,
    row_weights: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Clamped SwiGLU of `x [M, 2I]` (gate columns first), bf16 or fp32.

    `limit` None or 0 means no clamp; `row_weights [M]` fp32 multiplies each row. `out [M, I]` may have either float
    dtype and decides the rounding; without it the result has x's dtype. A negative limit, a wrong shape or dtype
    raises.
    """
    check_tensor("swiglu", "x", x, (None, None), FLOATS)
    rows, columns = x.shape
    if columns % 2:
        raise ValueError(f"swiglu: x has {columns} columns, expected an even number (gate and up)")
    if limit is not None and limit < 0:
        raise ValueError(f"swiglu: limit is {limit}, expected a positive number, or 0 or None for no clamp")
    if row_weights is not None:
        check_tensor("swiglu", "row_weights", row_weights, (rows,), torch.float32, device=x.device)
    inner = columns // 2
    if out is None:
        out = torch.empty(rows, inner, dtype=x.dtype, device=x.device)
    else:
        check_tensor("swiglu", "out", out, (rows, inner), FLOATS, device=x.device)
    if out.numel() == 0:
        return out
    family = family_of(x.device.type)
    weighted = row_weights is not None
    config = SPACE(family, rows=rows, inner=inner, dtype=x.dtype, result=out.dtype, weighted=weighted)
    block_m, block_i = config["BM"], config["BI"]
    grid = (min(triton.cdiv(rows, block_m) * (inner // block_i), family.vector_cores),)
    _swiglu_kernel[grid](
        x, row_weights, out, rows, INNER=inner, LIMIT=float(limit or 0), BM=block_m, BI=block_i, **config.options
    )
    return out
