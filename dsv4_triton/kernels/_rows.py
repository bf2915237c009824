"""How one 512-wide KV row is stored: plain values, or a 640-byte fp8 record (Ascend A5).

Record: bytes [0, 128) the 64 rotated features in bf16, [128, 576) the 448 others in e4m3, [576, 583) one e8m0 scale
(the biased exponent of a power of two) per 64 of them, [583, 640) zero. Kernels reach the rotary part and the rest
through two views of one cache (`record_views`), since the A5 compiler cannot cast pointers; their bytes do not overlap.
Source: the A5 record of vllm-ascend's KV compress kernel.
"""

import torch
import triton
import triton.language as tl

from dsv4_triton.kernels._checks import Dtypes, check_tensor
from dsv4_triton.kernels._fake_quant import quantise64
from dsv4_triton.kernels._index_quant import e4m3_code
from dsv4_triton.kernels._lang import extract_slice
from dsv4_triton.kernels._rope import HALF

HEAD_DIM = 512
RECORD_BYTES = 640
PLAIN_GROUPS = tl.constexpr(7)
VALUES_AT = tl.constexpr(128)
TAIL_AT = tl.constexpr(576)
"""The last 64 bytes: seven scales and zeros. Moved whole, because accesses of a few bytes are scalar code."""


def is_record(cache: torch.Tensor) -> bool:
    """Whether the rows of `cache` are records."""
    return isinstance(cache, torch.Tensor) and cache.dtype == torch.uint8


def check_rows(op: str, name: str, cache: torch.Tensor, dtype: Dtypes, device: torch.device) -> None:
    """Check a paged cache `[blocks, rows, 512]` of `dtype`, or `[blocks, rows, 640]` uint8."""
    if is_record(cache):
        check_tensor(op, name, cache, (None, None, RECORD_BYTES), torch.uint8, device=device, layout="page")
        if cache.stride(0) % 64:
            raise ValueError(f"{op}: {name} has blocks {cache.stride(0)} bytes apart, expected a multiple of 64")
    else:
        check_tensor(op, name, cache, (None, None, HEAD_DIM), dtype, device=device, layout="page")


def record_views(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The pages of a record cache as bf16 and as int8 tensors; a plain cache is returned twice."""
    if not is_record(cache):
        return cache, cache
    return cache.view(torch.bfloat16), cache.view(torch.int8)


@triton.jit
def store_record(rope_ptr, byte_ptr, offset, groups, a, b):
    """Write one record at byte `offset` of the views.

    `groups [8, 64]` fp32 are the plain features (the eighth group is ignored), `a` and `b` `[32]` the rotated halves.
    """
    group = tl.arange(0, 8)[:, None]
    lane = tl.arange(0, 64)[None, :]
    values, biased = quantise64(groups)
    code = e4m3_code(values).to(tl.int8)
    tl.store(byte_ptr + offset + VALUES_AT + group * 64 + lane, code, mask=group < PLAIN_GROUPS)
    # Scale i goes to lane i of the tail: a sum over a one-hot tile, exact in fp32.
    hit = (group == lane) & (group < PLAIN_GROUPS)
    tail = tl.sum(tl.where(hit, biased.to(tl.float32), 0.0), axis=0)
    tl.store(byte_ptr + offset + TAIL_AT + tl.arange(0, 64), tail.to(tl.int32).to(tl.int8))
    rope_row = rope_ptr + offset // 2 + tl.arange(0, HALF)
    tl.store(rope_row, a.to(tl.bfloat16))
    tl.store(rope_row + HALF, b.to(tl.bfloat16))


@triton.jit
def dequantise_rows(data, ROWS: tl.constexpr):
    """fp32 `[ROWS, 512]` of int8 `data [ROWS, 512]`, records from byte 128 on.

    Columns 448 to 511 become values without a meaning (NaN included). The scales are sliced out of a three-dimensional
    view, because triton-ascend 3.2.0 does not end on a slice of `data` itself.
    """
    tail = tl.reshape(extract_slice(tl.reshape(data, (ROWS, 8, 64)), (0, 7, 0), (ROWS, 1, 64), (1, 1, 1)), (ROWS, 64))
    biased = extract_slice(tail.to(tl.int32) & 0xFF, (0, 0), (ROWS, 8), (1, 1))
    scale = tl.reshape((biased << 23).to(tl.float32, bitcast=True), (ROWS * 8, 1))
    values = data.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return tl.reshape(tl.reshape(values, (ROWS * 8, 64)) * scale, (ROWS, 512))
