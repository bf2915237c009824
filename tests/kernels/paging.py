"""Paged tensors for the cache kernels' tests: strided, poisoned, with shuffled block tables."""

from __future__ import annotations

import torch

from tests.numeric import poisoned


def pages(blocks: int, rows: int, width: int, dtype: torch.dtype, *, gap: int = 64) -> torch.Tensor:
    """Poisoned pages [blocks, rows, width] whose block stride is `gap` elements larger than the page."""
    stride = rows * width + gap
    return poisoned(blocks * stride, dtype).as_strided((blocks, rows, width), (stride, width, 1))


def whole(paged: torch.Tensor) -> torch.Tensor:
    """All the memory behind `pages`, gaps included, as one flat tensor."""
    return paged.as_strided((paged.untyped_storage().size() // paged.element_size(),), (1,), 0)


def clone(paged: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides and the same gaps."""
    return whole(paged).clone().as_strided(paged.shape, paged.stride())


def shuffled_table(requests: int, columns: int) -> torch.Tensor:
    """A block table [requests, columns] int32 with distinct blocks from 1 on in random order (block 0 is null)."""
    return (torch.randperm(requests * columns) + 1).reshape(requests, columns).to(torch.int32)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def far_pages(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Pages [3, rows, width] of which block 2 starts more than 2^31 elements in; what is not written takes no space."""
    stride = (1 << 30) + 64
    size = 2 * stride + rows * width
    memory = torch.empty(0, dtype=dtype).set_(torch.UntypedStorage(size * torch.empty(0, dtype=dtype).element_size()))
    return memory.as_strided((3, rows, width), (stride, width, 1))
