"""Indexer keys: Hadamard rotation, quantisation and insert of the entries that close in this step.

e [T, 128] (bf16 or fp32), hadamard [128, 128] of +-1 in e's dtype, slots [T] int32. Per row with slot >= 0:
y = 128^-0.5 * e H in fp32, rounded to e's dtype; then quantised by the cache's dtype (see `_index_quant`) to
key_cache [blocks, rows, 128] and scale_cache [blocks, rows]. Rows with a negative slot are not read.

Only every fourth token closes an entry and rows go to scattered slots, so a row is one step of vector code: a
weighted sum of the matrix's rows, which stay on the core. The lower half of H is [M, -M] where the upper is [M, M],
so the upper half and the signs of row 64 are enough: y = sum_k H[k] e[k] + H[64] * sum_k H[k] e[64 + k] over k < 64.
Grid: one program per vector core at most, each with a contiguous range of tokens. UB bytes: about 64 * 128 * 10.
Families: all. Source: docs/model.md, sections 6 and 8.
"""

import torch
import triton
import triton.language as tl

from dsv4_triton.autotune.space import Space, buffering
from dsv4_triton.device import family_of
from dsv4_triton.kernels._checks import FLOATS, check_filled, check_tensor
from dsv4_triton.kernels._index_quant import FORMATS, PLAIN, SCALE_DTYPES, codes, quantise_rows

OP = "indexer_insert_k"
DIM = 128


@triton.jit
def store_key(y, keys_ptr, scales_ptr, slot, key_stride, scale_stride, ROWS: tl.constexpr, FORMAT: tl.constexpr):
    """Quantise the rotated key `y [D]` (fp32, rounded to the activations' dtype) into row `slot` (>= 0)."""
    D: tl.constexpr = y.shape[0]
    block = (slot // ROWS).to(tl.int64)
    row = slot % ROWS
    target = keys_ptr + block * key_stride + row * D + tl.arange(0, D)
    if FORMAT == PLAIN:
        tl.store(target, y.to(keys_ptr.dtype.element_ty))
    else:
        values, scale = quantise_rows(y[None, :], FORMAT)
        tl.store(target[None, :], values)
        tl.store(scales_ptr + block * scale_stride + row + tl.zeros((1, 1), tl.int32), scale)


@triton.jit(do_not_specialize=["tokens"])
def _indexer_insert_k_kernel(
    e_ptr,
    hadamard_ptr,
    keys_ptr,
    scales_ptr,
    slots_ptr,
    tokens,
    key_stride,
    scale_stride,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
):
    feature = tl.arange(0, D)
    half = tl.arange(0, D // 2)
    upper = tl.load(hadamard_ptr + half[:, None] * D + feature[None, :]).to(tl.float32)
    sign = tl.load(hadamard_ptr + (D // 2) * D + feature).to(tl.float32)
    share = tl.cdiv(tokens, tl.num_programs(0))
    begin = tl.program_id(0) * share
    for token in range(begin, tl.minimum(begin + share, tokens)):
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            source = e_ptr + tl.cast(token, tl.int64) * D
            first = tl.load(source + half).to(tl.float32)
            second = tl.load(source + D // 2 + half).to(tl.float32)
            y = tl.sum(upper * first[:, None], axis=0) + sign * tl.sum(upper * second[:, None], axis=0)
            y = (y * (D**-0.5)).to(e_ptr.dtype.element_ty).to(tl.float32)
            store_key(y, keys_ptr, scales_ptr, slot, key_stride, scale_stride, ROWS, FORMAT)


SPACE = Space(
    OP, default=lambda family, key: {"multibuffer": None}, candidates=lambda family, key: buffering(family)
)  # fmt: skip
"""Nothing but an option of the compiler: a row is one step."""


def indexer_insert_k(
    e: torch.Tensor,
    hadamard: torch.Tensor,
    key_cache: torch.Tensor,
    scale_cache: torch.Tensor | None,
    slots: torch.Tensor,
) -> None:
    """Rotate, quantise and write the rows of e [T, 128] (bf16 or fp32) whose slot is >= 0, in place.

    hadamard [128, 128] of +-1 in e's dtype. key_cache [blocks, rows, 128] is int8 (scale_cache fp16), float8_e4m3fn
    (scale_cache fp32), or bf16 or fp32 (scale_cache None); scale_cache is [blocks, rows]; both may have any block
    stride. slots [T] int32 (block * rows + offset; -1 = skip). TypeError or ValueError names the argument that does
    not fit.
    """
    check_tensor(OP, "e", e, (None, DIM), FLOATS)
    tokens, device = e.shape[0], e.device
    check_tensor(OP, "hadamard", hadamard, (DIM, DIM), e.dtype, device=device)
    check_tensor(OP, "key_cache", key_cache, (None, None, DIM), tuple(FORMATS), device=device, layout="page")
    check_tensor(OP, "slots", slots, (tokens,), torch.int32, device=device)
    blocks, rows, _ = key_cache.shape
    if (scale_cache is None) != (key_cache.dtype not in SCALE_DTYPES):
        given = "missing" if scale_cache is None else "given"
        raise ValueError(f"{OP}: scale_cache is {given} for keys of dtype {key_cache.dtype}")
    if scale_cache is not None:
        dtype = SCALE_DTYPES[key_cache.dtype]
        check_tensor(OP, "scale_cache", scale_cache, (blocks, rows), dtype, device=device, layout="page")
    if tokens == 0:
        return
    check_filled(OP, key_cache=key_cache)
    scales = key_cache if scale_cache is None else scale_cache
    family = family_of(device.type)
    config = SPACE(family, tokens=tokens, dtype=e.dtype, keys=key_cache.dtype)
    grid = (min(tokens, family.vector_cores),)
    _indexer_insert_k_kernel[grid](
        e,
        hadamard,
        codes(key_cache),
        scales,
        slots,
        tokens,
        key_cache.stride(0),
        scales.stride(0),
        ROWS=rows,
        D=DIM,
        FORMAT=FORMATS[key_cache.dtype],
        **config.options,
    )
