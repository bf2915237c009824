"""What the mHC ops share: the mixing product and the weighted collapse of the four streams.

Mixing, on the cube: for F = x as [T, 4D] and the N rows of fn (in P parts),

    part[s, r, t] = sum over K slice s of fn_parts[r, k] F[t, k]          r = p N + n
    gram[s, t, u] = sum over K slice s of F[t, k] F[u, k]                 its diagonal is the sum of squares

Tokens are the last axis, so that what follows works on token vectors. The sum of squares is a product too because a
tile that feeds both `tl.dot` and vector code is lost on the vector core by ascendnpu-ir 1.2.0 on A2. Grid: cube
cores; a persistent loop over (token tile, K slice), with so many slices that a small T still fills the cores. L1: two
operand tiles [BT, BK] and [P N, BK], doubled; L0C: (P N + BT) BT fp32.

The finishing kernels add up the partial results of all slices and parts.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dsv4_triton.autotune.space import Choices, Key, Space, buffering, products
from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels._lang import get_element
from dsv4_triton.kernels._tiling import next_power_of_2
from dsv4_triton.kernels._workspace import Part, carve, workspace_bytes

LANES = 16
"""Tokens whose mixes are read together to collapse some of them; the smallest tile of the product."""
_MAX_TOKEN_TILE = 64
_MAX_RUN = 8
MAX_CHUNK = 32
"""Partial results that are read at once where nobody tuned."""


@triton.jit(do_not_specialize=["T", "TP", "slices"])
def _mix_kernel(
    x_ptr,
    fn_ptr,
    part_ptr,
    gram_ptr,
    T,
    TP,
    slices,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    steps: tl.constexpr = K // BK
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, BT)
    k = tl.arange(0, BK)
    for item in range(tl.program_id(0), tl.cdiv(T, BT) * slices, tl.num_programs(0)):
        tile = item // slices
        s = item % slices
        first = tile * BT
        begin = s * steps // slices
        end = (s + 1) * steps // slices
        fn_at = fn_ptr + row[:, None] * K + k[None, :]
        x_at = x_ptr + first.to(tl.int64) * K + lane[:, None] * K + k[None, :]
        live = (lane < T - first)[:, None]
        f = tl.load(fn_at + begin * BK)
        x = tl.trans(tl.load(x_at + begin * BK, mask=live, other=0.0))
        u = tl.load(x_at + begin * BK, mask=live, other=0.0)
        part = tl.dot(f, x, input_precision="ieee")
        gram = tl.dot(u, x, input_precision="ieee")
        for step in range(begin + 1, end):
            f = tl.load(fn_at + step * BK)
            u = tl.load(x_at + step * BK, mask=live, other=0.0)
            x = tl.trans(u)
            part = tl.dot(f, x, part, input_precision="ieee")
            gram = tl.dot(u, x, gram, input_precision="ieee")
        tl.store(part_ptr + (s * ROWS + row[:, None]) * TP + first + lane[None, :], part)
        tl.store(gram_ptr + (s * TP + first + lane[:, None]) * BT + lane[None, :], gram)


@triton.jit
def mixes(
    part_ptr, first, TP, N: tl.constexpr, ROW: tl.constexpr, ROWS: tl.constexpr, PARTIALS: tl.constexpr,
    CHUNK: tl.constexpr, LANES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Rows ROW.. of the unscaled mixes `F fn^T`, [ROWS, LANES] fp32, of the tokens from `first` on.

    CHUNK of the PARTIALS results are read at a time. WHOLE: there are LANES tokens in all, so that the rows of a
    partial result are one contiguous run.
    """
    number = tl.arange(0, CHUNK)
    at = part_ptr + ROW * TP + first
    if WHOLE:
        at += number[:, None] * (N * LANES) + tl.arange(0, ROWS * LANES)[None, :]
    else:
        row = tl.arange(0, ROWS)[None, :, None] * TP
        at += number[:, None, None] * (N * TP) + row + tl.arange(0, LANES)[None, None, :]
    total = tl.sum(tl.load(at), axis=0)
    for start in tl.static_range(CHUNK, PARTIALS, CHUNK):
        total += tl.sum(tl.load(at + start * N * TP), axis=0)
    return tl.reshape(total, (ROWS, LANES))


