"""Step metadata against a brute-force oracle, its addresses, and what is computed once."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dsv4_triton.backend import metadata
from dsv4_triton.backend.attention import attend
from dsv4_triton.backend.metadata import DsaMetadataBuilder, StepPlanner

pytestmark = pytest.mark.usefixtures("host_driver")

MAX_TOKENS = 700
CACHES = ((64, 1), (64, 4), (2, 128), (4, 1), (8, 1))
"""Rows per block and tokens per row of the caches in use."""


def batch(rng: random.Random, requests: int, padding_requests: int = 0, padding_tokens: int = 0) -> Any:
    """vLLM's common metadata of a random ragged step with permuted block tables; padding as in a captured graph."""
    queries = [rng.choice((1, 1, 2, 5, 64, 130)) for _ in range(requests)]
    lengths = [query + rng.choice((0, 0, 3, 127, 256, 1000)) for query in queries]
    starts = [0]
    for query in queries:
        starts.append(starts[-1] + query)
    blocks = list(range(1, 1 + 400 * requests))
    rng.shuffle(blocks)
    table = torch.zeros(requests + padding_requests, 400, dtype=torch.int32)
    for request in range(requests):
        table[request] = torch.tensor(blocks[400 * request : 400 * (request + 1)])
    common = SimpleNamespace(
        query_start_loc=torch.tensor(starts + [starts[-1]] * padding_requests, dtype=torch.int32),
        seq_lens=torch.tensor(lengths + [0] * padding_requests, dtype=torch.int32),
        num_actual_tokens=starts[-1] + padding_tokens,
        max_seq_len=max(lengths),
        block_table_tensor=table,
    )
    return common


