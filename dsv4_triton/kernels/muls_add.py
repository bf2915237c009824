"""`out = x * scale + y`, element by element.

x and y are bf16 or fp32 of the same shape, possibly of different dtypes; fp32 arithmetic, one rounding to y's dtype.
Grid: vector cores; a persistent loop over blocks of up to 8192 elements, so few that every core has one (UB: 2 fp32
blocks and the three operand blocks, doubled).
"""

import torch
import triton
import triton.language as tl

from dsv4_triton.autotune.space import Choices, Key, Space, buffering
from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels._checks import FLOATS, check_tensor, output
from dsv4_triton.kernels._tiling import next_power_of_2

_MIN_BLOCK = 512
_MAX_BLOCK = 8192


@triton.jit(do_not_specialize=["N", "scale"])
def _muls_add_kernel(x_ptr, y_ptr, out_ptr, N, scale, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    for block in range(tl.program_id(0), tl.cdiv(N, BLOCK), tl.num_programs(0)):
        base = tl.cast(block, tl.int64) * BLOCK
        live = lane < N - base
        x = tl.load(x_ptr + base + lane, mask=live, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + base + lane, mask=live, other=0.0).to(tl.float32)
        tl.store(out_ptr + base + lane, (x * scale + y).to(out_ptr.dtype.element_ty), mask=live)


def _default(family: Family, key: Key) -> dict[str, int | None]:
    block = next_power_of_2(triton.cdiv(key["elements"], family.vector_cores))
    return {"BLOCK": min(_MAX_BLOCK, max(_MIN_BLOCK, block)), "multibuffer": None}


def _candidates(family: Family, key: Key) -> Choices:
    return {"BLOCK": (512, 1024, 2048, 4096, 8192, 16384), **buffering(family)}


SPACE = Space("muls_add", default=_default, candidates=_candidates, buckets=("elements",))


def muls_add(x: torch.Tensor, y: torch.Tensor, scale: float, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """`x * scale + y` in fp32, rounded once to y's dtype.

    x and y have one shape (any rank) and are contiguous, bf16 or fp32 each; `out` has y's shape and dtype and may be
    y, or x where the dtypes agree.
    """
    check_tensor("muls_add", "x", x, getattr(x, "shape", ()), FLOATS)
    check_tensor("muls_add", "y", y, x.shape, FLOATS, device=x.device)
    out = output("muls_add", "out", out, y.shape, y.dtype, y.device)
    if out.numel() == 0:
        return out
    family = family_of(x.device.type)
    config = SPACE(family, elements=out.numel(), x=x.dtype, y=y.dtype)
    grid = (min(triton.cdiv(out.numel(), config["BLOCK"]), family.vector_cores),)
    _muls_add_kernel[grid](x, y, out, out.numel(), float(scale), BLOCK=config["BLOCK"], **config.options)
    return out
