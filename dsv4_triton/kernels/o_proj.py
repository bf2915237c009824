"""Attention output: inverse RoPE at the query's position, then the grouped low-rank projection.

Formula: `o[..., 448:] <- unrope(o[..., 448:], p)`, then `z[t, g, :] = wo_a[g] @ o[t, heads of group g]`. The rotation
is fp32 with one cast to `o`'s dtype, in place; the product accumulates in fp32 with one cast.
A rotation kernel and a pure matrix kernel: fusing the rotation makes the product a mixed cube and vector kernel, which
costs more than reading 64 of 512 columns once more.
Grid: persistent over (group, rank block, token block), token blocks innermost so that a weight tile is reused.
L1 on A2 (bf16): about `(BM + BN) * BK * 6` bytes, two buffers and the peeled tile; L0C: `BM * BN * 4` bytes.
Source: output path of the DeepSeek-V4 reference (unrotated o, per-group einsum).
"""

import torch
import triton
import triton.language as tl

from dsv4_triton.device import family_of
from dsv4_triton.kernels._checks import FLOATS, check_filled, check_tensor, output
from dsv4_triton.kernels.rope import ROTARY, rope

OP = "o_proj"
HEAD_DIM = 512


@triton.jit(do_not_specialize=["T"])
def _grouped_product_kernel(
    o_ptr,
    w_ptr,
    z_ptr,
    T,
    G: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    RANK_BLOCKS: tl.constexpr = (R + BN - 1) // BN
    token_blocks = (T + BM - 1) // BM
    depth = tl.arange(0, BK)[None, :]
    for tile in range(tl.program_id(0), token_blocks * RANK_BLOCKS * G, tl.num_programs(0)):
        first_token = (tile % token_blocks) * BM
        group = tile // token_blocks // RANK_BLOCKS
        first_rank = (tile // token_blocks) % RANK_BLOCKS * BN
        token = tl.arange(0, BM)[:, None]
        rank = tl.arange(0, BN)
        o_base = o_ptr + tl.cast(first_token, tl.int64) * (G * K) + group * K
        w_base = w_ptr + tl.cast(group * R + first_rank, tl.int64) * K
        in_tokens = token < T - first_token
        in_ranks = rank < R - first_rank
        o = tl.load(o_base + token * (G * K) + depth, mask=in_tokens, other=0.0)
        w = tl.load(w_base + rank[:, None] * K + depth, mask=in_ranks[:, None], other=0.0)
        # The first product is peeled: an accumulator that starts from a product stays on the cube unit.
        acc = tl.dot(o, tl.trans(w), input_precision="ieee")
        for k in range(BK, K, BK):
            o = tl.load(o_base + k + token * (G * K) + depth, mask=in_tokens, other=0.0)
            w = tl.load(w_base + k + rank[:, None] * K + depth, mask=in_ranks[:, None], other=0.0)
            acc = tl.dot(o, tl.trans(w), acc, input_precision="ieee")
        z_base = z_ptr + tl.cast(first_token, tl.int64) * (G * R) + group * R + first_rank
        tl.store(
            z_base + token * (G * R) + rank[None, :],
            acc.to(z_ptr.dtype.element_ty),
            mask=in_tokens & in_ranks[None, :],
        )


def tile_sizes(tokens: int, rank: int) -> tuple[int, int, int]:
    """`(BM, BN, BK)` for `tokens` rows and `rank` outputs per group."""
    bm = 16 if tokens <= 16 else 64 if tokens <= 64 else 128
    bn = min(256, max(16, triton.next_power_of_2(rank)))
    return bm, bn, 256 if bm < 128 else 128


def o_proj(
    o: torch.Tensor,
    wo_a: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`z [T, G * R]` of `o [T, H, 512]` and `wo_a [G, R, H / G * 512]`, all of one dtype (bf16 or fp32).

    `o` is rotated in place: treat it as scratch afterwards. Padding tokens (position -1) give zero rows.
    `positions [T]` int32; `cos_sin [P, 64]` fp32, rows `[cos | sin]`; the last 64 features in half layout.
    """
    check_tensor(OP, "o", o, (None, None, HEAD_DIM), FLOATS)
    tokens, heads, _ = o.shape
    check_tensor(OP, "wo_a", wo_a, (None, None, None), o.dtype, device=o.device)
    check_tensor(OP, "positions", positions, (tokens,), torch.int32, device=o.device)
    check_tensor(OP, "cos_sin", cos_sin, (None, ROTARY), torch.float32, device=o.device)
    groups, rank, width = wo_a.shape
    if groups == 0 or heads % groups or width != heads // groups * HEAD_DIM:
        raise ValueError(f"{OP}: wo_a has shape {tuple(wo_a.shape)}, expected (G, R, {heads} / G * {HEAD_DIM})")
    out = output(OP, "out", out, (tokens, groups * rank), o.dtype, o.device)
    if o.numel() == 0 or rank == 0:
        return out
    check_filled(OP, cos_sin=cos_sin)
    rope(o, positions, cos_sin, inverse=True, out=o)
    bm, bn, bk = tile_sizes(tokens, rank)
    tiles = triton.cdiv(tokens, bm) * triton.cdiv(rank, bn) * groups
    grid = (min(tiles, family_of(o.device.type).cube_cores),)
    _grouped_product_kernel[grid](o, wo_a, out, tokens, G=groups, R=rank, K=width, BM=bm, BN=bn, BK=bk)
    return out
