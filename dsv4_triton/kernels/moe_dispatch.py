"""Group the rows of a step by expert: plan where each (token, choice) pair goes, and copy rows and weights there.

For few pairs one launch: every program works the plan out for itself, as far as its block of pairs needs it (all pairs
are counted, the earlier ones of its own pairs' experts compared), and copies its block's rows. For more, `moe_plan` and
a copy kernel: a persistent loop over tokens, whole rows of D.

Copies only; the plan is `moe_plan`'s, its counts are fp32. Grid: vector cores. UB: about 6 tiles [8, max(E, PAIRS)]
fp32 and a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton.autotune.space import Choices, Key, Space, buffering
from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels._checks import FLOATS, check_tensor, output
from dsv4_triton.kernels._workspace import check_workspace
from dsv4_triton.kernels.moe_plan import (
    count_chunk,
    expert_block,
    moe_plan,
    moe_plan_workspace,
    place_block,
    run_of_lanes,
    sum_before,
    tile_capacity,
    tiles_needed,
    write_tiles,
)

OP = "moe_dispatch"
_BLOCK = 8
"""Pairs whose rows one program copies: half of what a plan compares at once, since the copies need memory too."""
ALONE_PAIRS = (64, 256)
"""Numbers of pairs up to which one launch does it all; few, since each is compiled for itself. Every program compares
all pairs with all experts, so that for more the three launches are faster."""
_MOST_ALONE = 512


@triton.jit(do_not_specialize=["pairs", "capacity", "block_rows"])
def _plan_and_copy_kernel(
    x_ptr, weights_ptr, ids_ptr, rows_ptr, row_weights_ptr, positions_ptr, tiles_ptr, num_tiles_ptr,
    pairs, capacity, block_rows,
    K: tl.constexpr, D: tl.constexpr, E: tl.constexpr, EB: tl.constexpr, PAIRS: tl.constexpr, BS: tl.constexpr,
    TILES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BS)
    number = lane.to(tl.float32)
    d = tl.arange(0, D)
    for block in range(tl.program_id(0), tl.cdiv(pairs, BS), tl.num_programs(0)):
        first = block * BS
        total = count_chunk(ids_ptr, 0, pairs, E, EB, PAIRS, BS)
        position = place_block(ids_ptr, first, 0, pairs, total, None, E, EB, PAIRS, BS)
        tl.store(positions_ptr + first + lane, position.to(tl.int32), mask=lane < pairs - first)
        for pair in range(first, tl.minimum(first + BS, pairs)):
            here = number == (pair - first).to(tl.float32)
            row = tl.sum(tl.where(here, position, 0.0), axis=0).to(tl.int32).to(tl.int64)
            if row >= 0:
                x = tl.load(x_ptr + (pair // K).to(tl.int64) * D + d)
                tl.store(rows_ptr + row * D + d, x)
                tl.store(row_weights_ptr + row, tl.load(weights_ptr + pair))
        if block == tl.program_id(0):
            height = block_rows.to(tl.float32)
            start = sum_before(total, EB, LANES)
            need = tiles_needed(total, height)
            before = sum_before(need, EB, LANES)
            write_tiles(tiles_ptr, num_tiles_ptr, total, start, need, before, capacity, height, EB, TILES)


@triton.jit(do_not_specialize=["T"])
def _copy_kernel(x_ptr, weights_ptr, positions_ptr, rows_ptr, row_weights_ptr, T, K: tl.constexpr, D: tl.constexpr):
    d = tl.arange(0, D)
    for t in range(tl.program_id(0), T, tl.num_programs(0)):
        x = tl.load(x_ptr + tl.cast(t, tl.int64) * D + d)
        for j in tl.static_range(K):
            row = tl.load(positions_ptr + t * K + j).to(tl.int64)
            if row >= 0:
                tl.store(rows_ptr + row * D + d, x)
                tl.store(row_weights_ptr + row, tl.load(weights_ptr + t * K + j))


def _alone(pairs: int) -> int:
    """The number of pairs that one launch for `pairs` is compiled for."""
    return next((size for size in ALONE_PAIRS if pairs <= size), _MOST_ALONE)


def _default(family: Family, key: Key) -> dict[str, Any]:
    """ALONE: one launch, blocks of BS pairs, TILES tiles compared with all experts at once, LANES as in `moe_plan`."""
    alone, lanes = key["pairs"] <= ALONE_PAIRS[-1], run_of_lanes(family)
    return {"ALONE": alone, "BS": _BLOCK, "TILES": _BLOCK, "LANES": lanes, **dict.fromkeys(buffering(family))}


def _candidates(family: Family, key: Key) -> Choices:
    """No more launches than by default, which an estimate does not count."""
    alone = {_default(family, key)["ALONE"], True}
    runs = (8, 32, 64) if family.vector_registers else (_BLOCK,)
    blocks = {"BS": (4, 8, 16), "TILES": (8, 16, 24), "LANES": runs}
    return {"ALONE": sorted(alone), **blocks, **buffering(family)}


def _fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    """Pairs that are compiled for; a row, and two fp32 tiles of what is compared at once."""
    pairs, block, tiles, lanes = key["pairs"], config["BS"], config["TILES"], config["LANES"]
    if not config["ALONE"]:
        return ""
    experts = expert_block(key["experts"])
    if pairs > _MOST_ALONE or _alone(pairs) % block or experts % lanes:
        return f"one launch is for at most {_MOST_ALONE} pairs, in blocks and runs that divide pairs and experts"
    held = 0 if family.vector_registers else lanes
    wide = max(block * max(experts, _alone(pairs)), (tiles + held) * experts)
    fits = wide * 8 + key["width"] * key["dtype"].itemsize <= family.ub_bytes
    return "" if fits else f"blocks of {block} pairs, {tiles} tiles and runs of {lanes} do not fit"


SPACE = Space(OP, default=_default, candidates=_candidates, fits=_fits, buckets=("pairs",))
COPY = Space(
    "moe_copy",
    default=lambda family, key: dict.fromkeys(buffering(family)),
    candidates=lambda family, key: buffering(family),
)


def moe_dispatch_workspace(pairs: int, num_experts: int) -> int:
    """Bytes of scratch that `moe_dispatch` takes at most for up to `pairs` pairs of token and choice."""
    return moe_plan_workspace(pairs, num_experts)


def moe_dispatch(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    *,
    block_rows: int,
    rows: torch.Tensor | None = None,
    row_weights: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    tiles: torch.Tensor | None = None,
    num_tiles: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(rows [T k, D], row_weights [T k], positions [T, k], tiles [3, C], num_tiles [1])`.

    positions, tiles and num_tiles are `moe_plan(ids, num_experts, block_rows=block_rows)`; row positions[t, j] of
    `rows` is row t of `x [T, D]` (bf16 or fp32), and its weight is `weights [T, k]` fp32 at (t, j). Rows without a pair
    are not written. The results may be given as memory; `workspace`: `moe_dispatch_workspace` bytes, uint8. D is a
    multiple of 16. TypeError or ValueError names the argument that does not fit.
    """
    check_tensor(OP, "x", x, (None, None), FLOATS)
    T, D = x.shape
    check_tensor(OP, "weights", weights, (T, None), torch.float32, device=x.device)
    k = weights.shape[1]
    check_tensor(OP, "ids", ids, (T, k), torch.int32, device=x.device)
    if D % 16:
        raise ValueError(f"{OP}: D is {D}, expected a multiple of 16")
    pairs = T * k
    rows = output(OP, "rows", rows, (pairs, D), x.dtype, x.device)
    row_weights = output(OP, "row_weights", row_weights, (pairs,), torch.float32, x.device)
    family = family_of(x.device.type)
    config = SPACE(family, pairs=pairs, width=D, experts=num_experts, dtype=x.dtype)
    if not config["ALONE"] or pairs == 0 or block_rows < 1 or block_rows & (block_rows - 1):
        plan = moe_plan(
            ids,
            num_experts,
            block_rows=block_rows,
            positions=positions,
            tiles=tiles,
            num_tiles=num_tiles,
            workspace=workspace,
        )
        if rows.numel():
            copying = COPY(family, tokens=T, width=D, dtype=x.dtype).options
            grid = (min(T, family.vector_cores),)
            _copy_kernel[grid](x, weights, plan[0], rows, row_weights, T, K=k, D=D, **copying)
        return rows, row_weights, *plan
    if workspace is not None:
        check_workspace(OP, workspace, x.device)
    capacity = tile_capacity(pairs, num_experts, block_rows)
    positions = output(OP, "positions", positions, ids.shape, torch.int32, x.device)
    tiles = output(OP, "tiles", tiles, (3, capacity), torch.int32, x.device)
    num_tiles = output(OP, "num_tiles", num_tiles, (1,), torch.int32, x.device)
    _plan_and_copy_kernel[(min(triton.cdiv(pairs, config["BS"]), family.vector_cores),)](
        x, weights, ids, rows, row_weights, positions, tiles, num_tiles, pairs, capacity, block_rows,
        K=k, D=D, E=num_experts, EB=expert_block(num_experts), PAIRS=_alone(pairs), BS=config["BS"],
        TILES=config["TILES"], LANES=config["LANES"], **config.options,
    )  # fmt: skip
    return rows, row_weights, positions, tiles, num_tiles
