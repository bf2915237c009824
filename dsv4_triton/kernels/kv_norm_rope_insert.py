"""Window KV prologue: RMS norm, rotary embedding, optional fp8 simulation, insert into the paged window cache.

Formula per token: `x = kv * rsqrt(mean(kv^2 over 512) + eps) * weight`, rounded to `kv`'s dtype; the last 64 features
are rotated in fp32 and rounded again; with fake_quant the first 448 pass through the fp8 simulation (`_fake_quant`).
The row goes to `slots[t] = block * R + offset` of the cache, as it is or as an fp8 record (`_rows`).
Grid: persistent over runs of tokens. A run of consecutive positions and slots within one block (prefill) is one tile;
otherwise, and for records, rows go one by one. UB: about `RUN * 512 * 33` bytes on A2 (bf16).
Source: kv path of the DeepSeek-V4 reference attention.
"""

import torch
import triton
import triton.language as tl

from dsv4_triton.device import family_of
from dsv4_triton.kernels._checks import FLOATS, check_filled, check_tensor
from dsv4_triton.kernels._fake_quant import fp8_sim64
from dsv4_triton.kernels._rope import HALF, rotate
from dsv4_triton.kernels._rows import HEAD_DIM, check_rows, is_record, record_views, store_record

OP = "kv_norm_rope_insert"
ROTARY = 64
RUN = 8


