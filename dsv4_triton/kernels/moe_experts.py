"""The experts: group the rows by expert, two grouped products with a clamped SwiGLU between them, and sum per token.

    [a | b] = w13_e x
    h = weight * silu(min(a, limit)) * clamp(b, -limit, limit), in x's dtype
    out = sum over the token's choices of w2_e h

The routing weight is applied before w2. a, b, the products with w2 and the sum are fp32; the result is rounded once. A
shared expert is one more expert that every token chooses with weight 1 (see `moe_router`).

Four launches for few tokens: `moe_dispatch`, both products, and combine (sum the rows back, in the order of the
choices: vector cores, a persistent loop over (token, block of D); UB: 2 blocks). Source of the formula: `Expert` and
`MoE` of the official inference code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dsv4_triton.autotune.space import Choices, Key, Space, buffering
from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels._checks import FLOATS, check_tensor
from dsv4_triton.kernels._workspace import Part, carve, workspace_bytes
from dsv4_triton.kernels.grouped_matmul import BLOCK_ROWS, grouped_matmul
from dsv4_triton.kernels.grouped_matmul_swiglu import grouped_matmul_swiglu
from dsv4_triton.kernels.moe_dispatch import moe_dispatch, moe_dispatch_workspace
from dsv4_triton.kernels.moe_plan import rows_per_tile, tile_capacity

OP = "moe_experts"
RUN_TOKENS = 4096
"""Tokens of one pass over the experts; longer steps take several, so that scratch stays bounded."""


@triton.jit(do_not_specialize=["T"])
def _moe_combine_kernel(rows_ptr, positions_ptr, out_ptr, T, K: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    blocks: tl.constexpr = D // BD
    for item in range(tl.program_id(0), T * blocks, tl.num_programs(0)):
        t = item // blocks
        d = item % blocks * BD + tl.arange(0, BD)
        total = tl.zeros((BD,), tl.float32)
        for j in tl.static_range(K):
            position = tl.load(positions_ptr + t * K + j).to(tl.int64)
            width = tl.where(position >= 0, D, 0)
            row = tl.maximum(position, 0)
            total += tl.load(rows_ptr + row * D + d, mask=d < width, other=0.0)
        tl.store(out_ptr + tl.cast(t, tl.int64) * D + d, total.to(out_ptr.dtype.element_ty), mask=d < D)


def _default(family: Family, key: Key) -> dict[str, Any]:
    """ROWS of a tile of the grouped products."""
    return {"ROWS": rows_per_tile(key["pairs"], key["experts"], family.dot_rows)}


def _candidates(family: Family, key: Key) -> Choices:
    return {"ROWS": [rows for rows in BLOCK_ROWS if rows >= family.dot_rows]}


def _fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    return "" if config["ROWS"] in BLOCK_ROWS else f"ROWS {config['ROWS']} is none of {BLOCK_ROWS}"


SPACE = Space(OP, default=_default, candidates=_candidates, fits=_fits, buckets=("pairs",))


def _combine_default(family: Family, key: Key) -> dict[str, Any]:
    """Blocks of BD features of a token."""
    return {"BD": key["width"], **dict.fromkeys(buffering(family))}


def _combine_candidates(family: Family, key: Key) -> Choices:
    width = key["width"]
    return {"BD": [b for b in range(128, width + 1, 128) if width % b == 0], **buffering(family)}


def _combine_fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    """BD divides the features; two fp32 rows."""
    block, width = config["BD"], key["width"]
    return "" if width % block == 0 and block * 8 <= family.ub_bytes else f"blocks of {block} of {width} features"


COMBINE = Space("moe_combine", default=_combine_default, candidates=_combine_candidates, fits=_combine_fits)


class _Scratch(NamedTuple):
    """Parts of a workspace for one run of tokens; the grouped rows share the memory of the products, which are written
    when the rows have been read."""

    positions: Part
    tiles: Part
    num_tiles: Part
    row_weights: Part
    h: Part
    products: Part

    @classmethod
    def of(cls, tokens: int, k: int, capacity: int, D: int, inner: int, dtype: torch.dtype) -> _Scratch:
        pairs = tokens * k
        return cls(
            positions=((tokens, k), torch.int32),
            tiles=((3, capacity), torch.int32),
            num_tiles=((1,), torch.int32),
            row_weights=((pairs,), torch.float32),
            h=((pairs, inner), dtype),
            products=((pairs, D), torch.float32),
        )


def moe_experts_workspace(tokens: int, k: int, num_experts: int, D: int, inner: int, dtype: torch.dtype) -> int:
    """Bytes of scratch that `moe_experts` takes at most for up to `tokens` tokens with k choices each."""
    tokens = min(tokens, RUN_TOKENS)
    scratch = _Scratch.of(tokens, k, tokens * k, D, inner, dtype)
    return workspace_bytes(scratch) + moe_dispatch_workspace(tokens * k, num_experts)


def _run(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    limit: float | None,
    out: torch.Tensor,
    workspace: torch.Tensor | None,
) -> None:
    """`moe_experts` of at most RUN_TOKENS tokens."""
    (T, D), k = x.shape, ids.shape[1]
    E, inner = w13.shape[0], w2.shape[2]
    family = family_of(x.device.type)
    block_rows = SPACE(family, pairs=T * k, experts=E, width=D, inner=inner, dtype=x.dtype)["ROWS"]
    scratch = _Scratch.of(T, k, tile_capacity(T * k, E, block_rows), D, inner, x.dtype)
    positions, tiles, num_tiles, row_weights, h, products = carve(OP, workspace, x.device, scratch)
    rest = None if workspace is None else workspace[workspace_bytes(scratch) :]
    rows = products.view(-1).view(x.dtype)[: T * k * D].view(T * k, D)
    moe_dispatch(
        x,
        weights,
        ids,
        E,
        block_rows=block_rows,
        rows=rows,
        row_weights=row_weights,
        positions=positions,
        tiles=tiles,
        num_tiles=num_tiles,
        workspace=rest,
    )
    grouped_matmul_swiglu(
        rows, w13, tiles, num_tiles, block_rows=block_rows, limit=limit, row_weights=row_weights, out=h
    )
    grouped_matmul(h, w2, tiles, num_tiles, block_rows=block_rows, out=products)
    config = COMBINE(family, tokens=T, width=D, k=k, result=out.dtype)
    grid = (min(T * (D // config["BD"]), family.vector_cores),)
    _moe_combine_kernel[grid](products, positions, out, T, K=k, D=D, BD=config["BD"], **config.options)


def moe_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    swiglu_limit: float | None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, D]: the weighted sum of the experts `ids [T, k]` (int32) of each row of `x [T, D]`.

    `w13 [E, 2I, D]` (laid out as `grouped_matmul_swiglu.gate_up_view` says), `w2 [E, D, I]` in x's dtype (bf16 or
    fp32); `weights [T, k]` fp32 from `moe_router`. An id outside 0..E-1 (padding rows: -1) contributes nothing.
    `swiglu_limit` None or 0 means no clamp. D and I are multiples of 16. `out` is bf16 or fp32 and decides the
    rounding; without it the result is fp32. `workspace`: `moe_experts_workspace` bytes, uint8. Nothing is copied to the
    host.
    """
    check_tensor(OP, "x", x, (None, None), FLOATS)
    T, D = x.shape
    check_tensor(OP, "w13", w13, (None, None, D), x.dtype, device=x.device)
    E, inner = w13.shape[0], w13.shape[1] // 2
    check_tensor(OP, "w13", w13, (E, 2 * inner, D), x.dtype, device=x.device)
    check_tensor(OP, "w2", w2, (E, D, inner), x.dtype, device=x.device)
    check_tensor(OP, "weights", weights, (T, None), torch.float32, device=x.device)
    k = weights.shape[1]
    check_tensor(OP, "ids", ids, (T, k), torch.int32, device=x.device)
    if out is None:
        out = torch.empty(T, D, dtype=torch.float32, device=x.device)
    else:
        check_tensor(OP, "out", out, (T, D), FLOATS, device=x.device)
    if out.numel() == 0:
        return out
    for start in range(0, T, RUN_TOKENS):
        run = slice(start, start + RUN_TOKENS)
        _run(x[run], w13, w2, weights[run], ids[run], swiglu_limit, out[run], workspace)
    return out
