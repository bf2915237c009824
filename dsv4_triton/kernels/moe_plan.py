"""Where each (token, choice) pair goes when rows are grouped by expert.

Pairs are ordered by expert, then by token and choice: the position of pair i is (pairs of smaller experts) + (earlier
pairs of its own expert). Tiles cut each expert's rows into runs of at most `block_rows`, listed expert by expert.

Everything is counted with comparisons and sums (no atomics, no sort, no host): chunks of pairs are counted per
expert, then each chunk adds up the counts, places its own pairs and writes a share of the tiles. Where
one chunk holds all pairs the counting is part of the second kernel. Counts are fp32, exact below 2^24. No vector that
is carried by a loop is broadcast to a tile in that loop: ascendnpu-ir 1.2.0 takes megabytes of UB for such a tile on
A2. Grid: vector cores. UB: about 6 tiles [BLOCK, max(EB, CHUNK)].
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
from dsv4_triton.kernels._workspace import carve, check_workspace, workspace_bytes

OP = "moe_plan"
_BLOCK = 16
"""Pairs that are compared with all experts, or with all pairs of a chunk, at once."""
_LANES = 8
"""fp32 values of 32 bytes: rows of tiles start at multiples of it."""
_MIN_CHUNK = 64
_MAX_CHUNK = 256
_CHUNK_LANES = 384
"""Lanes of experts up to which tiles of `_MAX_CHUNK` pairs fit A2's UB beside those of the experts."""
_MAX_PAIRS = 1 << 24


@triton.jit
def _load_ids(ids_ptr, first, pairs, E: tl.constexpr, BS: tl.constexpr):
    """Experts [BS] fp32 of the pairs from `first` on; -1 for none."""
    lane = tl.arange(0, BS)
    ids = tl.load(ids_ptr + first + lane, mask=lane < pairs - first, other=-1).to(tl.float32)
    return tl.where((ids >= 0.0) & (ids < E), ids, -1.0)


@triton.jit
def count_chunk(ids_ptr, chunk, pairs, E: tl.constexpr, EB: tl.constexpr, CHUNK: tl.constexpr, BS: tl.constexpr):
    """Pairs of each expert [EB] fp32 in one chunk."""
    expert = tl.arange(0, EB).to(tl.float32)[None, :]
    count = tl.zeros((EB,), tl.float32)
    for first in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, pairs), BS):
        ids = _load_ids(ids_ptr, first, pairs, E, BS)
        count += tl.sum(tl.where(ids[:, None] == expert, 1.0, 0.0), axis=0)
    return count


@triton.jit(do_not_specialize=["pairs"])
def _moe_count_kernel(
    ids_ptr, counts_ptr, pairs, E: tl.constexpr, EB: tl.constexpr, CHUNK: tl.constexpr, BS: tl.constexpr
):
    for chunk in range(tl.program_id(0), tl.cdiv(pairs, CHUNK), tl.num_programs(0)):
        count = count_chunk(ids_ptr, chunk, pairs, E, EB, CHUNK, BS)
        tl.store(counts_ptr + chunk * EB + tl.arange(0, EB), count)


@triton.jit
def sum_before(x, EB: tl.constexpr, LANES: tl.constexpr):
    """For each lane of `x [EB]` the sum of the lanes before it, by comparisons in and between runs of LANES: a prefix
    sum is scalar code on A2. The compiler cuts all tiles that x comes from into such runs."""
    RUNS: tl.constexpr = EB // LANES
    rows = tl.reshape(x, (RUNS, LANES))
    column = tl.arange(0, LANES).to(tl.float32)
    run = tl.arange(0, RUNS).to(tl.float32)
    earlier = column[None, None, :] < column[None, :, None]
    inside = tl.sum(tl.where(earlier, rows[:, None, :], 0.0), axis=2)
    runs = tl.sum(tl.where(run[None, :] < run[:, None], tl.sum(rows, axis=1)[None, :], 0.0), axis=1)
    return tl.reshape(inside + runs[:, None], (EB,))


@triton.jit
def tiles_needed(rows, height):
    """Tiles of `height` rows that `rows` rows take; all fp32."""
    return tl.floor((rows + (height - 1.0)) / height)


@triton.jit
def write_tiles(
    tiles_ptr, num_tiles_ptr, total, start, need, before, capacity, height, EB: tl.constexpr, BS: tl.constexpr
):
    """This program's share of the tile list, from each expert's row count, first row, number of tiles and tiles of
    lower experts [EB]; `height` is the rows of a tile, fp32. Blocks of BS tiles go to the programs in turn."""
    expert = tl.arange(0, EB).to(tl.float32)[None, :]
    shift = (start - before * height)[None, :]
    last = (start + total)[None, :]
    end = (before + need)[None, :]
    used = tl.sum(need, axis=0)
    if tl.program_id(0) == 0:
        tl.store(num_tiles_ptr, used.to(tl.int32))
    for first in range(tl.program_id(0) * BS, capacity, tl.num_programs(0) * BS):
        slot = first + tl.arange(0, BS)
        tile = slot.to(tl.float32)
        live = tile < used
        owner = tl.sum(tl.where(end <= tile[:, None], 1.0, 0.0), axis=1)
        row = tile * height + tl.sum(tl.where(owner[:, None] == expert, shift, 0.0), axis=1)
        left = tl.sum(tl.where(owner[:, None] == expert, last, 0.0), axis=1) - row
        rows = tl.minimum(left, height, propagate_nan=tl.PropagateNan.ALL)
        kept = slot < capacity
        tl.store(tiles_ptr + slot, tl.where(live, owner, 0.0).to(tl.int32), mask=kept)
        tl.store(tiles_ptr + capacity + slot, tl.where(live, row, 0.0).to(tl.int32), mask=kept)
        tl.store(tiles_ptr + 2 * capacity + slot, tl.where(live, rows, 0.0).to(tl.int32), mask=kept)


