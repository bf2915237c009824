"""The two halves that `hc_pre` and `hc_head` share: the mixing product and the weighted collapse of the four streams.

Mixing, on the cube: for F = x as [T, 4D] and the N rows of fn (in P parts),

    part[s, r, t] = sum over K slice s of fn_parts[r, k] F[t, k]          r = p N + n
    gram[s, t, u] = sum over K slice s of F[t, k] F[u, k]                 its diagonal is the sum of squares

Tokens are the last axis, so that what follows works on token vectors. The sum of squares is a product too because a
tile that feeds both `tl.dot` and vector code is lost on the vector core by ascendnpu-ir 1.2.0 on A2. Grid: cube
cores; a persistent loop over (token tile, K slice), with so many slices that a small T still fills the cores. L1: two
operand tiles [BT, BK] and [P N, BK], doubled; L0C: (P N + BT) BT fp32.
"""

import torch
import triton
import triton.language as tl

from dsv4_triton.device import family_of
from dsv4_triton.kernels._tiling import next_power_of_2

LANES = 16
"""Tokens whose mixes are finished together; the unit of the gram matrix's diagonal."""
_MAX_TOKEN_TILE = 64


@triton.jit(do_not_specialize=["T", "TP", "slices"])
def _mix_kernel(
    x_ptr,
    fn_ptr,
    part_ptr,
    gram_ptr,
    T,
    TP,
    slices,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    steps: tl.constexpr = K // BK
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, BT)
    k = tl.arange(0, BK)
    for item in range(tl.program_id(0), tl.cdiv(T, BT) * slices, tl.num_programs(0)):
        tile = item // slices
        s = item % slices
        first = tile * BT
        begin = s * steps // slices
        end = (s + 1) * steps // slices
        fn_at = fn_ptr + row[:, None] * K + k[None, :]
        x_at = x_ptr + first.to(tl.int64) * K + lane[:, None] * K + k[None, :]
        live = (lane < T - first)[:, None]
        f = tl.load(fn_at + begin * BK)
        x = tl.trans(tl.load(x_at + begin * BK, mask=live, other=0.0))
        u = tl.load(x_at + begin * BK, mask=live, other=0.0)
        part = tl.dot(f, x, input_precision="ieee")
        gram = tl.dot(u, x, input_precision="ieee")
        for step in range(begin + 1, end):
            f = tl.load(fn_at + step * BK)
            u = tl.load(x_at + step * BK, mask=live, other=0.0)
            x = tl.trans(u)
            part = tl.dot(f, x, part, input_precision="ieee")
            gram = tl.dot(u, x, gram, input_precision="ieee")
        tl.store(part_ptr + (s * ROWS + row[:, None]) * TP + first + lane[None, :], part)
        tl.store(gram_ptr + (s * TP + first + lane[:, None]) * BT + lane[None, :], gram)


@triton.jit
def mix_row(part_ptr, row, first, slices, TP, N: tl.constexpr, P: tl.constexpr, LANES: tl.constexpr):
    """The unscaled mixes `(F fn^T)[t, row]` of LANES tokens from `first` on; `row` a tile of row numbers.

    Returns fp32 with the lanes as a new last axis.
    """
    at = part_ptr + row[:, None] * TP + first + tl.arange(0, LANES)[None, :]
    total = tl.zeros((row.shape[0], LANES), tl.float32)
    for s in range(slices):
        for p in tl.static_range(P):
            total += tl.load(at + (s * P + p) * N * TP)
    return total


@triton.jit
def inverse_rms(gram_ptr, first, slices, TP, BT, eps, K: tl.constexpr, LANES: tl.constexpr):
    """`rsqrt(mean(F^2) + eps)` [LANES] of the tokens from `first` on, from the diagonal of the gram matrices."""
    lane = tl.arange(0, LANES)
    diagonal = lane[:, None] == lane[None, :]
    column = first % BT
    square = tl.zeros((LANES,), tl.float32)
    for s in range(slices):
        block = tl.load(gram_ptr + (s * TP + first + lane[:, None]) * BT + column + lane[None, :])
        square += tl.sum(tl.where(diagonal, block, 0.0), axis=0)
    return tl.rsqrt(square / K + eps)


@triton.jit
def gate(part_ptr, base_ptr, scale, rms, row, first, slices, TP, N: tl.constexpr, P: tl.constexpr, LANES: tl.constexpr):
    """`sigmoid(m[row] scale + base[row])` for a tile of rows, `[rows, LANES]`."""
    mix = mix_row(part_ptr, row, first, slices, TP, N, P, LANES) * rms[None, :]
    return tl.sigmoid(mix * scale + tl.load(base_ptr + row)[:, None])


@triton.jit
def collapse_token(x_ptr, norm_ptr, y_ptr, t, pre, here, norm_eps, D: tl.constexpr, BD: tl.constexpr):
    """Write `y[t] = sum_j pre[j, lane] x[t, j]`, with the RMS norm where a weight is given.

    `pre` is [4, LANES], `here` [1, LANES] is true at the token's lane only.
    """
    d = tl.arange(0, BD)
    row = t.to(tl.int64) * D
    stream = tl.arange(0, 4)[:, None]
    y = tl.zeros((BD,), tl.float32)
    for j in tl.static_range(4):
        weight = tl.sum(tl.where(here & (stream == j), pre, 0.0))
        y += weight * tl.load(x_ptr + row * 4 + j * D + d, mask=d < D, other=0.0).to(tl.float32)
    y = y.to(y_ptr.dtype.element_ty)
    if norm_ptr is not None:
        wide = y.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide) / D + norm_eps)
        y = (tl.load(norm_ptr + d, mask=d < D, other=0.0).to(tl.float32) * wide * scale).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row + d, y, mask=d < D)


def token_tile(T: int, cores: int) -> int:
    """Tokens per mixing tile: 16 while that fills the cores, then more, so that fn is read less often."""
    return min(max(LANES, next_power_of_2(triton.cdiv(T, cores))), _MAX_TOKEN_TILE)


def tokens_per_program(T: int, cores: int) -> int:
    """Tokens one program finishes: a power of two up to LANES."""
    return min(next_power_of_2(triton.cdiv(T, cores)), LANES)


def mix(x: torch.Tensor, fn_parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`(part [S, P N, TP], gram [S, TP, BT])` fp32 of x [T, 4, D] and fn_parts [P, N, 4D]; TP is T rounded up to
    tiles."""
    T, K = x.shape[0], x.shape[1] * x.shape[2]
    rows = fn_parts.shape[0] * fn_parts.shape[1]
    cores = family_of(x.device.type).cube_cores
    block_t = token_tile(T, cores)
    block_k = next(b for b in (256, 128, 64) if K % b == 0)
    tiles = triton.cdiv(T, block_t)
    slices = min(max(1, cores // tiles), K // block_k)
    padded = tiles * block_t
    part = torch.empty(slices, rows, padded, dtype=torch.float32, device=x.device)
    gram = torch.empty(slices, padded, block_t, dtype=torch.float32, device=x.device)
    grid = (min(tiles * slices, cores),)
    _mix_kernel[grid](x, fn_parts, part, gram, T, padded, slices, K=K, ROWS=rows, BT=block_t, BK=block_k)
    return part, gram
