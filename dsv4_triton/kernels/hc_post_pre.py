"""mHC between two sub-layers: write the last one's output back, then collapse the streams for the next one.

    x'_k = post_k y + sum_j comb[j, k] x_j                  rounded to x's dtype: `hc_post`
    y', post', comb' = the collapse of the rounded x'       `hc_pre`

For few tokens two kernels, the second of them the finish of `hc_pre`. The first makes x' and, while it is on the core,
its products with fn. A program owns a slice of BD features of all four streams.

* Where vector cores can feed the cube within a kernel (A2, A3): x' of a tile of 16 tokens goes to the cube, which makes
  the partial mixes and gram matrices of `_hc.py`, four products each. Both vector cores take half of the tokens; for
  that the sums of squares must not be vector code. Grid: cube cores, a persistent loop over (token tile, slice). UB: 9
  tiles [16, BD], operands doubled.
* Elsewhere vector code alone: the program keeps its columns of fn (24 rows, the parts added up to fp32) and walks over
  the tokens; one partial result [24, 16 tokens] and sums of squares a slice. Grid: vector cores. UB bytes: about
  4 * 24 * BD * 4 for fn and 3 * 24 * BD * 4 for the products.

For more tokens three kernels: `hc_post`, then the two of `hc_pre`.
Source of the formulas: see `hc_post` and `hc_pre`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton.autotune.space import Choices, Config, Key, Space, mixing
from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels._checks import check_tensor, output
from dsv4_triton.kernels._hc import LANES, Mixed, mix, parts_of
from dsv4_triton.kernels._lang import extract_slice
from dsv4_triton.kernels._workspace import Part, carve, workspace_bytes
from dsv4_triton.kernels.hc_post import hc_post, new_stream
from dsv4_triton.kernels.hc_pre import ROWS, Coefficients, Collapsed, finish, hc_pre_workspace

OP = "hc_post_pre"
MATRIX_TOKENS = 64
"""Up to here the first kernel with the matrix unit costs no more than `hc_post`, a product and a launch."""
VECTOR_TOKENS = 8
"""... and the one of vector code."""
_MATRIX_FEATURES = 176
"""Features of a slice with the matrix unit at most, for the vector memory of A2 and A3 in bf16."""
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


@triton.jit
def _stream_tile(y, x0, x1, x2, x3, post, comb, k: tl.constexpr, BT: tl.constexpr):
    """Stream k of BT tokens in fp32: `hc_post.new_stream` with columns of post [BT, 4] and comb [BT, 16]."""
    mixed = extract_slice(post, (0, k), (BT, 1), (1, 1)) * y
    mixed += extract_slice(comb, (0, k), (BT, 1), (1, 1)) * x0
    mixed += extract_slice(comb, (0, 4 + k), (BT, 1), (1, 1)) * x1
    mixed += extract_slice(comb, (0, 8 + k), (BT, 1), (1, 1)) * x2
    mixed += extract_slice(comb, (0, 12 + k), (BT, 1), (1, 1)) * x3
    return mixed


@triton.jit(do_not_specialize=["T", "TP", "slices"])
def _post_matrix_kernel(
    y_ptr, x_ptr, post_ptr, comb_ptr, fn_ptr, out_ptr, part_ptr, gram_ptr, T, TP, slices,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BD)
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, BT)
    for item in range(tl.program_id(0), tl.cdiv(T, BT) * slices, tl.num_programs(0)):
        s = item % slices
        column = s * BD
        first = item // slices * BT
        inside = (d < D - column)[None, :]
        there = (lane < T - first)[:, None]
        live = there & inside
        token = first + lane[:, None]
        post = tl.load(post_ptr + token * 4 + tl.arange(0, 4)[None, :], mask=there, other=0.0)
        comb = tl.load(comb_ptr + token * 16 + tl.arange(0, 16)[None, :], mask=there, other=0.0)
        at = token * (4 * D) + column + d[None, :]
        y = tl.load(y_ptr + token * D + column + d[None, :], mask=live, other=0.0).to(tl.float32)
        x0 = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
        x1 = tl.load(x_ptr + at + D, mask=live, other=0.0).to(tl.float32)
        x2 = tl.load(x_ptr + at + 2 * D, mask=live, other=0.0).to(tl.float32)
        x3 = tl.load(x_ptr + at + 3 * D, mask=live, other=0.0).to(tl.float32)
        fn_at = fn_ptr + row[:, None] * (4 * D) + column + d[None, :]
        z = _stream_tile(y, x0, x1, x2, x3, post, comb, 0, BT).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at, z, mask=live)
        part = tl.dot(tl.load(fn_at, mask=inside, other=0.0), tl.trans(z), input_precision="ieee")
        gram = tl.dot(z, tl.trans(z), input_precision="ieee")
        for k in tl.static_range(1, 4):
            z = _stream_tile(y, x0, x1, x2, x3, post, comb, k, BT).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + at + k * D, z, mask=live)
            f = tl.load(fn_at + k * D, mask=inside, other=0.0)
            part = tl.dot(f, tl.trans(z), part, input_precision="ieee")
            gram = tl.dot(z, tl.trans(z), gram, input_precision="ieee")
        tl.store(part_ptr + (s * ROWS + row[:, None]) * TP + first + lane[None, :], part)
        tl.store(gram_ptr + (s * TP + token) * BT + lane[None, :], gram)


def feature_slice(D: int, cores: int, limit: int) -> int:
    """Features per slice, at most `limit`: every core gets as many slices where D is large enough."""
    rounds = triton.cdiv(D, cores * limit)
    return triton.cdiv(triton.cdiv(D, cores * rounds), FEATURES) * FEATURES


def _default(family: Family, key: Key) -> dict[str, Any]:
    """FUSED: the two kernels for few tokens, with slices of BD features."""
    limit = MATRIX_TOKENS if family.mixed_kernels else VECTOR_TOKENS
    block = _even_slice(key["width"], key["dtype"], family)
    return {"FUSED": key["tokens"] <= limit, "BD": block, **dict.fromkeys(mixing(family))}


def _candidates(family: Family, key: Key) -> Choices:
    """No more launches than by default, which an estimate does not count."""
    if not family.arch:
        return {}
    fused = {_default(family, key)["FUSED"], True}
    blocks = (32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256)
    return {"FUSED": sorted(fused), "BD": blocks, **mixing(family), "tile_mix_vector_loop": (None, 2)}


def _fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    """Scratch is bounded: by the tokens of the fused kernels, and by the number of slices."""
    block, D = config["BD"], key["width"]
    if config["FUSED"] and key["tokens"] > _most_fused_tokens(family):
        return f"{key['tokens']} tokens are too many for the fused kernels"
    if block % FEATURES or triton.cdiv(D, block) > _most_slices(D, key["dtype"], family):
        return f"BD {block} cuts {D} features into too many slices"
    return ""


SPACE = Space(OP, default=_default, candidates=_candidates, fits=_fits)


def _most_fused_tokens(family: Family) -> int:
    """Tokens that the fused kernels are for at most; the one of vector code has a single tile of them."""
    return 2 * MATRIX_TOKENS if family.mixed_kernels else LANES


def _even_slice(D: int, dtype: torch.dtype, family: Family) -> int:
    """Features of a slice so that every core has as many."""
    if family.mixed_kernels:
        return feature_slice(D, family.cube_cores, _MATRIX_FEATURES * 2 // dtype.itemsize // FEATURES * FEATURES)
    return feature_slice(D, family.vector_cores, D)


def _most_slices(D: int, dtype: torch.dtype, family: Family) -> int:
    return 2 * triton.cdiv(D, _even_slice(D, dtype, family))


def _post_and_mix(
    y: torch.Tensor,
    x: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn_parts: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor | None,
    config: Config,
) -> Mixed:
    T, _, D = x.shape
    parts = fn_parts.shape[0]
    family = family_of(x.device.type)
    block = config["BD"]
    slices = triton.cdiv(D, block)
    part, squares = carve(OP, workspace, x.device, _scratch(T, parts, slices, family))
    if family.mixed_kernels:
        padded = part.shape[2]
        grid = (min(padded // LANES * slices, family.cube_cores),)
        _post_matrix_kernel[grid](
            y, x, post, comb, fn_parts, out, part, squares, T, padded, slices,
            D=D, BD=block, ROWS=parts * ROWS, BT=LANES, **config.options,
        )  # fmt: skip
    else:
        _post_mix_kernel[(min(slices, family.vector_cores),)](
            y, x, post, comb, fn_parts, out, part, squares, T, LANES, slices,
            D=D, BD=block, N=ROWS, P=parts, LANES=LANES, **config.options,
        )  # fmt: skip
    return Mixed(part, squares)


def _scratch(T: int, parts: int, slices: int, family: Family) -> list[Part]:
    if family.mixed_kernels:
        padded = triton.cdiv(T, LANES) * LANES
        return [((slices * parts, ROWS, padded), torch.float32), ((slices, padded, LANES), torch.float32)]
    return [((slices, ROWS, LANES), torch.float32), ((slices, LANES), torch.float32)]


def hc_post_pre_workspace(tokens: int, hidden: int, dtype: torch.dtype, family: Family) -> int:
    """Bytes of scratch that `hc_post_pre` takes at most for up to `tokens` tokens of `hidden` features of `dtype`."""
    slices = _most_slices(hidden, dtype, family)
    fused = _scratch(min(tokens, _most_fused_tokens(family)), parts_of(dtype), slices, family)
    return max(hc_pre_workspace(tokens, dtype, family), workspace_bytes(fused))


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
    config = SPACE(family_of(x.device.type), tokens=T, width=D, dtype=x.dtype)
    if config["FUSED"]:
        mixed = _post_and_mix(y, x, post, comb, fn_parts, out, workspace, config)
    else:
        hc_post(y, x, post, comb, out=out)
        mixed = mix(OP, out, fn_parts, workspace)
    finish(out, mixed, parameters, results)
    return out, results.y, results.post, results.comb
