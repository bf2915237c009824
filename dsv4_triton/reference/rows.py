"""How one 512-wide KV row is stored: plain values, or a 640-byte fp8 record (Ascend A5).

Record: bytes [0, 128) the 64 rotated features in bf16, [128, 576) the 448 others in e4m3, [576, 583) one e8m0 scale
(the biased exponent of a power of two) per 64 of them, [583, 640) zero. Unpacking a record gives exactly the row that
the fp8 simulation (`fake_quant`) leaves in a bf16 cache. Source: the A5 record of vllm-ascend's KV compress kernel.
"""

from __future__ import annotations

import torch

from dsv4_triton.reference.fake_quant import dequantise64, quantise64

HEAD_DIM = 512
PLAIN = 448
"""Features before the rotary ones."""
RECORD_BYTES = 640
VALUES_AT, SCALES_AT, SCALES = 128, 576, 7
_BIAS = 127


def is_record(cache: torch.Tensor) -> bool:
    """Whether the rows of `cache` are records."""
    return cache.dtype == torch.uint8


def pack(rows: torch.Tensor) -> torch.Tensor:
    """Records `[..., 640]` uint8 of `rows [..., 512]` (bf16 or fp32): rotary features in bf16, the rest in e4m3."""
    values, exponent = quantise64(rows[..., :PLAIN])
    records = torch.zeros(*rows.shape[:-1], RECORD_BYTES, dtype=torch.uint8, device=rows.device)
    records[..., :VALUES_AT] = rows[..., PLAIN:].to(torch.bfloat16).contiguous().view(torch.uint8)
    records[..., VALUES_AT:SCALES_AT] = values.view(torch.uint8)
    records[..., SCALES_AT : SCALES_AT + SCALES] = (exponent + _BIAS).to(torch.uint8)
    return records


def unpack(records: torch.Tensor) -> torch.Tensor:
    """fp32 rows `[..., 512]` of `records [..., 640]`."""
    rotary = records[..., :VALUES_AT].contiguous().view(torch.bfloat16).float()
    values = records[..., VALUES_AT:SCALES_AT].contiguous().view(torch.float8_e4m3fn)
    exponent = records[..., SCALES_AT : SCALES_AT + SCALES].to(torch.int32) - _BIAS
    return torch.cat((dequantise64(values, exponent), rotary), dim=-1)


def stored(rows: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """`rows [..., 512]` in the form that `cache` stores."""
    return pack(rows) if is_record(cache) else rows.to(cache.dtype)


def loaded(cache: torch.Tensor) -> torch.Tensor:
    """fp32 rows of any part `[..., width]` of a cache."""
    return unpack(cache) if is_record(cache) else cache.float()
