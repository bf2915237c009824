"""mHC: collapse the four streams into a sub-layer's input and make the coefficients that write its output back.

    F = x as [T, 4D], stream-major;  s = rsqrt(mean(F^2) + norm_eps);  m = (F @ fn^T) * s
    pre_j = sigmoid(m[j] scale[0] + base[j]) + hc_eps
    post_j = 2 sigmoid(m[4+j] scale[1] + base[4+j])
    comb = Sinkhorn(m[8:] scale[2] + base[8:]): row softmax + hc_eps, then alternately columns and rows, columns last
    y = sum_j pre_j x_j, and optionally the sub-layer's RMS norm of it

Two kernels: the mixing product (`_hc.py`) and this file's finish. x, y bf16 or fp32 [T, 4, D] and [T, D]; fn as parts
in x's dtype; scale, base, post, comb fp32. Everything is fp32; y is rounded once to x's dtype before the norm and
once after. Finish: vector cores; a persistent loop over runs of tokens; the gates and Sinkhorn of the 16 tokens
around them are tiles [4, 16] and [4, 4, 16], then one row of D per token. UB: about 5 fp32 rows of D. Source of the
formula: `hc_pre` and `hc_split_sinkhorn` of the official DeepSeek inference code; the split of fn in bf16 parts is
ours.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels._checks import FLOATS, check_filled, check_tensor, output
from dsv4_triton.kernels._hc import (
    LANES,
    Mixed,
    collapse_token,
    inverse_rms,
    mix,
    mix_workspace,
    mixes,
    parts_of,
    tokens_per_program,
)
from dsv4_triton.kernels._lang import extract_slice

OP = "hc_pre"
ROWS = 24


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
def _sinkhorn(c, eps, ITERS: tl.constexpr):
    """Softmax of the rows (axis 1) of [4, 4, lanes], then ITERS column and ITERS - 1 row normalisations."""
    c = tl.exp(c - tl.max(c, axis=1)[:, None, :])
    c = c * (1.0 / tl.sum(c, axis=1))[:, None, :] + eps
    c = c * (1.0 / (tl.sum(c, axis=0) + eps))[None, :, :]
    for _ in range(ITERS - 1):
        c = c * (1.0 / (tl.sum(c, axis=1) + eps))[:, None, :]
        c = c * (1.0 / (tl.sum(c, axis=0) + eps))[None, :, :]
    return c


@triton.jit(do_not_specialize=["T", "TP", "BT", "partials", "slices", "tokens"])
def _hc_pre_finish_kernel(
    x_ptr,
    part_ptr,
    square_ptr,
    scale_ptr,
    base_ptr,
    norm_ptr,
    y_ptr,
    wide_ptr,
    post_ptr,
    comb_ptr,
    T,
    TP,
    BT,
    partials,
    slices,
    tokens,
    norm_eps,
    hc_eps,
    D: tl.constexpr,
    BD: tl.constexpr,
    ITERS: tl.constexpr,
    LANES: tl.constexpr,
    GRAM: tl.constexpr,
):
    four = tl.arange(0, 4)
    sixteen = tl.arange(0, 16)
    lane = tl.arange(0, LANES)
    pre_base = tl.load(base_ptr + four)[:, None]
    post_base = tl.load(base_ptr + 4 + four)[:, None]
    comb_base = tl.load(base_ptr + 8 + sixteen)[:, None]
    for item in range(tl.program_id(0), tl.cdiv(T, tokens), tl.num_programs(0)):
        first = item * tokens // LANES * LANES
        rms = inverse_rms(square_ptr, first, slices, TP, BT, norm_eps, 4 * D, LANES, GRAM)
        mix = mixes(part_ptr, first, partials, TP, 24, LANES) * rms[None, :]
        pre = tl.sigmoid(extract_slice(mix, (0, 0), (4, LANES), (1, 1)) * tl.load(scale_ptr) + pre_base) + hc_eps
        post = extract_slice(mix, (4, 0), (4, LANES), (1, 1)) * tl.load(scale_ptr + 1) + post_base
        post = 2.0 * tl.sigmoid(post)
        comb = extract_slice(mix, (8, 0), (16, LANES), (1, 1)) * tl.load(scale_ptr + 2) + comb_base
        comb = tl.reshape(_sinkhorn(tl.reshape(comb, (4, 4, LANES)), hc_eps, ITERS), (16, LANES))
        for t in range(item * tokens, tl.minimum(item * tokens + tokens, T)):
            here = (lane == t - first)[None, :]
            collapse_token(x_ptr, norm_ptr, y_ptr, wide_ptr, t, pre, here, norm_eps, D, BD)
            tl.store(post_ptr + t * 4 + four, tl.sum(tl.where(here, post, 0.0), axis=1))
            tl.store(comb_ptr + t * 16 + sixteen, tl.sum(tl.where(here, comb, 0.0), axis=1))


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


def finish(x: torch.Tensor, mixed: Mixed, parameters: Coefficients, results: Collapsed) -> None:
    """From a mixing product of the streams `x` to the results of the collapse."""
    T, _, D = x.shape
    cores = family_of(x.device.type).vector_cores
    tokens = tokens_per_program(T, cores)
    part, squares = mixed
    _hc_pre_finish_kernel[(min(triton.cdiv(T, tokens), cores),)](
        x,
        part,
        squares,
        parameters.scale,
        parameters.base,
        parameters.norm_weight,
        results.y,
        results.wide,
        results.post,
        results.comb,
        T,
        part.shape[2],
        mixed.gram,
        part.shape[0],
        squares.shape[0],
        tokens,
        parameters.norm_eps,
        parameters.hc_eps,
        D=D,
        BD=D,
        ITERS=parameters.sinkhorn_iters,
        LANES=LANES,
        GRAM=mixed.gram > 0,
    )


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
