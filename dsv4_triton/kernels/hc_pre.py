"""mHC: collapse the four streams into a sub-layer's input and make the coefficients that write its output back.

    F = x as [T, 4D], stream-major;  s = rsqrt(mean(F^2) + norm_eps);  m = (F @ fn^T) * s
    pre_j = sigmoid(m[j] scale[0] + base[j]) + hc_eps
    post_j = 2 sigmoid(m[4+j] scale[1] + base[4+j])
    comb = Sinkhorn(m[8:] scale[2] + base[8:]): row softmax + hc_eps, then alternately columns and rows, columns last
    y = sum_j pre_j x_j, and optionally the sub-layer's RMS norm of it

Two kernels: the mixing product (`_hc.py`) and this file's finish. x, y bf16 or fp32 [T, 4, D] and [T, D]; fn as parts
in x's dtype; scale, base, post, comb fp32. Everything is fp32; y is rounded once to x's dtype before the norm and
once after. Finish: vector cores, two loops that share nothing, so that for few tokens they run side by side on
different cores: post and comb of groups of 8 to 64 tokens, as tiles [4, 4, group] or, where chains of operations stay
in registers, as sixteen vectors; and y of runs of up to 8 tokens, a row of D at a time. UB: about 5 fp32 rows of D, or
all partial results of a group. Source of the formula: `hc_pre` and `hc_split_sinkhorn` of the official DeepSeek
inference code; the split of fn in bf16 parts is ours.
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
from dsv4_triton.kernels._hc import (
    LANES,
    MAX_CHUNK,
    Mixed,
    collapse_runs,
    finish_candidates,
    finish_fits,
    inverse_rms,
    mix,
    mix_workspace,
    mixes,
    parts_of,
    run_length,
)
from dsv4_triton.kernels._lang import extract_slice
from dsv4_triton.kernels._tiling import next_power_of_2

OP = "hc_pre"
ROWS = 24
_MIN_GROUP = 8
_GROUP_TILE = 32
_GROUP_REGISTERS = 64
"""Tokens whose coefficients are made together, at most: as a tile, and as vectors of one register each."""


def split_fn(fn: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The fp32 mixing matrix `[N, K]` as `[P, N, K]` parts in the activations' dtype that add up to it.

    fp32 activations take it whole (P = 1). For bf16 activations it is two bf16 parts, `bf16(fn)` and
    `bf16(fn - bf16(fn))`: relative error at most 2^-17, and products with bf16 activations are exact in fp32.
    """
    if dtype == torch.float32:
        return fn.float()[None].contiguous()
    if dtype != torch.bfloat16:
        raise TypeError(f"split_fn: activations have dtype {dtype}, expected torch.bfloat16 or torch.float32")
    high = fn.to(torch.bfloat16)
    return torch.stack((high, (fn.float() - high.float()).to(torch.bfloat16)))


@triton.jit
def _sinkhorn_tile(c, eps, ITERS: tl.constexpr):
    """Softmax of the rows (axis 1) of [4, 4, lanes], then ITERS column and ITERS - 1 row normalisations."""
    c = tl.exp(c - tl.max(c, axis=1)[:, None, :])
    c = c / tl.sum(c, axis=1)[:, None, :] + eps
    c = c / (tl.sum(c, axis=0) + eps)[None, :, :]
    for _ in range(ITERS - 1):
        c = c / (tl.sum(c, axis=1) + eps)[:, None, :]
        c = c / (tl.sum(c, axis=0) + eps)[None, :, :]
    return c


@triton.jit
def _softmax_row(mix, row: tl.constexpr, scale, base_ptr, eps, LANES: tl.constexpr):
    """The four entries, each a vector over tokens, of row `row` of exp(m) / sum + eps."""
    a = _logit(mix, 4 * row + 4, scale, base_ptr + 4, LANES)
    b = _logit(mix, 4 * row + 5, scale, base_ptr + 4, LANES)
    c = _logit(mix, 4 * row + 6, scale, base_ptr + 4, LANES)
    d = _logit(mix, 4 * row + 7, scale, base_ptr + 4, LANES)
    largest = tl.maximum(
        tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL),
        tl.maximum(c, d, propagate_nan=tl.PropagateNan.ALL),
        propagate_nan=tl.PropagateNan.ALL,
    )
    a, b, c, d = tl.exp(a - largest), tl.exp(b - largest), tl.exp(c - largest), tl.exp(d - largest)
    total = (a + b) + (c + d)
    return a / total + eps, b / total + eps, c / total + eps, d / total + eps


