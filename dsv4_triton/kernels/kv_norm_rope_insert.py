"""Window KV prologue: RMS norm, rotary embedding, optional fp8 simulation, insert into the paged window cache.

Formula per token: `x = kv * rsqrt(mean(kv^2 over 512) + eps) * weight`, rounded to `kv`'s dtype; the last 64 features
are rotated in fp32 and rounded again; with fake_quant the first 448 pass through the fp8 simulation (`_fake_quant`).
The row goes to `slots[t] = block * R + offset` of the cache, as it is or as an fp8 record (`_rows`).
Grid: vector cores, each with a contiguous share of the tokens. Where shares are long they are walked in tiles of RUN
tokens. A tile whose positions and slots follow one another, within one block, is one transfer to the cache; any other
is normed and rotated as a whole, too, and then stored row by row. Records, and short shares, go one by one.
UB: about `RUN * 512 * 19` bytes on A2 (bf16), twice that for fake_quant.
Source: kv path of the DeepSeek-V4 reference attention.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton.autotune.space import Choices, Key, Space, buffering
from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels._checks import FLOATS, check_filled, check_tensor
from dsv4_triton.kernels._fake_quant import fp8_sim64
from dsv4_triton.kernels._lang import extract_slice, insert_slice
from dsv4_triton.kernels._rope import HALF, load_cos_sin, rotate
from dsv4_triton.kernels._rows import HEAD_DIM, check_rows, is_record, record_views, store_record

OP = "kv_norm_rope_insert"
ROTARY = 64
RUN = 16
FAKE_QUANT_RUN = 8


@triton.jit
def _insert_record(
    kv_ptr, kv_stride, weight, cos_sin_ptr, cache_ptr, byte_ptr, token, position, target, eps, D: tl.constexpr
):  # fmt: skip
    """One token, to byte `target` of the cache."""
    PLAIN: tl.constexpr = D - 2 * HALF
    cos, sin = load_cos_sin(cos_sin_ptr, position, False)
    x = tl.load(kv_ptr + tl.cast(token, tl.int64) * kv_stride + tl.arange(0, D)).to(tl.float32)
    x = (x * tl.rsqrt(tl.sum(x * x, axis=0) * (1.0 / D) + eps) * weight).to(kv_ptr.dtype.element_ty)
    a = extract_slice(x, (PLAIN,), (HALF,), (1,)).to(tl.float32)
    b = extract_slice(x, (PLAIN + HALF,), (HALF,), (1,)).to(tl.float32)
    a, b = rotate(a, b, cos, sin)
    store_record(cache_ptr, byte_ptr, target, tl.reshape(x.to(tl.float32), (D // 64, 64)), a, b)


@triton.jit
def _insert_tile(
    kv_ptr, kv_stride, weight, positions_ptr, cos_sin_ptr, cache_ptr, slots_ptr, token, count, block_stride, eps,
    R: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, FAKE_QUANT: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """`count` up to ROWS tokens from `token` on. TOGETHER: a tile of which `_is_run` is true."""
    PLAIN: tl.constexpr = D - 2 * HALF
    dtype = kv_ptr.dtype.element_ty
    row = tl.arange(0, ROWS)
    column = tl.arange(0, D)[None, :]
    lane = tl.arange(0, HALF)[None, :]
    live = row < count
    source = kv_ptr + tl.cast(token, tl.int64) * kv_stride
    x = tl.load(source + row[:, None] * kv_stride + column, mask=live[:, None], other=0.0).to(tl.float32)
    x = (x * tl.rsqrt(tl.sum(x * x, axis=1) * (1.0 / D) + eps)[:, None] * weight[None, :]).to(dtype)
    a = extract_slice(x, (0, PLAIN), (ROWS, HALF), (1, 1)).to(tl.float32)
    b = extract_slice(x, (0, PLAIN + HALF), (ROWS, HALF), (1, 1)).to(tl.float32)
    if FAKE_QUANT:
        x = tl.reshape(fp8_sim64(tl.reshape(x.to(tl.float32), (ROWS * D // 64, 64))), (ROWS, D)).to(dtype)
    if TOGETHER:
        position = tl.load(positions_ptr + token)
        slot = tl.load(slots_ptr + token)
        angle = cos_sin_ptr + tl.cast(position, tl.int64) * (2 * HALF) + row[:, None] * (2 * HALF) + lane
        at = cache_ptr + (tl.cast(slot // R, tl.int64) * block_stride + slot % R * D) + row[:, None] * D
    else:
        position = tl.maximum(tl.load(positions_ptr + token + row, mask=live, other=0), 0).to(tl.int64)
        angle = cos_sin_ptr + (position * (2 * HALF))[:, None] + lane
    live = live[:, None]
    cos = tl.load(angle, mask=live, other=0.0)
    sin = tl.load(angle + HALF, mask=live, other=0.0)
    a, b = rotate(a, b, cos, sin)
    x = insert_slice(x, a.to(dtype), (0, PLAIN), (ROWS, HALF), (1, 1))
    x = insert_slice(x, b.to(dtype), (0, PLAIN + HALF), (ROWS, HALF), (1, 1))
    if TOGETHER:
        tl.store(at + column, x, mask=live)
    else:
        for i in range(count):
            to = tl.load(slots_ptr + token + i)
            if (to >= 0) & (tl.load(positions_ptr + token + i) >= 0):
                at = cache_ptr + (tl.cast(to // R, tl.int64) * block_stride + to % R * D)
                tl.store(at + column, extract_slice(x, (i, 0), (1, D), (1, 1)))


@triton.jit
def _is_run(slots_ptr, positions_ptr, token, count, R: tl.constexpr, ROWS: tl.constexpr):
    """Whether the `count` tokens from `token` on have consecutive positions and slots, these in one block."""
    slot = tl.load(slots_ptr + token)
    position = tl.load(positions_ptr + token)
    run = (slot >= 0) & (position >= 0) & (slot % R + count <= R)
    if ROWS > 1:
        row = tl.arange(0, ROWS)
        live = row < count
        slots = tl.load(slots_ptr + token + row, mask=live, other=0)
        positions = tl.load(positions_ptr + token + row, mask=live, other=0)
        drift = tl.abs((slots - row - slot).to(tl.float32)) + tl.abs((positions - row - position).to(tl.float32))
        run = run & (tl.max(tl.where(live, drift, 0.0), axis=0) == 0.0)
    return run


@triton.jit
def share_bound(slots_ptr, at, share, T, RUN: tl.constexpr):
    """Where the share that begins at token `at`, a multiple of `share`, really begins: up to RUN - 1 tokens later, at a
    slot that is a multiple of RUN, in this request or the next one, so that few runs are short. The share before it
    ends there."""
    bound = tl.minimum(at, T)
    if RUN > 1:
        if (at > 0) & (at < T) & (share >= RUN):
            slot = tl.maximum(tl.load(slots_ptr + at), 0)
            ahead = (RUN - slot % RUN) % RUN
            there = tl.load(slots_ptr + tl.minimum(at + ahead, T - 1))
            if there != slot + ahead:
                ahead = tl.maximum(ahead - tl.maximum(there, 0) % RUN, 0)
            bound = tl.minimum(at + ahead, T)
    return bound


@triton.jit
def insert_tokens(
    kv_ptr, kv_stride, weight_ptr, positions_ptr, cos_sin_ptr, cache_ptr, byte_ptr, slots_ptr,
    start, end, block_stride, eps,
    R: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, FAKE_QUANT: tl.constexpr, RECORD: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """Insert the tokens from `start` to before `end`, RUN at a time.

    `block_stride` and ROW, the width of a row, are in cache elements, or in bytes for records.
    """
    weight = tl.load(weight_ptr + tl.arange(0, D)).to(tl.float32)
    for token in range(start, end, RUN):
        count = tl.minimum(end - token, RUN)
        if _is_run(slots_ptr, positions_ptr, token, count, R, RUN):
            if RECORD:
                slot = tl.load(slots_ptr + token)
                _insert_record(
                    kv_ptr, kv_stride, weight, cos_sin_ptr, cache_ptr, byte_ptr, token, tl.load(positions_ptr + token),
                    tl.cast(slot // R, tl.int64) * block_stride + slot % R * ROW, eps, D,
                )  # fmt: skip
            else:
                _insert_tile(
                    kv_ptr, kv_stride, weight, positions_ptr, cos_sin_ptr, cache_ptr, slots_ptr, token, count,
                    block_stride, eps, R, RUN, D, FAKE_QUANT, True,
                )  # fmt: skip
        elif RUN > 1:
            _insert_tile(
                kv_ptr, kv_stride, weight, positions_ptr, cos_sin_ptr, cache_ptr, slots_ptr, token, count,
                block_stride, eps, R, RUN, D, FAKE_QUANT, False,
            )  # fmt: skip


@triton.jit(do_not_specialize=["T", "block_stride"])
def _kv_norm_rope_insert_kernel(
    kv_ptr, weight_ptr, positions_ptr, cos_sin_ptr, cache_ptr, byte_ptr, slots_ptr, T, kv_stride, block_stride, eps,
    R: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, FAKE_QUANT: tl.constexpr, RECORD: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    share = tl.cdiv(T, tl.num_programs(0))
    start = tl.program_id(0) * share
    insert_tokens(
        kv_ptr, kv_stride, weight_ptr, positions_ptr, cos_sin_ptr, cache_ptr, byte_ptr, slots_ptr,
        share_bound(slots_ptr, start, share, T, RUN), share_bound(slots_ptr, start + share, share, T, RUN),
        block_stride, eps, R, D, ROW, FAKE_QUANT, RECORD, RUN,
    )  # fmt: skip


def run_length(tokens: int, cores: int, fake_quant: bool, record: bool) -> int:
    """Tokens of a tile: more than one where every core gets a whole tile."""
    run = FAKE_QUANT_RUN if fake_quant else RUN
    return run if tokens >= run * cores and not record else 1


def aligned_share(tokens: int, items: int, align: int) -> int:
    """Tokens of one of up to `items` shares, a multiple of `align`."""
    return triton.cdiv(triton.cdiv(tokens, items), align) * align


def runs(family: Family, fake_quant: bool, record: bool) -> list[int]:
    """Tokens of a tile that are worth a try: what fits vector memory."""
    return [1] if record else [run for run in (1, 2, 4, 8, 16, 32) if run_problem(family, run, fake_quant, 2) == ""]


def run_problem(family: Family, run: int, fake_quant: bool, itemsize: int) -> str:
    """ "" or why tiles of `run` tokens cannot fit."""
    size = run * HEAD_DIM * (9 + 2 * itemsize) * (2 if fake_quant else 1)
    return f"RUN {run} takes {size} bytes, UB has {family.ub_bytes}" if family.arch and size > family.ub_bytes else ""


def _default(family: Family, key: Key) -> dict[str, Any]:
    """RUN: tokens of a tile. ALIGN: the share of a core is a multiple of it."""
    run = run_length(key["tokens"], family.vector_cores, key["fake_quant"], key["record"])
    return {"RUN": run, "ALIGN": 1, "multibuffer": None}


def _candidates(family: Family, key: Key) -> Choices:
    """On the host a tile may add up a row in another order than a single one."""
    if not family.arch:
        return {}
    return {"RUN": runs(family, key["fake_quant"], key["record"]), "ALIGN": (1, 8, 16, 32), **buffering(family)}


def _fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    if key["record"] and config["RUN"] > 1:
        return "records are stored one by one"
    return run_problem(family, config["RUN"], key["fake_quant"], key["bytes"])


SPACE = Space(OP, default=_default, candidates=_candidates, fits=_fits)


def kv_norm_rope_insert(
    kv: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    eps: float,
    fake_quant: bool = False,
) -> None:
    """Write one row per token of `kv [T, 512]` (rows of any stride) into `cache`: `[num_blocks, R, 512]` of `kv`'s
    dtype (bf16 or fp32), or `[num_blocks, R, 640]` uint8 for records, which are always quantised.

    `weight [512]` bf16 or fp32; `positions [T]`, `slots [T]` int32, a negative value skips the token; `cos_sin [P, 64]`
    fp32, rows `[cos | sin]`. The cache's blocks may be any stride apart. Slots of one call must differ.
    """
    check_tensor(OP, "kv", kv, (None, HEAD_DIM), FLOATS, layout="rows")
    tokens = kv.shape[0]
    check_tensor(OP, "weight", weight, (HEAD_DIM,), FLOATS, device=kv.device)
    check_tensor(OP, "positions", positions, (tokens,), torch.int32, device=kv.device)
    check_tensor(OP, "cos_sin", cos_sin, (None, ROTARY), torch.float32, device=kv.device)
    check_rows(OP, "cache", cache, kv.dtype, kv.device)
    check_tensor(OP, "slots", slots, (tokens,), torch.int32, device=kv.device)
    if tokens == 0:
        return
    check_filled(OP, cos_sin=cos_sin, cache=cache)
    family = family_of(kv.device.type)
    record = is_record(cache)
    config = SPACE(family, tokens=tokens, fake_quant=fake_quant, record=record, page=cache.shape[1], bytes=kv.itemsize)
    programs = min(tokens, family.vector_cores)
    if config["ALIGN"] > 1:
        programs = triton.cdiv(tokens, aligned_share(tokens, programs, config["ALIGN"]))
    values, as_bytes = record_views(cache)
    _kv_norm_rope_insert_kernel[(programs,)](
        kv, weight, positions, cos_sin, values, as_bytes, slots, tokens, kv.stride(0), cache.stride(0), eps,
        R=cache.shape[1], D=HEAD_DIM, ROW=cache.shape[2], FAKE_QUANT=fake_quant, RECORD=record,
        RUN=config["RUN"], **config.options,
    )  # fmt: skip
