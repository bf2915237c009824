"""Block sizes that several launchers choose the same way."""

from __future__ import annotations


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n` (1 for n <= 1)."""
    return 1 << max(0, n - 1).bit_length()


def even_block(n: int, limit: int) -> int:
    """The largest power of two up to `limit` that divides `n`, or `n` itself where it fits and none of at least 16
    does."""
    block = min(n & -n, 1 << (limit.bit_length() - 1))
    return n if block < 16 and n <= limit else block
