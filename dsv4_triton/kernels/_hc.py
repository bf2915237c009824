"""What the mHC ops share: the mixing product and the weighted collapse of the four streams.

Mixing, on the cube: for F = x as [T, 4D] and the N rows of fn (in P parts),

    part[s, r, t] = sum over K slice s of fn_parts[r, k] F[t, k]          r = p N + n
    gram[s, t, u] = sum over K slice s of F[t, k] F[u, k]                 its diagonal is the sum of squares

Tokens are the last axis, so that what follows works on token vectors. The sum of squares is a product too because a
tile that feeds both `tl.dot` and vector code is lost on the vector core by ascendnpu-ir 1.2.0 on A2. Grid: cube
cores; a persistent loop over (token tile, K slice), with so many slices that a small T still fills the cores. L1: two
operand tiles [BT, BK] and [P N, BK], doubled; L0C: (P N + BT) BT fp32.

The finishing kernels add up the partial results of all slices and parts, PARTIALS at a time.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels._tiling import next_power_of_2
from dsv4_triton.kernels._workspace import Part, carve, workspace_bytes

LANES = 16
"""Tokens whose mixes are finished together; the unit of the gram matrix's diagonal."""
_MAX_TOKEN_TILE = 64
PARTIALS = tl.constexpr(16)


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
def mixes(part_ptr, first, partials, TP, N: tl.constexpr, LANES: tl.constexpr):
    """The unscaled mixes `F fn^T` [N, LANES] fp32 of the tokens from `first` on, from `partials` results [N, TP]."""
    number = tl.arange(0, PARTIALS)
    row = tl.arange(0, N)[None, :, None] * TP
    at = part_ptr + first + number[:, None, None] * (N * TP) + row + tl.arange(0, LANES)[None, None, :]
    total = tl.zeros((N, LANES), tl.float32)
    for start in range(0, partials, PARTIALS):
        live = (number < partials - start)[:, None, None]
        total += tl.sum(tl.load(at + start * N * TP, mask=live, other=0.0), axis=0)
    return total


@triton.jit
def inverse_rms(square_ptr, first, slices, TP, BT, eps, K: tl.constexpr, LANES: tl.constexpr, GRAM: tl.constexpr):
    """`rsqrt(mean(F^2) + eps)` [LANES] of the tokens from `first` on.

    The squares' sums come from `slices` rows [TP], or with GRAM from the diagonals of gram matrices [TP, BT].
    """
    lane = tl.arange(0, LANES)
    square = tl.zeros((LANES,), tl.float32)
    if GRAM:
        diagonal = lane[:, None] == lane[None, :]
        at = square_ptr + (first + lane[:, None]) * BT + first % BT + lane[None, :]
        for s in range(slices):
            square += tl.sum(tl.where(diagonal, tl.load(at + s * TP * BT), 0.0), axis=0)
    else:
        number = tl.arange(0, PARTIALS)
        at = square_ptr + first + number[:, None] * TP + lane[None, :]
        for start in range(0, slices, PARTIALS):
            live = (number < slices - start)[:, None]
            square += tl.sum(tl.load(at + start * TP, mask=live, other=0.0), axis=0)
    return tl.rsqrt(square / K + eps)


@triton.jit
def collapse_token(x_ptr, norm_ptr, y_ptr, wide_ptr, t, pre, here, norm_eps, D: tl.constexpr, BD: tl.constexpr):
    """Write `y[t] = sum_j pre[j, lane] x[t, j]`, with the RMS norm where a weight is given; in fp32 to `wide` too.

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
    if wide_ptr is not None:
        tl.store(wide_ptr + row + d, y.to(tl.float32), mask=d < D)


def parts_of(dtype: torch.dtype) -> int:
    """Parts into which the mixing matrix is split for activations of `dtype`."""
    return 1 if dtype == torch.float32 else 2


def token_tile(T: int, cores: int) -> int:
    """Tokens per mixing tile: 16 while that fills the cores, then more, so that fn is read less often."""
    return min(max(LANES, next_power_of_2(triton.cdiv(T, cores))), _MAX_TOKEN_TILE)


def tokens_per_program(T: int, cores: int) -> int:
    """Tokens one program finishes: a power of two up to LANES."""
    return min(next_power_of_2(triton.cdiv(T, cores)), LANES)


class Mixed(NamedTuple):
    """Partial results of a mixing product, and what the sums of squares are made from.

    part [S, N, TP] fp32, where TP is T rounded up to tiles; squares [slices, TP] or gram matrices [slices, TP, BT].
    """

    part: torch.Tensor
    squares: torch.Tensor

    @property
    def gram(self) -> int:
        """BT, or 0 where `squares` holds plain sums."""
        return self.squares.shape[2] if self.squares.dim() == 3 else 0


def _mix_tiles(T: int, K: int, family: Family) -> tuple[int, int, int, int]:
    """Tokens and K of a tile, tiles of tokens, K slices."""
    block_t = token_tile(T, family.cube_cores)
    block_k = next(b for b in (256, 128, 64) if K % b == 0)
    tiles = triton.cdiv(T, block_t)
    return block_t, block_k, tiles, min(max(1, family.cube_cores // tiles), K // block_k)


def mix_workspace(tokens: int, rows: int, family: Family) -> int:
    """Bytes that `mix` takes at most for up to `tokens` tokens and `rows` = P N rows of fn."""
    columns = max(family.cube_cores * _MAX_TOKEN_TILE, tokens + _MAX_TOKEN_TILE)
    scratch: list[Part] = [((rows, columns), torch.float32), ((columns, _MAX_TOKEN_TILE), torch.float32)]
    return workspace_bytes(scratch)


def mix(op: str, x: torch.Tensor, fn_parts: torch.Tensor, workspace: torch.Tensor | None) -> Mixed:
    """The mixing product of x [T, 4, D] with fn_parts [P, N, 4D] for the op named `op`."""
    T, K = x.shape[0], x.shape[1] * x.shape[2]
    P, N = fn_parts.shape[:2]
    family = family_of(x.device.type)
    block_t, block_k, tiles, slices = _mix_tiles(T, K, family)
    padded = tiles * block_t
    scratch: list[Part] = [
        ((slices * P, N, padded), torch.float32),
        ((slices, padded, block_t), torch.float32),
    ]
    part, gram = carve(op, workspace, x.device, scratch)
    grid = (min(tiles * slices, family.cube_cores),)
    _mix_kernel[grid](x, fn_parts, part, gram, T, padded, slices, K=K, ROWS=P * N, BT=block_t, BK=block_k)
    return Mixed(part, gram)
