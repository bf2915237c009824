"""Page layouts of the caches: rows, bytes and padding of every kind of page, for each geometry and device family.

A page holds `rows` rows of one cache; a row stands for `ratio` tokens. With `--block-size` B:

    cache             row of                     fine: rows    vllm-ascend: rows     padded with
    window            512 values or a record     64            B                     rows
    c4 compressed     512 values or a record     64            B                     rows
    c128 compressed   512 values or a record     2             B                     rows
    index keys        128 values and a scale     64            B                     keys
    c4 state          2048 fp32                  4             B / 16                rows
    index state       512 fp32                   4             B / 16                keys
    c128 state        1024 fp32                  8             B / 4, records B / 8  rows

`fine` pads nothing, B is 256, and prefix-cache hits come every 256 tokens. In `vllm-ascend` B is 32, 64 or 128, pages
are padded to the largest of their class ("rows" or "keys"), so that two sizes serve all caches, and hits come every
128 B tokens. Source of its tables: `get_dsv4_block_sizes` of vllm-ascend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dsv4_triton.config import HEAD_DIM, INDEX_DIM, WINDOW
from dsv4_triton.device import IndexFormat, RowFormat
from dsv4_triton.options import Choices, Geometry

RECORD_BYTES = 640
"""Row of the fp8 record format: 64 bf16 RoPE values, 448 e4m3 values, 7 e8m0 scales, padding."""
INDEX_STORAGE = {"int8": (torch.int8, torch.float16), "e4m3": (torch.float8_e4m3fn, torch.float32)}
"""Key and scale dtype of the quantised indexer formats."""
STATE_WINDOW = {4: 8, 128: 128}
"""Tokens a compressor state row stays needed: both windows of an overlapping c4 entry, the one window of c128."""

FINE_TOKENS = 256
FINE_WINDOW_ROWS = 64
FINE_STATE_ROWS = {4: 4, 128: 8}


def overlap(ratio: int) -> int:
    """Windows that one compressed entry of this ratio folds: c4 windows overlap, c128 windows do not."""
    return 2 if ratio == 4 else 1


@dataclass(frozen=True)
class Pages:
    """Pages of one kind of cache: `rows` rows of `width` elements, each row for `ratio` tokens.

    `window` is the number of tokens a row stays needed, None as long as the request lives; `padded` the bytes from one
    page to the next where that is more than the rows take.
    """

    rows: int
    ratio: int
    width: int
    dtype: torch.dtype
    window: int | None = None
    padded: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens that one page stands for."""
        return self.rows * self.ratio

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of a page with its padding."""
        return self.padded or self.rows * self.row_bytes


@dataclass(frozen=True)
class Layout:
    """The pages of every cache of a model; `ratios` has the ratio of each of its layers, `shared_indices` the c4 layers
    without index keys."""

    geometry: Geometry
    block_size: int
    ratios: tuple[int, ...]
    window: Pages
    compressed: dict[int, Pages]
    state: dict[int, Pages]
    index_keys: Pages
    index_state: Pages
    index_format: IndexFormat
    shared_indices: frozenset[int] = frozenset()

    @property
    def growing_tokens(self) -> int:
        """Tokens of a page of the model's compressed rows; where c4 and c128 differ, of c4."""
        return self.compressed[4 if 4 in self.ratios else 128].tokens

    @property
    def hit_tokens(self) -> int:
        """Step of prefix-cache hits: the least common multiple of all blocks in use."""
        pages = [self.window]
        for ratio in {4, 128}.intersection(self.ratios):
            pages += [self.compressed[ratio], self.state[ratio]]
        return math.lcm(*(p.tokens for p in pages))

    @property
    def token_bytes(self) -> float:
        """Bytes that a token of context takes in all layers for as long as its request lives, padding included, and in
        `vllm-ascend` the room for keys of layers that have none (`LayerCaches`)."""
        c4, c128 = (self.compressed[ratio].page_bytes / self.compressed[ratio].tokens for ratio in (4, 128))
        keys = self.index_keys.page_bytes / self.index_keys.tokens
        without = len(self.shared_indices) if self.geometry == "fine" else 0
        return self.ratios.count(4) * (c4 + keys) - without * keys + self.ratios.count(128) * c128


def layout(choices: Choices, ratios: Sequence[int], row_format: RowFormat, dtype: torch.dtype) -> Layout:
    """The layout of `choices` for rows in `row_format`; plain rows and plain index keys are kept in `dtype`."""
    width, row_dtype = (HEAD_DIM, dtype) if row_format is RowFormat.PLAIN else (RECORD_BYTES, torch.uint8)
    key_width, key_dtype = INDEX_DIM, dtype
    if choices.index_format != "plain":
        key_width, key_dtype = INDEX_DIM + INDEX_STORAGE[choices.index_format][1].itemsize, torch.uint8
    if choices.geometry == "fine":
        # A model without compressed layers has one group of caches, and vLLM wants --block-size for its block.
        window_rows, state_rows = FINE_WINDOW_ROWS if any(ratios) else FINE_TOKENS, FINE_STATE_ROWS
        rows = {ratio: FINE_TOKENS // ratio for ratio in (4, 128)}
    else:
        window_rows = choices.block_size
        rows = dict.fromkeys((4, 128), choices.block_size)
        share = 8 if choices.family.row_format is RowFormat.RECORD else 4
        state_rows = {4: choices.block_size // 16, 128: choices.block_size // share}
    result = Layout(
        geometry=choices.geometry,
        block_size=choices.block_size,
        ratios=tuple(ratios),
        window=Pages(window_rows, 1, width, row_dtype, window=WINDOW),
        compressed={ratio: Pages(rows[ratio], ratio, width, row_dtype) for ratio in (4, 128)},
        state={ratio: _state(state_rows[ratio], ratio, HEAD_DIM) for ratio in (4, 128)},
        index_keys=Pages(rows[4], 4, key_width, key_dtype),
        index_state=_state(state_rows[4], 4, INDEX_DIM),
        index_format=choices.index_format,
        shared_indices=choices.shared_indices,
    )
    return result if choices.geometry == "fine" else _padded(result)


def _state(rows: int, ratio: int, dim: int) -> Pages:
    """Rows [u | g] of both halves where windows overlap, fp32."""
    return Pages(rows, 1, 2 * overlap(ratio) * dim, torch.float32, window=STATE_WINDOW[ratio])


def _padded(plain: Layout) -> Layout:
    """`plain` with every page padded to the largest of its class."""
    key_bytes = max(plain.index_keys.page_bytes, plain.index_state.page_bytes)
    large = (plain.window, *plain.compressed.values(), *plain.state.values())
    row_bytes = max(pages.page_bytes for pages in large)
    return replace(
        plain,
        window=replace(plain.window, padded=row_bytes),
        compressed={ratio: replace(pages, padded=row_bytes) for ratio, pages in plain.compressed.items()},
        state={ratio: replace(pages, padded=row_bytes) for ratio, pages in plain.state.items()},
        index_keys=replace(plain.index_keys, padded=key_bytes),
        index_state=replace(plain.index_state, padded=key_bytes),
    )
