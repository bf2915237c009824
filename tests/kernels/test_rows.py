"""fp8 records: the byte layout, and that they hold exactly what the fp8 simulation leaves in a bf16 cache."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from dsv4_triton.kernels import _rows
from dsv4_triton.kernels.kv_norm_rope_insert import kv_norm_rope_insert
from dsv4_triton.reference import rows
from dsv4_triton.reference.fake_quant import fp8sim64
from dsv4_triton.reference.kv_norm_rope_insert import kv_norm_rope_insert as reference_insert
from tests.kernels.paging import clone, ints, pages, whole
from tests.kernels.rotary import table
from tests.numeric import assert_equal, poisoned


@triton.jit
def _unpack_kernel(byte_ptr, y_ptr, ROWS: tl.constexpr):
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, 512)[None, :]
    data = tl.load(byte_ptr + row * 640 + 128 + column)
    tl.store(y_ptr + row * 512 + column, _rows.dequantise_rows(data, ROWS))


def hard_rows(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows with groups from 1e-6 to 1e6, a zero group and a signed zero."""
    x = torch.randn(count, 512) * torch.logspace(-6, 6, 512)[torch.randperm(512)]
    x[0, 64:128] = 0.0
    x[0, 65] = -0.0
    return x.to(dtype)


def without_signed_zeros(cache: torch.Tensor) -> torch.Tensor:
    """Bytes with the e4m3 code of -0 as +0: kernels do not keep the sign of zero."""
    cache = cache.clone()
    codes = cache[..., 128:576]
    codes[codes == 0x80] = 0
    return cache


def test_layout_by_hand():
    row = torch.zeros(1, 512)
    row[0, 0], row[0, 1], row[0, 447], row[0, 448], row[0, 511] = 448.0, -1.0, 1792.0, 1.0, -2.0
    record = rows.pack(row)[0]
    assert record.shape == (640,) and record.dtype == torch.uint8
    assert record[:2].tolist() == [0x80, 0x3F] and record[126:128].tolist() == [0x00, 0xC0]
    assert record[128:131].tolist() == [0x7E, 0xB8, 0] and record[575] == 0x7E
    assert record[576:583].tolist() == [127] + [127 - 22] * 5 + [129]
    assert not record[583:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_record_is_the_simulated_row(dtype):
    x = hard_rows(50, dtype)
    unpacked = rows.unpack(rows.pack(x))
    assert_equal(unpacked[:, :448].contiguous(), fp8sim64(x[:, :448].contiguous()).float())
    assert_equal(unpacked[:, 448:].contiguous(), x[:, 448:].bfloat16().float())


def test_the_device_unpacks_what_the_reference_packed():
    x = hard_rows(16, torch.bfloat16)
    _, as_bytes = _rows.record_views(rows.pack(x)[None])
    y = poisoned((16, 512), torch.float32)
    _unpack_kernel[(1,)](as_bytes, y, ROWS=16)
    assert_equal(y[:, :448].contiguous(), rows.unpack(rows.pack(x))[:, :448].contiguous())


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_insert_writes_records_and_nothing_else(tokens, dtype):
    """Byte equality with the reference; a mean square that is a power of four has one possible norm."""
    signs = torch.where(torch.rand(tokens, 512) < 0.5, -1.0, 1.0)
    kv = (signs * 2.0 ** torch.randint(-6, 6, (tokens, 1))).to(dtype)
    weight = (torch.randn(512) * torch.logspace(-4, 4, 512)).to(dtype)
    positions = torch.arange(tokens, dtype=torch.int32) + 3
    slots = torch.randperm(tokens, dtype=torch.int32) + 17
    if tokens > 4:
        slots[2], positions[7] = -1, -1
    cache = pages(tokens // 16 + 3, 16, 640, torch.uint8)
    expected = clone(cache)
    cos_sin = table(positions)
    kv_norm_rope_insert(kv, weight, positions, cos_sin, cache, slots, eps=0.0)
    reference_insert(kv, weight, positions, cos_sin, expected, slots, eps=0.0)
    assert_equal(without_signed_zeros(cache.contiguous()), without_signed_zeros(expected.contiguous()))
    live = torch.zeros(cache.shape[:2], dtype=torch.bool).flatten()
    live[slots[(slots >= 0) & (positions >= 0)].long()] = True
    untouched = pages(*cache.shape, torch.uint8)
    untouched.copy_(torch.where(live.unflatten(0, cache.shape[:2])[..., None], cache, untouched))
    assert_equal(whole(cache), whole(untouched), "rows of other slots and gaps between pages")


def test_record_caches_are_checked():
    kv, weight, cos_sin, slot = torch.zeros(1, 512), torch.ones(512), torch.zeros(1, 64), ints(0)
    for cache, message in (
        (torch.zeros(2, 4, 512, dtype=torch.uint8), "expected \\(any, any, 640\\)"),
        (pages(2, 4, 640, torch.uint8, gap=2), "multiple of 64"),
    ):
        with pytest.raises(ValueError, match=message):
            kv_norm_rope_insert(kv, weight, slot, cos_sin, cache, slot, eps=1e-6)
