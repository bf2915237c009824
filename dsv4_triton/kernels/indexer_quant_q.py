"""Indexer queries: RoPE, Hadamard rotation, quantisation.

q [T, HI, 128] (bf16 or fp32), positions [T] int32, cos_sin [P, 64] fp32, hadamard [128, 128] of +-1 in q's dtype.
Per token and head: the last 64 features are rotated (half layout) and rounded to q's dtype; y = 128^-0.5 * x H in
fp32, rounded to q's dtype; then one scale per row of 128 (see `_index_quant`): int8 with an fp16 scale, e4m3 with an
fp32 scale that is a power of two, or no scale for bf16 and fp32.

RoPE is `q_norm_rope`'s or `rope`'s: operands that come from memory as they are keep this a matrix product with a vector
epilogue, whose two halves overlap on A2, and which A5 can link. Grid: one program per cube core at most, persistent
over blocks of heads. UB bytes: about BH * 128 * 12. Families: all. Source: docs/model.md, section 6.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton.autotune.space import MIXED, Choices, Key, Space, mixing
from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels._checks import FLOATS, check_filled, check_tensor, output
from dsv4_triton.kernels._index_quant import FORMATS, PLAIN, SCALE_DTYPES, codes, quantise_rows
from dsv4_triton.kernels._rope import HALF
from dsv4_triton.kernels.rope import rope

OP = "indexer_quant_q"
DIM = 128
MAX_HEADS_PER_BLOCK = 64
ITEM_COST = 32
"""What an item costs beside its heads, in heads: the start of its vector instructions."""


@triton.jit(do_not_specialize=["items"])
def _indexer_quant_q_kernel(
    q_ptr,
    hadamard_ptr,
    out_ptr,
    scale_ptr,
    items,
    BH: tl.constexpr,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Item i is BH heads, all of one token."""
    head = tl.arange(0, BH)[:, None]
    column = tl.arange(0, D)[None, :]
    matrix = tl.load(hadamard_ptr + tl.arange(0, D)[:, None] * D + column)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        place = tl.cast(item, tl.int64) * (BH * D) + head * D + column
        x = tl.load(q_ptr + place)
        y = (tl.dot(x, matrix) * (D**-0.5)).to(x.dtype)
        if FORMAT == PLAIN:
            tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty))
        else:
            values, scale = quantise_rows(y.to(tl.float32), FORMAT)
            tl.store(out_ptr + place, values)
            tl.store(scale_ptr + item * BH + head, scale)


def heads_per_item(tokens: int, heads: int, cores: int) -> int:
    """The power of two of heads that makes the busiest core's items cheapest; the larger of equal ones."""
    largest = min(heads & -heads, MAX_HEADS_PER_BLOCK)
    blocks = [b for b in (64, 32, 16) if b <= largest] or [largest]
    return min(blocks, key=lambda block: (triton.cdiv(tokens * heads // block, cores) * (block + ITEM_COST), -block))


def _default(family: Family, key: Key) -> dict[str, Any]:
    """BH: heads of an item."""
    return {"BH": heads_per_item(key["tokens"], key["heads"], family.cube_cores), **MIXED}


def _candidates(family: Family, key: Key) -> Choices:
    return {"BH": [block for block in (8, 16, 32, 64, 128) if key["heads"] % block == 0], **mixing(family)}


def _fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    block, size = config["BH"], config["BH"] * DIM * 12
    if block & (block - 1) or key["heads"] % block:
        return f"BH {block} is no power of two that divides {key['heads']} heads"
    return f"BH {block} takes {size} bytes, UB has {family.ub_bytes}" if family.arch and size > family.ub_bytes else ""


SPACE = Space(OP, default=_default, candidates=_candidates, fits=_fits)


def indexer_quant_q(
    q: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    hadamard: torch.Tensor,
    *,
    dtype: torch.dtype,
    rotated: bool = False,
    q_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Queries [T, HI, 128] (bf16 or fp32) -> (values [T, HI, 128] of `dtype`, scale [T, HI] or None).

    `dtype` int8 has an fp16 scale, float8_e4m3fn an fp32 one, bfloat16 and float32 none. positions [T] int32,
    cos_sin [P, 64] fp32, hadamard [128, 128] of +-1 in q's dtype. Rounding: see the module. `rotated` says that RoPE is
    done, which saves a launch and a copy of q; without it padding tokens give zero values. TypeError or ValueError
    names the argument that does not fit.
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
    if not rotated:
        q = rope(q, positions, cos_sin)
    family = family_of(q.device.type)
    config = SPACE(family, tokens=tokens, heads=heads, dtype=q.dtype, values=dtype)
    block = config["BH"]
    items = tokens * (heads // block)
    _indexer_quant_q_kernel[(min(items, family.cube_cores),)](
        q,
        hadamard,
        codes(values),
        values if scale is None else scale,
        items,
        BH=block,
        D=DIM,
        FORMAT=FORMATS[dtype],
        **config.options,
    )
    return values, scale