@triton.jit
def inverse_rms(
    square_ptr, first, TP, BT, eps, K: tl.constexpr, SLICES: tl.constexpr, LANES: tl.constexpr, GRAM: tl.constexpr
):  # fmt: skip
    """`rsqrt(mean(F^2) + eps)` [LANES] of the tokens from `first` on.

    The squares' sums come from SLICES rows [TP], or with GRAM from the diagonals of gram matrices [TP, BT].
    """
    lane = tl.arange(0, LANES)
    number = tl.arange(0, SLICES)
    if GRAM:
        at = square_ptr + (first + lane[None, :, None]) * BT + first % BT + lane[None, None, :]
        gram = tl.sum(tl.load(at + number[:, None, None] * TP * BT), axis=0)
        square = tl.sum(tl.where(lane[:, None] == lane[None, :], gram, 0.0), axis=0)
    else:
        square = tl.sum(tl.load(square_ptr + first + number[:, None] * TP + lane[None, :]), axis=0)
    return tl.rsqrt(square / K + eps)


@triton.jit
def collapse_token(x_ptr, norm, y_ptr, wide_ptr, t, pre, lane, norm_eps, D: tl.constexpr, NORMED: tl.constexpr):
    """Write `y[t] = sum_j pre[lane, j] x[t, j]`, with the RMS norm by `norm` where NORMED; in fp32 to `wide` too."""
    d = tl.arange(0, D)
    row = t.to(tl.int64) * D
    y = get_element(pre, (lane, 0)) * tl.load(x_ptr + row * 4 + d).to(tl.float32)
    y += get_element(pre, (lane, 1)) * tl.load(x_ptr + row * 4 + D + d).to(tl.float32)
    y += get_element(pre, (lane, 2)) * tl.load(x_ptr + row * 4 + 2 * D + d).to(tl.float32)
    y += get_element(pre, (lane, 3)) * tl.load(x_ptr + row * 4 + 3 * D + d).to(tl.float32)
    y = y.to(y_ptr.dtype.element_ty)
    if NORMED:
        wide = y.to(tl.float32)
        # a vector of equal values, so that the root is taken once and not with every feature
        mean = tl.zeros((8,), tl.float32) + tl.sum(wide * wide) * (1.0 / D)
        y = (norm * (wide * get_element(tl.rsqrt(mean + norm_eps), (0,)))).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row + d, y)
    if wide_ptr is not None:
        tl.store(wide_ptr + row + d, y.to(tl.float32))