@triton.jit
def _logit(mix, row: tl.constexpr, scale, base_ptr, LANES: tl.constexpr):
    return tl.reshape(extract_slice(mix, (row, 0), (1, LANES), (1, 1)), (LANES,)) * scale + tl.load(base_ptr + row)


@triton.jit
def _normalised(a, b, c, d, eps):
    total = ((a + b) + (c + d)) + eps
    return a / total, b / total, c / total, d / total


@triton.jit
def _store_four(to, a, b, c, d, live):
    tl.store(to, a, mask=live)
    tl.store(to + 1, b, mask=live)
    tl.store(to + 2, c, mask=live)
    tl.store(to + 3, d, mask=live)


@triton.jit
def _comb_in_registers(mix, scale, base_ptr, comb_at, live, eps, ITERS: tl.constexpr, LANES: tl.constexpr):
    """`_sinkhorn_tile` with sixteen vectors over tokens."""
    a0, a1, a2, a3 = _softmax_row(mix, 0, scale, base_ptr, eps, LANES)
    b0, b1, b2, b3 = _softmax_row(mix, 1, scale, base_ptr, eps, LANES)
    c0, c1, c2, c3 = _softmax_row(mix, 2, scale, base_ptr, eps, LANES)
    d0, d1, d2, d3 = _softmax_row(mix, 3, scale, base_ptr, eps, LANES)
    a0, b0, c0, d0 = _normalised(a0, b0, c0, d0, eps)
    a1, b1, c1, d1 = _normalised(a1, b1, c1, d1, eps)
    a2, b2, c2, d2 = _normalised(a2, b2, c2, d2, eps)
    a3, b3, c3, d3 = _normalised(a3, b3, c3, d3, eps)
    for _ in range(ITERS - 1):
        a0, a1, a2, a3 = _normalised(a0, a1, a2, a3, eps)
        b0, b1, b2, b3 = _normalised(b0, b1, b2, b3, eps)
        c0, c1, c2, c3 = _normalised(c0, c1, c2, c3, eps)
        d0, d1, d2, d3 = _normalised(d0, d1, d2, d3, eps)
        a0, b0, c0, d0 = _normalised(a0, b0, c0, d0, eps)
        a1, b1, c1, d1 = _normalised(a1, b1, c1, d1, eps)
        a2, b2, c2, d2 = _normalised(a2, b2, c2, d2, eps)
        a3, b3, c3, d3 = _normalised(a3, b3, c3, d3, eps)
    _store_four(comb_at, a0, a1, a2, a3, live)
    _store_four(comb_at + 4, b0, b1, b2, b3, live)
    _store_four(comb_at + 8, c0, c1, c2, c3, live)
    _store_four(comb_at + 12, d0, d1, d2, d3, live)


