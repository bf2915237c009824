"""latent_norm_insert: equal to its reference and, bit for bit, to the ops whose work it takes over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_triton.device import A2, HOST, acting_as, family_of
from dsv4_triton.kernels.compressor_state_insert import compressor_state_insert
from dsv4_triton.kernels.kv_norm_rope_insert import RUN, kv_norm_rope_insert
from dsv4_triton.kernels.latent_norm_insert import latent_norm_insert
from dsv4_triton.reference.latent_norm_insert import latent_norm_insert as reference
from dsv4_triton.reference.rows import RECORD_BYTES
from tests.kernels.paging import clone, ints, pages, whole
from tests.kernels.rotary import table
from tests.numeric import Guarded, assert_close, assert_equal

BF16, FP32 = torch.bfloat16, torch.float32
MANY = RUN * family_of("cpu").vector_cores + 3
"""From MANY - 3 tokens on, consecutive rows are stored as tiles."""
WIDTHS = {"c4": (4, 1024, 256), "c128": (128, 512, 0), "window": (0, 0, 0)}


def slots_of(tokens: int) -> torch.Tensor:
    """A run, then scattered slots, and three that are skipped; one of them is padding."""
    slots = torch.arange(tokens, dtype=torch.int32) + 19
    half = tokens // 2
    slots[half:] = slots[half:][torch.randperm(tokens - half)]
    if tokens > 4:
        slots[[1, tokens - 2, tokens - 1]] = -1
    return slots


def make(kind: str, tokens: int, dtype: torch.dtype, *, width: int = 48, record: bool = False) -> dict[str, Any]:
    """Arguments as a layer gives them: slices of one bf16 and one fp32 projection, poisoned pages."""
    ratio, main, index = WIDTHS[kind]
    first = torch.randn(tokens, width + 512).to(dtype)
    rows = torch.randn(tokens, 2 * main + 2 * index + 8)
    positions = torch.arange(tokens, dtype=torch.int32) + 5
    if tokens > 4:
        positions[tokens - 2] = -1
    blocks = tokens // 16 + 4
    arguments: dict[str, Any] = {
        "latent": first[:, :width], "latent_weight": torch.randn(width), "kv": first[:, width:],
        "kv_weight": torch.randn(512).to(dtype), "positions": positions, "cos_sin": table(positions),
        "cache": pages(blocks, 16, RECORD_BYTES, torch.uint8) if record else pages(blocks, 16, 512, dtype),
        "slots": slots_of(tokens), "eps": 1e-6,
    }  # fmt: skip
    start = 0
    for prefix, columns in (("", main), ("index_", index)):
        if columns:
            arguments |= {
                f"{prefix}proj": rows[:, start : start + 2 * columns], f"{prefix}ape": torch.randn(ratio, columns),
                f"{prefix}state": pages(blocks, 16, 2 * columns, FP32),
                f"{prefix}slots" if prefix else "state_slots": slots_of(tokens),
            }  # fmt: skip
            start += 2 * columns
    return arguments


def with_own_caches(arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments | {name: clone(arguments[name]) for name in ("cache", "state", "index_state") if name in arguments}


@pytest.mark.parametrize(
    ("kind", "tokens", "dtype", "family"),
    [
        *((kind, tokens, FP32, HOST) for kind in WIDTHS for tokens in (1, 7, MANY)),
        *((kind, 5, BF16, HOST) for kind in WIDTHS),
        ("c4", 33, BF16, A2),
    ],
)
def test_equals_reference_and_its_parts(kind: str, tokens: int, dtype: torch.dtype, family: Any) -> None:
    arguments = make(kind, tokens, dtype)
    expected, parts = with_own_caches(arguments), with_own_caches(arguments)
    latent = Guarded((tokens, 48), dtype)
    with acting_as(family):
        assert latent_norm_insert(**arguments, out=latent.out) is latent.out
        keys = ("kv", "kv_weight", "positions", "cos_sin", "cache", "slots")
        kv_norm_rope_insert(*(parts[key] for key in keys), eps=1e-6)
    want = reference(**expected)
    # Sums of 48 and 512 squares in another order; in bf16 they may move a value across two roundings.
    tolerance = {"rtol": 2e-6, "atol": 1e-6} if dtype == FP32 else {"rtol": 2**-6, "atol": 2**-9}
    assert_close(latent.out, want, **tolerance, what="latent")
    latent.assert_margins("latent")
    assert_close(whole(arguments["cache"]), whole(expected["cache"]), **tolerance, what="window cache")
    assert_equal(whole(arguments["cache"]), whole(parts["cache"]), "window cache against kv_norm_rope_insert")
    for prefix in ("", "index_"):
        if f"{prefix}proj" in arguments:
            names = [f"{prefix}proj", f"{prefix}ape", "positions", f"{prefix}state"]
            where = arguments[f"{prefix}slots" if prefix else "state_slots"]
            compressor_state_insert(*(parts[name] for name in names), where)
            assert_equal(whole(arguments[f"{prefix}state"]), whole(expected[f"{prefix}state"]), f"{prefix}state")
            assert_equal(whole(arguments[f"{prefix}state"]), whole(parts[f"{prefix}state"]), f"{prefix}state op")


@pytest.mark.parametrize("record", [False, True])
def test_fp8_rows(record: bool) -> None:
    arguments = make("c4", 6, BF16, record=record)
    parts = with_own_caches(arguments)
    latent_norm_insert(**arguments, fake_quant=True)
    keys = ("kv", "kv_weight", "positions", "cos_sin", "cache", "slots")
    kv_norm_rope_insert(*(parts[key] for key in keys), eps=1e-6, fake_quant=True)
    assert_equal(whole(arguments["cache"]), whole(parts["cache"]))


def test_padding_writes_no_row_and_breaks_no_other() -> None:
    """A token without a position still gets a latent row, which nobody reads; its NaN stays in it."""
    arguments = make("c4", 9, FP32)
    clean = with_own_caches(arguments)
    latent = latent_norm_insert(**clean)
    for name in ("slots", "state_slots", "index_slots"):
        clean[name][4] = arguments[name][4] = -1
    clean = with_own_caches(arguments)
    latent = latent_norm_insert(**clean)
    for name in ("latent", "kv", "proj", "index_proj"):
        arguments[name][4] = float("nan")
    broken = latent_norm_insert(**arguments)
    others = [t for t in range(9) if t != 4]
    assert_equal(broken[others], latent[others])
    for name in ("cache", "state", "index_state"):
        assert_equal(whole(arguments[name]), whole(clean[name]), name)


def test_no_tokens_and_wrong_arguments() -> None:
    arguments = make("c4", 3, BF16)
    names = ("latent", "kv", "positions", "slots", "proj", "state_slots", "index_proj", "index_slots")
    assert latent_norm_insert(**(arguments | {name: arguments[name][:0] for name in names})).shape == (0, 48)
    for error, match, changes in (
        (TypeError, "kv has dtype", {"kv": arguments["kv"].float()}),
        (ValueError, "ape is missing, give proj, ape, state, state_slots together", {"ape": None}),
        (ValueError, "index_slots is missing", {"index_slots": None}),
        (ValueError, "need proj", dict.fromkeys(("proj", "ape", "state", "state_slots"))),
        (ValueError, "index_ape has 2 phases, ape 4", {"index_ape": torch.zeros(2, 256)}),
        (ValueError, "state has shape", {"state": arguments["index_state"]}),
        (ValueError, "slots has shape", {"slots": ints(1, 2)}),
    ):
        with pytest.raises(error, match=match):
            latent_norm_insert(**(arguments | changes))
