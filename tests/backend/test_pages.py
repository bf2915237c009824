"""What kernels leave in the pages of every layout, byte for byte, read by a decoder of the tables.

Caches lie in memory as vLLM plans it, block ids are shuffled, and inputs are such that every stored value has one
possible result: rows of equal magnitude, whose norm is a power of two, folds in which one token takes all the weight,
norm weights with four significant bits, no rotation. The ops are those that serving uses.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from dsv4_triton.backend.attention_backend import TritonDsaBackend
from dsv4_triton.backend.caches import CacheLayer
from dsv4_triton.device import FAMILIES, acting_as
from dsv4_triton.kernels.compressor_fold import compressor_fold
from dsv4_triton.kernels.compressor_fold_keys import compressor_fold_keys
from dsv4_triton.kernels.latent_norm_insert import latent_norm_insert
from tests.backend import page_tables
from tests.backend.layouts import caches_of, layout_of
from tests.backend.test_geometry import kind_of, packed

pytestmark = pytest.mark.usefixtures("host_driver")

RATIOS = (4, 128)
LENGTHS = (260, 141)
TOKENS = sum(LENGTHS)
POISON = 0xFF
WIDTH = 512
SYLVESTER = np.array([[1 - 2 * ((i & j).bit_count() % 2) for j in range(128)] for i in range(128)])


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


def signs(rows: int, width: int) -> torch.Tensor:
    return torch.where(torch.rand(rows, width) < 0.5, -1.0, 1.0)


class Windows(NamedTuple):
    """Projections [T, 2W] and ape [ratio, W] of a compressor, the state rows [T, 2W] they make, and the signs of the
    features [T, d] of every entry, at its closing token."""

    projections: torch.Tensor
    ape: torch.Tensor
    rows: np.ndarray
    entries: torch.Tensor


def windows(batch: Batch, ratio: int, dim: int) -> Windows:
    """Rows of one magnitude in each window, and gates that give all weight of a feature to one of the rows."""
    halves = 2 if ratio == 4 else 1
    u = torch.ones(TOKENS, halves, dim)
    g = torch.full((TOKENS, halves, dim), -1e4)
    entries = torch.zeros(TOKENS, dim)
    for start, length in zip(batch.common.query_start_loc.tolist(), LENGTHS, strict=False):
        for first in range(0, length, ratio):
            own = range(start + first, start + min(first + ratio, length))
            members = [(token, halves - 1) for token in own]
            if halves == 2 and first:
                members += [(token - 4, 0) for token in range(own.start, own.start + 4)]
            tokens, sides = (torch.tensor(column) for column in zip(*members, strict=True))
            u[tokens, sides] = signs(len(members), dim) * 2.0 ** int(torch.randint(-5, 6, ()))
            winner = torch.randint(len(members), (dim,))
            g[tokens[winner], sides[winner], torch.arange(dim)] = 0.0
            entries[own[-1]] = u[tokens[winner], sides[winner], torch.arange(dim)].sign()
    projections, ape = torch.cat((u.flatten(1), g.flatten(1)), 1), torch.rand(ratio, halves * dim)
    added = torch.cat((torch.zeros_like(ape), ape), 1)[batch.positions.long() % ratio]
    return Windows(projections, ape, (projections + added).numpy(), entries)


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

    def check(
        self, name: str, tokens: Iterable[int], expected: np.ndarray, largest: Sequence[float] | None = None
    ) -> None:
        """Rows of `tokens`; `largest` are the largest values of the groups of 64, which decide a record's scales."""
        for token in tokens:
            page, row = self.page(name, token)
            np.testing.assert_array_equal(page.row(row), expected[token], f"{name}, token {token}")
            if self.family == "a5" and largest is not None:
                assert page.record_exponents(row) == [exponent(value) for value in largest]

    def check_keys(self, name: str, tokens: Iterable[int], entries: np.ndarray) -> None:
        """Keys of entries +-1, which the transform makes whole numbers times 128^-0.5, rounded to bf16."""
        for token in tokens:
            page, row = self.page(name, token)
            exact = (entries[token] @ SYLVESTER).astype(np.float32) * np.float32(128**-0.5)
            key = torch.tensor(exact).bfloat16().float().numpy()
            if self.family == "a5":
                scale = 2.0 ** exponent(float(np.abs(key).max()))
                codes = page_tables.round_to_e4m3(key / scale)
            else:
                scale = float((np.abs(key).max() / np.float32(127)).astype(np.float16))
                codes = np.round(key / np.float32(scale)).clip(-127, 127)
            np.testing.assert_array_equal(page.row(row), codes, f"{name}, token {token}")
            assert page.scale(row) == scale


