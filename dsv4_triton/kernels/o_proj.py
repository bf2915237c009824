"""Attention output: inverse RoPE at the query's position, then the grouped low-rank projection.

Formula: `o[..., 448:] <- unrope(o[..., 448:], p)`, then `z[t, g, :] = wo_a[g] @ o[t, heads of group g]`. The rotation
is fp32 with one cast to `o`'s dtype; the product accumulates in fp32 with one cast.
A vector kernel and a matrix kernel: fusing the rotation makes the product a mixed cube and vector kernel, which costs
more than reading 64 of 512 columns once more.
MXFP8 operands: weights are quantised once (`quantise_wo_a`), the rotated o by the vector kernel, both as `reference.mx`
defines: MX elements in blocks of 32, aligned to one power-of-two scale for each (token, group) and each row of wo_a,
which the product's result is multiplied with in fp32.
Grid: persistent; the vector kernels over (token, heads), the product over (group, rank block, token block), token
blocks innermost so that a weight tile is reused.
L1: `(BM + BN) * (2 * BK + FIRST)` operands, where the peeled product takes the `FIRST` columns of K that leave whole
steps of BK; L0C: `BM * BN * 4` bytes. UB of the quantisation: about `K * 6` bytes. Families: all; MXFP8 where there is
fp8 (A5, host).
Source: output path of the DeepSeek-V4 reference (unrotated o, per-group einsum); MX operands as in vllm-ascend on A5.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton.autotune.space import Choices, Key, Space, buffering, products
from dsv4_triton.device import Family, UnsupportedDeviceError, family_of
from dsv4_triton.kernels._checks import FLOATS, check_filled, check_tensor, output
from dsv4_triton.kernels._lang import insert_slice
from dsv4_triton.kernels._mx import BLOCK, block_exponent, elements, row_scale
from dsv4_triton.kernels._rope import load_cos_sin, rotate
from dsv4_triton.kernels._tiling import even_block, next_power_of_2
from dsv4_triton.kernels._workspace import Part, carve, check_workspace, workspace_bytes
from dsv4_triton.kernels.rope import ROTARY, rope

OP = "o_proj"
HEAD_DIM = 512
E4M3 = torch.float8_e4m3fn


@triton.jit
def _tile(pointers, inside, WHOLE: tl.constexpr):
    """A tile from memory; WHOLE ones are read without the mask, which fp8 loads cannot have on A5."""
    if WHOLE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["rows", "capacity"])
def _quantise_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    positions_ptr,
    cos_sin_ptr,
    rows,
    capacity,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    BH: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """Row r is group `r % GROUPS` of token `r // GROUPS`: HEADS heads of 512 values, 16 blocks each.

    Blocks 14 and 15 of a head are the halves of its rotated features. Scales are `[GROUPS, capacity]`.
    """
    ROW: tl.constexpr = HEADS * 16 * BLOCK
    block = tl.arange(0, BH * 16)[:, None]
    head = tl.arange(0, BH)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    inside = block < HEADS * 16
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        token = row // GROUPS
        source = x_ptr + tl.cast(row, tl.int64) * ROW
        target = out_ptr + tl.cast(row, tl.int64) * ROW + block * BLOCK + lane
        scale = scale_ptr + (row % GROUPS) * capacity + token
        position = 0
        if ROTATE:
            position = tl.load(positions_ptr + token)
        if position >= 0:
            x = _tile(source + block * BLOCK + lane, inside, BH == HEADS)
            if ROTATE:
                cos, sin = load_cos_sin(cos_sin_ptr, position, False)
                first = source + 14 * BLOCK + head * (16 * BLOCK) + lane
                a = _tile(first, head < HEADS, BH == HEADS)
                b = _tile(first + BLOCK, head < HEADS, BH == HEADS)
                # The conjugate rotation is that of the swapped pair.
                b, a = rotate(b.to(tl.float32), a.to(tl.float32), cos[None, :], sin[None, :])
                x = insert_slice(x, a.to(x.dtype), (14, 0), (BH, BLOCK), (16, 1))
                x = insert_slice(x, b.to(x.dtype), (15, 0), (BH, BLOCK), (16, 1))
            exponent = block_exponent(x)
            most = tl.maximum(tl.max(exponent), 1)
            tl.store(target, elements(x, exponent, most), mask=inside)
            tl.store(scale, row_scale(most))
        else:
            tl.store(target, tl.zeros((BH * 16, BLOCK), tl.int8).to(tl.float8e4nv, bitcast=True), mask=inside)
            tl.store(scale, 0.0)


@triton.jit(do_not_specialize=["T", "capacity"])
def _grouped_product_kernel(
    o_ptr,
    w_ptr,
    z_ptr,
    o_scale_ptr,
    w_scale_ptr,
    T,
    capacity,
    G: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SCALED: tl.constexpr,
):
    """SCALED: there are whole tiles of o, up to `capacity` rows, and of wo_a, with scales `[G, capacity]` and `[G, R]`.

    Rows of o from T on may hold anything.
    """
    RANK_BLOCKS: tl.constexpr = (R + BN - 1) // BN
    token_blocks = (T + BM - 1) // BM
    FIRST: tl.constexpr = (K - 1) % BK + 1
    depth = tl.arange(0, BK)[None, :]
    first = tl.arange(0, FIRST)[None, :]
    for tile in range(tl.program_id(0), token_blocks * RANK_BLOCKS * G, tl.num_programs(0)):
        first_token = (tile % token_blocks) * BM
        group = tile // token_blocks // RANK_BLOCKS
        first_rank = (tile // token_blocks) % RANK_BLOCKS * BN
        token = tl.arange(0, BM)[:, None]
        rank = tl.arange(0, BN)
        o_tile = o_ptr + tl.cast(first_token, tl.int64) * (G * K) + group * K + token * (G * K)
        w_tile = w_ptr + tl.cast(group * R + first_rank, tl.int64) * K + rank[:, None] * K
        in_tokens = token < T - first_token
        in_ranks = rank < R - first_rank
        o_first = _tile(o_tile + first, in_tokens, SCALED)
        w_first = _tile(w_tile + first, in_ranks[:, None], SCALED)
        # The first product is peeled: an accumulator that starts from a product stays on the cube unit.
        acc = tl.dot(o_first, tl.trans(w_first), input_precision="ieee")
        for k in range(FIRST, K, BK):
            o = _tile(o_tile + k + depth, in_tokens, SCALED)
            w = _tile(w_tile + k + depth, in_ranks[:, None], SCALED)
            acc = tl.dot(o, tl.trans(w), acc, input_precision="ieee")
        if SCALED:
            o_scale = tl.load(o_scale_ptr + group * capacity + first_token + tl.arange(0, BM))
            w_scale = tl.load(w_scale_ptr + group * R + first_rank + rank)
            acc = acc * o_scale[:, None] * w_scale[None, :]
        z_base = z_ptr + tl.cast(first_token, tl.int64) * (G * R) + group * R + first_rank
        tl.store(
            z_base + token * (G * R) + rank[None, :],
            acc.to(z_ptr.dtype.element_ty),
            mask=in_tokens & in_ranks[None, :],
        )


def _default(family: Family, key: Key) -> dict[str, Any]:
    """BK is as long as L1 allows, up to 512 bytes: a transfer costs extra for every row of a tile. On the host 64
    outputs of e4m3 take half the time of 256."""
    tokens, rank, fp8 = key["tokens"], key["rank"], key["fp8"]
    bm = 16 if tokens <= 16 else 64 if tokens <= 64 else 128
    bn = even_block(rank, 64 if family.any_tile else 256) if fp8 else min(256, max(16, triton.next_power_of_2(rank)))
    fits = family.dot_copies * (bm + bn) * 512 <= family.l1_bytes
    bk = (512 if fits else 256) // (1 if fp8 else 2)
    return {"BM": bm, "BN": bn, "BK": bk, **dict.fromkeys(products(family))}


def _candidates(family: Family, key: Key) -> Choices:
    rows = min(next_power_of_2(key["tokens"]), 256)
    tiles: Choices = {
        "BM": [b for b in (16, 32, 64, 96, 128, 192, 256) if b == 16 >= rows or rows // 4 < b <= max(64, rows)],
        "BN": (64, 128, 192, 224, 256, 352),
    }
    return {**tiles, "BK": (128, 256, 320, 336, 512, 1024), **products(family)} if family.arch else tiles


def _fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    """Whole tiles with fp8; steps of K in multiples of 16; tiles in L0C, and two buffers of each operand in L1: one
    would leave the cube waiting, which the cost model does not see."""
    bm, bn, bk = config["BM"], config["BN"], config["BK"]
    rank, width, fp8 = key["rank"], key["width"], key["fp8"]
    if bm > _most_rows(key["tokens"]):
        return f"BM {bm} is no size of a tile for {key['tokens']} tokens"
    if bn > max(16, next_power_of_2(rank)) or (fp8 and rank % bn):
        return f"BN {bn} is no size of a tile for {rank} outputs"
    if bk > width or width % bk % 16:
        return f"BK {bk} does not cut {width} columns"
    operands = 2 * (bm + bn) * bk * (1 if fp8 else key["dtype"].itemsize)
    if bm * bn * 4 > family.l0c_bytes or operands > family.l1_bytes:
        return f"tile {bm} x {bn} x {bk} does not fit L0C, or not twice into L1"
    return ""


SPACE = Space(OP, default=_default, candidates=_candidates, fits=_fits)
QUANTISE = Space(
    "o_proj_quantise",
    default=lambda family, key: dict.fromkeys(buffering(family)),
    candidates=lambda family, key: buffering(family),
    buckets=("rows",),
)


def _most_rows(tokens: int) -> int:
    """Rows of the largest tile for `tokens` tokens."""
    return 16 if tokens <= 16 else min(256, max(64, next_power_of_2(tokens)))


def _scratch(rows: int, groups: int, width: int) -> list[Part]:
    """For whole tiles of together `rows` rows."""
    return [((rows, groups, width), E4M3), ((groups, rows), torch.float32)]


def o_proj_workspace(tokens: int, groups: int, width: int) -> int:
    """Bytes that suffice for MXFP8 operands, up to `tokens` tokens and `width` columns a group; others need none."""
    return workspace_bytes(_scratch(tokens + _most_rows(tokens) - 1, groups, width))


def _quantise(
    x: torch.Tensor, elements: torch.Tensor, scale: torch.Tensor, groups: int, angles: tuple[torch.Tensor, ...] | None
) -> None:
    """MXFP8 rows of `x [rows, K]` into `elements`, scales into `scale [groups, ...]`; `angles` are positions and
    table of the inverse rotation, if any."""
    rows, width = x.shape
    heads = width // HEAD_DIM
    family = family_of(x.device.type)
    rotated = angles is not None
    config = QUANTISE(family, rows=rows, heads=heads, dtype=x.dtype, rotated=rotated)
    _quantise_kernel[(min(rows, family.vector_cores),)](
        x, elements, scale, *(angles or (scale, scale)), rows, scale.shape[1],
        GROUPS=groups, HEADS=heads, BH=triton.next_power_of_2(heads), ROTATE=rotated, **config.options,
    )  # fmt: skip


def _check_fp8(device: torch.device) -> None:
    """UnsupportedDeviceError for a family without fp8."""
    family = family_of(device.type)
    if not family.fp8:
        raise UnsupportedDeviceError(f"{OP}: wo_a is to be MXFP8, but family {family.name!r} has no fp8; use bf16")


def quantise_wo_a(wo_a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP8 weights `[G, R, K]` (float8_e4m3fn) and scales `[G, R]` (fp32) of `wo_a` (bf16 or fp32), for `o_proj`."""
    check_tensor(OP, "wo_a", wo_a, (None, None, None), FLOATS)
    groups, rank, width = wo_a.shape
    if width % HEAD_DIM:
        raise ValueError(f"{OP}: wo_a has {width} columns, expected a multiple of {HEAD_DIM}")
    _check_fp8(wo_a.device)
    elements = torch.empty(wo_a.shape, dtype=E4M3, device=wo_a.device)
    scale = torch.empty(groups, rank, dtype=torch.float32, device=wo_a.device)
    if wo_a.numel():
        _quantise(wo_a.view(-1, width), elements, scale.view(1, -1), 1, None)
    return elements, scale


