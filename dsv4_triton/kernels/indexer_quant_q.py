"""Indexer queries: RoPE, Hadamard rotation, quantisation.

q [T, HI, 128] (bf16 or fp32), positions [T] int32, cos_sin [P, 64] fp32, hadamard [128, 128] of +-1 in q's dtype.
Per token and head: the last 64 features are rotated (half layout) and rounded to q's dtype; y = 128^-0.5 * x H in
fp32, rounded to q's dtype; then one scale per row of 128 (see `_index_quant`): int8 with an fp16 scale, e4m3 with an
fp32 scale that is a power of two, or no scale for bf16 and fp32. Padding tokens (position -1) give zero rows and zero
scales.

Grid: one program per cube core at most, persistent over (token, block of heads). The rotation's columns go to the
matrix unit in three parts (64 untouched, two rotated halves of 32), so nothing is concatenated. UB bytes: about BH *
128 * 16. Families: all. Source: docs/model.md, section 6.
"""

import torch
import triton
import triton.language as tl

from dsv4_triton.device import family_of
from dsv4_triton.kernels._checks import FLOATS, check_filled, check_tensor, output
from dsv4_triton.kernels._index_quant import FORMATS, PLAIN, SCALE_DTYPES, codes, quantise_rows
from dsv4_triton.kernels._rope import HALF, heads_per_block, load_cos_sin, rotate

OP = "indexer_quant_q"
DIM = 128
MAX_HEADS_PER_BLOCK = 32


@triton.jit(do_not_specialize=["items"])
def _indexer_quant_q_kernel(
    q_ptr,
    positions_ptr,
    cos_sin_ptr,
    hadamard_ptr,
    out_ptr,
    scale_ptr,
    items,
    H: tl.constexpr,
    BH: tl.constexpr,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Item i is the block `i % (H / BH)` of heads of token `i // (H / BH)`."""
    UNROTATED: tl.constexpr = D - 2 * HALF
    head = tl.arange(0, BH)
    column = tl.arange(0, D)[None, :]
    left = tl.arange(0, UNROTATED)
    lane = tl.arange(0, HALF)
    left_rows = tl.load(hadamard_ptr + left[:, None] * D + column)
    a_rows = tl.load(hadamard_ptr + (UNROTATED + lane)[:, None] * D + column)
    b_rows = tl.load(hadamard_ptr + (UNROTATED + HALF + lane)[:, None] * D + column)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        position = tl.load(positions_ptr + item // (H // BH))
        base = tl.cast(item, tl.int64) * (BH * D)
        target = out_ptr + base + head[:, None] * D + column
        if position >= 0:
            source = q_ptr + base + head[:, None] * D
            cos, sin = load_cos_sin(cos_sin_ptr, position, False)
            x = tl.load(source + left[None, :])
            a = tl.load(source + UNROTATED + lane[None, :]).to(tl.float32)
            b = tl.load(source + UNROTATED + HALF + lane[None, :]).to(tl.float32)
            a, b = rotate(a, b, cos[None, :], sin[None, :])
            y = tl.dot(x, left_rows)
            y = tl.dot(a.to(x.dtype), a_rows, y)
            y = tl.dot(b.to(x.dtype), b_rows, y)
            y = (y * (D**-0.5)).to(x.dtype)
            if FORMAT == PLAIN:
                tl.store(target, y.to(out_ptr.dtype.element_ty))
            else:
                values, scale = quantise_rows(y.to(tl.float32), FORMAT)
                tl.store(target, values)
                tl.store(scale_ptr + item * BH + head[:, None], scale)
        else:
            tl.store(target, tl.zeros((BH, D), out_ptr.dtype.element_ty))
            if FORMAT != PLAIN:
                tl.store(scale_ptr + item * BH + head, tl.zeros((BH,), scale_ptr.dtype.element_ty))


def indexer_quant_q(
    q: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    hadamard: torch.Tensor,
    *,
    dtype: torch.dtype,
    q_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Queries [T, HI, 128] (bf16 or fp32) -> (values [T, HI, 128] of `dtype`, scale [T, HI] or None).

    `dtype` int8 has an fp16 scale, float8_e4m3fn an fp32 one, bfloat16 and float32 none. positions [T] int32,
    cos_sin [P, 64] fp32, hadamard [128, 128] of +-1 in q's dtype. Rounding: see the module. Padding tokens give
    zeros. TypeError or ValueError names the argument that does not fit.
    """
    if dtype not in FORMATS:
        raise TypeError(f"{OP}: dtype must be one of {', '.join(map(str, FORMATS))}, got {dtype}")
    check_tensor(OP, "q", q, (None, None, DIM), FLOATS)
    tokens, heads, _ = q.shape
    check_tensor(OP, "positions", positions, (tokens,), torch.int32, device=q.device)
    check_tensor(OP, "cos_sin", cos_sin, (None, 2 * int(HALF)), torch.float32, device=q.device)
    check_tensor(OP, "hadamard", hadamard, (DIM, DIM), q.dtype, device=q.device)
    values = output(OP, "q_out", q_out, q.shape, dtype, q.device)
    scale = None
    if dtype in SCALE_DTYPES:
        scale = output(OP, "scale_out", scale_out, (tokens, heads), SCALE_DTYPES[dtype], q.device)
    elif scale_out is not None:
        raise ValueError(f"{OP}: scale_out must be None for {dtype}, which has no scale")
    if q.numel() == 0:
        return values, scale
    check_filled(OP, cos_sin=cos_sin)
    block = heads_per_block(heads, MAX_HEADS_PER_BLOCK)
    items = tokens * (heads // block)
    grid = (min(items, family_of(q.device.type).cube_cores),)
    _indexer_quant_q_kernel[grid](
        q,
        positions,
        cos_sin,
        hadamard,
        codes(values),
        values if scale is None else scale,
        items,
        H=heads,
        BH=block,
        D=DIM,
        FORMAT=FORMATS[dtype],
    )
    return values, scale