@triton.jit
def _load_rows(ptr, ROWS: tl.constexpr, stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """fp32 `[ROWS, COLUMNS]` of rows `stride` apart, zero from column WIDTH on; one row is a plain `[COLUMNS]` vector.

    Axes of size 1 are avoided here and below: the A5 compiler rejects masked copies of them.
    """
    column = tl.arange(0, COLUMNS)
    if ROWS == 1:
        return tl.load(ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    else:
        row = tl.arange(0, ROWS)[:, None] * stride
        return tl.load(ptr + row + column[None, :], mask=column[None, :] < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def _store_rows(ptr, x, ROWS: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    if ROWS == 1:
        tl.store(ptr + column, x, mask=column < WIDTH)
    else:
        row = tl.arange(0, ROWS)[:, None] * STRIDE
        tl.store(ptr + row + column[None, :], x, mask=column[None, :] < WIDTH)


@triton.jit
def _sum_of_squares(x, ROWS: tl.constexpr):
    if ROWS == 1:
        return tl.sum(x * x, axis=0)
    else:
        return tl.sum(x * x, axis=1)[:, None]


@triton.jit
def _times_weight(x, weight, ROWS: tl.constexpr):
    if ROWS == 1:
        return x * weight
    else:
        return x * weight[None, :]


@triton.jit
def _insert_rows(
    kv_ptr, kv_stride, weight, weight_a, weight_b, cos_sin_ptr, cache_ptr, byte_ptr, token, position, target, eps,
    ROWS: tl.constexpr, D: tl.constexpr, FAKE_QUANT: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """ROWS tokens from `token` on, at consecutive positions, to consecutive rows at offset `target` of the cache."""
    PLAIN: tl.constexpr = D - 2 * HALF
    dtype = kv_ptr.dtype.element_ty
    source = kv_ptr + tl.cast(token, tl.int64) * kv_stride
    angle = cos_sin_ptr + tl.cast(position, tl.int64) * (2 * HALF)
    x = _load_rows(source, ROWS, kv_stride, PLAIN, D)
    a = _load_rows(source + PLAIN, ROWS, kv_stride, HALF, HALF)
    b = _load_rows(source + PLAIN + HALF, ROWS, kv_stride, HALF, HALF)
    cos = _load_rows(angle, ROWS, 2 * HALF, HALF, HALF)
    sin = _load_rows(angle + HALF, ROWS, 2 * HALF, HALF, HALF)

    total = _sum_of_squares(x, ROWS) + _sum_of_squares(a, ROWS) + _sum_of_squares(b, ROWS)
    scale = tl.rsqrt(total * (1.0 / D) + eps)
    x = _times_weight(x * scale, weight, ROWS).to(dtype)
    a = _times_weight(a * scale, weight_a, ROWS).to(dtype).to(tl.float32)
    b = _times_weight(b * scale, weight_b, ROWS).to(dtype).to(tl.float32)
    a, b = rotate(a, b, cos, sin)
    if RECORD:
        store_record(cache_ptr, byte_ptr, target, tl.reshape(x.to(tl.float32), (D // 64, 64)), a, b)
    else:
        if FAKE_QUANT:
            blocks = tl.reshape(x.to(tl.float32), (ROWS * D // 64, 64))
            x = tl.reshape(fp8_sim64(blocks), x.shape).to(dtype)
        row = cache_ptr + target
        _store_rows(row, x, ROWS, D, PLAIN, D)
        _store_rows(row + PLAIN, a.to(dtype), ROWS, D, HALF, HALF)
        _store_rows(row + PLAIN + HALF, b.to(dtype), ROWS, D, HALF, HALF)


@triton.jit
def load_weight(weight_ptr, D: tl.constexpr):
    """The norm's weight in fp32: all of it, and the two rotated halves."""
    PLAIN: tl.constexpr = D - 2 * HALF
    lane = tl.arange(0, HALF)
    weight = tl.load(weight_ptr + tl.arange(0, D)).to(tl.float32)
    weight_a = tl.load(weight_ptr + PLAIN + lane).to(tl.float32)
    weight_b = tl.load(weight_ptr + PLAIN + HALF + lane).to(tl.float32)
    return weight, weight_a, weight_b


@triton.jit
def insert_run(
    kv_ptr, kv_stride, weight, weight_a, weight_b, positions_ptr, cos_sin_ptr, cache_ptr, byte_ptr, slots_ptr,
    start, T, block_stride, eps,
    R: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, FAKE_QUANT: tl.constexpr, RECORD: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """Insert the up to RUN tokens from `start` on.

    `block_stride` and ROW, the width of a row, are in cache elements, or in bytes for records.
    """
    whole = 0
    if RUN > 1:
        if start + RUN <= T:
            slot = tl.load(slots_ptr + start)
            position = tl.load(positions_ptr + start)
            row = tl.arange(0, RUN)
            slot_drift = tl.load(slots_ptr + start + row) - row - slot
            position_drift = tl.load(positions_ptr + start + row) - row - position
            drift = tl.max(tl.abs(slot_drift.to(tl.float32)) + tl.abs(position_drift.to(tl.float32)), axis=0)
            if (drift == 0) & (slot >= 0) & (position >= 0) & (slot % R + RUN <= R):
                whole = 1
    if whole == 1:
        slot = tl.load(slots_ptr + start)
        target = tl.cast(slot // R, tl.int64) * block_stride + slot % R * ROW
        _insert_rows(
            kv_ptr, kv_stride, weight, weight_a, weight_b, cos_sin_ptr, cache_ptr, byte_ptr,
            start, tl.load(positions_ptr + start), target, eps, RUN, D, FAKE_QUANT, RECORD,
        )  # fmt: skip
    else:
        for token in range(start, tl.minimum(start + RUN, T)):
            slot = tl.load(slots_ptr + token)
            position = tl.load(positions_ptr + token)
            if (slot >= 0) & (position >= 0):
                target = tl.cast(slot // R, tl.int64) * block_stride + slot % R * ROW
                _insert_rows(
                    kv_ptr, kv_stride, weight, weight_a, weight_b, cos_sin_ptr, cache_ptr, byte_ptr,
                    token, position, target, eps, 1, D, FAKE_QUANT, RECORD,
                )  # fmt: skip


@triton.jit(do_not_specialize=["T", "block_stride"])
def _kv_norm_rope_insert_kernel(
    kv_ptr, weight_ptr, positions_ptr, cos_sin_ptr, cache_ptr, byte_ptr, slots_ptr, T, kv_stride, block_stride, eps,
    R: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, FAKE_QUANT: tl.constexpr, RECORD: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    weight, weight_a, weight_b = load_weight(weight_ptr, D)
    for start in range(tl.program_id(0) * RUN, T, tl.num_programs(0) * RUN):
        insert_run(
            kv_ptr, kv_stride, weight, weight_a, weight_b, positions_ptr, cos_sin_ptr, cache_ptr, byte_ptr, slots_ptr,
            start, T, block_stride, eps, R, D, ROW, FAKE_QUANT, RECORD, RUN,
        )  # fmt: skip


def run_length(tokens: int, cores: int, record: bool) -> int:
    """Tokens that one program takes at a time: more than one where every core gets a whole run."""
    return RUN if tokens >= RUN * cores and not record else 1


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
    cores = family_of(kv.device.type).vector_cores
    record = is_record(cache)
    run = run_length(tokens, cores, record)
    values, as_bytes = record_views(cache)
    grid = (min(triton.cdiv(tokens, run), cores),)
    _kv_norm_rope_insert_kernel[grid](
        kv, weight, positions, cos_sin, values, as_bytes, slots, tokens, kv.stride(0), cache.stride(0), eps,
        R=cache.shape[1], D=HEAD_DIM, ROW=cache.shape[2], FAKE_QUANT=fake_quant, RECORD=record, RUN=run,
    )  # fmt: skip
