"""Time to plan one decode step: layout of the batch, and slots of all six cache kinds, at several batch sizes.

Planning happens once per step, whatever the number of layers. Each figure is the median of many steps, every one
with batch tensors of its own, as vLLM makes them. The peer is the same planning by the PyTorch references on one thread
(more threads only add waiting at these sizes).

    dsv4-triton bench metadata [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from vllm.v1.attention.backend import CommonAttentionMetadata

from dsv4_triton.backend.geometry import FINE_STATE_ROWS, FINE_TOKENS, FINE_WINDOW_ROWS
from dsv4_triton.backend.metadata import StepPlanner
from dsv4_triton.bench.measure import host_clock
from dsv4_triton.compiler import host
from dsv4_triton.console import print_line
from dsv4_triton.device import HOST
from dsv4_triton.reference.step_layout import step_layout
from dsv4_triton.reference.token_slots import token_slots

CACHES = {
    "window": (FINE_WINDOW_ROWS, 1),
    "c4 compressed": (FINE_TOKENS // 4, 4),
    "c128 compressed": (FINE_TOKENS // 128, 128),
    "indexer keys": (FINE_TOKENS // 4, 4),
    "c4 state": (FINE_STATE_ROWS[4], 1),
    "c128 state": (FINE_STATE_ROWS[128], 1),
}
"""Rows per block and tokens per row of each kind of cache in geometry `fine`."""
CONTEXT = 8192


def tables(batch: int) -> dict[str, torch.Tensor]:
    """A block table [batch, blocks] int32 for each cache, every entry a block of its own."""
    result = {}
    for name, (rows, ratio) in CACHES.items():
        blocks = -(-CONTEXT // (rows * ratio))
        result[name] = torch.arange(1, batch * blocks + 1, dtype=torch.int32).reshape(batch, blocks)
    return result


def batch_tensors(batch: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`query_start_loc` and `seq_lens` of a decode step at ragged contexts."""
    starts = torch.arange(batch + 1, dtype=torch.int32)
    lengths = torch.arange(batch, dtype=torch.int32) * 37 % (CONTEXT - 512) + 1 + step
    return starts, lengths


def common_metadata(starts: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor) -> CommonAttentionMetadata:
    batch = len(lengths)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        num_reqs=batch,
        num_actual_tokens=batch,
        max_query_len=1,
        max_seq_len=CONTEXT,
        block_table_tensor=table,
        slot_mapping=torch.empty(0, dtype=torch.int64),
    )


def plan_step(planner: StepPlanner, block_tables: dict[str, torch.Tensor], batch: int, step: int) -> float:
    """Seconds that planning one step takes."""
    starts, lengths = batch_tensors(batch, step)
    commons = [common_metadata(starts, lengths, table) for table in block_tables.values()]
    began = time.perf_counter()
    for common, (rows, ratio) in zip(commons, CACHES.values(), strict=True):
        planner.plan(common, rows, ratio, again=False)
    return time.perf_counter() - began


def reference_step(block_tables: dict[str, torch.Tensor], batch: int, step: int) -> float:
    starts, lengths = batch_tensors(batch, step)
    began = time.perf_counter()
    positions, token_req, _, _ = step_layout(starts, lengths, batch)
    for table, (rows, ratio) in zip(block_tables.values(), CACHES.values(), strict=True):
        token_slots(positions, token_req, table, rows_per_block=rows, ratio=ratio)
    return time.perf_counter() - began


def measure(batch: int, repeat: int) -> dict[str, Any]:
    """Median seconds per step of the planner and of the references."""
    block_tables = tables(batch)
    planner = StepPlanner(batch, torch.device("cpu"))
    plan_step(planner, block_tables, batch, 0)
    runs = [
        (plan_step(planner, block_tables, batch, 1 + i % 500), reference_step(block_tables, batch, i % 500))
        for i in range(repeat)
    ]
    ours, theirs = (statistics.median(times) for times in zip(*runs, strict=True))
    return {"sequences": batch, "planner_s": ours, "reference_s": theirs}


def lookup_seconds(calls: int = 10000) -> float:
    """Seconds of one look-up of launch parameters for sizes that were seen before, which every launch makes."""
    from dsv4_triton.kernels.muls_add import SPACE

    def burst() -> None:
        for _ in range(calls):
            SPACE(HOST, elements=65536, x=torch.float32, y=torch.bfloat16)

    return min(host_clock(burst) for _ in range(5)) / calls


def first_lookup_seconds(sizes: int = 1000) -> float:
    """Median seconds of the first look-up of launch parameters for a size, with the files of configs read before."""
    from dsv4_triton.kernels.muls_add import SPACE

    SPACE.forget()
    SPACE(HOST, elements=1, x=torch.float32, y=torch.bfloat16)
    times = [
        host_clock(partial(SPACE, HOST, elements=65536 + size, x=torch.float32, y=torch.bfloat16))
        for size in range(sizes)
    ]
    SPACE.forget()
    return statistics.median(times)


def run(repeat: int, console: Console) -> dict[str, Any]:
    """Print the planning time of a decode step at 1, 64 and 256 sequences, `repeat` timed steps for each, and the time
    of look-ups of launch parameters."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with host.installed():
            figures = [measure(batch, repeat) for batch in (1, 64, 256)]
    finally:
        torch.set_num_threads(threads)
    table = Table(title=f"planning a decode step, {len(CACHES)} caches, context up to {CONTEXT}")
    for column in ("sequences", "planner, us", "PyTorch references, us", "ratio"):
        table.add_column(column, justify="right")
    for row in figures:
        ours, theirs = row["planner_s"] * 1e6, row["reference_s"] * 1e6
        table.add_row(str(row["sequences"]), f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}")
    console.print(table)
    lookup, first = lookup_seconds(), first_lookup_seconds()
    print_line(
        console, f"look-up of launch parameters: {lookup * 1e6:.2f} us, the first of a size {first * 1e6:.1f} us"
    )
    return {"steps": figures, "lookup_s": lookup, "first_lookup_s": first}
