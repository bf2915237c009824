"""mHC between two sub-layers: write the last one's output back, then collapse the streams for the next one.

    x'_k = post_k y + sum_j comb[j, k] x_j                  rounded to x's dtype: `hc_post`
    y', post', comb' = the collapse of the rounded x'       `hc_pre`

For few tokens two kernels. The first makes x' and, while it is on the core, its products with fn: a program owns a
slice of BD features of all four streams, keeps its columns of fn (24 rows, the parts added up to fp32) and walks over
the tokens; products and the sums of squares are fp32 vector code, one partial result [24, 16 tokens] a slice. The
second is the finish of `hc_pre`. For more tokens the matrix unit pays off: `hc_post`, then the two kernels of `hc_pre`.
Making x' and multiplying it on the matrix unit in one kernel is no choice: A5 cannot link it, A2 leaves one of two
vector cores idle. Grid: vector cores. UB bytes: about 4 * 24 * BD * 4 for fn and 3 * 24 * BD * 4 for the products.
Source of the formulas: see `hc_post` and `hc_pre`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels._checks import check_tensor, output
from dsv4_triton.kernels._hc import LANES, Mixed, mix
from dsv4_triton.kernels._workspace import Part, carve, workspace_bytes
from dsv4_triton.kernels.hc_post import hc_post, new_stream
from dsv4_triton.kernels.hc_pre import ROWS, Coefficients, Collapsed, finish, hc_pre_workspace

OP = "hc_post_pre"
FUSED_TOKENS = LANES
"""Up to here the first kernel costs no more than a matrix product and a launch."""
FEATURES = 16
"""Slices are multiples of this many features."""


@triton.jit
def _fn_columns(fn_ptr, column, live, D: tl.constexpr, BD: tl.constexpr, N: tl.constexpr, P: tl.constexpr):
    """Columns `column`.. of all parts of fn, added up: [N, BD] fp32."""
    at = fn_ptr + column + tl.arange(0, N)[:, None] * (4 * D) + tl.arange(0, BD)[None, :]
    total = tl.load(at, mask=live, other=0.0).to(tl.float32)
    for p in tl.static_range(1, P):
        total += tl.load(at + p * N * 4 * D, mask=live, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["T", "TP", "slices"])
def _post_mix_kernel(
    y_ptr,
    x_ptr,
    post_ptr,
    comb_ptr,
    fn_ptr,
    out_ptr,
    part_ptr,
    square_ptr,
    T,
    TP,
    slices,
    D: tl.constexpr,
    BD: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    LANES: tl.constexpr,
):
    d = tl.arange(0, BD)
    row = tl.arange(0, N)
    lane = tl.arange(0, LANES)
    for s in range(tl.program_id(0), slices, tl.num_programs(0)):
        column = s * BD
        live = d < D - column
        wide = live[None, :]
        f0 = _fn_columns(fn_ptr, column, wide, D, BD, N, P)
        f1 = _fn_columns(fn_ptr, column + D, wide, D, BD, N, P)
        f2 = _fn_columns(fn_ptr, column + 2 * D, wide, D, BD, N, P)
        f3 = _fn_columns(fn_ptr, column + 3 * D, wide, D, BD, N, P)
        part = tl.zeros((N, LANES), tl.float32)
        square = tl.zeros((LANES,), tl.float32)
        for t in range(T):
            at = t * (4 * D) + column + d
            y = tl.load(y_ptr + t * D + column + d, mask=live, other=0.0).to(tl.float32)
            x0 = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
            x1 = tl.load(x_ptr + at + D, mask=live, other=0.0).to(tl.float32)
            x2 = tl.load(x_ptr + at + 2 * D, mask=live, other=0.0).to(tl.float32)
            x3 = tl.load(x_ptr + at + 3 * D, mask=live, other=0.0).to(tl.float32)
            z0 = new_stream(post_ptr, comb_ptr, t, 0, y, x0, x1, x2, x3).to(out_ptr.dtype.element_ty)
            z1 = new_stream(post_ptr, comb_ptr, t, 1, y, x0, x1, x2, x3).to(out_ptr.dtype.element_ty)
            z2 = new_stream(post_ptr, comb_ptr, t, 2, y, x0, x1, x2, x3).to(out_ptr.dtype.element_ty)
            z3 = new_stream(post_ptr, comb_ptr, t, 3, y, x0, x1, x2, x3).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + at, z0, mask=live)
            tl.store(out_ptr + at + D, z1, mask=live)
            tl.store(out_ptr + at + 2 * D, z2, mask=live)
            tl.store(out_ptr + at + 3 * D, z3, mask=live)
            z0 = z0.to(tl.float32)
            z1 = z1.to(tl.float32)
            z2 = z2.to(tl.float32)
            z3 = z3.to(tl.float32)
            products = f0 * z0[None, :] + f1 * z1[None, :] + f2 * z2[None, :] + f3 * z3[None, :]
            here = lane == t
            part = tl.where(here[None, :], tl.sum(products, axis=1)[:, None], part)
            square = tl.where(here, tl.sum(z0 * z0 + z1 * z1 + z2 * z2 + z3 * z3, axis=0), square)
        tl.store(part_ptr + (s * N + row[:, None]) * TP + lane[None, :], part)
        tl.store(square_ptr + s * TP + lane, square)


def feature_slice(D: int, cores: int) -> int:
    """Features per program: all cores get one slice where D is large enough."""
    return triton.cdiv(triton.cdiv(D, cores), FEATURES) * FEATURES


def _post_and_mix(
    y: torch.Tensor,
    x: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn_parts: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor | None,
) -> Mixed:
    T, _, D = x.shape
    cores = family_of(x.device.type).vector_cores
    block = feature_slice(D, cores)
    slices = triton.cdiv(D, block)
    part, squares = carve(OP, workspace, x.device, _scratch(slices))
    _post_mix_kernel[(min(slices, cores),)](
        y, x, post, comb, fn_parts, out, part, squares, T, LANES, slices,
        D=D, BD=block, N=ROWS, P=fn_parts.shape[0], LANES=LANES,
    )  # fmt: skip
    return Mixed(part, squares)


def _scratch(slices: int) -> list[Part]:
    return [((slices, ROWS, LANES), torch.float32), ((slices, LANES), torch.float32)]


def hc_post_pre_workspace(tokens: int, dtype: torch.dtype, family: Family) -> int:
    """Bytes of scratch that `hc_post_pre` takes at most for up to `tokens` tokens of `dtype`."""
    return max(hc_pre_workspace(tokens, dtype, family), workspace_bytes(_scratch(family.vector_cores)))


def hc_post_pre(
    y: torch.Tensor,
    x: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn_parts: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iters: int = 20,
    norm_weight: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    wide: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(streams [T, 4, D], y' [T, D], post' [T, 4], comb' [T, 4, 4])`: `hc_post` of the first four arguments, then
    `hc_pre` of the new streams with the others.

    y and x have one dtype (bf16 or fp32); see the two ops for the rest. `out` is memory for the new streams and must
    not be x; `wide [T, D]` fp32 receives y' once more. `workspace`: `hc_post_pre_workspace` bytes, uint8.
    """
    parameters = Coefficients(fn_parts, scale, base, norm_weight, norm_eps, hc_eps, sinkhorn_iters)
    parameters.check(OP, x)
    T, _, D = x.shape
    check_tensor(OP, "y", y, (T, D), x.dtype, device=x.device)
    check_tensor(OP, "post", post, (T, 4), torch.float32, device=x.device)
    check_tensor(OP, "comb", comb, (T, 4, 4), torch.float32, device=x.device)
    out = output(OP, "out", out, x.shape, x.dtype, x.device)
    results = Collapsed.of(OP, x, None, wide, None, None)
    if T == 0:
        return out, results.y, results.post, results.comb
    if out.data_ptr() == x.data_ptr():
        raise ValueError(f"{OP}: out must not be x, every new stream reads all old ones")
    if T <= FUSED_TOKENS:
        mixed = _post_and_mix(y, x, post, comb, fn_parts, out, workspace)
    else:
        hc_post(y, x, post, comb, out=out)
        mixed = mix(OP, out, fn_parts, workspace)
    finish(out, mixed, parameters, results)
    return out, results.y, results.post, results.comb
