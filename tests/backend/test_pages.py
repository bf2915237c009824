"""What kernels leave in the pages of every layout, byte for byte, read by a decoder of the tables.

Caches lie in memory as vLLM plans it, block ids are shuffled, and inputs are such that every stored value has one
possible result: rows of equal magnitude, whose norm is a power of two, folds in which one token takes all the weight,
norm weights with four significant bits, no rotation.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from dsv4_triton.backend.attention_backend import TritonDsaBackend
from dsv4_triton.backend.caches import CacheLayer
from dsv4_triton.device import FAMILIES, acting_as
from dsv4_triton.kernels.compressor_fold import compressor_fold
from dsv4_triton.kernels.compressor_state_insert import compressor_state_insert
from dsv4_triton.kernels.indexer_insert_k import indexer_insert_k
from dsv4_triton.kernels.kv_norm_rope_insert import kv_norm_rope_insert
from tests.backend import page_tables
from tests.backend.layouts import caches_of, layout_of
from tests.backend.test_geometry import kind_of, packed

pytestmark = pytest.mark.usefixtures("host_driver")

RATIOS = (4, 128)
LENGTHS = (260, 141)
TOKENS = sum(LENGTHS)
POISON = 0xFF
WIDTH = 512


class Pool(NamedTuple):
    """Memory [blocks, bytes] of a block pool, and the caches in it with their byte offsets and block tables."""

    memory: np.ndarray
    caches: dict[str, CacheLayer]
    offsets: dict[str, int]
    tables: dict[str, torch.Tensor]


def make_pool(family: str, block_size: int | None) -> Pool:
    from vllm.v1.worker.gpu.attn_utils import _reshape_attention_kv_cache

    geometry: Any = "fine" if block_size is None else "vllm-ascend"
    layout = layout_of(RATIOS, device_family=family, geometry=geometry, block_size=block_size)
    caches = caches_of(layout, TOKENS)
    columns = {name: [math.ceil(n / cache.spec.block_size) for n in LENGTHS] for name, cache in caches.items()}
    plan = packed(layout, 1 + sum(sum(columns[group.layer_names[0]]) for group in packed(layout, 1).kv_cache_groups))
    ids = iter((torch.randperm(plan.num_blocks - 1) + 1).tolist())
    tables, offsets = {}, {}
    for group in plan.kv_cache_groups:
        counts = columns[group.layer_names[0]]
        table = torch.zeros(len(LENGTHS), max(counts), dtype=torch.int32)
        for request, count in enumerate(counts):
            table[request, :count] = torch.tensor(list(itertools.islice(ids, count)))
        tables |= dict.fromkeys(group.layer_names, table)
    raw = torch.full((plan.kv_cache_tensors[0].size,), -1, dtype=torch.int8)
    for tensor in plan.kv_cache_tensors:
        for name in tensor.shared_by:
            spec = caches[name].spec
            shape = TritonDsaBackend.get_kv_cache_shape(plan.num_blocks, spec.storage_block_size, 1, spec.head_size)
            packing = (tensor.offset, tensor.block_stride)
            view = _reshape_attention_kv_cache(raw, spec, shape, (0, 1, 2), plan.num_blocks, packing)
            caches[name].bind_kv_cache(view)
            offsets[name] = tensor.offset
    return Pool(raw.numpy().view(np.uint8).reshape(plan.num_blocks, -1), caches, offsets, tables)


class Batch:
    """Two prompts in one step, with what each cache is to hold. All random; `groups` are 64 features of one scale."""

    def __init__(self) -> None:
        self.positions = torch.cat([torch.arange(n) for n in LENGTHS]).int()
        self.common = SimpleNamespace(
            query_start_loc=torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32),
            seq_lens=torch.tensor(LENGTHS, dtype=torch.int32),
            num_actual_tokens=TOKENS,
            max_seq_len=max(LENGTHS),
        )
        self.cos_sin = torch.cat((torch.ones(max(LENGTHS), 32), torch.zeros(max(LENGTHS), 32)), 1)
        # Four significant bits, at most four binades below the largest of a group: e4m3 holds them at any scale.
        scale = torch.randint(-6, 7, (8, 1))
        significand = torch.randint(8, 16, (8, 64))
        significand[:, 0] = torch.tensor([14, 15, 8, 14, 13, 9, 14, 12])  # the largest; 14 is 448 times a power of two
        drop = torch.randint(1, 5, (8, 64)).index_fill_(1, torch.tensor([0]), 0)
        self.weight = (significand * 2.0 ** (scale - drop)).flatten()
        self.largest = self.weight.view(8, 64)[:7, 0].tolist()

    def signed_powers(self, rows: int, width: int = WIDTH) -> torch.Tensor:
        """Rows of one magnitude each, with random signs."""
        signs = torch.where(torch.rand(rows, width) < 0.5, -1.0, 1.0)
        return signs * 2.0 ** torch.randint(-5, 6, (rows, 1))

    def values(self, signs: torch.Tensor) -> np.ndarray:
        return (signs.sign() * self.weight).numpy()


def compressor_inputs(batch: Batch, ratio: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Projections [T, 2W], ape [ratio, W], and the sign of every entry's features [T, 512] at closing tokens."""
    halves = 2 if ratio == 4 else 1
    u = torch.ones(TOKENS, halves, WIDTH)
    g = torch.full((TOKENS, halves, WIDTH), -1e4)
    entries = torch.zeros(TOKENS, WIDTH)
    features = torch.arange(WIDTH)
    for request_start, length in zip(batch.common.query_start_loc.tolist(), LENGTHS, strict=False):
        for first in range(0, length, ratio):
            own = range(request_start + first, min(request_start + first + ratio, request_start + length))
            rows = [(token, halves - 1) for token in own]
            if halves == 2 and first:
                rows += [(token - 4, 0) for token in range(own.start, own.start + 4)]
            tokens, sides = (torch.tensor(column) for column in zip(*rows, strict=True))
            u[tokens, sides] = batch.signed_powers(len(rows)).sign() * 2.0 ** int(torch.randint(-5, 6, ()))
            winner = torch.randint(len(rows), (WIDTH,))
            g[tokens[winner], sides[winner], features] = 0.0
            entries[own[-1]] = u[tokens[winner], sides[winner], features]
    ape = torch.rand(ratio, halves * WIDTH)
    return torch.cat((u.flatten(1), g.flatten(1)), 1), ape, entries


