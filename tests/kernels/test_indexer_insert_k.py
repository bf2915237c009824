"""`indexer_insert_k` against its reference, over every storage format."""

from __future__ import annotations

import pytest
import torch

from dsv4_triton.hadamard import sylvester
from dsv4_triton.kernels._index_quant import SCALE_DTYPES, codes
from dsv4_triton.kernels.indexer_insert_k import indexer_insert_k
from dsv4_triton.reference.hadamard import hadamard
from dsv4_triton.reference.indexer_insert_k import indexer_insert_k as reference
from dsv4_triton.reference.token_slots import token_slots
from tests.kernels.paging import clone, far_pages, ints, pages, shuffled_table, whole
from tests.numeric import assert_close, assert_equal, poisoned

FORMATS = [torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float32]


def caches(blocks: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Poisoned key pages and, for formats with a scale, scale pages; the strides of the two differ."""
    scale = SCALE_DTYPES.get(dtype)
    scales = None if scale is None else pages(blocks, rows, 1, scale, gap=8).squeeze(-1)
    return pages(blocks, rows, 128, dtype, gap=32), scales


@pytest.mark.parametrize(
    ("dtype", "e_dtype"), [*((dtype, torch.bfloat16) for dtype in FORMATS), (torch.float32, torch.float32)]
)
def test_integer_rows_are_exact(dtype: torch.dtype, e_dtype: torch.dtype) -> None:
    """Small integers have exact sums, so all memory of the caches must agree bit for bit. Skipped rows are NaN."""
    e = torch.randint(-8, 9, (29, 128)).to(e_dtype)
    positions = torch.arange(29, dtype=torch.int32)
    req = (positions >= 17).int()
    slots = token_slots(
        torch.where(req > 0, positions - 17, positions), req, shuffled_table(2, 3), rows_per_block=2, ratio=4
    )
    e[slots < 0] = float("nan")
    e[int(slots.argmax())] = 0
    keys, scales = caches(7, 2, dtype)
    expected_keys, expected_scales = clone(keys), None if scales is None else clone(scales)
    matrix = sylvester(128, dtype=e_dtype)
    indexer_insert_k(e, matrix, keys, scales, slots)
    reference(e, matrix, expected_keys, expected_scales, slots)
    assert_equal(codes(whole(keys)), codes(whole(expected_keys)), "key memory")
    if scales is not None and expected_scales is not None:
        assert_equal(whole(scales), whole(expected_scales), "scale memory")


@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize("dtype", FORMATS)
def test_stored_rows_stand_for_the_rotated_entries(dtype: torch.dtype, tokens: int) -> None:
    """What a reader gets back (value times scale) is the rotated entry up to half a step of the format."""
    e = torch.randn(tokens, 128)
    matrix = sylvester(128)
    keys, scales = caches(tokens + 1, 1, dtype)
    slots = (torch.randperm(tokens) + 1).to(torch.int32)
    indexer_insert_k(e, matrix, keys, scales, slots)
    rows = keys[slots.long(), 0].float()
    if scales is not None:
        rows = rows * scales[slots.long()].float()
    # int8: half a step of amax / 127, amax < 5; e4m3: 2^-4 of the value; bf16: 2^-8; fp32: the order of the sum.
    bound = {
        torch.int8: (0.0, 0.5 * 5 / 127),
        torch.float8_e4m3fn: (2**-4, 2**-9 * 5 / 224),
        torch.bfloat16: (2**-8, 1e-6),
        torch.float32: (1e-5, 1e-6),
    }[dtype]
    assert_close(rows, hadamard(e, matrix), rtol=bound[0], atol=bound[1])


def test_scale_stands_at_the_row_of_its_key() -> None:
    """Row i of a page gets a key of size 2^i: a reader that pairs rows and scales differently would be off by 2^k."""
    rows = 16
    e = torch.randn(rows, 128) * 2.0 ** torch.arange(rows)[:, None]
    keys, scales = caches(3, rows, torch.int8)
    assert scales is not None
    indexer_insert_k(e, sylvester(128), keys, scales, torch.arange(rows, 2 * rows, dtype=torch.int32))
    read = keys[1].float() * scales[1].float()[:, None]
    norm = e.norm(dim=1)
    assert_close(read.norm(dim=1) / norm, torch.ones(rows), rtol=0.02, atol=0)
    assert bool((codes(whole(keys)).view(torch.int8)[: rows * 128] == -77).all()), "block 0 is untouched"


def test_block_offset_beyond_int32() -> None:
    keys, scales = far_pages(2, 128, torch.int8), torch.zeros(3, 2, dtype=torch.float16)
    e = torch.randint(-8, 9, (1, 128)).bfloat16()
    indexer_insert_k(e, sylvester(128, dtype=e.dtype), keys, scales, ints(5))
    near, near_scales = torch.zeros(3, 2, 128, dtype=torch.int8), torch.zeros(3, 2, dtype=torch.float16)
    reference(e, sylvester(128, dtype=e.dtype), near, near_scales, ints(5))
    assert_equal(keys[2, 1], near[2, 1])
    assert_equal(scales, near_scales)


def test_nothing_to_insert() -> None:
    keys, scales = caches(2, 4, torch.int8)
    before = whole(keys).clone()
    indexer_insert_k(torch.empty(0, 128), sylvester(128), keys, scales, ints())
    indexer_insert_k(poisoned((2, 128), torch.float32), sylvester(128), keys, scales, ints(-1, -1))
    assert_equal(whole(keys), before)


def test_errors_name_the_argument() -> None:
    e, matrix, slots = torch.randn(1, 128), sylvester(128), ints(4)
    keys, scales = torch.zeros(2, 4, 128, dtype=torch.int8), torch.zeros(2, 4, dtype=torch.float16)
    with pytest.raises(ValueError, match="scale_cache is missing"):
        indexer_insert_k(e, matrix, keys, None, slots)
    with pytest.raises(ValueError, match="scale_cache is given"):
        indexer_insert_k(e, matrix, keys.float(), scales, slots)
    with pytest.raises(TypeError, match="scale_cache has dtype"):
        indexer_insert_k(e, matrix, keys, scales.float(), slots)
    with pytest.raises(TypeError, match="key_cache has dtype"):
        indexer_insert_k(e, matrix, keys.half(), None, slots)
    with pytest.raises(ValueError, match="e has shape"):
        indexer_insert_k(torch.randn(1, 64), matrix, keys, scales, slots)