def oracle(common: Any, rows_per_block: int, ratio: int) -> dict[str, list[int]]:
    """Every field, token by token."""
    fields: dict[str, list[int]] = {name: [] for name in ("positions", "token_req", "n_vis4", "n_vis128", "slots")}
    starts = common.query_start_loc.tolist()
    for request, length in enumerate(common.seq_lens.tolist()):
        count = starts[request + 1] - starts[request]
        for position in range(length - count, length):
            fields["positions"].append(position)
            fields["token_req"].append(request)
            fields["n_vis4"].append((position + 1) // 4)
            fields["n_vis128"].append((position + 1) // 128)
            row = position // ratio
            block = int(common.block_table_tensor[request, row // rows_per_block])
            closes = (position + 1) % ratio == 0
            fields["slots"].append(block * rows_per_block + row % rows_per_block if closes else -1)
    missing = common.num_actual_tokens - len(fields["slots"])
    for name, padding in (("positions", -1), ("token_req", -1), ("n_vis4", 0), ("n_vis128", 0), ("slots", -1)):
        fields[name] += [padding] * missing
    return fields


def check(planned: metadata.CacheMetadata, common: Any, rows_per_block: int, ratio: int) -> None:
    expected = oracle(common, rows_per_block, ratio)
    assert planned.slots.tolist() == expected.pop("slots")
    for name, values in expected.items():
        assert getattr(planned.step, name).tolist() == values, name
    assert planned.step.num_tokens == common.num_actual_tokens


@pytest.mark.parametrize("seed", range(6))
def test_random_schedules(seed: int) -> None:
    rng = random.Random(seed)
    planner = StepPlanner(MAX_TOKENS, torch.device("cpu"))
    for requests in (1, 4, 3):
        common = batch(rng, requests, padding_requests=seed % 3, padding_tokens=7 * (seed % 2))
        for rows_per_block, ratio in CACHES:
            check(planner.plan(common, rows_per_block, ratio, again=False), common, rows_per_block, ratio)


def test_null_blocks_are_never_written() -> None:
    common = batch(random.Random(0), 2)
    common.block_table_tensor.zero_()
    planned = StepPlanner(MAX_TOKENS, torch.device("cpu")).plan(common, 64, 1, again=False)
    assert (planned.slots == -1).all()


def test_tokens_of_sequences_without_length_are_padding() -> None:
    """As in a batch that stands for a shape alone."""
    common = batch(random.Random(0), 3)
    common.seq_lens.zero_()
    planned = StepPlanner(MAX_TOKENS, torch.device("cpu")).plan(common, 64, 4, again=False)
    assert (planned.slots == -1).all() and (planned.step.positions == -1).all()
    assert not planned.step.n_vis4.any() and not planned.step.n_vis128.any()


def test_addresses_are_those_of_the_last_step() -> None:
    planner = StepPlanner(MAX_TOKENS, torch.device("cpu"))
    rng = random.Random(1)
    table = torch.zeros(4, 400, dtype=torch.int32)
    addresses = set()
    for _ in range(3):
        common = batch(rng, 4)
        common.block_table_tensor = table.copy_(common.block_table_tensor)
        planned = planner.plan(common, 64, 4, again=False)
        tensors = (planned.slots, planned.step.positions, planned.step.token_req, planned.step.n_vis4)
        addresses.add(tuple(tensor.data_ptr() for tensor in tensors))
    assert len(addresses) == 1


def test_one_computation_per_step_and_table(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("step_layout", "token_slots"):
        usual = getattr(metadata, name)
        monkeypatch.setattr(metadata, name, lambda *a, _f=usual, _n=name, **k: (calls.append(_n), _f(*a, **k))[1])
    planner = StepPlanner(MAX_TOKENS, torch.device("cpu"))
    common = batch(random.Random(2), 3)
    other_group = SimpleNamespace(**{**vars(common), "block_table_tensor": common.block_table_tensor.clone()})
    for group in (common, other_group):
        for _ in range(3):
            planner.plan(group, 64, 1, again=False)
        planner.plan(group, 4, 1, again=False)
    assert calls == ["step_layout", *["token_slots"] * 4]
    planner.plan(common, 64, 1, again=True)
    assert calls[5:] == ["step_layout", "token_slots"]


def test_a_new_step_is_noticed() -> None:
    planner = StepPlanner(MAX_TOKENS, torch.device("cpu"))
    common = batch(random.Random(3), 2)
    first = planner.plan(common, 64, 1, again=False).step.positions.clone()
    common.seq_lens += 1
    common.seq_lens = common.seq_lens[:]  # vLLM makes a new view of the same memory every step
    planned = planner.plan(common, 64, 1, again=False)
    assert torch.equal(planned.step.positions, first + 1)
    check(planned, common, 64, 1)


def builder_of(cache: Any) -> DsaMetadataBuilder:
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"c": cache}),
        model_config=SimpleNamespace(max_model_len=4096),
    )
    return DsaMetadataBuilder(None, ["c"], config, torch.device("cpu"))


def test_captures_and_idle_steps_belong_to_no_request() -> None:
    """In the tensors of real steps, whatever is left of these, with the bound of the longest sequence."""
    planner = StepPlanner(MAX_TOKENS, torch.device("cpu"))
    builder = builder_of(SimpleNamespace(planner=planner, rows_per_block=64, ratio=1))
    common = batch(random.Random(5), 3)
    real = builder.build(0, common)
    idle = builder.build_for_cudagraph_capture(common)
    assert idle.step.max_seq_len == 4096
    for name, value in (("positions", -1), ("token_req", -1), ("n_vis4", 0), ("n_vis128", 0)):
        assert getattr(idle.step, name).data_ptr() == getattr(real.step, name).data_ptr()
        assert getattr(idle.step, name).tolist() == [value] * common.num_actual_tokens
    assert idle.slots.data_ptr() == real.slots.data_ptr() and (idle.slots == -1).all()
    check(builder.build(0, common), common, 64, 1)


def test_builder_takes_the_geometry_of_its_cache() -> None:
    planner = StepPlanner(MAX_TOKENS, torch.device("cpu"))
    cache = SimpleNamespace(planner=planner, rows_per_block=2, ratio=128)
    builder = builder_of(cache)
    common = batch(random.Random(4), 3)
    check(builder.build(0, common), common, 2, 128)
    common.seq_lens += 1
    common.num_actual_tokens = np.int32(common.num_actual_tokens)  # as vLLM has it where no drafter's batch is padded
    check(builder.build_for_drafting(common, 1), common, 2, 128)
    assert builder.build(0, common).step.max_seq_len == common.max_seq_len


def test_a_step_of_another_number_of_tokens_is_an_error() -> None:
    layer: Any = SimpleNamespace(caches=SimpleNamespace(window=SimpleNamespace(prefix="window")))
    metadata = {"window": SimpleNamespace(step=SimpleNamespace(num_tokens=2))}
    hidden = torch.empty(3, 8)
    with pytest.raises(ValueError, match="hidden has 3 tokens, the step's metadata 2"):
        attend(layer, hidden, hidden, hidden, metadata)
