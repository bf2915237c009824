"""gather_rows: rows bit by bit, masks, and nothing written beyond what a token needs."""

from __future__ import annotations

import pytest
import torch

from dsv4_triton.kernels.gather_rows import gather_rows
from dsv4_triton.reference.gather_rows import gather_rows as reference
from tests.kernels.attention_cases import DIM, EDGES, MIXED, Case, build
from tests.numeric import assert_equal, poisoned

CASES = [
    Case((EDGES,), compressed="selected", topk=32),
    Case(MIXED, compressed="holes", topk=40, dtype=torch.bfloat16),
    Case(MIXED, compressed="dense", ratio=4, gap=32),
    Case((EDGES, (900,)), compressed="dense", ratio=16, cmp_page=2, dtype=torch.bfloat16),
    Case((EDGES,), window=17, page=16),
    Case((EDGES,), compressed="holes", record=True, gap=64),
    Case((EDGES,), compressed="dense", ratio=128, cmp_page=2, record=True, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_reference(case):
    inputs = build(case)
    first = -(-case.window // 32) * 32
    width = {"selected": case.topk, "holes": case.topk, "none": 0}.get(case.compressed, 256)
    columns = first + -(-width // 32) * 32
    caches = inputs.window_cache, inputs.window_table, inputs.token_req, inputs.positions
    arguments = dict(window=case.window, columns=columns, dtype=case.dtype, **inputs.compressed)
    want, want_bias = reference(*caches, **arguments)
    rows = poisoned((len(inputs.q), columns, DIM), case.dtype)
    bias = poisoned((len(inputs.q), columns), torch.float32)
    gather_rows(*caches, **arguments, rows=rows, bias=bias)
    for t, position in enumerate(inputs.positions.tolist()):
        live = columns
        if case.compressed == "dense":
            block = 16 if case.record else 32
            live = first + -(-case.visible(position) // block) * block
        if position < 0:
            live = first
        assert_equal(rows[t, :live], want[t, :live], f"rows of token {t}")
        assert ((bias[t, :live] == 0) == (want_bias[t, :live] == 0)).all()
        assert (bias[t, :live][want_bias[t, :live] != 0] < -4e29).all()
        assert torch.isnan(rows[t, live:]).all() and torch.isnan(bias[t, live:]).all()


@pytest.mark.parametrize("case", [CASES[1], CASES[2], CASES[5]], ids=str)
def test_fill_stores_every_row_of_a_tile(case):
    """Rows that do not exist are zero up to a multiple of `fill`, a padding token's too, and nothing lies beyond."""
    inputs = build(case)
    caches = inputs.window_cache, inputs.window_table, inputs.token_req, inputs.positions
    arguments = dict(window=case.window, columns=512, dtype=case.dtype, **inputs.compressed)
    want, _ = reference(*caches, **arguments)
    rows = poisoned((len(inputs.q), 512, DIM), case.dtype)
    gather_rows(*caches, **arguments, rows=rows, fill=192)
    for t, position in enumerate(inputs.positions.tolist()):
        count = case.visible(position) if position >= 0 and case.compressed == "dense" else 0
        live = -(-(128 + count) // 192) * 192
        assert_equal(rows[t, :live], want[t, :live], f"rows of token {t}")
        if case.compressed == "dense":
            assert torch.isnan(rows[t, live:]).all()


@pytest.mark.parametrize("case", [CASES[1], CASES[3], CASES[5]], ids=str)
def test_without_window_and_bias(case):
    inputs = build(case)
    caches = inputs.window_cache, inputs.window_table, inputs.token_req, inputs.positions
    arguments = dict(window=0, columns=64, dtype=case.dtype, no_bias=True, **inputs.compressed)
    want, _ = reference(*caches, **arguments)
    rows, bias = gather_rows(*caches, **arguments, rows=poisoned((len(inputs.q), 64, DIM), case.dtype))
    assert bias is None
    for t, position in enumerate(inputs.positions.tolist()):
        live = 0 if position < 0 else -(-case.visible(position) // 32) * 32 if case.compressed == "dense" else 64
        assert_equal(rows[t, :live], want[t, :live], f"rows of token {t}")


def test_columns_that_do_not_fit():
    inputs = build(Case(((5,),)))
    with pytest.raises(ValueError, match="columns is 96, expected a multiple of 32 of at least 128"):
        gather_rows(*inputs.args()[1:3], inputs.token_req, inputs.positions, window=128, columns=96)
    with pytest.raises(ValueError, match="fill is 48, expected 0 or a multiple of 32"):
        gather_rows(*inputs.args()[1:3], inputs.token_req, inputs.positions, window=128, columns=128, fill=48)
    with pytest.raises(ValueError, match="window is 128, expected 0 with no_bias"):
        gather_rows(*inputs.args()[1:3], inputs.token_req, inputs.positions, window=128, columns=128, no_bias=True)