@triton.jit(do_not_specialize=["T", "TP", "BT"])
def _hc_pre_finish_kernel(
    x_ptr, part_ptr, square_ptr, scale_ptr, base_ptr, norm_ptr, y_ptr, wide_ptr, post_ptr, comb_ptr, T, TP, BT,
    norm_eps, hc_eps,
    D: tl.constexpr, ITERS: tl.constexpr, PARTIALS: tl.constexpr, CHUNK: tl.constexpr, SLICES: tl.constexpr,
    RUN: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, GRAM: tl.constexpr, WHOLE: tl.constexpr,
    REGISTERS: tl.constexpr,
):  # fmt: skip
    programs = tl.num_programs(0)
    groups = tl.cdiv(T, GROUP)
    lane = tl.arange(0, GROUP)
    four = tl.arange(0, 4)
    sixteen = tl.arange(0, 16)
    for group in range(tl.program_id(0), groups, programs):
        first = group * GROUP
        live = lane < T - first
        rms = inverse_rms(square_ptr, first, TP, BT, norm_eps, 4 * D, SLICES, GROUP, GRAM)
        mix = mixes(part_ptr, first, TP, 24, 4, 20, PARTIALS, CHUNK, GROUP, WHOLE and GROUP == LANES) * rms[None, :]
        post_scale = tl.load(scale_ptr + 1)
        comb_scale = tl.load(scale_ptr + 2)
        if REGISTERS:
            p0 = 2.0 * tl.sigmoid(_logit(mix, 0, post_scale, base_ptr + 4, GROUP))
            p1 = 2.0 * tl.sigmoid(_logit(mix, 1, post_scale, base_ptr + 4, GROUP))
            p2 = 2.0 * tl.sigmoid(_logit(mix, 2, post_scale, base_ptr + 4, GROUP))
            p3 = 2.0 * tl.sigmoid(_logit(mix, 3, post_scale, base_ptr + 4, GROUP))
            _store_four(post_ptr + (first + lane) * 4, p0, p1, p2, p3, live)
            comb_at = comb_ptr + (first + lane) * 16
            _comb_in_registers(mix, comb_scale, base_ptr, comb_at, live, hc_eps, ITERS, GROUP)
        else:
            post = extract_slice(mix, (0, 0), (4, GROUP), (1, 1)) * post_scale
            post = 2.0 * tl.sigmoid(post + tl.load(base_ptr + 4 + four)[:, None])
            comb = extract_slice(mix, (4, 0), (16, GROUP), (1, 1)) * comb_scale
            comb += tl.load(base_ptr + 8 + sixteen)[:, None]
            comb = tl.reshape(_sinkhorn_tile(tl.reshape(comb, (4, 4, GROUP)), hc_eps, ITERS), (16, GROUP))
            token = first + lane[:, None]
            tl.store(post_ptr + token * 4 + four[None, :], tl.trans(post), mask=live[:, None])
            tl.store(comb_ptr + token * 16 + sixteen[None, :], tl.trans(comb), mask=live[:, None])
    start = (tl.program_id(0) + programs - groups % programs) % programs
    collapse_runs(
        x_ptr, part_ptr, square_ptr, scale_ptr, base_ptr, norm_ptr, y_ptr, wide_ptr, T, TP, BT, norm_eps, hc_eps, start,
        D, 24, PARTIALS, CHUNK, SLICES, RUN, LANES, GRAM, WHOLE,
    )  # fmt: skip


class Coefficients(NamedTuple):
    """The parameters of one collapse: `fn_parts [P, 24, 4D]`, scale [3] and base [24] fp32, and how to use them."""

    fn_parts: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor
    norm_weight: torch.Tensor | None
    norm_eps: float
    hc_eps: float
    sinkhorn_iters: int

    def check(self, op: str, x: torch.Tensor) -> None:
        """TypeError or ValueError for what does not fit the streams `x [T, 4, D]`."""
        check_tensor(op, "x", x, (None, 4, None), FLOATS)
        D = x.shape[2]
        check_tensor(op, "fn_parts", self.fn_parts, (None, ROWS, 4 * D), x.dtype, device=x.device)
        check_tensor(op, "scale", self.scale, (3,), torch.float32, device=x.device)
        check_tensor(op, "base", self.base, (ROWS,), torch.float32, device=x.device)
        if self.norm_weight is not None:
            check_tensor(op, "norm_weight", self.norm_weight, (D,), FLOATS, device=x.device)
        if D % 16:
            raise ValueError(f"{op}: D is {D}, expected a multiple of 16")
        if self.sinkhorn_iters < 1:
            raise ValueError(f"{op}: sinkhorn_iters is {self.sinkhorn_iters}, expected at least 1")
        check_filled(op, fn_parts=self.fn_parts)


class Collapsed(NamedTuple):
    """The results of one collapse: y [T, D], y in fp32 where it is wanted, post [T, 4] and comb [T, 4, 4]."""

    y: torch.Tensor
    wide: torch.Tensor | None
    post: torch.Tensor
    comb: torch.Tensor

    @classmethod
    def of(
        cls,
        op: str,
        x: torch.Tensor,
        y: torch.Tensor | None,
        wide: torch.Tensor | None,
        post: torch.Tensor | None,
        comb: torch.Tensor | None,
    ) -> Collapsed:
        """The caller's memory, checked, or new memory; `wide` is never made here."""
        T, _, D = x.shape
        if wide is not None:
            check_tensor(op, "wide", wide, (T, D), torch.float32, device=x.device)
        return cls(
            output(op, "y", y, (T, D), x.dtype, x.device),
            wide,
            output(op, "post", post, (T, 4), torch.float32, x.device),
            output(op, "comb", comb, (T, 4, 4), torch.float32, x.device),
        )


