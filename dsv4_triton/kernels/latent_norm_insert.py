"""What follows the first projections of a token, in one launch: the query latent's norm, and the rows of all caches.

    latent   x * rsqrt(mean(x^2) + eps) * weight in fp32, one cast                          -> the result
    kv       as `kv_norm_rope_insert`                                                       -> window cache
    proj     as `compressor_state_insert`: the main compressor, then the indexer's          -> state caches

Each of the two to four jobs is done for every share of the tokens, and (job, share) is one item of a persistent loop
over the vector cores: with few tokens a share is one of them and the jobs spread over the cores, with many it is what
one core takes of each job. All inputs may be slices of wider rows. Dtypes, rounding and what is skipped: see the two
ops. UB: that of `kv_norm_rope_insert`.
Source: prologue of the DeepSeek-V4 reference attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dsv4_triton.autotune.space import Choices, Key, Space, buffering
from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels._checks import FLOATS, check_filled, check_tensor, output
from dsv4_triton.kernels._rows import HEAD_DIM, check_rows, is_record, record_views
from dsv4_triton.kernels._tiling import next_power_of_2
from dsv4_triton.kernels.compressor_state_insert import insert_state_row
from dsv4_triton.kernels.kv_norm_rope_insert import (
    ROTARY,
    aligned_share,
    insert_tokens,
    run_length,
    run_problem,
    runs,
    share_bound,
)

OP = "latent_norm_insert"
_NORM_TILE = 4096
_LONG_SHARE = 8
"""Latent features that are normed at once, of several tokens where a share has at least so many."""


class _Rows(NamedTuple):
    """What one compressor stores; the arguments of `compressor_state_insert`."""

    proj: torch.Tensor
    ape: torch.Tensor
    state: torch.Tensor
    slots: torch.Tensor

    def check(self, prefix: str, tokens: int, device: torch.device) -> None:
        proj, ape, state, slots = _names(prefix)
        check_tensor(OP, ape, self.ape, (None, None), torch.float32, device=device)
        width = self.ape.shape[1]
        check_tensor(OP, proj, self.proj, (tokens, 2 * width), torch.float32, device=device, layout="rows")
        check_tensor(OP, state, self.state, (None, None, 2 * width), torch.float32, device=device, layout="page")
        check_tensor(OP, slots, self.slots, (tokens,), torch.int32, device=device)
        check_filled(OP, **{ape: self.ape, state: self.state})


def _names(prefix: str) -> tuple[str, str, str, str]:
    return f"{prefix}proj", f"{prefix}ape", f"{prefix}state", f"{prefix or 'state_'}slots"


def _rows(prefix: str, *arguments: torch.Tensor | None) -> _Rows | None:
    """The four arguments, or None where none is given."""
    given = [argument for argument in arguments if argument is not None]
    if given and len(given) < len(arguments):
        missing = next(name for name, argument in zip(_names(prefix), arguments) if argument is None)
        raise ValueError(f"{OP}: {missing} is missing, give {', '.join(_names(prefix))} together")
    return _Rows(*given) if given else None


@triton.jit
def _norm_rows(
    x_ptr, x_stride, weight_ptr, out_ptr, start, end, eps, ROWS: tl.constexpr, Q: tl.constexpr, QB: tl.constexpr
):
    """RMS norm of the rows from `start` to before `end`, ROWS at a time."""
    column = tl.arange(0, QB)
    weight = tl.load(weight_ptr + column, mask=column < Q, other=0.0).to(tl.float32)
    if ROWS == 1:
        for token in range(start, end):
            row = tl.cast(token, tl.int64)
            x = tl.load(x_ptr + row * x_stride + column, mask=column < Q, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(x * x, axis=0) * (1.0 / Q) + eps)
            tl.store(out_ptr + row * Q + column, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=column < Q)
    else:
        row = tl.arange(0, ROWS)[:, None]
        for first in range(start, end, ROWS):
            live = (row < end - first) & (column < Q)[None, :]
            source = x_ptr + tl.cast(first, tl.int64) * x_stride
            x = tl.load(source + row * x_stride + column[None, :], mask=live, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(x * x, axis=1) * (1.0 / Q) + eps)[:, None]
            target = out_ptr + tl.cast(first, tl.int64) * Q + row * Q + column[None, :]
            tl.store(target, (x * scale * weight[None, :]).to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _insert_states(
    proj_ptr, ape_ptr, positions_ptr, state_ptr, slots_ptr, start, end, proj_stride, block_stride,
    ROWS: tl.constexpr, RATIO: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    for token in range(start, end):
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            source = proj_ptr + tl.cast(token, tl.int64) * proj_stride
            position = tl.load(positions_ptr + token)
            insert_state_row(source, ape_ptr, position, state_ptr, slot, block_stride, ROWS, RATIO, WIDTH)


@triton.jit(do_not_specialize=["T", "share", "block_stride", "state_stride", "index_state_stride"])
def _latent_norm_insert_kernel(
    latent_ptr, latent_weight_ptr, out_ptr, kv_ptr, kv_weight_ptr, positions_ptr, cos_sin_ptr, cache_ptr, byte_ptr,
    slots_ptr, proj_ptr, ape_ptr, state_ptr, state_slots_ptr,
    index_proj_ptr, index_ape_ptr, index_state_ptr, index_slots_ptr,
    T, share, latent_stride, kv_stride, block_stride, proj_stride, state_stride, index_proj_stride, index_state_stride,
    eps,
    Q: tl.constexpr, QB: tl.constexpr, NORM_ROWS: tl.constexpr, R: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr,
    FAKE_QUANT: tl.constexpr, RECORD: tl.constexpr, RUN: tl.constexpr, STATES: tl.constexpr,
    STATE_ROWS: tl.constexpr, RATIO: tl.constexpr, WIDTH: tl.constexpr,
    INDEX_ROWS: tl.constexpr, INDEX_WIDTH: tl.constexpr,
):  # fmt: skip
    """Item i is job i // shares for tokens (i % shares) * share on: 0 kv, 1 latent, then STATES compressors."""
    shares = tl.cdiv(T, share)
    for item in range(tl.program_id(0), shares * (2 + STATES), tl.num_programs(0)):
        job = item // shares
        start = item % shares * share
        end = tl.minimum(start + share, T)
        if job == 0:
            insert_tokens(
                kv_ptr, kv_stride, kv_weight_ptr, positions_ptr, cos_sin_ptr, cache_ptr, byte_ptr, slots_ptr,
                share_bound(slots_ptr, start, share, T, RUN), share_bound(slots_ptr, start + share, share, T, RUN),
                block_stride, eps, R, D, ROW, FAKE_QUANT, RECORD, RUN,
            )  # fmt: skip
        if job == 1:
            _norm_rows(latent_ptr, latent_stride, latent_weight_ptr, out_ptr, start, end, eps, NORM_ROWS, Q, QB)
        if STATES > 0:
            if job == 2:
                _insert_states(
                    proj_ptr, ape_ptr, positions_ptr, state_ptr, state_slots_ptr, start, end, proj_stride,
                    state_stride, STATE_ROWS, RATIO, WIDTH,
                )  # fmt: skip
        if STATES > 1:
            if job == 3:
                _insert_states(
                    index_proj_ptr, index_ape_ptr, positions_ptr, index_state_ptr, index_slots_ptr, start, end,
                    index_proj_stride, index_state_stride, INDEX_ROWS, RATIO, INDEX_WIDTH,
                )  # fmt: skip


