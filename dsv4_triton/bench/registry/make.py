"""Tensors of the cases. Data can be left unwritten: then it costs address space but no memory and no time.

Control tensors (positions, tables, slots, indices) are always real. They depend on the case alone, while data also
depends on the seed.
"""

from __future__ import annotations

import math
import mmap

import torch

from dsv4_triton.backend.geometry import Pages

POOL_BYTES = 1 << 30
"""Bound of a cache's pages; requests that need more share them, as a prefix cache would let them."""
PAGE_GAP = 4096
"""Bytes between two pages: caches of several layers are packed into one block, so pages never touch."""
_LARGE = 1 << 24
_PATTERN = 4_000_037
"""Random values that are repeated to fill a tensor; no multiple of any row width, so that rows differ."""
_PATTERN_ROWS = 4093


def reserve(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """An unwritten tensor. On the CPU a large one only reserves addresses: not even more than the machine's memory is
    refused, and only what is written takes any."""
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size < _LARGE:
        return torch.empty(shape, dtype=dtype, device=device)
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


class Maker:
    """Makes the tensors of one case on `device`; with `fill`, data is random instead of unwritten."""

    def __init__(self, device: torch.device | str, fill: bool, seed: int) -> None:
        self.device, self.fill = device, fill
        self._random = torch.Generator().manual_seed(seed)
        self._control = torch.Generator().manual_seed(0)

    def to(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of control values, on the device."""
        return tensor.to(self.device)

    def normal(self, *shape: int, std: float = 1.0, mean: float = 0.0) -> torch.Tensor:
        """Random fp32 values on the CPU, for the making of other data."""
        return torch.randn(shape, generator=self._random) * std + mean

    def data(
        self, *shape: int, dtype: torch.dtype = torch.bfloat16, std: float = 1.0, mean: float = 0.0
    ) -> torch.Tensor:
        """Activations or weights: normal values."""
        tensor = reserve(shape, dtype, self.device)
        if self.fill:
            self._repeat(tensor.view(-1), self.normal(min(tensor.numel(), _PATTERN), std=std, mean=mean).to(dtype))
        return tensor

    def _repeat(self, target: torch.Tensor, pattern: torch.Tensor) -> None:
        pattern = pattern.to(self.device)
        for start in range(0, len(target), max(1, len(pattern))):
            part = target[start : start + len(pattern)]
            part.copy_(pattern[: len(part)])

    def permutation(self, n: int) -> torch.Tensor:
        """0..n-1 in an order that depends on the case alone."""
        return torch.randperm(n, generator=self._control)

    def pages(self, blocks: int, pages: Pages) -> torch.Tensor:
        """Unwritten pages [blocks, rows, width], with their padding and PAGE_GAP bytes between them."""
        stride = (pages.page_bytes + PAGE_GAP) // pages.dtype.itemsize
        memory = reserve((blocks, stride), pages.dtype, self.device)
        return memory[:, : pages.rows * pages.width].unflatten(1, (pages.rows, pages.width))

    def fill_rows(self, pages: torch.Tensor, rows: torch.Tensor) -> None:
        """Write `rows` [n, ...] over and over to the rows of `pages` [blocks, rows per block, ...]."""
        if not self.fill:
            return
        rows = rows.to(self.device)
        blocks, per_block = pages.shape[:2]
        for start in range(0, blocks, 1024):
            part = pages[start : start + 1024]
            at = (torch.arange(part.shape[0] * per_block, device=self.device) + start * per_block) % len(rows)
            part.copy_(rows[at].view(part.shape))

    def row_pattern(self, width: int, std: float = 1.0) -> torch.Tensor:
        """fp32 rows on the CPU for `fill_rows`."""
        return self.normal(_PATTERN_ROWS if self.fill else 0, width, std=std)