def _default(family: Family, key: Key) -> dict[str, Any]:
    """Runs of RUN tokens and coefficients of at most GROUP tokens together, with CHUNK partial results at once."""
    T, cores = key["tokens"], family.vector_cores
    run = run_length(T, cores)
    group = _GROUP_REGISTERS if family.vector_registers else _GROUP_TILE
    idle = cores - triton.cdiv(T, run)
    if idle > 0 and not family.vector_registers:
        # Smaller tiles take less time, as long as every group has a core of its own.
        group = min(group, max(_MIN_GROUP, next_power_of_2(triton.cdiv(T, idle))))
    return {"RUN": run, "GROUP": group, "CHUNK": MAX_CHUNK, **dict.fromkeys(buffering(family))}


def _candidates(family: Family, key: Key) -> Choices:
    return {"GROUP": (8, 16, 32, 64), **finish_candidates(family)}


def _fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    group = config["GROUP"]
    return finish_fits(config) or ("" if group in (8, 16, 32, 64) else f"GROUP {group} is none of 8 to 64")


SPACE = Space(OP, default=_default, candidates=_candidates, fits=_fits)


def finish(x: torch.Tensor, mixed: Mixed, parameters: Coefficients, results: Collapsed) -> None:
    """From a mixing product of the streams `x` to the results of the collapse."""
    T, _, D = x.shape
    family = family_of(x.device.type)
    part, squares = mixed
    config = SPACE(
        family, tokens=T, width=D, dtype=x.dtype, normed=parameters.norm_weight is not None,
        wide=results.wide is not None, gram=mixed.gram > 0,
    )  # fmt: skip
    run, group = config["RUN"], mixed.group(config["GROUP"])
    items = triton.cdiv(T, run) + triton.cdiv(T, group)
    _hc_pre_finish_kernel[(min(items, family.vector_cores),)](
        x, part, squares, parameters.scale, parameters.base, parameters.norm_weight, results.y, results.wide,
        results.post, results.comb, T, part.shape[2], mixed.gram, parameters.norm_eps, parameters.hc_eps,
        D=D, ITERS=parameters.sinkhorn_iters, PARTIALS=part.shape[0], CHUNK=mixed.chunk(config["CHUNK"]),
        SLICES=squares.shape[0], RUN=run, GROUP=group, LANES=LANES, GRAM=mixed.gram > 0,
        WHOLE=part.shape[2] == LANES, REGISTERS=family.vector_registers, **config.options,
    )  # fmt: skip


def hc_pre_workspace(tokens: int, dtype: torch.dtype, family: Family) -> int:
    """Bytes of scratch that `hc_pre` takes at most for up to `tokens` tokens of `dtype`."""
    return mix_workspace(tokens, ROWS * parts_of(dtype), family)


def hc_pre(
    x: torch.Tensor,
    fn_parts: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iters: int = 20,
    norm_weight: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
    wide: torch.Tensor | None = None,
    post: torch.Tensor | None = None,
    comb: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(y [T, D] in x's dtype, post [T, 4] fp32, comb [T, 4, 4] fp32)` of the streams `x [T, 4, D]`.

    `fn_parts [P, 24, 4D]` comes from `split_fn` for x's dtype; scale [3] and base [24] are fp32 (rows: 4 pre, 4 post,
    16 comb, row-major). `norm_weight [D]` (bf16 or fp32) fuses the sub-layer's RMS norm with `norm_eps`. D is a
    multiple of 16. y, post and comb may be given as memory for the results, and `wide [T, D]` fp32 receives y once
    more, for fp32 projections. `workspace`: `hc_pre_workspace` bytes, uint8.
    """
    parameters = Coefficients(fn_parts, scale, base, norm_weight, norm_eps, hc_eps, sinkhorn_iters)
    parameters.check(OP, x)
    results = Collapsed.of(OP, x, y, wide, post, comb)
    if len(x):
        finish(x, mix(OP, x, fn_parts, workspace), parameters, results)
    return results.y, results.post, results.comb
