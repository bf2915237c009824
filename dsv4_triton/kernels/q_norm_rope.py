"""Query prologue: per-head RMS norm without a weight, then rotary embedding.

Formula, per token and head: `q <- q * rsqrt(mean(q^2 over 512) + eps)`, then the last 64 features are rotated by the
angles of the token's position (half layout, see `_rope`). fp32 from load to store, one cast. The indexer's queries, of
which the last 64 features are rotated without a norm, may take part in the launch: its product then has operands that
come from memory as they are.
Grid: persistent over (token, block of heads), one `[BH, 512]` tile each; blocks are so small that every core has one,
and those of the indexer's heads start at the core behind the last of them. UB: about `BH * 512 * 19` bytes on A2
(bf16), `BH * 512 * 11` where a core has a single block. Squares are summed by halves of the row, and the zeros of a
padding token are stored in pieces: otherwise 32 heads do not fit.
Source: DeepSeek-V4 reference attention (q path); the fp32 rounding follows vLLM's fused kernel.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton.autotune.space import Choices, Key, Space, buffering
from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels._checks import FLOATS, check_filled, check_tensor, output
from dsv4_triton.kernels._lang import extract_slice
from dsv4_triton.kernels._rope import HALF, heads_per_block, load_cos_sin, rotate
from dsv4_triton.kernels._tiling import next_power_of_2

OP = "q_norm_rope"
HEAD_DIM = 512
ROTARY = 64
_MIN_HEADS_AT_ONCE = 2
"""Tiles of a single row are refused by the A5 compiler of triton-ascend 3.2.0."""
_MAX_HEADS_PER_BLOCK = 16
_MAX_HEADS_AT_ONCE = 32
"""bf16 heads of a block: in loops with two buffers, and where every core has a single block and needs no second."""
INDEX_DIM = 128
_MAX_INDEX_HEADS_PER_BLOCK = 64


@triton.jit
def _rotate_index_heads(
    q_ptr, positions_ptr, cos_sin_ptr, before, items, H: tl.constexpr, BH: tl.constexpr, D: tl.constexpr
):
    """Rotate q [T, H, D] in place; item i is the block `i % (H / BH)` of heads of token `i // (H / BH)`.

    The programs take turns as if `before` items had come first.
    """
    ROTATED: tl.constexpr = D - 2 * HALF
    head = tl.arange(0, BH)[:, None] * D
    lane = tl.arange(0, HALF)[None, :]
    dtype = q_ptr.dtype.element_ty
    programs = tl.num_programs(0)
    for item in range((tl.program_id(0) + programs - before % programs) % programs, items, programs):
        position = tl.load(positions_ptr + item // (H // BH))
        base = q_ptr + tl.cast(item, tl.int64) * (BH * D)
        if position >= 0:
            cos, sin = load_cos_sin(cos_sin_ptr, position, False)
            a = tl.load(base + ROTATED + head + lane).to(tl.float32)
            b = tl.load(base + ROTATED + HALF + head + lane).to(tl.float32)
            a, b = rotate(a, b, cos[None, :], sin[None, :])
            tl.store(base + ROTATED + head + lane, a.to(dtype))
            tl.store(base + ROTATED + HALF + head + lane, b.to(dtype))
        else:
            tl.store(base + head + tl.arange(0, D)[None, :], tl.zeros((BH, D), dtype))


@triton.jit(do_not_specialize=["items", "index_items"])
def _q_norm_rope_kernel(
    q_ptr,
    out_ptr,
    index_ptr,
    positions_ptr,
    cos_sin_ptr,
    items,
    index_items,
    eps,
    H: tl.constexpr,
    BH: tl.constexpr,
    D: tl.constexpr,
    INDEX_H: tl.constexpr,
    INDEX_BH: tl.constexpr,
    INDEX_D: tl.constexpr,
    IN_PLACE: tl.constexpr,
):
    """Item i is the block `i % (H / BH)` of heads of token `i // (H / BH)`; with IN_PLACE only `q_ptr` is used."""
    PLAIN: tl.constexpr = D - 2 * HALF
    head = tl.arange(0, BH)[:, None] * D
    column = tl.arange(0, D)[None, :]
    lane = tl.arange(0, HALF)[None, :]
    dtype = q_ptr.dtype.element_ty
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        token = item // (H // BH)
        position = tl.load(positions_ptr + token)
        base = tl.cast(item, tl.int64) * (BH * D)
        source = q_ptr + base
        target = source
        if not IN_PLACE:
            target = out_ptr + base
        if position >= 0:
            cos, sin = load_cos_sin(cos_sin_ptr, position, False)
            x = tl.load(source + head + column).to(tl.float32)
            left = extract_slice(x, (0, 0), (BH, D // 2), (1, 1))
            right = extract_slice(x, (0, D // 2), (BH, D // 2), (1, 1))
            total = tl.sum(left * left + right * right, axis=1)
            scale = tl.rsqrt(total * (1.0 / D) + eps)[:, None]
            x = x * scale
            a = extract_slice(x, (0, PLAIN), (BH, HALF), (1, 1))
            b = extract_slice(x, (0, PLAIN + HALF), (BH, HALF), (1, 1))
            a, b = rotate(a, b, cos[None, :], sin[None, :])
            tl.store(target + head + column, x.to(dtype), mask=column < PLAIN)
            tl.store(target + PLAIN + head + lane, a.to(dtype))
            tl.store(target + PLAIN + HALF + head + lane, b.to(dtype))
        else:
            for start in range(0, D, 128):
                tl.store(target + head + start + tl.arange(0, 128)[None, :], tl.zeros((BH, 128), dtype))
    if INDEX_H > 0:
        _rotate_index_heads(index_ptr, positions_ptr, cos_sin_ptr, items, index_items, INDEX_H, INDEX_BH, INDEX_D)


def _heads_at_once(rows: int, cores: int, element_size: int) -> int:
    """Heads of a block for `rows` heads of all tokens: a block a core while one can hold that much."""
    share = max(_MIN_HEADS_AT_ONCE, next_power_of_2(triton.cdiv(rows, cores)))
    return share if share * element_size <= _MAX_HEADS_AT_ONCE * 2 else _MAX_HEADS_PER_BLOCK * 2 // element_size


def _default(family: Family, key: Key) -> dict[str, int | None]:
    """BH heads a block, and INDEX_BH of the indexer, which fill the cores that are left."""
    tokens, heads, index_heads = key["tokens"], key["heads"], key["index_heads"]
    cores, size = family.vector_cores, key["dtype"].itemsize
    block = heads_per_block(heads, _heads_at_once(tokens * heads, cores, size))
    index_block = 1
    if index_heads:
        share = next_power_of_2(triton.cdiv(tokens * index_heads, cores - tokens * (heads // block) % cores))
        share = min(_MAX_INDEX_HEADS_PER_BLOCK, max(_MIN_HEADS_AT_ONCE, share))
        index_block = heads_per_block(index_heads, share)
    # A core with a single block has nothing to fill a second buffer with.
    once = False if block * size > _MAX_HEADS_PER_BLOCK * 2 else None
    return {"BH": block, "INDEX_BH": index_block, "multibuffer": once}


def _candidates(family: Family, key: Key) -> Choices:
    index_heads = key["index_heads"]
    blocks = (2, 4, 8, 16, 32)
    return {
        "BH": [b for b in blocks if key["heads"] % b == 0],
        "INDEX_BH": [b for b in (*blocks, 64) if index_heads % b == 0] if index_heads else (1,),
        **buffering(family),
    }


def _fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    """Blocks divide the heads; what a block reads and two fp32 copies of it."""
    for name, heads, width in (("BH", key["heads"], HEAD_DIM), ("INDEX_BH", key["index_heads"], ROTARY)):
        block = config[name]
        if heads % block:
            return f"{name} {block} does not divide {heads} heads"
        if block * width * (key["dtype"].itemsize + 8) > family.ub_bytes:
            return f"{block} heads of {width} features do not fit"
    return ""


SPACE = Space(OP, default=_default, candidates=_candidates, fits=_fits)


def q_norm_rope(
    q: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    eps: float,
    index_q: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm and rotate `q [T, H, 512]` (bf16 or fp32); `out` may be `q`. Rows of padding tokens become zero.

    `positions [T]` int32; `cos_sin [P, 64]` fp32, rows `[cos | sin]`; the last 64 features in half layout. `index_q
    [T, HI, 128]` in q's dtype is rotated in place, without a norm.
    """
    check_tensor(OP, "q", q, (None, None, HEAD_DIM), FLOATS)
    tokens, heads, _ = q.shape
    check_tensor(OP, "positions", positions, (tokens,), torch.int32, device=q.device)
    check_tensor(OP, "cos_sin", cos_sin, (None, ROTARY), torch.float32, device=q.device)
    index_heads = 0
    if index_q is not None:
        check_tensor(OP, "index_q", index_q, (tokens, None, INDEX_DIM), q.dtype, device=q.device)
        index_heads = index_q.shape[1]
    out = output(OP, "out", out, q.shape, q.dtype, q.device)
    if q.numel() == 0:
        return out
    check_filled(OP, cos_sin=cos_sin)
    family = family_of(q.device.type)
    config = SPACE(family, tokens=tokens, heads=heads, index_heads=index_heads, dtype=q.dtype)
    block, index_block = config["BH"], config["INDEX_BH"]
    items, index_items = tokens * (heads // block), tokens * (index_heads // index_block)
    grid = (min(items + index_items, family.vector_cores),)
    _q_norm_rope_kernel[grid](
        q, out, q if index_q is None else index_q, positions, cos_sin,
        items, index_items, eps,
        H=heads, BH=block, D=HEAD_DIM, INDEX_H=index_heads, INDEX_BH=index_block, INDEX_D=INDEX_DIM,
        IN_PLACE=out.data_ptr() == q.data_ptr(), **config.options,
    )  # fmt: skip
    return out
