"""Rotary embedding of the last 64 features, forward or inverse, half layout or interleaved pairs.

Formula: each pair `a + jb` of the last 64 features is multiplied by `e^{j theta}` (inverse: by its conjugate); the pair
is features `(i, 32 + i)`, or `(2i, 2i + 1)` when interleaved. fp32 arithmetic, one cast. The other features are copied,
or left alone in place. Fused kernels use half layout only; interleaved is for tensors whose weights are not permuted.
Grid: persistent over (token, block of heads). UB on A2 (bf16): about `BH * d * 8` bytes, `BH * 64 * 32` in place.
Source: RoPE of the DeepSeek-V4 reference (complex multiplication of GPT-J pairs, conjugate on the attention output).
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton.autotune.space import Choices, Key, Space, buffering
from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels._checks import FLOATS, check_filled, check_tensor, output
from dsv4_triton.kernels._rope import HALF, heads_per_block, load_cos_sin, rotate

OP = "rope"
ROTARY = 64
_TILE_VALUES = 16384
"""Values of one head block: keeps the copied part within the smallest unified buffer (fp32, double buffered)."""


@triton.jit(do_not_specialize=["items"])
def _rope_kernel(
    x_ptr,
    out_ptr,
    positions_ptr,
    cos_sin_ptr,
    items,
    H: tl.constexpr,
    BH: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    INVERSE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    IN_PLACE: tl.constexpr,
):
    """Item i is the block `i % (H / BH)` of heads of token `i // (H / BH)`; with IN_PLACE only `x_ptr` is used."""
    PLAIN: tl.constexpr = D - 2 * HALF
    head = tl.arange(0, BH)[:, None] * D
    column = tl.arange(0, BD)[None, :]
    lane = tl.arange(0, HALF)
    dtype = x_ptr.dtype.element_ty
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        position = tl.load(positions_ptr + item // (H // BH))
        base = tl.cast(item, tl.int64) * (BH * D)
        source = x_ptr + base
        target = source
        if not IN_PLACE:
            target = out_ptr + base
        if position >= 0:
            cos, sin = load_cos_sin(cos_sin_ptr, position, INVERSE)
            if not IN_PLACE:
                if PLAIN > 0:
                    x = tl.load(source + head + column, mask=column < PLAIN)
                    tl.store(target + head + column, x, mask=column < PLAIN)
            if INTERLEAVED:
                # Partner features meet through a gather within the row: strided access is not possible on every family.
                wide = tl.arange(0, 2 * HALF)
                pair = (wide >> 1)[None, :] + tl.zeros((BH, 1), tl.int32)
                partner = (wide ^ 1)[None, :] + tl.zeros((BH, 1), tl.int32)
                rows = tl.zeros((BH, 1), tl.float32)
                x = tl.load(source + PLAIN + head + wide[None, :]).to(tl.float32)
                sign = ((wide & 1) * 2 - 1).to(tl.float32)
                cosine = tl.gather(rows + cos[None, :], pair, 1)
                sine = tl.gather(rows + sin[None, :], pair, 1)
                y = x * cosine + tl.gather(x, partner, 1) * sine * sign[None, :]
                tl.store(target + PLAIN + head + wide[None, :], y.to(dtype))
            else:
                a = tl.load(source + PLAIN + head + lane[None, :]).to(tl.float32)
                b = tl.load(source + PLAIN + HALF + head + lane[None, :]).to(tl.float32)
                a, b = rotate(a, b, cos[None, :], sin[None, :])
                tl.store(target + PLAIN + head + lane[None, :], a.to(dtype))
                tl.store(target + PLAIN + HALF + head + lane[None, :], b.to(dtype))
        else:
            tl.store(target + head + column, tl.zeros((BH, BD), dtype), mask=column < D)


def _default(family: Family, key: Key) -> dict[str, int | None]:
    columns = triton.next_power_of_2(key["width"])
    return {"BH": heads_per_block(key["heads"], max(1, _TILE_VALUES // columns)), **dict.fromkeys(buffering(family))}


def _candidates(family: Family, key: Key) -> Choices:
    return {"BH": [b for b in (2, 4, 8, 16, 32, 64, 128) if key["heads"] % b == 0], **buffering(family)}


def _fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    """BH divides the heads; two fp32 copies of what a block reads."""
    block, heads = config["BH"], key["heads"]
    if heads % block:
        return f"BH {block} does not divide {heads} heads"
    width = ROTARY if key["in_place"] else key["width"]
    return "" if block * width * 8 <= family.ub_bytes else f"{block} heads of {width} features do not fit"


SPACE = Space(OP, default=_default, candidates=_candidates, fits=_fits)


def rope(
    x: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    inverse: bool = False,
    interleaved: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate the last 64 features of `x [T, H, d]` (bf16 or fp32); `out` may be `x`. Padding tokens become zero rows.

    `positions [T]` int32; `cos_sin [P, 64]` fp32, rows `[cos | sin]`.
    """
    check_tensor(OP, "x", x, (None, None, None), FLOATS)
    tokens, heads, width = x.shape
    if width < ROTARY:
        raise ValueError(f"{OP}: x has {width} features per head, at least {ROTARY} are needed")
    check_tensor(OP, "positions", positions, (tokens,), torch.int32, device=x.device)
    check_tensor(OP, "cos_sin", cos_sin, (None, ROTARY), torch.float32, device=x.device)
    out = output(OP, "out", out, x.shape, x.dtype, x.device)
    if x.numel() == 0:
        return out
    check_filled(OP, cos_sin=cos_sin)
    family = family_of(x.device.type)
    in_place = out.data_ptr() == x.data_ptr()
    config = SPACE(
        family, tokens=tokens, heads=heads, width=width, dtype=x.dtype, in_place=in_place, interleaved=interleaved
    )
    items = tokens * (heads // config["BH"])
    _rope_kernel[(min(items, family.vector_cores),)](
        x, out, positions, cos_sin, items,
        H=heads, BH=config["BH"], D=width, BD=triton.next_power_of_2(width), INVERSE=inverse, INTERLEAVED=interleaved,
        IN_PLACE=in_place, **config.options,
    )  # fmt: skip
    return out
