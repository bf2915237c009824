"""The last tokens of 1,048,576, with page tables that name few blocks, which lie more than 2^31 elements apart.

Every op that reads or writes a paged cache gives there, bit for bit, what it gives in a small cache. Of the memory only
what is touched exists. The ops that these take the place of have such cases in their own tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from dsv4_triton.bench.registry.make import reserve
from dsv4_triton.device import A2, A5, HOST, Family, acting_as
from dsv4_triton.hadamard import sylvester
from dsv4_triton.kernels._index_quant import SCALE_DTYPES, codes
from dsv4_triton.kernels.compressor_fold import compressor_fold
from dsv4_triton.kernels.compressor_fold_keys import compressor_fold_keys
from dsv4_triton.kernels.indexer_score import indexer_score
from dsv4_triton.kernels.indexer_topk import indexer_topk
from dsv4_triton.kernels.latent_norm_insert import latent_norm_insert
from dsv4_triton.kernels.sparse_attention import sparse_attention
from dsv4_triton.kernels.token_slots import token_slots
from dsv4_triton.reference.index_quant import quantise_rows
from dsv4_triton.reference.rows import RECORD_BYTES, pack
from dsv4_triton.reference.sparse_attention import sparse_attention as reference_attention
from tests.kernels.paging import ints, pages
from tests.kernels.rotary import LAST_POSITION, table
from tests.kernels.test_sparse_attention import TOLERANCE
from tests.numeric import assert_close, assert_equal

BF16, FP32 = torch.bfloat16, torch.float32
CONTEXT = LAST_POSITION + 1
FAR = (1 << 31) + 64
"""Elements from one block to the next."""
LAST = torch.arange(CONTEXT - 3, CONTEXT, dtype=torch.int32)
REQ = torch.zeros(3, dtype=torch.int32)


def away(near: torch.Tensor) -> torch.Tensor:
    """A copy of the blocks of `near` [blocks, rows, ...], FAR elements apart."""
    size = (len(near) - 1) * FAR + near[0].numel()
    far = reserve((size,), near.dtype).as_strided(near.shape, (FAR, *near[0].contiguous().stride()))
    far.copy_(near)
    return far


def table_of(rows: Iterable[int], per_block: int, of: int) -> torch.Tensor:
    """Page table [1, of / per_block] of one request that holds these of `of` rows in blocks 1, 2, ..."""
    named = torch.zeros(1, of // per_block, dtype=torch.int32)
    columns = torch.tensor(sorted({row // per_block for row in rows}))
    named[0, columns] = torch.arange(1, len(columns) + 1, dtype=torch.int32)
    return named


def alternating(per_block: int, of: int) -> torch.Tensor:
    """A page table of which every second column is block 1, the others block 2."""
    return (torch.arange(of // per_block, dtype=torch.int32) % 2 + 1)[None]


def cos_sin(positions: torch.Tensor) -> torch.Tensor:
    return table(positions, size=CONTEXT, base=160000.0)


def slots(per_block: int, ratio: int = 1) -> torch.Tensor:
    """Where the last tokens write, in block 2 of a table of two blocks."""
    rows = CONTEXT // ratio
    found = token_slots(
        LAST, REQ, table_of((rows - 1 - per_block, rows - 1), per_block, rows), rows_per_block=per_block, ratio=ratio
    )
    closing = (LAST + 1) % ratio == 0
    assert_equal(found, torch.where(closing, 2 * per_block + LAST // ratio % per_block, -1).int())
    return found


@pytest.mark.parametrize(("record", "dtype"), [(False, FP32), (True, BF16)])
def test_latent_norm_insert(record: bool, dtype: torch.dtype) -> None:
    window = pages(3, 16, RECORD_BYTES, torch.uint8) if record else pages(3, 16, 512, dtype)
    caches = {"cache": window, "state": pages(3, 16, 2048, FP32), "index_state": pages(3, 16, 512, FP32)}
    far = {name: away(near) for name, near in caches.items()}
    inputs: dict[str, Any] = {
        "latent": torch.randn(3, 48).to(dtype), "latent_weight": torch.randn(48), "kv": torch.randn(3, 512).to(dtype),
        "kv_weight": torch.randn(512).to(dtype), "positions": LAST, "cos_sin": cos_sin(LAST), "slots": slots(16),
        "eps": 1e-6, "proj": torch.randn(3, 2048), "ape": torch.randn(4, 1024), "state_slots": slots(16),
        "index_proj": torch.randn(3, 512), "index_ape": torch.randn(4, 256), "index_slots": slots(16),
    }  # fmt: skip
    assert_equal(latent_norm_insert(**inputs, **far), latent_norm_insert(**inputs, **caches), "latent")
    for name, near in caches.items():
        assert_equal(far[name], near.contiguous(), name)


@pytest.mark.parametrize(
    ("dtype", "key_dtype", "record"),
    [(FP32, FP32, False), (BF16, torch.int8, True)],
)
def test_compressor_fold_keys(dtype: torch.dtype, key_dtype: torch.dtype, record: bool) -> None:
    states = [pages(3, 8, width, FP32).copy_(torch.randn(3, 8, width)) for width in (2048, 512)]
    where = table_of((CONTEXT - 16, CONTEXT - 8), 8, CONTEXT)
    scale = SCALE_DTYPES.get(key_dtype)
    caches: dict[str, Any] = {
        "cache": pages(3, 2, RECORD_BYTES, torch.uint8) if record else pages(3, 2, 512, dtype),
        "key_cache": pages(3, 2, 128, key_dtype, gap=32),
        "scale_cache": None if scale is None else pages(3, 2, 1, scale, gap=8).squeeze(-1),
    }
    far = {name: None if near is None else away(near) for name, near in caches.items()}
    inputs: dict[str, Any] = {
        "state_table": where, "slots": slots(2, 4), "weight": torch.randn(512).to(dtype), "key_state_table": where,
        "key_slots": slots(2, 4), "key_weight": torch.randn(128).to(dtype), "hadamard": sylvester(128, dtype=dtype),
        "token_req": REQ, "positions": LAST, "cos_sin": cos_sin(torch.tensor([CONTEXT - 4])), "eps": 1e-6,
        "fake_quant": record,
    }  # fmt: skip
    compressor_fold_keys(**inputs, state=states[0], key_state=states[1], **caches)
    compressor_fold_keys(**inputs, state=away(states[0]), key_state=away(states[1]), **far)
    for name, near in caches.items():
        if near is not None:
            assert_equal(codes(far[name]), codes(near.contiguous()), name)


def test_compressor_fold_of_128_tokens() -> None:
    state = pages(3, 64, 1024, FP32).copy_(torch.randn(3, 64, 1024))
    near = pages(3, 2, 512, FP32)
    far = away(near)
    where = table_of(range(CONTEXT - 128, CONTEXT), 64, CONTEXT)
    for rows, cache in ((state, near), (away(state), far)):
        compressor_fold(
            rows, where, REQ, LAST, slots(2, 128), torch.ones(512), cos_sin(torch.tensor([CONTEXT - 128])),
            ratio=128, eps=1e-6, cache=cache,
        )  # fmt: skip
    assert_equal(far, near.contiguous())


@pytest.mark.parametrize("dtype", [torch.int8, FP32])
def test_indexer_of_all_entries(dtype: torch.dtype) -> None:
    """262,144 scores a token, and the choice among them."""
    entries, where = CONTEXT // 4, alternating(64, CONTEXT // 4)
    keys, scales = quantise_rows(torch.randn(3 * 64, 128), dtype)
    keys = keys.view(3, 64, 128)
    q, q_scale = quantise_rows(torch.randn(3, 8, 128), dtype)
    caches = (keys, None) if scales is None else (keys, scales.view(3, 64))
    weights, visible = torch.randn(3, 8), (LAST + 1) // 4
    near, far = (
        indexer_score(q, q_scale, weights, *pair, where, REQ, visible, max_entries=entries)
        for pair in (caches, tuple(None if cache is None else away(cache) for cache in caches))
    )
    assert_equal(far, near)
    repeats = near[:, :128].repeat(1, entries // 128)
    repeats[torch.arange(entries) >= visible[:, None]] = float("-inf")
    assert_equal(near, repeats)
    chosen = indexer_topk(far, visible, 512).long()
    assert ((chosen >= 0) & (chosen < visible[:, None])).all()
    best = far.sort(dim=1, descending=True, stable=True).indices[:, :512]
    assert_equal(chosen.sort(dim=1).values, best.sort(dim=1).values)


@pytest.mark.parametrize("compressed", ["selected", "dense"])
@pytest.mark.parametrize(("family", "record"), [(HOST, False), (A2, False), (A5, True)])
def test_sparse_attention(family: Family, record: bool, compressed: str) -> None:
    def cache(rows: int) -> torch.Tensor:
        values = torch.randn(3 * rows, 512)
        return (pack(values) if record else values.to(BF16)).view(3, rows, -1)

    window, entries = cache(64), cache(64)
    ratio, arguments = (4, {}) if compressed == "selected" else (128, {"n_vis": (LAST + 1) // 128})
    if compressed == "selected":
        last = CONTEXT // 4 - 2
        arguments["indices"] = torch.cat((ints(0, last), torch.randperm(last)[:510].int() % last))[None].repeat(3, 1)
    inputs = (torch.randn(8), REQ, LAST)
    where = table_of((CONTEXT - 128, CONTEXT - 1), 64, CONTEXT)
    arguments |= {"scale": 512**-0.5, "cmp_table": alternating(64, CONTEXT // ratio)}
    q = torch.randn(3, 8, 512).to(BF16)
    with acting_as(family):
        near = sparse_attention(q, window, where, *inputs, **arguments, cmp_cache=entries)
        far = sparse_attention(q, away(window), where, *inputs, **arguments, cmp_cache=away(entries))
    assert_equal(far, near)
    expected = reference_attention(q, window, where, *inputs, **arguments, cmp_cache=entries)
    assert_close(near, expected, **TOLERANCE[BF16])
