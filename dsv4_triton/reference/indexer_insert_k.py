"""Reference of `indexer_insert_k`: Hadamard, quantisation and cache insert of indexer keys, docs/model.md section 6."""

from __future__ import annotations

import torch

from dsv4_triton.reference.hadamard import hadamard as rotate
from dsv4_triton.reference.index_quant import quantise_rows


def indexer_insert_k(
    e: torch.Tensor,
    hadamard: torch.Tensor,
    key_cache: torch.Tensor,
    scale_cache: torch.Tensor | None,
    slots: torch.Tensor,
) -> None:
    """Rotate e [T, 128], round to `e.dtype`, quantise to `key_cache.dtype` and write rows whose slot is >= 0.

    key_cache [blocks, rows, 128], scale_cache [blocks, rows] (fp16 for int8, fp32 for e4m3, None otherwise),
    slots [T] int32 (block * rows + offset; -1 = skip). Rows of `e` that are skipped are never read.
    """
    live = (slots >= 0).nonzero().squeeze(-1)
    if not len(live):
        return
    values, scale = quantise_rows(rotate(e[live], hadamard), key_cache.dtype)
    slot = slots[live].long()
    block, offset = slot // key_cache.shape[1], slot % key_cache.shape[1]
    key_cache[block, offset] = values
    if scale_cache is not None and scale is not None:
        scale_cache[block, offset] = scale
