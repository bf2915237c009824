"""Cache pages as vllm-ascend's tables describe them, read from bytes with numpy alone.

Nothing here comes from the package: the tables are `get_dsv4_block_sizes` of vllm-ascend (rows per page and the two
padded page sizes) and its row formats, so that the package can be held against them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Bytes = np.ndarray

BLOCKS = {
    "a2": {128: (128, 128, 8, 32), 64: (64, 64, 4, 16), 32: (32, 32, 2, 8)},
    "a3": {128: (128, 128, 8, 32), 64: (64, 64, 4, 16), 32: (32, 32, 2, 8)},
    "a5": {128: (128, 128, 8, 16), 64: (64, 64, 4, 8), 32: (32, 32, 2, 4)},
}
"""Rows per page of compressed rows and keys, window rows, c4 states and c128 states, by family and --block-size."""
PADDED = {
    "a2": {128: (16640, 131072), 64: (8320, 65536), 32: (4160, 32768)},
    "a3": {128: (16640, 131072), 64: (8320, 65536), 32: (4160, 32768)},
    "a5": {128: (16896, 81920), 64: (8448, 40960), 32: (4224, 20480)},
}
"""Bytes of a padded page: those of keys and their state, and all others."""
FINE = {"window": 64, "c4": 64, "c128": 2, "keys": 64, "c4 state": 4, "key state": 4, "c128 state": 8}
"""Rows per page of geometry `fine`, whose pages are not padded."""
ROW_BYTES = {
    "a2": {"window": 1024, "c4": 1024, "c128": 1024, "keys": 130},
    "a3": {"window": 1024, "c4": 1024, "c128": 1024, "keys": 130},
    "a5": {"window": 640, "c4": 640, "c128": 640, "keys": 132},
}
STATE_BYTES = {"c4 state": 8192, "key state": 2048, "c128 state": 4096}
KINDS = (*ROW_BYTES["a2"], *STATE_BYTES)


def rows_per_page(family: str, block_size: int | None) -> dict[str, int]:
    """Rows of a page of each kind; `block_size` None is geometry `fine`."""
    if block_size is None:
        return FINE
    compressed, window, c4_state, c128_state = BLOCKS[family][block_size]
    rows = (window, compressed, compressed, compressed, c4_state, c4_state, c128_state)
    return dict(zip(KINDS, rows, strict=True))


def page_bytes(family: str, block_size: int | None) -> dict[str, int]:
    """Bytes from one page of a kind to the next."""
    rows = rows_per_page(family, block_size)
    if block_size is None:
        return {kind: rows[kind] * row_bytes(family)[kind] for kind in KINDS}
    keys, others = PADDED[family][block_size]
    return {kind: keys if kind in ("keys", "key state") else others for kind in KINDS}


def row_bytes(family: str) -> dict[str, int]:
    return ROW_BYTES[family] | STATE_BYTES


def floats(bits: Bytes) -> Bytes:
    """bf16 bytes as fp32 values."""
    return (bits.copy().view("<u2").astype(np.uint32) << 16).view(np.float32)


def e4m3(codes: Bytes) -> Bytes:
    """fp32 values of e4m3 codes: sign, four bits of exponent biased by 7, three of mantissa; no infinities."""
    codes = codes.astype(np.int64)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    value = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    value[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -value, value).astype(np.float32)


def round_to_e4m3(values: Bytes) -> Bytes:
    """The nearest e4m3 values, ties to the even code."""
    grid = e4m3(np.arange(127, dtype=np.uint8))
    above = np.searchsorted(grid, np.abs(values)).clip(0, 126)
    below = (above - 1).clip(0)
    up, down = grid[above] - np.abs(values), np.abs(values) - grid[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return np.copysign(grid[code], values)


@dataclass(frozen=True)
class Page:
    """One page of a kind; every read marks its bytes in `read`, so that the rest can be checked too."""

    family: str
    kind: str
    rows: int
    data: Bytes
    read: Bytes

    def _take(self, start: int, count: int) -> Bytes:
        self.read[start : start + count] = True
        return self.data[start : start + count]

    def row(self, index: int) -> Bytes:
        """The fp32 values of a row; of keys without their scale."""
        assert 0 <= index < self.rows
        if self.kind == "keys":
            codes = self._take(index * 128, 128)
            return e4m3(codes) if self.family == "a5" else codes.view(np.int8).astype(np.float32)
        size = row_bytes(self.family)[self.kind]
        data = self._take(index * size, size)
        if self.kind in STATE_BYTES:
            return data.copy().view("<f4")
        if self.family != "a5":
            return floats(data)
        assert not data[583:].any(), "padding of a record"
        scales = np.repeat(2.0 ** (data[576:583].astype(np.float64) - 127), 64)
        return np.concatenate(((e4m3(data[128:576]) * scales).astype(np.float32), floats(data[:128])))

    def record_exponents(self, index: int) -> list[int]:
        """Exponents of a record's seven scales."""
        start = index * 640 + 576
        return [int(byte) - 127 for byte in self.data[start : start + 7]]

    def scale(self, index: int) -> float:
        """The scale of a key; scales follow after all keys of the page."""
        size, dtype = (4, "<f4") if self.family == "a5" else (2, "<f2")
        return float(self._take(self.rows * 128 + index * size, size).copy().view(dtype)[0])
