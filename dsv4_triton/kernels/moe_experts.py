"""The routed experts: group the rows by expert, two grouped products around a clamped SwiGLU, and sum per token.

    [a | b] = w13_e x
    h = weight * silu(min(a, limit)) * clamp(b, -limit, limit), in x's dtype
    out = sum over the token's choices of w2_e h

The routing weight is applied before w2. a, b, the products with w2 and the sum are fp32. Own kernels: dispatch (copy
each token's row and weights to the positions of `moe_plan`) and combine (sum the rows back, in the order of the
choices): vector cores, a persistent loop over tokens, whole rows of D; UB: 2 rows. Source of the formula: `Expert`
and `MoE` of the official DeepSeek inference code.
"""

import torch
import triton
import triton.language as tl

from dsv4_triton.device import family_of
from dsv4_triton.kernels._checks import FLOATS, check_tensor, output
from dsv4_triton.kernels._tiling import next_power_of_2
from dsv4_triton.kernels.grouped_matmul import grouped_matmul
from dsv4_triton.kernels.moe_plan import moe_plan
from dsv4_triton.kernels.swiglu import swiglu


@triton.jit(do_not_specialize=["T"])
def _moe_dispatch_kernel(
    x_ptr,
    weights_ptr,
    positions_ptr,
    rows_ptr,
    row_weights_ptr,
    T,
    K: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    d = tl.arange(0, BD)
    for t in range(tl.program_id(0), T, tl.num_programs(0)):
        x = tl.load(x_ptr + tl.cast(t, tl.int64) * D + d, mask=d < D, other=0.0)
        for j in tl.static_range(K):
            position = tl.load(positions_ptr + t * K + j).to(tl.int64)
            if position >= 0:
                tl.store(rows_ptr + position * D + d, x, mask=d < D)
                tl.store(row_weights_ptr + position, tl.load(weights_ptr + t * K + j))


@triton.jit(do_not_specialize=["T"])
def _moe_combine_kernel(rows_ptr, positions_ptr, out_ptr, T, K: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    d = tl.arange(0, BD)
    for t in range(tl.program_id(0), T, tl.num_programs(0)):
        total = tl.zeros((BD,), tl.float32)
        for j in tl.static_range(K):
            position = tl.load(positions_ptr + t * K + j).to(tl.int64)
            width = tl.where(position >= 0, D, 0)
            row = tl.maximum(position, 0)
            total += tl.load(rows_ptr + row * D + d, mask=d < width, other=0.0)
        tl.store(out_ptr + tl.cast(t, tl.int64) * D + d, total, mask=d < D)


def rows_per_tile(pairs: int, num_experts: int, dot_rows: int) -> int:
    """Rows per tile of the grouped products: about the mean number of rows of an expert, `dot_rows` to 128."""
    return min(max(dot_rows, next_power_of_2(triton.cdiv(pairs, num_experts))), 128)


def moe_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    swiglu_limit: float | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, D] fp32: the weighted sum of the experts `ids [T, k]` (int32) of each row of `x [T, D]`.

    `w13 [E, 2I, D]` (gate rows first), `w2 [E, D, I]` in x's dtype (bf16 or fp32); `weights [T, k]` fp32 from
    `moe_router`. An id outside 0..E-1 (padding rows: -1) contributes nothing. `swiglu_limit` None or 0 means no
    clamp. D and I are multiples of 16. Nothing is copied to the host.
    """
    check_tensor("moe_experts", "x", x, (None, None), FLOATS)
    T, D = x.shape
    check_tensor("moe_experts", "w13", w13, (None, None, D), x.dtype, device=x.device)
    E, inner = w13.shape[0], w13.shape[1] // 2
    check_tensor("moe_experts", "w13", w13, (E, 2 * inner, D), x.dtype, device=x.device)
    check_tensor("moe_experts", "w2", w2, (E, D, inner), x.dtype, device=x.device)
    check_tensor("moe_experts", "weights", weights, (T, None), torch.float32, device=x.device)
    k = weights.shape[1]
    check_tensor("moe_experts", "ids", ids, (T, k), torch.int32, device=x.device)
    out = output("moe_experts", "out", out, (T, D), torch.float32, x.device)
    if out.numel() == 0:
        return out
    pairs = T * k
    family = family_of(x.device.type)
    block_rows = rows_per_tile(pairs, E, family.dot_rows)
    positions, tiles, num_tiles = moe_plan(ids, E, block_rows=block_rows)
    rows = torch.empty(pairs, D, dtype=x.dtype, device=x.device)
    row_weights = torch.empty(pairs, dtype=torch.float32, device=x.device)
    grid = (min(T, family.vector_cores),)
    _moe_dispatch_kernel[grid](x, weights, positions, rows, row_weights, T, K=k, D=D, BD=D)
    gate_up = grouped_matmul(rows, w13, tiles, num_tiles, block_rows=block_rows)
    h = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    swiglu(gate_up, limit=swiglu_limit, row_weights=row_weights, out=h)
    products = grouped_matmul(h, w2, tiles, num_tiles, block_rows=block_rows)
    _moe_combine_kernel[grid](products, positions, out, T, K=k, D=D, BD=D)
    return out
