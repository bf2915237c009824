"""Window KV prologue: RMS norm, RoPE, optional fp8 simulation, insert into the paged window cache."""

from __future__ import annotations

import torch

from dsv4_triton.reference.fake_quant import fp8sim64
from dsv4_triton.reference.rope import ROTARY, rotate_last
from dsv4_triton.reference.rows import is_record, stored


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
    """Write one row per token of `kv [T, 512]` into `cache [num_blocks, R, 512]` at `slots [T]` (block * R + offset),
    or into `[num_blocks, R, 640]` uint8 as fp8 records (`rows`).

    The norm is computed in fp32 and rounded to `kv`'s dtype; the rotation reads the rounded values and is rounded
    again; `fake_quant` applies the fp8 simulation to the first 448 features. Tokens with a negative slot or position
    write nothing.
    """
    x = kv.float()
    x = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()).to(kv.dtype)
    x = rotate_last(x, positions, cos_sin).to(kv.dtype)
    if fake_quant and not is_record(cache):
        x[:, :-ROTARY] = fp8sim64(x[:, :-ROTARY])
    live = (slots >= 0) & (positions >= 0)
    rows_per_block = cache.shape[1]
    flat = slots[live].long()
    cache[flat // rows_per_block, flat % rows_per_block] = stored(x[live], cache)