@triton.jit
def place_block(
    ids_ptr,
    first,
    chunk_first,
    pairs,
    total,
    before,
    E: tl.constexpr,
    EB: tl.constexpr,
    CHUNK: tl.constexpr,
    BS: tl.constexpr,
):
    """Positions [BS] fp32 of the pairs from `first` on, -1 for none: the `total [EB]` of lower experts, one for each
    earlier pair of the same expert from `chunk_first` on, where the chunk of CHUNK pairs begins, and those `before`
    that chunk ([EB], or None where it is the first)."""
    number = tl.arange(0, EB).to(tl.float32)[None, :]
    distance = tl.arange(0, CHUNK).to(tl.float32)[None, :] - tl.arange(0, BS).to(tl.float32)[:, None]
    ids = _load_ids(ids_ptr, first, pairs, E, BS)
    others = _load_ids(ids_ptr, chunk_first, pairs, E, CHUNK)
    earlier = distance < (first - chunk_first).to(tl.float32)
    position = tl.sum(tl.where(number < ids[:, None], total[None, :], 0.0), axis=1)
    if before is not None:
        position += tl.sum(tl.where(ids[:, None] == number, before[None, :], 0.0), axis=1)
    position += tl.sum(tl.where((ids[:, None] == others[None, :]) & earlier, 1.0, 0.0), axis=1)
    return tl.where(ids >= 0.0, position, -1.0)


@triton.jit(do_not_specialize=["pairs", "capacity", "block_rows"])
def _moe_place_kernel(
    ids_ptr,
    counts_ptr,
    positions_ptr,
    tiles_ptr,
    num_tiles_ptr,
    pairs,
    capacity,
    block_rows,
    E: tl.constexpr,
    EB: tl.constexpr,
    CHUNK: tl.constexpr,
    BS: tl.constexpr,
    TILES: tl.constexpr,
    LANES: tl.constexpr,
):
    lane = tl.arange(0, BS)
    expert = tl.arange(0, EB)
    chunks = tl.cdiv(pairs, CHUNK)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        before = tl.zeros((EB,), tl.float32)
        total = tl.zeros((EB,), tl.float32)
        if counts_ptr is None:
            total = count_chunk(ids_ptr, chunk, pairs, E, EB, CHUNK, BS)
        else:
            for c in range(0, chunks, BS):
                at = counts_ptr + (c + lane)[:, None] * EB + expert[None, :]
                counts = tl.load(at, mask=(lane < chunks - c)[:, None], other=0.0)
                total += tl.sum(counts, axis=0)
                before += tl.sum(tl.where((lane < chunk - c)[:, None], counts, 0.0), axis=0)
        for first in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, pairs), BS):
            position = place_block(ids_ptr, first, chunk * CHUNK, pairs, total, before, E, EB, CHUNK, BS).to(tl.int32)
            tl.store(positions_ptr + first + lane, position, mask=lane < pairs - first)
        if chunk == tl.program_id(0):
            height = block_rows.to(tl.float32)
            start = sum_before(total, EB, LANES)
            need = tiles_needed(total, height)
            before = sum_before(need, EB, LANES)
            write_tiles(tiles_ptr, num_tiles_ptr, total, start, need, before, capacity, height, EB, TILES)


