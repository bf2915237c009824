"""mHC write-back: the sub-layer's output and the old streams become the new streams.

    out_k = post_k y + sum_j comb[j, k] x_j        k = 0..3; the sum runs over comb's FIRST index

y [T, D], x and out [T, 4, D] bf16 or fp32; post [T, 4], comb [T, 4, 4] fp32. fp32 arithmetic, one rounding. Grid:
vector cores; a persistent loop over (token, block of D). The twenty coefficients are scalars of the token, so every
product is scalar times contiguous row and no tile has a 4-wide axis. UB: 5 fp32 rows of BD, one accumulator, operand
rows doubled. Source of the formula: `hc_post` of the official DeepSeek inference code.
"""

import torch
import triton
import triton.language as tl

from dsv4_triton.device import family_of
from dsv4_triton.kernels._checks import FLOATS, check_tensor, output

_MAX_BLOCK = 3584


@triton.jit
def new_stream(post_ptr, comb_ptr, t, k: tl.constexpr, y, x0, x1, x2, x3):
    """Stream k of token t in fp32, from fp32 rows of the sub-layer's output and of the four old streams."""
    mixed = tl.load(post_ptr + t * 4 + k) * y
    mixed += tl.load(comb_ptr + t * 16 + k) * x0
    mixed += tl.load(comb_ptr + t * 16 + 4 + k) * x1
    mixed += tl.load(comb_ptr + t * 16 + 8 + k) * x2
    mixed += tl.load(comb_ptr + t * 16 + 12 + k) * x3
    return mixed


@triton.jit(do_not_specialize=["T"])
def _hc_post_kernel(y_ptr, x_ptr, post_ptr, comb_ptr, out_ptr, T, D: tl.constexpr, BD: tl.constexpr):
    lane = tl.arange(0, BD)
    blocks: tl.constexpr = D // BD
    for item in range(tl.program_id(0), T * blocks, tl.num_programs(0)):
        t = item // blocks
        column = item % blocks * BD + lane
        row = t.to(tl.int64) * D
        y = tl.load(y_ptr + row + column).to(tl.float32)
        x0 = tl.load(x_ptr + row * 4 + column).to(tl.float32)
        x1 = tl.load(x_ptr + row * 4 + D + column).to(tl.float32)
        x2 = tl.load(x_ptr + row * 4 + 2 * D + column).to(tl.float32)
        x3 = tl.load(x_ptr + row * 4 + 3 * D + column).to(tl.float32)
        for k in tl.static_range(4):
            mixed = new_stream(post_ptr, comb_ptr, t, k, y, x0, x1, x2, x3)
            tl.store(out_ptr + row * 4 + k * D + column, mixed.to(out_ptr.dtype.element_ty))


def _block(D: int) -> int:
    """The largest divisor of D that is a multiple of 16 and at most `_MAX_BLOCK`."""
    return next(D // n for n in range(1, D + 1) if D % n == 0 and D // n <= _MAX_BLOCK and D // n % 16 == 0)


def hc_post(
    y: torch.Tensor,
    x: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """New streams [T, 4, D] from the sub-layer output `y [T, D]` and the streams `x [T, 4, D]` before the sub-layer.

    y and x have one dtype (bf16 or fp32); post [T, 4] and comb [T, 4, 4] are fp32, from `hc_pre`. D is a multiple of
    16. `out` must not overlap x.
    """
    check_tensor("hc_post", "x", x, (None, 4, None), FLOATS)
    T, _, D = x.shape
    check_tensor("hc_post", "y", y, (T, D), x.dtype, device=x.device)
    check_tensor("hc_post", "post", post, (T, 4), torch.float32, device=x.device)
    check_tensor("hc_post", "comb", comb, (T, 4, 4), torch.float32, device=x.device)
    if D % 16:
        raise ValueError(f"hc_post: D is {D}, expected a multiple of 16")
    out = output("hc_post", "out", out, x.shape, x.dtype, x.device)
    if out.numel() == 0:
        return out
    if out.data_ptr() == x.data_ptr():
        raise ValueError("hc_post: out must not be x, every new stream reads all old ones")
    block = _block(D)
    grid = (min(T * (D // block), family_of(x.device.type).vector_cores),)
    _hc_post_kernel[grid](y, x, post, comb, out, T, D=D, BD=block)
    return out