def _default(family: Family, key: Key) -> dict[str, Any]:
    """ITEMS: items a core for each job, 0 for one in all. ALIGN: tokens of an item are a multiple of it. RUN: tokens of
    a tile of kv rows. NORM_ROWS: tokens of a tile of latents."""
    cores, padded = family.vector_cores, next_power_of_2(key["width"])
    norm_rows = max(1, _NORM_TILE // padded) if triton.cdiv(key["tokens"], cores) >= _LONG_SHARE else 1
    run = run_length(key["tokens"], cores, key["fake_quant"], key["record"])
    return {"ITEMS": 1, "ALIGN": 1, "RUN": run, "NORM_ROWS": norm_rows, "multibuffer": None}


def _candidates(family: Family, key: Key) -> Choices:
    """On the host a tile may add up a row in another order than a single one."""
    if not family.arch:
        return {}
    return {
        "ITEMS": (0, 1, 2), "ALIGN": (1, 8, 16), "RUN": runs(family, key["fake_quant"], key["record"]),
        "NORM_ROWS": (1, 2, 4, 8), **buffering(family),
    }  # fmt: skip


def _fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    if key["record"] and config["RUN"] > 1:
        return "records are stored one by one"
    size = config["NORM_ROWS"] * next_power_of_2(key["width"]) * (4 + key["bytes"])
    if family.arch and size > family.ub_bytes:
        return f"NORM_ROWS {config['NORM_ROWS']} takes {size} bytes, UB has {family.ub_bytes}"
    return run_problem(family, config["RUN"], key["fake_quant"], key["bytes"])


SPACE = Space(OP, default=_default, candidates=_candidates, fits=_fits)


def latent_norm_insert(
    latent: torch.Tensor,
    latent_weight: torch.Tensor,
    kv: torch.Tensor,
    kv_weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    eps: float,
    fake_quant: bool = False,
    proj: torch.Tensor | None = None,
    ape: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    state_slots: torch.Tensor | None = None,
    index_proj: torch.Tensor | None = None,
    index_ape: torch.Tensor | None = None,
    index_state: torch.Tensor | None = None,
    index_slots: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The normed query latent [T, Q] of `latent [T, Q]`, and the step's rows in the caches.

    `kv`, `kv_weight`, `positions`, `cos_sin`, `cache`, `slots`, `fake_quant`: `kv_norm_rope_insert`. `proj`, `ape`,
    `state`, `state_slots`: `compressor_state_insert` of the main compressor, all or none; the four `index_` arguments
    likewise, for a layer that has both. latent and kv share a dtype (bf16 or fp32), rows of any stride;
    `latent_weight [Q]` bf16 or fp32. TypeError or ValueError names the argument that does not fit.
    """
    check_tensor(OP, "latent", latent, (None, None), FLOATS, layout="rows")
    tokens, width = latent.shape
    device = latent.device
    check_tensor(OP, "latent_weight", latent_weight, (width,), FLOATS, device=device)
    check_tensor(OP, "kv", kv, (tokens, HEAD_DIM), latent.dtype, device=device, layout="rows")
    check_tensor(OP, "kv_weight", kv_weight, (HEAD_DIM,), FLOATS, device=device)
    check_tensor(OP, "positions", positions, (tokens,), torch.int32, device=device)
    check_tensor(OP, "cos_sin", cos_sin, (None, ROTARY), torch.float32, device=device)
    check_rows(OP, "cache", cache, kv.dtype, device)
    check_tensor(OP, "slots", slots, (tokens,), torch.int32, device=device)
    main = _rows("", proj, ape, state, state_slots)
    index = _rows("index_", index_proj, index_ape, index_state, index_slots)
    for prefix, rows in (("", main), ("index_", index)):
        if rows is not None:
            rows.check(prefix, tokens, device)
    if index is not None and main is None:
        raise ValueError(f"{OP}: index_proj, index_ape, index_state and index_slots need proj")
    if index is not None and main is not None and len(index.ape) != len(main.ape):
        raise ValueError(f"{OP}: index_ape has {len(index.ape)} phases, ape {len(main.ape)}")
    out = output(OP, "out", out, (tokens, width), latent.dtype, device)
    if tokens == 0:
        return out
    check_filled(OP, cos_sin=cos_sin, cache=cache)
    family = family_of(device.type)
    cores, record = family.vector_cores, is_record(cache)
    values, as_bytes = record_views(cache)
    states = (main is not None) + (index is not None)
    config = SPACE(
        family, tokens=tokens, width=width, states=states, fake_quant=fake_quant, record=record,
        page=cache.shape[1], bytes=kv.element_size(),
    )  # fmt: skip
    most, items = config["ITEMS"], 2 + states
    share = aligned_share(tokens * (1 if most else items), cores * max(1, most), config["ALIGN"])
    row = latent[:1]  # its shape says nothing of the step: sizes of these are constants of the kernel
    unused = _Rows(row, row, row[None], slots)
    main, index = main or unused, index or unused
    _latent_norm_insert_kernel[(min(triton.cdiv(tokens, share) * (2 + states), cores),)](
        latent, latent_weight, out, kv, kv_weight, positions, cos_sin, values, as_bytes, slots, *main, *index,
        tokens, share, latent.stride(0), kv.stride(0), cache.stride(0),
        main.proj.stride(0), main.state.stride(0), index.proj.stride(0), index.state.stride(0), eps,
        Q=width, QB=next_power_of_2(width), NORM_ROWS=config["NORM_ROWS"], STATES=states,
        R=cache.shape[1], D=HEAD_DIM, ROW=cache.shape[2], FAKE_QUANT=fake_quant, RECORD=record, RUN=config["RUN"],
        STATE_ROWS=main.state.shape[1], RATIO=main.ape.shape[0], WIDTH=main.ape.shape[1],
        INDEX_ROWS=index.state.shape[1], INDEX_WIDTH=index.ape.shape[1],
    )  # fmt: skip
    return out
