"""Device helpers: rotation of the last 64 features in half layout, where [even(32) | odd(32)] are stored side by side.

The angle's table row is `[cos(32) | sin(32)]` fp32. Half layout keeps every access contiguous; the model permutes its
weights once at load time, which changes no score and no output.
"""

import triton
import triton.language as tl

HALF = tl.constexpr(32)
"""Pairs that are rotated: half of the 64 rotary features."""


@triton.jit
def load_cos_sin(cos_sin_ptr, position, INVERSE: tl.constexpr):
    """cos and sin `[32]` fp32 of one position (a scalar >= 0); the sine is negated for the inverse rotation."""
    row = cos_sin_ptr + position.to(tl.int64) * (2 * HALF)
    lane = tl.arange(0, HALF)
    cos = tl.load(row + lane)
    sin = tl.load(row + HALF + lane)
    if INVERSE:
        sin = -sin
    return cos, sin


@triton.jit
def rotate(a, b, cos, sin):
    """`(a + jb) * (cos + j sin)` as the pair of its parts: `a cos - b sin`, `b cos + a sin`."""
    return a * cos - b * sin, b * cos + a * sin


def heads_per_block(heads: int, limit: int) -> int:
    """The largest power of two that divides `heads`, at most `limit`: blocks of heads then need no mask."""
    return min(heads & -heads, limit)
