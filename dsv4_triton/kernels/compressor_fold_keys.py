"""Fold the windows of a c4 layer that close in this step, of its main compressor and of its indexer's, in one launch.

    main      as `compressor_fold` with ratio 4                                   -> row slots[t] of the cache
    indexer   as `compressor_fold` with ratio 4 and d = 128, in the activations' dtype, then as `indexer_insert_k`:
              y = 128^-0.5 * e H, rounded, quantised                              -> row key_slots[t] of the key cache

The tokens are cut into contiguous shares: closing tokens are every fourth one, so a strided walk would leave most
programs without work. The main windows of a share are one item and its keys another, all main ones first; with few
tokens a core has one item, with many one of each kind, which cost differently. Keys never leave the core between fold
and insert. Grid: one program per vector core at most. UB bytes: those of `compressor_fold` for d = 512,
and up to 128 * 128 * 4 for the matrix. Families: all. Source: docs/model.md, sections 5, 6 and 8.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton.autotune.space import Choices, Key, Space, buffering
from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels._checks import FLOATS, check_filled, check_tensor
from dsv4_triton.kernels._index_quant import FORMATS, SCALE_DTYPES, codes
from dsv4_triton.kernels._lang import extract_slice
from dsv4_triton.kernels._rope import HALF
from dsv4_triton.kernels._rows import HEAD_DIM, check_rows, is_record, record_views
from dsv4_triton.kernels.compressor_fold import chunk_choices, chunk_problem, chunk_rows, fold_entry, store_entry
from dsv4_triton.kernels.indexer_insert_k import store_key

OP = "compressor_fold_keys"
RATIO = 4
KEY_DIM = 128
_MANY = 8
"""Tokens a core from which on it takes main windows and keys of one share."""


@triton.jit
def _matrix_rows(hadamard_ptr, row: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr):
    """ROWS rows of the matrix from `row` on, as one fp32 vector."""
    return tl.load(hadamard_ptr + row * DIM + tl.arange(0, ROWS * DIM)).to(tl.float32)


@triton.jit
def _load_matrix(hadamard_ptr, DIM: tl.constexpr, FACTORED: tl.constexpr):
    """The parts of the matrix H that `_times_matrix` needs for features [0, 64), [64, 96) and [96, 128), and at last.

    FACTORED: H is the Kronecker product of H8 and H16, and its row k < 8 is row k of H8, each sign once a column of
    H16 [16, 8]; its rows l < 16 are H16, once a column of H8. Otherwise: H is [M, M; M, -M], so its upper half and the
    signs of row 64 are enough.
    """
    if FACTORED:
        first = tl.reshape(_matrix_rows(hadamard_ptr, 0, 4, DIM), (4, 16, 8))
        a = tl.reshape(_matrix_rows(hadamard_ptr, 4, 2, DIM), (2, 16, 8))
        b = tl.reshape(_matrix_rows(hadamard_ptr, 6, 2, DIM), (2, 16, 8))
        return first, a, b, tl.reshape(_matrix_rows(hadamard_ptr, 0, 16, DIM), (16, 8, 16))
    else:
        first = tl.reshape(_matrix_rows(hadamard_ptr, 0, 2 * HALF, DIM), (2 * HALF, DIM))
        a = tl.reshape(_matrix_rows(hadamard_ptr, 0, HALF, DIM), (HALF, DIM))
        b = tl.reshape(_matrix_rows(hadamard_ptr, HALF, HALF, DIM), (HALF, DIM))
        return first, a, b, _matrix_rows(hadamard_ptr, 2 * HALF, 1, DIM)


@triton.jit
def _times_matrix(first, a, b, matrix, matrix_a, matrix_b, last, DIM: tl.constexpr, FACTORED: tl.constexpr):
    """`x H [DIM]` of the features x = [first [1, 64], a [1, 32], b [1, 32]].

    FACTORED: H8 X H16 for x as X [8, 16]: few short operations, for cores where each goes through vector memory.
    """
    if FACTORED:
        turned = tl.sum(matrix * tl.reshape(first, (4, 16))[:, :, None], axis=0)
        turned += tl.sum(matrix_a * tl.reshape(a, (2, 16))[:, :, None], axis=0)
        turned += tl.sum(matrix_b * tl.reshape(b, (2, 16))[:, :, None], axis=0)
        return tl.reshape(tl.sum(last * turned[:, :, None], axis=0), (DIM,))
    else:
        second = tl.sum(matrix_a * tl.reshape(a, (HALF,))[:, None], axis=0)
        second += tl.sum(matrix_b * tl.reshape(b, (HALF,))[:, None], axis=0)
        return tl.sum(matrix * tl.reshape(first, (2 * HALF,))[:, None], axis=0) + last * second


@triton.jit(do_not_specialize=["tokens", "share", "table_stride", "key_table_stride"])
def _compressor_fold_keys_kernel(
    state_ptr, table_ptr, slots_ptr, weight_ptr, result_ptr, byte_ptr,
    key_state_ptr, key_table_ptr, key_slots_ptr, key_weight_ptr, hadamard_ptr, keys_ptr, scales_ptr,
    token_req_ptr, positions_ptr, cos_sin_ptr,
    tokens, share, table_stride, block_stride, result_stride,
    key_table_stride, key_block_stride, key_stride, scale_stride, eps,
    ROWS: tl.constexpr, RESULT_ROWS: tl.constexpr, RESULT_WIDTH: tl.constexpr, RECORD: tl.constexpr,
    FAKE_QUANT: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr,
    KEY_ROWS: tl.constexpr, KEY_STATE_ROWS: tl.constexpr, KEY_CHUNK: tl.constexpr, KEY_DIM: tl.constexpr,
    FORMAT: tl.constexpr, RATIO: tl.constexpr, FACTORED: tl.constexpr,
):  # fmt: skip
    """Item i are the main windows of the `share` tokens from i * share on; after `shares` such items come the keys."""
    dtype: tl.constexpr = hadamard_ptr.dtype.element_ty
    matrix, matrix_a, matrix_b, last = _load_matrix(hadamard_ptr, KEY_DIM, FACTORED)
    weight = tl.load(weight_ptr + tl.arange(0, DIM)).to(tl.float32)
    key_weight = tl.load(key_weight_ptr + tl.arange(0, KEY_DIM)).to(tl.float32)
    shares = tl.cdiv(tokens, share)
    for item in range(tl.program_id(0), 2 * shares, tl.num_programs(0)):
        begin = item % shares * share
        end = tl.minimum(begin + share, tokens)
        if item < shares:
            for token in range(begin, end):
                slot = tl.load(slots_ptr + token)
                if slot >= 0:
                    position = tl.load(positions_ptr + token)
                    table = table_ptr + tl.load(token_req_ptr + token).to(tl.int64) * table_stride
                    groups, a, b = fold_entry(
                        state_ptr, table, position, block_stride, weight, cos_sin_ptr, eps,
                        result_ptr.dtype.element_ty, ROWS, RATIO, 2, DIM, CHUNK,
                    )  # fmt: skip
                    offset = (slot // RESULT_ROWS).to(tl.int64) * result_stride + (slot % RESULT_ROWS) * RESULT_WIDTH
                    store_entry(result_ptr, byte_ptr, offset, groups, a, b, DIM, RECORD, FAKE_QUANT)
        else:
            for token in range(begin, end):
                slot = tl.load(key_slots_ptr + token)
                if slot >= 0:
                    position = tl.load(positions_ptr + token)
                    table = key_table_ptr + tl.load(token_req_ptr + token).to(tl.int64) * key_table_stride
                    groups, a, b = fold_entry(
                        key_state_ptr, table, position, key_block_stride, key_weight, cos_sin_ptr, eps, dtype,
                        KEY_STATE_ROWS, RATIO, 2, KEY_DIM, KEY_CHUNK,
                    )  # fmt: skip
                    first = extract_slice(groups, (0, 0), (1, 2 * HALF), (1, 1))
                    a = a.to(dtype).to(tl.float32)
                    b = b.to(dtype).to(tl.float32)
                    y = _times_matrix(first, a, b, matrix, matrix_a, matrix_b, last, KEY_DIM, FACTORED)
                    y = (y * (KEY_DIM**-0.5)).to(dtype).to(tl.float32)
                    store_key(y, keys_ptr, scales_ptr, slot, key_stride, scale_stride, KEY_ROWS, FORMAT)


def _default(family: Family, key: Key) -> dict[str, Any]:
    """CHUNK, KEY_CHUNK: rows that are folded at once. BOTH: whether a core takes main windows and keys of one share of
    the tokens. FACTORED: `_times_matrix`."""
    return {
        "CHUNK": chunk_rows(key["rows"], RATIO), "KEY_CHUNK": chunk_rows(key["key_rows"], RATIO),
        "BOTH": key["tokens"] >= _MANY * family.vector_cores, "FACTORED": not family.vector_registers,
        "multibuffer": None,
    }  # fmt: skip


def _candidates(family: Family, key: Key) -> Choices:
    """On the host the order of the sums does not change."""
    if not family.arch:
        return {"BOTH": (False, True)}
    return {
        "CHUNK": chunk_choices(key["rows"], RATIO), "KEY_CHUNK": chunk_choices(key["key_rows"], RATIO),
        "BOTH": (False, True), "FACTORED": (False, True), **buffering(family),
    }  # fmt: skip


def _fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    return chunk_problem(family, key["rows"], RATIO, config["CHUNK"], HEAD_DIM) or chunk_problem(
        family, key["key_rows"], RATIO, config["KEY_CHUNK"], KEY_DIM
    )


SPACE = Space(OP, default=_default, candidates=_candidates, fits=_fits)


def compressor_fold_keys(
    state: torch.Tensor,
    state_table: torch.Tensor,
    slots: torch.Tensor,
    weight: torch.Tensor,
    cache: torch.Tensor,
    key_state: torch.Tensor,
    key_state_table: torch.Tensor,
    key_slots: torch.Tensor,
    key_weight: torch.Tensor,
    hadamard: torch.Tensor,
    key_cache: torch.Tensor,
    scale_cache: torch.Tensor | None,
    token_req: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    eps: float,
    fake_quant: bool = False,
) -> None:
    """Write the entry and the index key of every window that closes in this step.

    `compressor_fold(state, state_table, token_req, positions, slots, weight, cos_sin, ratio=4, cache=cache,
    fake_quant=...)`, the same of the `key_` arguments into rows of 128 in hadamard's dtype (bf16 or fp32), and
    `indexer_insert_k` of those: see the three ops for shapes and dtypes. state [blocks, rows, 2048] and key_state
    [blocks, rows, 512] fp32; cache [blocks, rows, 512] in hadamard's dtype or fp8 records. Tokens whose slot is
    negative write nothing. TypeError or ValueError names the argument that does not fit.
    """
    check_tensor(OP, "hadamard", hadamard, (KEY_DIM, KEY_DIM), FLOATS)
    device = hadamard.device
    check_tensor(OP, "positions", positions, (None,), torch.int32, device=device)
    tokens = positions.shape[0]
    for name, vector in (("token_req", token_req), ("slots", slots), ("key_slots", key_slots)):
        check_tensor(OP, name, vector, (tokens,), torch.int32, device=device)
    for name, rows, dim in (("state", state, HEAD_DIM), ("key_state", key_state, KEY_DIM)):
        check_tensor(OP, name, rows, (None, None, 4 * dim), torch.float32, device=device, layout="page")
    for name, table in (("state_table", state_table), ("key_state_table", key_state_table)):
        check_tensor(OP, name, table, (None, None), torch.int32, device=device, layout="rows")
    check_tensor(OP, "weight", weight, (HEAD_DIM,), FLOATS, device=device)
    check_tensor(OP, "key_weight", key_weight, (KEY_DIM,), FLOATS, device=device)
    check_tensor(OP, "cos_sin", cos_sin, (None, 2 * int(HALF)), torch.float32, device=device)
    check_rows(OP, "cache", cache, hadamard.dtype, device)
    check_tensor(OP, "key_cache", key_cache, (None, None, KEY_DIM), tuple(FORMATS), device=device, layout="page")
    if (scale_cache is None) != (key_cache.dtype not in SCALE_DTYPES):
        given = "missing" if scale_cache is None else "given"
        raise ValueError(f"{OP}: scale_cache is {given} for keys of dtype {key_cache.dtype}")
    if scale_cache is not None:
        shape, dtype = key_cache.shape[:2], SCALE_DTYPES[key_cache.dtype]
        check_tensor(OP, "scale_cache", scale_cache, shape, dtype, device=device, layout="page")
    if tokens == 0:
        return
    check_filled(OP, state=state, state_table=state_table, cos_sin=cos_sin, cache=cache)
    check_filled(OP, key_state=key_state, key_state_table=key_state_table, key_cache=key_cache)
    scales = key_cache if scale_cache is None else scale_cache
    values, as_bytes = record_views(cache)
    family = family_of(device.type)
    cores = family.vector_cores
    config = SPACE(
        family, tokens=tokens, rows=state.shape[1], key_rows=key_state.shape[1], record=is_record(cache),
        fake_quant=fake_quant, dtype=hadamard.dtype, keys=key_cache.dtype,
    )  # fmt: skip
    share = triton.cdiv(tokens if config["BOTH"] else 2 * tokens, cores)
    _compressor_fold_keys_kernel[(min(2 * triton.cdiv(tokens, share), cores),)](
        state, state_table, slots, weight, values, as_bytes,
        key_state, key_state_table, key_slots, key_weight, hadamard, codes(key_cache), scales,
        token_req, positions, cos_sin,
        tokens, share, state_table.stride(0), state.stride(0), cache.stride(0),
        key_state_table.stride(0), key_state.stride(0), key_cache.stride(0), scales.stride(0), eps,
        ROWS=state.shape[1], RESULT_ROWS=cache.shape[1], RESULT_WIDTH=cache.shape[2], RECORD=is_record(cache),
        FAKE_QUANT=fake_quant, CHUNK=config["CHUNK"], DIM=HEAD_DIM,
        KEY_ROWS=key_cache.shape[1], KEY_STATE_ROWS=key_state.shape[1],
        KEY_CHUNK=config["KEY_CHUNK"], KEY_DIM=KEY_DIM, FORMAT=FORMATS[key_cache.dtype], RATIO=RATIO,
        FACTORED=config["FACTORED"], **config.options,
    )  # fmt: skip