def exponent(largest: float) -> int:
    """Of the smallest power of two that brings `largest` to 448 or less."""
    mantissa, binade = math.frexp(largest / 448)
    return binade - (mantissa == 0.5)


CASES = [("a2", None), ("a2", 128), ("a3", 32), ("a5", None), ("a5", 64)]


@pytest.mark.parametrize(("family", "block_size"), CASES)
def test_pages_hold_what_the_tables_say(family: str, block_size: int | None) -> None:
    pool, batch = make_pool(family, block_size), Batch()
    reader = Reader(pool, family, block_size)
    weight, ones = batch.weight.bfloat16(), torch.ones(128).bfloat16()
    for layer, ratio in enumerate(RATIOS):
        prefix = f"model.layers.{layer}.attn."
        caches: Any = {name.removeprefix(prefix): c for name, c in pool.caches.items() if name.startswith(prefix)}
        plans = {}
        for name, cache in caches.items():
            common: Any = SimpleNamespace(**vars(batch.common), block_table_tensor=pool.tables[prefix + name])
            plans[name] = cache.planner.plan(common, cache.rows_per_block, cache.ratio, again=False)
        window, compressed, state = caches["window"].rows, caches["compressed"].rows, caches["state"].rows
        step, table = plans["state"].step, plans["state"].block_table
        kv, latent = signs(TOKENS, WIDTH) * 2.0 ** torch.randint(-5, 6, (TOKENS, 1)), torch.randn(TOKENS, 128)
        main, index = windows(batch, ratio, WIDTH), windows(batch, ratio, 128)
        states = {"proj": main.projections, "ape": main.ape, "state": state, "state_slots": plans["state"].slots}
        if ratio == 4:
            rows, slots = caches["index_state"].rows, plans["index_state"].slots
            states |= {"index_proj": index.projections, "index_ape": index.ape}
            states |= {"index_state": rows, "index_slots": slots}
        with acting_as(FAMILIES[family]):
            latent_norm_insert(
                latent.bfloat16(), ones, kv.bfloat16(), weight, step.positions, batch.cos_sin,
                window, plans["window"].slots, eps=0.0, **states,
            )  # fmt: skip
            if ratio == 4:
                keys, key_plan = caches["index_keys"], plans["index_state"]
                compressor_fold_keys(
                    state, table, plans["compressed"].slots, weight, compressed,
                    caches["index_state"].rows, key_plan.block_table, plans["index_keys"].slots, ones,
                    torch.tensor(SYLVESTER).bfloat16(), keys.keys, keys.scales,
                    step.token_req, step.positions, batch.cos_sin, eps=0.0,
                )  # fmt: skip
            else:
                compressor_fold(
                    state, table, step.token_req, step.positions, plans["compressed"].slots, weight, batch.cos_sin,
                    ratio=ratio, eps=0.0, cache=compressed,
                )  # fmt: skip
        closing = [token for token in range(TOKENS) if (int(batch.positions[token]) + 1) % ratio == 0]
        weights = batch.weight.numpy()
        reader.check(prefix + "window", range(TOKENS), kv.sign().numpy() * weights, batch.largest)
        reader.check(prefix + "state", range(TOKENS), main.rows)
        reader.check(prefix + "compressed", closing, main.entries.numpy() * weights, batch.largest)
        if ratio == 4:
            reader.check(prefix + "index_state", range(TOKENS), index.rows)
            reader.check_keys(prefix + "index_keys", closing, index.entries.numpy())
    assert (pool.memory[~reader.read] == POISON).all(), "bytes outside of rows were written"
