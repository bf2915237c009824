"""Cache slot of each token's row: one launch per cache group and step.

Formula: row `j = p // ratio` of a token at position p that closes a window of `ratio` tokens, `(p + 1) % ratio == 0`
(every token when ratio is 1); `slot = block_table[request, j // R] * R + j % R` with R rows per block. -1 for every
other token, for padding and for the null block 0. Integers only.
Grid: persistent over blocks of tokens. UB: about 430 bytes per token of a block. Rows and ratio are powers of two in
every cache geometry: shifts then stand for the divisions, which A5's device library lacks for vectors of integers.
Source: slot mapping of vLLM's paged caches; compressed caches are written at closing tokens only.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton.autotune.space import Choices, Key, Space, buffering
from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels._checks import check_tensor, output
from dsv4_triton.kernels._tiling import next_power_of_2

OP = "token_slots"
MIN_BLOCK = 16
MAX_BLOCK = 128
WIDE = tl.constexpr(8)
"""Entries of a block table that are read at once: 32 bytes."""


@triton.jit
def _divided(x, N: tl.constexpr, SHIFT: tl.constexpr):
    """`x // N` of integers x >= -1; SHIFT is log2(N), or -1 where N is no power of two."""
    if SHIFT >= 0:
        return x >> SHIFT
    else:
        return x // N


@triton.jit(do_not_specialize=["T", "columns", "table_stride"])
def _token_slots_kernel(
    positions_ptr,
    token_req_ptr,
    table_ptr,
    out_ptr,
    T,
    columns,
    table_stride,
    ROWS: tl.constexpr,
    ROWS_SHIFT: tl.constexpr,
    RATIO: tl.constexpr,
    RATIO_SHIFT: tl.constexpr,
    BT: tl.constexpr,
):
    lane = tl.arange(0, WIDE)
    for start in range(tl.program_id(0) * BT, T, tl.num_programs(0) * BT):
        token = start + tl.arange(0, BT)
        inside = token < T
        position = tl.load(positions_ptr + token, mask=inside, other=-1)
        request = tl.load(token_req_ptr + token, mask=inside, other=-1)
        row = _divided(position, RATIO, RATIO_SHIFT)
        column = _divided(row, ROWS, ROWS_SHIFT)
        live = (position >= 0) & (request >= 0) & (column < columns)
        if RATIO > 1:
            live = live & (position - row * RATIO == RATIO - 1)
        # A run of WIDE entries, of which one is kept: single entries would be read one by one. Dead lanes read run 0.
        run = tl.where(live, column, 0) & -WIDE
        entry = run[:, None] + lane[None, :]
        index = tl.where(live, request, 0).to(tl.int64)[:, None] * table_stride + entry
        entries = tl.load(table_ptr + index, mask=entry < columns, other=0)
        wanted = (column - run).to(tl.float32)[:, None] == lane.to(tl.float32)[None, :]
        block = tl.sum(tl.where(wanted, entries, 0), axis=1)
        slot = tl.where(live & (block > 0), (block - column) * ROWS + row, -1)
        tl.store(out_ptr + token, slot, mask=inside)


def _shift(n: int) -> int:
    """log2 of a power of two, -1 for any other number."""
    return n.bit_length() - 1 if n & (n - 1) == 0 else -1


def _default(family: Family, key: Key) -> dict[str, Any]:
    """BT: tokens of an item, so few that every core has one."""
    block = next_power_of_2(triton.cdiv(key["tokens"], family.vector_cores))
    return {"BT": min(max(MIN_BLOCK, block), MAX_BLOCK), "multibuffer": None}


def _candidates(family: Family, key: Key) -> Choices:
    return {"BT": (8, 16, 32, 64, 128, 256), **buffering(family)}


def _fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    size = 430 * config["BT"]
    return f"BT {config['BT']} takes {size} bytes, UB has {family.ub_bytes}" if size > family.ub_bytes else ""


SPACE = Space(OP, default=_default, candidates=_candidates, fits=_fits)


def token_slots(
    positions: torch.Tensor,
    token_req: torch.Tensor,
    block_table: torch.Tensor,
    *,
    rows_per_block: int,
    ratio: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Flat slots `[T]` int32 (`block * rows_per_block + offset`, -1 to skip) of the rows that the tokens write.

    `positions`, `token_req` `[T]` int32, -1 for padding; `block_table [B, M]` int32, its rows may be strided.
    A row beyond the table or in a block <= 0 has slot -1. `rows_per_block` and `ratio` are positive.
    """
    check_tensor(OP, "positions", positions, (None,), torch.int32)
    tokens = positions.shape[0]
    check_tensor(OP, "token_req", token_req, (tokens,), torch.int32, device=positions.device)
    check_tensor(OP, "block_table", block_table, (None, None), torch.int32, device=positions.device, layout="rows")
    if rows_per_block < 1 or ratio < 1:
        raise ValueError(f"{OP}: rows_per_block and ratio must be positive, got {rows_per_block} and {ratio}")
    out = output(OP, "out", out, (tokens,), torch.int32, positions.device)
    if tokens == 0:
        return out
    if block_table.numel() == 0:
        return out.fill_(-1)
    family = family_of(positions.device.type)
    config = SPACE(family, tokens=tokens, rows=rows_per_block, ratio=ratio)
    block = config["BT"]
    grid = (min(triton.cdiv(tokens, block), family.vector_cores),)
    _token_slots_kernel[grid](
        positions, token_req, block_table, out, tokens, block_table.shape[1], block_table.stride(0),
        ROWS=rows_per_block, ROWS_SHIFT=_shift(rows_per_block), RATIO=ratio, RATIO_SHIFT=_shift(ratio), BT=block,
        **config.options,
    )  # fmt: skip
    return out