@triton.jit
def collapse_runs(
    x_ptr, part_ptr, square_ptr, scale_ptr, base_ptr, norm_ptr, y_ptr, wide_ptr, T, TP, BT, norm_eps, hc_eps, program,
    D: tl.constexpr, N: tl.constexpr, PARTIALS: tl.constexpr, CHUNK: tl.constexpr, SLICES: tl.constexpr,
    RUN: tl.constexpr, LANES: tl.constexpr, GRAM: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The collapse of runs of RUN tokens, every `num_programs`-th from number `program` on."""
    runs = tl.cdiv(T, RUN)
    if program < runs:
        norm = 0.0
        if norm_ptr is not None:
            norm = tl.load(norm_ptr + tl.arange(0, D)).to(tl.float32)
        base = tl.load(base_ptr + tl.arange(0, 4))[:, None]
        for run in range(program, runs, tl.num_programs(0)):
            first = run * RUN // LANES * LANES
            rms = inverse_rms(square_ptr, first, TP, BT, norm_eps, 4 * D, SLICES, LANES, GRAM)
            pre = mixes(part_ptr, first, TP, N, 0, 4, PARTIALS, CHUNK, LANES, WHOLE) * rms[None, :]
            pre = tl.trans(tl.sigmoid(pre * tl.load(scale_ptr) + base) + hc_eps)
            for t in range(run * RUN, tl.minimum(run * RUN + RUN, T)):
                collapse_token(x_ptr, norm, y_ptr, wide_ptr, t, pre, t - first, norm_eps, D, norm_ptr is not None)


def parts_of(dtype: torch.dtype) -> int:
    """Parts into which the mixing matrix is split for activations of `dtype`."""
    return 1 if dtype == torch.float32 else 2


def run_length(T: int, cores: int) -> int:
    """Tokens that are collapsed in one go where nobody tuned: a power of two."""
    return min(next_power_of_2(triton.cdiv(T, cores)), _MAX_RUN)


def finish_candidates(family: Family) -> Choices:
    """Values of RUN, CHUNK and options of the finishing kernels. On the host sums keep their order."""
    runs = {"RUN": (1, 2, 4, 8, 16)}
    return {**runs, "CHUNK": (8, 12, 16, 24, 32, 48), **buffering(family)} if family.arch else runs


def finish_fits(config: Mapping[str, Any]) -> str:
    """ "" or why RUN cannot be: it divides the tokens whose mixes are read together."""
    return "" if LANES % config["RUN"] == 0 else f"RUN {config['RUN']} does not divide {LANES} tokens"


class Mixed(NamedTuple):
    """Partial results of a mixing product, and what the sums of squares are made from.

    part [S, N, TP] fp32, where TP is T rounded up to tiles; squares [slices, TP] or gram matrices [slices, TP, BT].
    """

    part: torch.Tensor
    squares: torch.Tensor

    @property
    def gram(self) -> int:
        """BT, or 0 where `squares` holds plain sums."""
        return self.squares.shape[2] if self.squares.dim() == 3 else 0

    def chunk(self, limit: int) -> int:
        """Partial results that are read at once: the largest divisor of their number up to `limit`."""
        return max(n for n in range(1, limit + 1) if self.part.shape[0] % n == 0)

    def group(self, limit: int) -> int:
        """Tokens whose results can be read as one tile, at most `limit`: a power of two that divides the tiles."""
        tile = self.gram or LANES
        return min(tile & -tile, limit)


def _default(family: Family, key: Key) -> dict[str, Any]:
    """BT tokens a tile: 16 while that fills the cores, then more, so that fn is read less often. So many SLICES of K
    that the tiles fill the cores."""
    T, K = key["tokens"], key["width"]
    block_t = min(max(LANES, next_power_of_2(triton.cdiv(T, family.cube_cores))), _MAX_TOKEN_TILE)
    block_k = next(b for b in (256, 128, 64) if K % b == 0)
    slices = min(max(1, family.cube_cores // triton.cdiv(T, block_t)), K // block_k)
    return {"BT": block_t, "BK": block_k, "SLICES": slices, **dict.fromkeys(products(family))}


def _candidates(family: Family, key: Key) -> Choices:
    """On the host sums keep their order."""
    block_t = (16, 32, 48, 64)
    if not family.arch:
        return {"BT": block_t}
    slices = sorted({max(1, n // triton.cdiv(key["tokens"], t)) for t in block_t for n in _shares(family)})
    return {"BT": block_t, "BK": (256, 512, 1024), "SLICES": slices, **products(family)}


def _shares(family: Family) -> tuple[int, int, int]:
    """Work items: one for every core, and fewer, which leave less to add up."""
    return family.cube_cores, family.cube_cores * 2 // 3, family.cube_cores // 2


def _fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    """Whole steps of K; no more partial results than there are cores, or one a tile; operands in L1, results in L0C."""
    block_t, block_k, slices = config["BT"], config["BK"], config["SLICES"]
    T, K, rows = key["tokens"], key["width"], key["rows"]
    if K % block_k or slices > K // block_k:
        return f"BK {block_k} and {slices} slices do not cut {K} columns"
    if slices > 1 and slices * triton.cdiv(T, block_t) > family.cube_cores:
        return f"{slices} slices of {triton.cdiv(T, block_t)} tiles are more than there are cores"
    operands = 2 * (rows + 2 * block_t) * block_k * key["dtype"].itemsize
    if operands > family.l1_bytes or (rows + block_t) * block_t * 4 > family.l0c_bytes:
        return f"tile {block_t} x {block_k} does not fit"
    return ""


SPACE = Space("hc_mix", default=_default, candidates=_candidates, fits=_fits)


def mix_workspace(tokens: int, rows: int, family: Family) -> int:
    """Bytes that `mix` takes at most for up to `tokens` tokens and `rows` = P N rows of fn."""
    columns = max(family.cube_cores * _MAX_TOKEN_TILE, tokens + _MAX_TOKEN_TILE)
    scratch: list[Part] = [((rows, columns), torch.float32), ((columns, _MAX_TOKEN_TILE), torch.float32)]
    return workspace_bytes(scratch)


def mix(op: str, x: torch.Tensor, fn_parts: torch.Tensor, workspace: torch.Tensor | None) -> Mixed:
    """The mixing product of x [T, 4, D] with fn_parts [P, N, 4D] for the op named `op`."""
    T, K = x.shape[0], x.shape[1] * x.shape[2]
    P, N = fn_parts.shape[:2]
    family = family_of(x.device.type)
    config = SPACE(family, tokens=T, width=K, rows=P * N, dtype=x.dtype)
    block_t, slices = config["BT"], config["SLICES"]
    tiles = triton.cdiv(T, block_t)
    padded = tiles * block_t
    scratch: list[Part] = [
        ((slices * P, N, padded), torch.float32),
        ((slices, padded, block_t), torch.float32),
    ]
    part, gram = carve(op, workspace, x.device, scratch)
    _mix_kernel[(min(tiles * slices, family.cube_cores),)](
        x, fn_parts, part, gram, T, padded, slices, K=K, ROWS=P * N, BT=block_t, BK=config["BK"], **config.options
    )
    return Mixed(part, gram)
