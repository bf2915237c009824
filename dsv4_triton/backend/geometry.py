"""Cache geometry `fine`: block sizes in tokens, row widths, and how long rows are kept.

The least common multiple of the blocks, HIT_TOKENS, is the step of prefix-cache hits.
"""

from __future__ import annotations

HIT_TOKENS = 256
"""Tokens of a block of compressed rows: 64 rows for ratio 4, 2 rows for ratio 128."""
WINDOW_BLOCK = 64
RECORD_BYTES = 640
"""Row of the fp8 record format: 64 bf16 RoPE values, 448 e4m3 values, 7 e8m0 scales, padding."""
STATE_BLOCK = {4: 4, 128: 8}
STATE_WINDOW = {4: 8, 128: 128}
"""Tokens a compressor state row stays needed: both windows of an overlapping c4 entry, the one window of c128."""


def overlap(ratio: int) -> int:
    """Windows that one compressed entry of this ratio folds: c4 windows overlap, c128 windows do not."""
    return 2 if ratio == 4 else 1