class Reader:
    """Reads rows of a pool's pages and keeps track of the bytes that were read."""

    def __init__(self, pool: Pool, family: str, block_size: int | None) -> None:
        self.pool, self.family, self.block_size = pool, family, block_size
        self.read = np.zeros(pool.memory.shape, dtype=bool)

    def page(self, name: str, token: int) -> tuple[page_tables.Page, int]:
        """The page and the row in it of the token at `token` in the step."""
        kind = kind_of(name, RATIOS[int(name.split(".")[2])])
        rows = page_tables.rows_per_page(self.family, self.block_size)[kind]
        size = page_tables.page_bytes(self.family, self.block_size)[kind]
        request, position = (0, token) if token < LENGTHS[0] else (1, token - LENGTHS[0])
        row = position // {"c4": 4, "keys": 4, "c128": 128}.get(kind, 1)
        block, start = int(self.pool.tables[name][request, row // rows]), self.pool.offsets[name]
        data, read = (array[block, start : start + size] for array in (self.pool.memory, self.read))
        return page_tables.Page(self.family, kind, rows, data, read), row % rows


def exponent(largest: float) -> int:
    """Of the smallest power of two that brings `largest` to 448 or less."""
    mantissa, binade = math.frexp(largest / 448)
    return binade - (mantissa == 0.5)


CASES = [("a2", None), ("a2", 32), ("a2", 128), ("a3", 64), ("a5", None), ("a5", 32), ("a5", 128)]


@pytest.mark.parametrize(("family", "block_size"), CASES)
def test_pages_hold_what_the_tables_say(family: str, block_size: int | None) -> None:
    pool, batch = make_pool(family, block_size), Batch()
    reader = Reader(pool, family, block_size)

    def plan(name: str) -> Any:
        cache = pool.caches[name]
        common = SimpleNamespace(**vars(batch.common), block_table_tensor=pool.tables[name])
        return cache.planner.plan(common, cache.rows_per_block, cache.ratio, again=False)

    def check_rows(name: str, tokens: list[int], expected: np.ndarray) -> None:
        for token in tokens:
            page, row = reader.page(name, token)
            np.testing.assert_array_equal(page.row(row), expected[token], f"{name}, token {token}")
            if family == "a5":
                assert page.record_exponents(row) == [exponent(value) for value in batch.largest]

    weight = batch.weight.bfloat16()
    with acting_as(FAMILIES[family]):
        for layer, ratio in enumerate(RATIOS):
            prefix = f"model.layers.{layer}.attn"
            closing = [t for t in range(TOKENS) if (int(batch.positions[t]) + 1) % ratio == 0]
            caches = {name: pool.caches[f"{prefix}.{name}"] for name in ("window", "compressed", "state")}
            plans = {name: plan(f"{prefix}.{name}") for name in caches}

            kv = batch.signed_powers(TOKENS)
            window = (caches["window"].rows, plans["window"].slots)
            kv_norm_rope_insert(kv.bfloat16(), weight, batch.positions, batch.cos_sin, *window, eps=0.0)
            check_rows(f"{prefix}.window", list(range(TOKENS)), batch.values(kv))

            projections, ape, entries = compressor_inputs(batch, ratio)
            state, metadata = caches["state"].rows, plans["state"]
            compressor_state_insert(projections, ape, batch.positions, state, metadata.slots)
            added = torch.cat((torch.zeros_like(ape), ape), 1)[batch.positions.long() % ratio]
            for token in range(TOKENS):
                page, row = reader.page(f"{prefix}.state", token)
                np.testing.assert_array_equal(page.row(row), (projections + added)[token].numpy())
            compressor_fold(
                state, metadata.block_table, metadata.step.token_req, batch.positions, plans["compressed"].slots,
                weight, batch.cos_sin, ratio=ratio, eps=0.0, cache=caches["compressed"].rows,
            )  # fmt: skip
            check_rows(f"{prefix}.compressed", closing, batch.values(entries))
        check_index_pages(reader, plan, batch)
    assert (pool.memory[~reader.read] == POISON).all(), "bytes outside of rows were written"


def check_index_pages(reader: Reader, plan: Any, batch: Batch) -> None:
    """Keys with one feature each, whose Hadamard transform has one magnitude; state rows of the indexer."""
    name, state_name = "model.layers.0.attn.index_keys", "model.layers.0.attn.index_state"
    cache: Any = reader.pool.caches[name]
    feature, power = torch.randint(128, (TOKENS,)), torch.randint(-5, 6, (TOKENS,))
    folded = torch.zeros(TOKENS, 128).scatter_(1, feature[:, None], 2.0 ** power[:, None].float()).bfloat16()
    sylvester = np.array([[1 - 2 * ((i & j).bit_count() % 2) for j in range(128)] for i in range(128)])
    matrix = torch.tensor(sylvester).bfloat16()
    indexer_insert_k(folded, matrix, cache.keys, cache.scales, plan(name).slots)
    e4m3_values = page_tables.e4m3(np.arange(127, dtype=np.uint8))
    for token in range(TOKENS):
        if (int(batch.positions[token]) + 1) % 4:
            continue
        page, row = reader.page(name, token)
        magnitude = 2.0 ** int(power[token]) * 181 / 2048  # 128^-0.5 in bf16, in which transformed keys are rounded
        if reader.family == "a5":
            scale = 2.0 ** exponent(magnitude)
            code = e4m3_values[np.abs(e4m3_values - magnitude / scale).argmin()]
        else:
            scale, code = float(np.float16(magnitude / 127)), 127
        np.testing.assert_array_equal(page.row(row), code * sylvester[feature[token]].astype(np.float32))
        assert page.scale(row) == scale

    rows = torch.randn(TOKENS, 512)
    metadata = plan(state_name)
    state = reader.pool.caches[state_name].rows
    compressor_state_insert(rows, torch.zeros(4, 256), batch.positions, state, metadata.slots)
    for token in range(TOKENS):
        page, row = reader.page(state_name, token)
        np.testing.assert_array_equal(page.row(row), rows[token].numpy())