def _default(family: Family, key: Key) -> dict[str, Any]:
    """CHUNK pairs a chunk, to balance comparing within a chunk with adding up the chunks' counts; few sizes to compile.
    BS of them are compared at once, and TILES tiles with all experts. LANES of experts are a run of `sum_before`."""
    chunk, lanes = _chunk(key["pairs"], expert_block(key["experts"])), run_of_lanes(family)
    return {"CHUNK": chunk, "BS": _BLOCK, "TILES": _BLOCK // 2, "LANES": lanes, **dict.fromkeys(buffering(family))}


def run_of_lanes(family: Family) -> int:
    """LANES by default: a whole vector where chains of operations stay in registers; elsewhere tiles of it would not
    fit vector memory."""
    return _LANES * _LANES if family.vector_registers else _LANES


def _chunk(pairs: int, block_e: int) -> int:
    largest = _MAX_CHUNK if block_e <= _CHUNK_LANES else _MAX_CHUNK // 2
    if pairs <= largest:
        return _MIN_CHUNK if pairs <= _MIN_CHUNK else largest
    return _MIN_CHUNK if pairs * block_e <= _MIN_CHUNK**3 else largest


def expert_block(num_experts: int) -> int:
    """Lanes of a vector over the experts, so many that `sum_before` has whole rows of whole runs."""
    lanes = _LANES * _LANES
    return triton.cdiv(num_experts, lanes) * lanes


def rows_per_tile(pairs: int, num_experts: int, dot_rows: int) -> int:
    """Rows per tile of the grouped products: about the mean number of rows of an expert, `dot_rows` to 128."""
    return min(max(dot_rows, next_power_of_2(triton.cdiv(pairs, num_experts))), 128)


def tile_capacity(pairs: int, num_experts: int, block_rows: int) -> int:
    """Tiles that `pairs` rows can need at most, however they are spread over the experts."""
    active = min(pairs, num_experts)
    return active + (pairs - active) // block_rows


def _candidates(family: Family, key: Key) -> Choices:
    runs = (8, 32, 64) if family.vector_registers else (_LANES,)
    blocks = {"CHUNK": (64, 128, 256), "BS": (8, 16, 32), "TILES": (8, 16, 32), "LANES": runs}
    return {**blocks, **buffering(family)}


def _fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    """Scratch is for chunks of at least 64 pairs; two fp32 tiles of what is compared at once, runs of a prefix sum only
    where they are not kept in registers."""
    chunk, block, tiles, lanes = config["CHUNK"], config["BS"], config["TILES"], config["LANES"]
    if chunk < _MIN_CHUNK or chunk % block:
        return f"CHUNK {chunk} is less than {_MIN_CHUNK} or no multiple of {block}"
    experts = expert_block(key["experts"])
    if experts % lanes:
        return f"LANES {lanes} does not divide {experts} lanes"
    wide = max(block * max(experts, chunk), (tiles + (0 if family.vector_registers else lanes)) * experts)
    return "" if wide * 8 <= family.ub_bytes else f"blocks of {block} pairs and {tiles} tiles do not fit"


SPACE = Space(OP, default=_default, candidates=_candidates, fits=_fits, buckets=("pairs",))


def moe_plan_workspace(pairs: int, num_experts: int) -> int:
    """Bytes of scratch that `moe_plan` takes at most for up to `pairs` pairs of token and choice."""
    return workspace_bytes([((triton.cdiv(pairs, _MIN_CHUNK), expert_block(num_experts)), torch.float32)])


def moe_plan(
    ids: torch.Tensor,
    num_experts: int,
    *,
    block_rows: int,
    positions: torch.Tensor | None = None,
    tiles: torch.Tensor | None = None,
    num_tiles: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(positions [T, k], tiles [3, C], num_tiles [1])`, int32, of the chosen experts `ids [T, k]` int32.

    positions: the row of each pair when all are grouped by expert (stable); -1 where the id is not in
    0..num_experts-1. tiles: expert, first row and number of rows (1..block_rows) of each run of rows; zeros from
    `num_tiles` on. C is `tile_capacity(T k, num_experts, block_rows)`. `block_rows` is a power of two; T k stays
    below 2^24. The results may be given as memory; `workspace`: `moe_plan_workspace` bytes, uint8.
    """
    check_tensor(OP, "ids", ids, (None, None), torch.int32)
    pairs = ids.numel()
    if block_rows < 1 or block_rows & (block_rows - 1):
        raise ValueError(f"{OP}: block_rows is {block_rows}, expected a power of two")
    if pairs >= _MAX_PAIRS:
        raise ValueError(f"{OP}: {pairs} pairs of token and choice, expected fewer than {_MAX_PAIRS}")
    capacity = tile_capacity(pairs, num_experts, block_rows)
    positions = output(OP, "positions", positions, ids.shape, torch.int32, ids.device)
    tiles = output(OP, "tiles", tiles, (3, capacity), torch.int32, ids.device)
    num_tiles = output(OP, "num_tiles", num_tiles, (1,), torch.int32, ids.device)
    if workspace is not None:
        check_workspace(OP, workspace, ids.device)
    if pairs == 0:
        return positions, tiles, num_tiles.zero_()
    family = family_of(ids.device.type)
    block_e = expert_block(num_experts)
    config = SPACE(family, pairs=pairs, experts=num_experts)
    chunks = triton.cdiv(pairs, config["CHUNK"])
    grid = (min(chunks, family.vector_cores),)
    shape = {"E": num_experts, "EB": block_e, "CHUNK": config["CHUNK"], "BS": config["BS"], **config.options}
    counts = None
    if chunks > 1:
        (counts,) = carve(OP, workspace, ids.device, [((chunks, block_e), torch.float32)])
        _moe_count_kernel[grid](ids, counts, pairs, **shape)
    _moe_place_kernel[grid](
        ids, counts, positions, tiles, num_tiles, pairs, capacity, block_rows, TILES=config["TILES"],
        LANES=config["LANES"], **shape,
    )  # fmt: skip
    return positions, tiles, num_tiles
