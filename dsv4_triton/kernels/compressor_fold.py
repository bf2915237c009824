"""Fold the raw rows of a closed compressor window into one entry, and store it.

For a token at position p with `slots[t] >= 0` (it closes a window), per feature, in fp32:

    ratio 4:    rows p-7..p-4 with u[:d], g[:d], then rows p-3..p with u[d:], g[d:]; rows below 0 do not exist
    ratio 128:  rows p-127..p with u, g
    c = sum_rows softmax(g) * u,  rounded to the result dtype
    e = c * rsqrt(mean(c^2) + eps) * weight,  rounded to the result dtype
    e[d-64:] rotated for position p + 1 - ratio (half layout), rounded; FAKE_QUANT: e[:d-64] takes the fp8 simulation
    stored as it is, or as an fp8 record (see `_rows`)

state [blocks, rows, 2cd] fp32 holds [u | g + ape]; position q stands in row q % rows of block state_table[req, q //
rows]. Rows that do not exist are not loaded: the loop starts behind them, so a reused page may hold anything.

The softmax is online over chunks of CHUNK rows; a chunk divides the page and the window, so it is contiguous.
Grid: one program per vector core at most, each with a contiguous range of tokens (closing tokens are every ratio-th,
so a strided walk would leave most programs without work). UB bytes: about 5 * CHUNK * d * 4, doubled for the two
loads. Families: all. Source: docs/model.md, sections 5 and 8.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton.autotune.space import Choices, Key, Space, buffering
from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels._checks import FLOATS, check_filled, check_tensor
from dsv4_triton.kernels._fake_quant import fp8_sim64
from dsv4_triton.kernels._lang import extract_slice
from dsv4_triton.kernels._rope import HALF, load_cos_sin, rotate
from dsv4_triton.kernels._rows import check_rows, is_record, record_views, store_record

OP = "compressor_fold"
RATIOS = (4, 128)
DIMS = (128, 512)
MAX_CHUNK_ROWS = 8


@triton.jit
def _fold_window(
    state_ptr,
    table_ptr,
    position,
    block_stride,
    ROWS: tl.constexpr,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The softmax-weighted sum [DIM] fp32 of the window that closes at `position`, online over chunks."""
    WIDTH: tl.constexpr = OVERLAP * DIM
    PER_WINDOW: tl.constexpr = RATIO // CHUNK
    start = position - (OVERLAP * RATIO - 1)
    first = tl.where(start < 0, PER_WINDOW, 0)
    cell = tl.arange(0, CHUNK)[:, None] * (2 * WIDTH) + tl.arange(0, DIM)[None, :]
    top = tl.full((DIM,), float("-inf"), tl.float32)
    total = tl.zeros((DIM,), tl.float32)
    entry = tl.zeros((DIM,), tl.float32)
    for chunk in range(first, OVERLAP * PER_WINDOW):
        row = start + chunk * CHUNK
        block = tl.maximum(tl.load(table_ptr + row // ROWS), 0)
        half = (chunk // PER_WINDOW) * DIM
        source = state_ptr + block.to(tl.int64) * block_stride + (row % ROWS) * (2 * WIDTH) + half
        logits = tl.load(source + WIDTH + cell)
        values = tl.load(source + cell)
        peak = tl.maximum(top, tl.max(logits, axis=0), propagate_nan=tl.PropagateNan.ALL)
        decay = tl.exp(top - peak)
        share = tl.exp(logits - peak[None, :])
        total = total * decay + tl.sum(share, axis=0)
        entry = entry * decay + tl.sum(share * values, axis=0)
        top = peak
    return entry / total


@triton.jit
def _load_half(
    state_ptr, table_ptr, row, block_stride, exists, ROWS: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr,
    HALF: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Logits and values [COUNT, DIM] of half HALF of the rows from `row` on, which are in one block; -inf and 0 unless
    `exists`."""
    block = tl.maximum(tl.load(table_ptr + tl.maximum(row, 0) // ROWS), 0)
    step = tl.arange(0, COUNT)[:, None]
    live = step < tl.where(exists, COUNT, 0)
    source = state_ptr + block.to(tl.int64) * block_stride + (tl.maximum(row, 0) % ROWS) * (2 * WIDTH) + HALF * DIM
    cell = step * (2 * WIDTH) + tl.arange(0, DIM)[None, :]
    logits = tl.load(source + WIDTH + cell, mask=live, other=float("-inf"))
    return logits, tl.load(source + cell, mask=live, other=0.0)


@triton.jit
def _fold_pair(
    state_ptr, table_ptr, position, block_stride, ROWS: tl.constexpr, RATIO: tl.constexpr, DIM: tl.constexpr
):
    """As `_fold_window` with overlap, for halves that are whole chunks: both are added before rows are."""
    start = position - (2 * RATIO - 1)
    logits_a, values_a = _load_half(
        state_ptr, table_ptr, start, block_stride, start >= 0, ROWS, RATIO, 2 * DIM, 0, DIM
    )  # fmt: skip
    logits_b, values_b = _load_half(
        state_ptr, table_ptr, start + RATIO, block_stride, True, ROWS, RATIO, 2 * DIM, 1, DIM
    )  # fmt: skip
    peak = tl.max(tl.maximum(logits_a, logits_b, propagate_nan=tl.PropagateNan.ALL), axis=0)[None, :]
    share_a = tl.exp(logits_a - peak)
    share_b = tl.exp(logits_b - peak)
    total = tl.sum(share_a + share_b, axis=0)
    return tl.sum(share_a * values_a + share_b * values_b, axis=0) / total


@triton.jit
def fold_entry(
    state_ptr, table_ptr, position, block_stride, weight, cos_sin_ptr, eps, dtype: tl.constexpr,
    ROWS: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The entry of the window that closes at `position`: (normed features [DIM / 64, 64] rounded to `dtype`, of which
    the last group is not rotated, and the rotated halves of that group [1, 32] twice); all fp32."""
    GROUPS: tl.constexpr = DIM // 64
    if OVERLAP == 2 and CHUNK == RATIO:
        entry = _fold_pair(state_ptr, table_ptr, position, block_stride, ROWS, RATIO, DIM)
    else:
        entry = _fold_window(state_ptr, table_ptr, position, block_stride, ROWS, RATIO, OVERLAP, DIM, CHUNK)
    entry = entry.to(dtype).to(tl.float32)
    scale = tl.rsqrt(tl.sum(entry * entry, axis=0) * (1.0 / DIM) + eps)
    groups = tl.reshape((entry * scale * weight).to(dtype).to(tl.float32), (GROUPS, 64))
    cos, sin = load_cos_sin(cos_sin_ptr, position + 1 - RATIO, False)
    a = extract_slice(groups, (GROUPS - 1, 0), (1, HALF), (1, 1))
    b = extract_slice(groups, (GROUPS - 1, HALF), (1, HALF), (1, 1))
    a, b = rotate(a, b, cos[None, :], sin[None, :])
    return groups, a, b


@triton.jit
def store_entry(
    result_ptr, byte_ptr, offset, groups, a, b, DIM: tl.constexpr, RECORD: tl.constexpr, FAKE_QUANT: tl.constexpr
):
    """Store what `fold_entry` returned at `offset` of the result."""
    GROUPS: tl.constexpr = DIM // 64
    dtype = result_ptr.dtype.element_ty
    if RECORD:
        store_record(result_ptr, byte_ptr, offset, groups, tl.reshape(a, (HALF,)), tl.reshape(b, (HALF,)))
    else:
        if FAKE_QUANT:
            groups = fp8_sim64(groups)
        plain = extract_slice(groups, (0, 0), (GROUPS - 1, 64), (1, 1))
        target = result_ptr + offset
        lane = tl.arange(0, HALF)[None, :]
        cell = tl.arange(0, GROUPS - 1)[:, None] * 64 + tl.arange(0, 64)[None, :]
        tl.store(target + cell, plain.to(dtype))
        tl.store(target + (DIM - 64) + lane, a.to(dtype))
        tl.store(target + (DIM - 32) + lane, b.to(dtype))


@triton.jit(do_not_specialize=["tokens", "table_stride"])
def _compressor_fold_kernel(
    state_ptr,
    table_ptr,
    token_req_ptr,
    positions_ptr,
    slots_ptr,
    weight_ptr,
    cos_sin_ptr,
    result_ptr,
    byte_ptr,
    tokens,
    table_stride,
    block_stride,
    result_stride,
    eps,
    ROWS: tl.constexpr,
    RESULT_ROWS: tl.constexpr,
    RESULT_WIDTH: tl.constexpr,
    RECORD: tl.constexpr,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    FAKE_QUANT: tl.constexpr,
):
    """Entries go to row `slot` of pages of RESULT_ROWS rows, or, when that is 0, to row `token` of a dense result.

    `result_stride` and RESULT_WIDTH, the width of a row, are in elements, or in bytes for records.
    """
    dtype: tl.constexpr = result_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + tl.arange(0, DIM)).to(tl.float32)
    share = tl.cdiv(tokens, tl.num_programs(0))
    begin = tl.program_id(0) * share
    for token in range(begin, tl.minimum(begin + share, tokens)):
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            position = tl.load(positions_ptr + token)
            table = table_ptr + tl.load(token_req_ptr + token).to(tl.int64) * table_stride
            groups, a, b = fold_entry(
                state_ptr, table, position, block_stride, weight, cos_sin_ptr, eps, dtype,
                ROWS, RATIO, OVERLAP, DIM, CHUNK,
            )  # fmt: skip
            if RESULT_ROWS > 0:
                offset = (slot // RESULT_ROWS).to(tl.int64) * result_stride + (slot % RESULT_ROWS) * RESULT_WIDTH
            else:
                offset = tl.cast(token, tl.int64) * RESULT_WIDTH
            store_entry(result_ptr, byte_ptr, offset, groups, a, b, DIM, RECORD, FAKE_QUANT)


def chunk_rows(rows: int, ratio: int) -> int:
    """Rows of the state that are folded at once, for pages of `rows` rows."""
    return math.gcd(rows, ratio, MAX_CHUNK_ROWS)


def chunk_choices(rows: int, ratio: int) -> list[int]:
    """Rows that can be folded at once."""
    return [chunk for chunk in (1, 2, 4, 8, 16, 32, 64) if math.gcd(rows, ratio) % chunk == 0]


def chunk_problem(family: Family, rows: int, ratio: int, chunk: int, dim: int) -> str:
    """ "" or why `chunk` rows of `dim` features cannot be folded at once, for pages of `rows` rows."""
    if math.gcd(rows, ratio) % chunk:
        return f"{chunk} rows do not divide {rows} and {ratio}"
    size = 4 * chunk * dim * 4
    return f"{chunk} rows take {size} bytes, UB has {family.ub_bytes}" if family.arch and size > family.ub_bytes else ""


def _default(family: Family, key: Key) -> dict[str, Any]:
    """CHUNK: rows that are folded at once."""
    return {"CHUNK": chunk_rows(key["rows"], key["ratio"]), "multibuffer": None}


def _candidates(family: Family, key: Key) -> Choices:
    """On the host the order of the sums does not change."""
    return {"CHUNK": chunk_choices(key["rows"], key["ratio"]), **buffering(family)} if family.arch else {}


def _fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    return chunk_problem(family, key["rows"], key["ratio"], config["CHUNK"], key["dim"])


SPACE = Space(OP, default=_default, candidates=_candidates, fits=_fits)


def compressor_fold(
    state: torch.Tensor,
    state_table: torch.Tensor,
    token_req: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    weight: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    ratio: int,
    eps: float,
    cache: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    fake_quant: bool = False,
) -> None:
    """Write the entry of every window that closes in this step; tokens with `slots[t] < 0` write nothing.

    state [blocks, rows, 2cd] fp32 (any block stride), state_table [B, M] int32, token_req, positions and slots [T]
    int32, weight [d] (bf16 or fp32) and cos_sin [P, 64] fp32, c = 2 for ratio 4 and 1 for ratio 128. d is 128 or 512.
    The result is row slots[t] of `cache` [blocks, rows, d] (any block stride) or row t of `out` [T, d], in bf16 or
    fp32; exactly one of them must be given. A cache for d = 512 may also hold fp8 records, [blocks, rows, 640] uint8;
    their entries are rounded to bf16 and are always quantised. TypeError or ValueError names what does not fit.
    """
    result = cache if out is None else out
    if result is None or (cache is not None and out is not None):
        raise ValueError(
            f"{OP}: exactly one of cache and out must be given, got {'neither' if result is None else 'both'}"
        )
    if ratio not in RATIOS:
        raise ValueError(f"{OP}: ratio must be one of {RATIOS}, got {ratio}")
    name, axes = ("cache", 3) if out is None else ("out", 2)
    check_tensor(OP, name, result, (None,) * axes, (*FLOATS, torch.uint8), layout="page")
    record = cache is not None and is_record(cache)
    dim = max(DIMS) if record else result.shape[-1]
    if dim not in DIMS:
        raise ValueError(f"{OP}: {name} has {dim} features, expected one of {DIMS}")
    overlap = 2 if ratio == 4 else 1
    device = result.device
    check_tensor(OP, "state", state, (None, None, 2 * overlap * dim), torch.float32, device=device, layout="page")
    check_tensor(OP, "positions", positions, (None,), torch.int32, device=device)
    tokens = positions.shape[0]
    check_tensor(OP, "state_table", state_table, (None, None), torch.int32, device=device, layout="rows")
    for name, vector in (("token_req", token_req), ("slots", slots)):
        check_tensor(OP, name, vector, (tokens,), torch.int32, device=device)
    check_tensor(OP, "weight", weight, (dim,), FLOATS, device=device)
    check_tensor(OP, "cos_sin", cos_sin, (None, 64), torch.float32, device=device)
    if cache is not None and dim == max(DIMS):
        check_rows(OP, "cache", cache, FLOATS, device)
    elif cache is not None:
        check_tensor(OP, "cache", cache, (None, None, dim), FLOATS, device=device, layout="page")
    else:
        check_tensor(OP, "out", result, (tokens, dim), FLOATS, device=device)
    if tokens == 0:
        return
    check_filled(OP, state=state, state_table=state_table, cos_sin=cos_sin, cache=cache)
    rows = state.shape[1]
    values, as_bytes = record_views(result)
    family = family_of(device.type)
    config = SPACE(
        family, tokens=tokens, ratio=ratio, dim=dim, rows=rows, record=record, fake_quant=fake_quant,
        dtype=result.dtype,
    )  # fmt: skip
    grid = (min(tokens, family.vector_cores),)
    _compressor_fold_kernel[grid](
        state,
        state_table,
        token_req,
        positions,
        slots,
        weight,
        cos_sin,
        values,
        as_bytes,
        tokens,
        state_table.stride(0),
        state.stride(0),
        result.stride(0),
        eps,
        ROWS=rows,
        RESULT_ROWS=0 if cache is None else cache.shape[1],
        RESULT_WIDTH=result.shape[-1],
        RECORD=record,
        RATIO=ratio,
        OVERLAP=overlap,
        DIM=dim,
        CHUNK=config["CHUNK"],
        FAKE_QUANT=fake_quant,
        **config.options,
    )
