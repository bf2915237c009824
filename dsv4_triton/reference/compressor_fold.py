"""Reference of `compressor_fold`: the softmax fold of a closed window into one entry (docs/model.md, section 5)."""

from __future__ import annotations

import torch

from dsv4_triton.reference.fake_quant import fp8sim64
from dsv4_triton.reference.rope import rope
from dsv4_triton.reference.rows import HEAD_DIM, is_record, stored

ROPE_DIM = 64


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
    """Fold the window that closes at each token with `slots[t] >= 0` into one entry of d features.

    state [blocks, rows, 2cd] fp32: row p % rows of block state_table[req, p // rows] is [u | g + ape] of position p.
    Ratio 128 (c = 1) folds positions p-127..p. Ratio 4 (c = 2) folds p-7..p: the first four with the first d features
    of u and g, the last four with the second d; positions below 0 take no part, whatever their rows hold.
    The entry is softmax-weighted per feature in fp32, rounded to the result dtype, RMS normalised with weight [d],
    rotated for position p + 1 - ratio, and with `fake_quant` its first d - 64 features pass the fp8 simulation.
    It goes to row slots[t] of `cache` [blocks, rows, d] (or [blocks, rows, 640] uint8: fp8 records, see `rows`) or to
    row t of `out` [T, d]; exactly one of them is given.
    """
    result = cache if out is None else out
    if result is None or (cache is not None and out is not None):
        raise ValueError("compressor_fold: exactly one of cache and out must be given")
    token = (slots >= 0).nonzero().squeeze(-1)
    if not len(token):
        return
    record = is_record(result)
    dim, dtype = (HEAD_DIM, torch.bfloat16) if record else (result.shape[-1], result.dtype)
    overlap = 2 if ratio == 4 else 1
    width = overlap * dim
    rows = state.shape[1]
    position = positions[token].long()
    member = position[:, None] - (overlap * ratio - 1) + torch.arange(overlap * ratio, device=state.device)
    live = member >= 0
    member = member.clamp(min=0)
    block = state_table[token_req[token].long()[:, None], member // rows].long().clamp(min=0)
    raw = state[block, member % rows]
    values, logits = raw[..., :width], raw[..., width:]
    if overlap == 2:
        values = torch.cat((values[:, :ratio, :dim], values[:, ratio:, dim:]), 1)
        logits = torch.cat((logits[:, :ratio, :dim], logits[:, ratio:, dim:]), 1)
    share = torch.softmax(torch.where(live[..., None], logits, -torch.inf), 1)
    entry = (share * torch.where(live[..., None], values, 0.0)).sum(1).to(dtype).float()
    entry = entry * torch.rsqrt(entry.square().mean(-1, keepdim=True) + eps) * weight.float()
    first = (position + 1 - ratio).to(torch.int32)
    entry = rope(entry.to(dtype)[:, None], first, cos_sin)[:, 0]
    if fake_quant and not record:
        entry[:, : dim - ROPE_DIM] = fp8sim64(entry[:, : dim - ROPE_DIM])
    if out is not None:
        out[token] = entry
    else:
        slot = slots[token].long()
        result[slot // result.shape[1], slot % result.shape[1]] = stored(entry, result)
