"""compressor_fold_keys: equal to its reference, and to the three ops whose work it takes over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_triton.device import A2, HOST, acting_as
from dsv4_triton.hadamard import sylvester
from dsv4_triton.kernels._index_quant import SCALE_DTYPES, codes
from dsv4_triton.kernels.compressor_fold import compressor_fold
from dsv4_triton.kernels.compressor_fold_keys import compressor_fold_keys
from dsv4_triton.kernels.indexer_insert_k import indexer_insert_k
from dsv4_triton.reference.compressor_fold_keys import compressor_fold_keys as reference
from dsv4_triton.reference.rows import RECORD_BYTES
from dsv4_triton.reference.token_slots import token_slots
from tests.kernels import rotary
from tests.kernels.paging import clone, pages, shuffled_table, whole
from tests.numeric import assert_close, assert_equal, poisoned

BF16, FP32 = torch.bfloat16, torch.float32
CACHES = ("cache", "key_cache", "scale_cache")


def make(
    tokens: int, dtype: torch.dtype, key_dtype: torch.dtype, *, requests: int = 2, record: bool = False
) -> dict[str, Any]:
    """Requests of `tokens` tokens each, interleaved, with padding; pages beyond the written rows are poisoned."""
    positions = torch.arange(tokens, dtype=torch.int32).repeat(requests)
    req = torch.arange(requests, dtype=torch.int32).repeat_interleave(tokens)
    columns = -(-tokens // 8)
    tables = [shuffled_table(requests, columns) for _ in range(2)]
    states = [pages(requests * columns + 1, 8, width, FP32) for width in (2048, 512)]
    for table, state in zip(tables, states, strict=True):
        slot = token_slots(positions, req, table, rows_per_block=8).long()
        state[slot // 8, slot % 8] = torch.randn(len(slot), state.shape[2])
    order = torch.randperm(len(positions))
    positions, req = positions[order].clone(), req[order].clone()
    positions[::5], req[::5] = -1, -1
    where = [
        token_slots(positions, req, shuffled_table(requests, columns), rows_per_block=2, ratio=4) for _ in range(2)
    ]
    scale = SCALE_DTYPES.get(key_dtype)
    blocks = requests * columns + 1
    return {
        "state": states[0], "state_table": tables[0], "slots": where[0], "weight": torch.randn(512).to(dtype),
        "cache": pages(blocks, 2, RECORD_BYTES, torch.uint8) if record else pages(blocks, 2, 512, dtype),
        "key_state": states[1], "key_state_table": tables[1], "key_slots": where[1],
        "key_weight": torch.randn(128).to(dtype), "hadamard": sylvester(128, dtype=dtype),
        "key_cache": pages(blocks, 2, 128, key_dtype, gap=32),
        "scale_cache": None if scale is None else pages(blocks, 2, 1, scale, gap=8).squeeze(-1),
        "token_req": req, "positions": positions, "cos_sin": rotary.table(torch.arange(tokens)), "eps": 1e-6,
    }  # fmt: skip


def with_own_caches(arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments | {name: clone(arguments[name]) for name in CACHES if arguments[name] is not None}


def by_parts(arguments: dict[str, Any], fake_quant: bool) -> None:
    """The three ops in a row; their keys differ from the fused ones by the order of one sum."""
    a = arguments
    shared = {"ratio": 4, "eps": 1e-6}
    common = (a["token_req"], a["positions"])
    compressor_fold(
        a["state"], a["state_table"], *common, a["slots"], a["weight"], a["cos_sin"], cache=a["cache"],
        fake_quant=fake_quant, **shared,
    )  # fmt: skip
    keys = poisoned((len(a["positions"]), 128), a["hadamard"].dtype)
    compressor_fold(
        a["key_state"], a["key_state_table"], *common, a["key_slots"], a["key_weight"], a["cos_sin"], out=keys, **shared
    )
    indexer_insert_k(keys, a["hadamard"], a["key_cache"], a["scale_cache"], a["key_slots"])


def stored_keys(arguments: dict[str, Any]) -> torch.Tensor:
    """What a reader gets: values times scales of the rows that were written."""
    slot = arguments["key_slots"][arguments["key_slots"] >= 0].long()
    rows = arguments["key_cache"][slot // 2, slot % 2].float()
    scales = arguments["scale_cache"]
    return rows if scales is None else rows * scales[slot // 2, slot % 2].float()[:, None]


@pytest.mark.parametrize(
    ("dtype", "key_dtype", "family"),
    [
        (FP32, FP32, HOST), (BF16, torch.int8, HOST), (BF16, torch.float8_e4m3fn, HOST), (BF16, BF16, HOST),
        (BF16, torch.int8, A2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("tokens", [9, 22])
def test_equals_reference_and_its_parts(tokens: int, dtype: torch.dtype, key_dtype: torch.dtype, family: Any) -> None:
    arguments = make(tokens, dtype, key_dtype)
    assert (arguments["slots"] >= 0).any() and (arguments["key_slots"] >= 0).any()
    expected, parts = with_own_caches(arguments), with_own_caches(arguments)
    with acting_as(family):
        compressor_fold_keys(**arguments)
    reference(**expected)
    by_parts(parts, False)
    assert_equal(whole(arguments["cache"]), whole(parts["cache"]), "cache memory")
    # fp32: shares and squares in another order. bf16: two of the roundings fall to the other side. Quantised keys:
    # one step, 1/127 of the row's largest value or 2^-3 of the value.
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == FP32 else {"rtol": 8e-3, "atol": 8e-3}
    assert_close(whole(arguments["cache"]), whole(expected["cache"]), **tolerance, what="cache")
    step = {"rtol": 0.13, "atol": 0.06} if key_dtype not in (FP32, BF16) else {"rtol": 3e-2, "atol": 3e-2}
    if dtype == FP32:
        step = {"rtol": 1e-5, "atol": 2e-5}
    for other, what in ((expected, "reference"), (parts, "parts")):
        assert_close(stored_keys(arguments), stored_keys(other), **step, what=f"keys against the {what}")
    slot = arguments["key_slots"][arguments["key_slots"] >= 0].long()
    for name in ("key_cache", "scale_cache"):
        if arguments[name] is not None:
            arguments[name][slot // 2, slot % 2] = expected[name][slot // 2, slot % 2]
            assert_equal(codes(whole(arguments[name])), codes(whole(expected[name])), f"other memory of {name}")


@pytest.mark.parametrize("record", [False, True])
def test_fp8_rows(record: bool) -> None:
    arguments = make(13, BF16, torch.int8, record=record)
    parts = with_own_caches(arguments)
    compressor_fold_keys(**arguments, fake_quant=True)
    by_parts(parts, True)
    assert_equal(whole(arguments["cache"]), whole(parts["cache"]))


def test_nothing_closes() -> None:
    arguments = make(9, BF16, torch.int8)
    arguments["slots"].fill_(-1)
    arguments["key_slots"].fill_(-1)
    untouched = with_own_caches(arguments)
    compressor_fold_keys(**arguments)
    for name in CACHES:
        assert_equal(codes(whole(arguments[name])), codes(whole(untouched[name])), name)


def test_no_tokens_and_wrong_arguments() -> None:
    arguments = make(5, BF16, torch.int8)
    per_token = ("slots", "key_slots", "token_req", "positions")
    compressor_fold_keys(**(arguments | {name: arguments[name][:0] for name in per_token}))
    for error, match, changes in (
        (ValueError, "scale_cache is missing", {"scale_cache": None}),
        (ValueError, "key_state has shape", {"key_state": arguments["state"]}),
        (TypeError, "cache has dtype", {"cache": arguments["cache"].float()}),
        (ValueError, "key_slots has shape", {"key_slots": arguments["key_slots"][:3]}),
        (ValueError, "key_weight has shape", {"key_weight": arguments["weight"]}),
    ):
        with pytest.raises(error, match=match):
            compressor_fold_keys(**(arguments | changes))
