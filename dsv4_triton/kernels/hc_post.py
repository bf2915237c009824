"""mHC write-back: the sub-layer's output and the old streams become the new streams.

    out_k = post_k y + sum_j comb[j, k] x_j        k = 0..3; the sum runs over comb's FIRST index

y [T, D], x and out [T, 4, D] bf16 or fp32; post [T, 4], comb [T, 4, 4] fp32. fp32 arithmetic, one rounding. Grid:
vector cores; a persistent loop over (token, block of D). Where every vector operation goes through vector memory, the
four new streams are one tile [4, BD], the sum of five outer products: twelve operations a block. Where chains of
operations stay in registers (A5) each stream is a chain of scalar times row. UB: 5 fp32 rows of BD and the new streams,
operand rows doubled. Source of the formula: `hc_post` of the official DeepSeek inference code.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton.autotune.space import Choices, Key, Space, buffering
from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels._checks import FLOATS, check_tensor, output
from dsv4_triton.kernels._lang import extract_slice

_MAX_BLOCK = 2048
"""Twelve rows of this many features, operands doubled, fit the vector memory of A2 and A3."""
_ITEM_FEATURES = 336
"""Features that take as long as what an item costs besides its features, by the cost model for A2."""


@triton.jit
def new_stream(post_ptr, comb_ptr, t, k: tl.constexpr, y, x0, x1, x2, x3):
    """Stream k of token t in fp32, from fp32 rows of the sub-layer's output and of the four old streams."""
    mixed = tl.load(post_ptr + t * 4 + k) * y
    mixed += tl.load(comb_ptr + t * 16 + k) * x0
    mixed += tl.load(comb_ptr + t * 16 + 4 + k) * x1
    mixed += tl.load(comb_ptr + t * 16 + 8 + k) * x2
    mixed += tl.load(comb_ptr + t * 16 + 12 + k) * x3
    return mixed


@triton.jit(do_not_specialize=["T"])
def _hc_post_kernel(
    y_ptr, x_ptr, post_ptr, comb_ptr, out_ptr, T, D: tl.constexpr, BD: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    lane = tl.arange(0, BD)
    four = tl.arange(0, 4)
    blocks: tl.constexpr = D // BD
    for item in range(tl.program_id(0), T * blocks, tl.num_programs(0)):
        t = item // blocks
        column = item % blocks * BD + lane
        row = t.to(tl.int64) * D
        y = tl.load(y_ptr + row + column).to(tl.float32)
        if TILES:
            at = row * 4 + four[:, None] * D + column[None, :]
            x = tl.load(x_ptr + at).to(tl.float32)
            mixed = tl.load(post_ptr + t * 4 + four)[:, None] * y[None, :]
            for j in tl.static_range(4):
                old = extract_slice(x, (j, 0), (1, BD), (1, 1))
                mixed += tl.load(comb_ptr + t * 16 + j * 4 + four)[:, None] * old
            tl.store(out_ptr + at, mixed.to(out_ptr.dtype.element_ty))
        else:
            x0 = tl.load(x_ptr + row * 4 + column).to(tl.float32)
            x1 = tl.load(x_ptr + row * 4 + D + column).to(tl.float32)
            x2 = tl.load(x_ptr + row * 4 + 2 * D + column).to(tl.float32)
            x3 = tl.load(x_ptr + row * 4 + 3 * D + column).to(tl.float32)
            for k in tl.static_range(4):
                mixed = new_stream(post_ptr, comb_ptr, t, k, y, x0, x1, x2, x3)
                tl.store(out_ptr + row * 4 + k * D + column, mixed.to(out_ptr.dtype.element_ty))


def _blocks(D: int) -> list[int]:
    """Features that an item can have: divisors of D that are multiples of 16 and fit, or the smallest of all."""
    return [d for d in range(16, min(D, _MAX_BLOCK) + 1, 16) if D % d == 0]


def _default(family: Family, key: Key) -> dict[str, int | None]:
    """The block with the shortest busiest core."""
    T, D = key["tokens"], key["width"]

    def busiest(block: int) -> int:
        return triton.cdiv(T * (D // block), family.vector_cores) * (block + _ITEM_FEATURES)

    return {"BD": min(_blocks(D), key=lambda d: (busiest(d), -d)), "multibuffer": None}


def _candidates(family: Family, key: Key) -> Choices:
    return {"BD": [d for d in _blocks(key["width"]) if d >= 128], **buffering(family)}


def _fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    return f"BD {config['BD']} does not divide {key['width']}" if key["width"] % config["BD"] else ""


SPACE = Space("hc_post", default=_default, candidates=_candidates, fits=_fits)


def hc_post(
    y: torch.Tensor,
    x: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """New streams [T, 4, D] from the sub-layer output `y [T, D]` and the streams `x [T, 4, D]` before the sub-layer.

    y and x have one dtype (bf16 or fp32); post [T, 4] and comb [T, 4, 4] are fp32, from `hc_pre`. D is a multiple of
    16. `out` must not overlap x.
    """
    check_tensor("hc_post", "x", x, (None, 4, None), FLOATS)
    T, _, D = x.shape
    check_tensor("hc_post", "y", y, (T, D), x.dtype, device=x.device)
    check_tensor("hc_post", "post", post, (T, 4), torch.float32, device=x.device)
    check_tensor("hc_post", "comb", comb, (T, 4, 4), torch.float32, device=x.device)
    if D % 16:
        raise ValueError(f"hc_post: D is {D}, expected a multiple of 16")
    out = output("hc_post", "out", out, x.shape, x.dtype, x.device)
    if out.numel() == 0:
        return out
    if out.data_ptr() == x.data_ptr():
        raise ValueError("hc_post: out must not be x, every new stream reads all old ones")
    family = family_of(x.device.type)
    config = SPACE(family, tokens=T, width=D, dtype=x.dtype)
    grid = (min(T * (D // config["BD"]), family.vector_cores),)
    _hc_post_kernel[grid](
        y, x, post, comb, out, T, D=D, BD=config["BD"], TILES=not family.vector_registers, **config.options
    )
    return out