def o_proj(
    o: torch.Tensor,
    wo_a: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    wo_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """`z [T, G * R]` of `o [T, H, 512]` and `wo_a [G, R, H / G * 512]`, of one dtype (bf16 or fp32).

    Or `wo_a` is float8_e4m3fn with scales `wo_scale [G, R]`, as `quantise_wo_a` makes them; o is then quantised too,
    into `workspace` (`o_proj_workspace`). `o` may be rotated in place: treat it as scratch afterwards. Padding tokens
    (position -1) give zero rows.
    `positions [T]` int32; `cos_sin [P, 64]` fp32, rows `[cos | sin]`; the last 64 features in half layout.
    TypeError or ValueError names the argument that does not fit; UnsupportedDeviceError where there is no fp8.
    """
    check_tensor(OP, "o", o, (None, None, HEAD_DIM), FLOATS)
    tokens, heads, _ = o.shape
    device = o.device
    check_tensor(OP, "wo_a", wo_a, (None, None, None), (o.dtype, E4M3), device=device)
    fp8 = wo_a.dtype == E4M3
    check_tensor(OP, "positions", positions, (tokens,), torch.int32, device=device)
    check_tensor(OP, "cos_sin", cos_sin, (None, ROTARY), torch.float32, device=device)
    groups, rank, width = wo_a.shape
    if groups == 0 or heads % groups or width != heads // groups * HEAD_DIM:
        raise ValueError(f"{OP}: wo_a has shape {tuple(wo_a.shape)}, expected (G, R, {heads} / G * {HEAD_DIM})")
    if (wo_scale is not None) != fp8:
        raise ValueError(f"{OP}: wo_scale is {'missing' if fp8 else 'given'} for wo_a of dtype {wo_a.dtype}")
    if wo_scale is not None:
        check_tensor(OP, "wo_scale", wo_scale, (groups, rank), torch.float32, device=device)
        if rank % 16:
            raise ValueError(f"{OP}: wo_a has {rank} outputs a group, MXFP8 takes a multiple of 16")
        _check_fp8(device)
    if workspace is not None:
        check_workspace(OP, workspace, device)
    out = output(OP, "out", out, (tokens, groups * rank), o.dtype, device)
    if o.numel() == 0 or rank == 0:
        return out
    check_filled(OP, cos_sin=cos_sin)
    family = family_of(device.type)
    config = SPACE(family, tokens=tokens, groups=groups, rank=rank, width=width, dtype=o.dtype, fp8=fp8)
    bm, bn = config["BM"], config["BN"]
    token_blocks = triton.cdiv(tokens, bm)
    if wo_scale is None:
        rope(o, positions, cos_sin, inverse=True, out=o)
        operand, o_scale, wo_scale, capacity = o, o, wo_a, tokens
    else:
        capacity = token_blocks * bm
        operand, o_scale = carve(OP, workspace, device, _scratch(capacity, groups, width))
        _quantise(o.view(-1, width), operand, o_scale, groups, (positions, cos_sin))
    grid = (min(token_blocks * triton.cdiv(rank, bn) * groups, family.cube_cores),)
    _grouped_product_kernel[grid](
        operand, wo_a, out, o_scale, wo_scale, tokens, capacity,
        G=groups, R=rank, K=width, BM=bm, BN=bn, BK=config["BK"], SCALED=fp8, **config.options,
    )  # fmt: skip
    return out
