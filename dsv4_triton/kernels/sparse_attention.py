"""Sparse attention: window rows, compressed rows and a sink in one softmax, for prefill and decode alike.

For token t at position p and head h, with K the window rows max(0, p - window + 1)..p and the compressed rows:

    a_s = scale * <q[t, h], k_s>;   M = max_s a_s;   Z = sum_s exp(a_s - M) + exp(sink[h] - M)
    out[t, h] = sum_s round(exp(a_s - M) / Z) * k_s

fp32 throughout; `round` is the cast to the cache's dtype (P is bf16 for bf16 rows, while Z sums unrounded terms); one
cast of the result. A row is key and value at once. Terms are added in the order of the token's own rows, whatever else
the batch holds; only the split of many dense rows into chunks follows `max_n_vis`.

`_attend_plan.py` chooses the launches by shapes and device family:

* rows read where they lie, in one launch: whole pages as tiles, or single rows where the family can load a product's
  operand row by row;
* `gather_rows` copies what a token attends, decoded where rows are records (uint8), then one launch attends it, or
  three launches do one step each (`_attend_split.py`); where requests have several tokens, `_dense_rows.py` copies rows
  that all of these attend once per request;
* sets of dense rows too long for one softmax give partial results, which a last launch merges with the sink.

Cube and vector cores; grids are persistent. On-chip sizes: `_attend.py`, `gather_rows.py`. Formula: official
inference code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from dsv4_triton.autotune.space import Config
from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels import _attend, _attend_split
from dsv4_triton.kernels._attend_plan import (
    HEAD_DIM,
    Call,
    Limits,
    Plan,
    Tiling,
    once,
    plan,
    rounded,
    sizes,
)
from dsv4_triton.kernels._attend_scratch import RUN, Scratch, parts_of, run_length, shared_rows
from dsv4_triton.kernels._attend_space import SPACE, limits_of, most_scratch
from dsv4_triton.kernels._attend_split_space import MERGE, SCORES, SOFTMAX, VALUES, parts
from dsv4_triton.kernels._checks import FLOATS, check_filled, check_tensor, output
from dsv4_triton.kernels._dense_rows import dense_rows
from dsv4_triton.kernels._rows import check_rows, is_record
from dsv4_triton.kernels._workspace import ALIGNMENT, carve, check_workspace
from dsv4_triton.kernels.gather_rows import gather_rows

OP = "sparse_attention"


@dataclass
class _Tokens:
    """What belongs to a run of tokens, and what all of them share."""

    q: torch.Tensor
    window_cache: torch.Tensor
    window_table: torch.Tensor
    token_req: torch.Tensor
    positions: torch.Tensor
    cmp_cache: torch.Tensor | None
    cmp_table: torch.Tensor | None
    n_vis: torch.Tensor | None
    indices: torch.Tensor | None
    sink: torch.Tensor
    out: torch.Tensor
    scale: float
    call: Call
    family: Family
    limit: Limits
    options: dict[str, Any]

    def runs(self, length: int) -> Iterator[_Tokens]:
        """The tokens in runs of `length`."""
        if length >= len(self.q):
            yield self
            return
        for start in range(0, len(self.q), length):
            run = slice(start, start + length)
            yield replace(
                self, q=self.q[run], token_req=self.token_req[run], positions=self.positions[run], out=self.out[run],
                n_vis=None if self.n_vis is None else self.n_vis[run],
                indices=None if self.indices is None else self.indices[run],
            )  # fmt: skip

    def attend(self, tiling: Tiling, plan: Plan, scratch: Scratch, slot0: int) -> None:
        """One launch into `out`, with the sink, or into the partial results from slot `slot0` on."""
        tokens, heads = self.q.shape[:2]
        call = self.call
        rows = self.window_cache if self.cmp_cache is None else self.cmp_cache
        table = self.window_table if self.cmp_table is None else self.cmp_table
        pick, columns, base = self.sink, call.picked, call.picked
        if scratch.rows is not None:
            rows = scratch.rows
            base = columns = plan.gathered
        if scratch.bias is not None:
            pick = scratch.bias
        elif self.indices is not None:
            pick = self.indices
        counted = self.n_vis is not None
        if counted:
            base = plan.base
        items = tokens * -(-heads // tiling.HEADS)
        splits = 1
        if plan.slots and tiling.TILES:
            splits = max(1, min(plan.slots - slot0, self.limit.CORE_ITEMS * self.family.cube_cores // items))
        chosen = asdict(tiling) | self.options
        if once(self.family, tiling, self.limit, items * splits, heads):
            chosen = {"multibuffer": False} | chosen | {"DV": HEAD_DIM}
        _attend.attend_kernel[(min(items * splits, self.family.cube_cores),)](
            self.q, self.window_cache, self.window_table, rows, table, pick, self.sink, self.token_req, self.positions,
            self.n_vis if counted else self.positions, *scratch.target(self.out, self.sink),
            tokens, heads, self.window_table.stride(0), self.window_cache.stride(0), table.stride(0), rows.stride(0),
            columns, base, base + call.dense, call.window, splits, plan.slots or 1, slot0, self.scale,
            COUNTED=counted, FINAL=not plan.slots, D=HEAD_DIM,
            **chosen,
        )  # fmt: skip

    def steps(self, plan: Plan, scratch: Scratch) -> None:
        """Scores, softmax and values of the gathered rows, a launch each."""
        tokens, heads = self.q.shape[:2]
        counted = self.n_vis is not None
        n_vis = self.n_vis if counted else self.positions
        base = plan.base if counted else plan.gathered
        bounds = base, base + self.call.dense
        kind = {"SHARED": plan.shared, "COUNTED": counted}
        cubes, vectors = self.family.cube_cores, self.family.vector_cores
        slots, chunk, first = plan.slots or 1, plan.chunk, plan.base if plan.shared else 0
        key = {"heads": heads, "chunk": chunk, "first": first, "bytes": self.q.element_size()}
        config = SCORES(self.family, tokens=tokens, columns=plan.gathered, **key)
        items = tokens * -(-heads // config["HEADS"])
        splits = parts(plan.gathered // config["ROWS"], items, cubes)
        _attend_split.scores_kernel[(min(items * splits, cubes),)](
            self.q, scratch.rows, self.token_req, self.positions, n_vis, scratch.scores, tokens, heads, plan.gathered,
            *bounds, scratch.shared_rows, splits, **kind, RAGGED=heads % config["HEADS"] != 0, ROWS=config["ROWS"],
            HEADS=config["HEADS"], D=HEAD_DIM, **config.options,
        )  # fmt: skip
        final = not plan.slots
        values, lse = scratch.target(self.out, self.sink)
        config = SOFTMAX(self.family, chunks=tokens * slots, heads=heads, chunk=chunk)
        block = config["HEADS"]
        _attend_split.softmax_kernel[(min(tokens * slots * -(-heads // block), vectors),)](
            scratch.scores, scratch.bias, self.sink, self.positions, n_vis, scratch.weights, lse, tokens, heads,
            plan.gathered, *bounds, slots, self.scale, **kind, FINAL=final, RAGGED=heads % block != 0, CHUNK=chunk,
            HEADS=block, **config.options,
        )  # fmt: skip
        config = VALUES(self.family, tokens=tokens, **key)
        block, width, rows = config["HEADS"], config["DV"], config["ROWS"]
        items = tokens * -(-heads // block) * (HEAD_DIM // width)
        _attend_split.values_kernel[(min(items, cubes),)](
            scratch.weights, scratch.rows, self.token_req, self.positions, n_vis, values, tokens, heads, plan.gathered,
            *bounds, scratch.shared_rows, slots, **kind, FINAL=final, RAGGED=heads % block != 0, CHUNK=chunk,
            FIRST=first or rows, ROWS=rows, HEADS=block, D=HEAD_DIM, DV=width, **config.options,
        )  # fmt: skip

    def merge(self, plan: Plan, scratch: Scratch) -> None:
        """The partial results and the sink into `out`."""
        tokens, heads = self.q.shape[:2]
        config = MERGE(self.family, tokens=tokens, heads=heads)
        block, base = config["HEADS"], plan.base or plan.chunk
        _attend_split.merge_kernel[(min(tokens * -(-heads // block), self.family.vector_cores),)](
            scratch.values, scratch.lse, self.sink, self.positions, self.n_vis, self.out, tokens, heads, plan.slots,
            base, base + self.call.dense, plan.chunk, HEADS=block, D=HEAD_DIM, **config.options,
        )  # fmt: skip

    def run(self, plan: Plan, scratch: Scratch) -> None:
        """All launches of the plan but for the copy of shared rows."""
        if plan.own:
            alone = not plan.shared
            gather_rows(
                self.window_cache, self.window_table, self.token_req, self.positions,
                window=self.call.window if plan.base else 0, columns=plan.own,
                cmp_cache=self.cmp_cache if alone else None, cmp_table=self.cmp_table if alone else None,
                n_vis=self.n_vis if alone else None, indices=self.indices, dtype=self.q.dtype, rows=scratch.own_rows,
                bias=scratch.bias, no_bias=not plan.bias, fill=0 if plan.launches else plan.chunk,
            )  # fmt: skip
        if not plan.launches:
            self.steps(plan, scratch)
        for slot0, tiling in enumerate(plan.launches):
            self.attend(tiling, plan, scratch, slot0)
        if plan.slots:
            self.merge(plan, scratch)


def sparse_attention_workspace(
    tokens: int,
    heads: int,
    dtype: torch.dtype,
    family: Family,
    *,
    window_page: int,
    cmp_page: int = 1,
    topk: int = 0,
    max_n_vis: int = 0,
    record: bool = False,
    window: int = 128,
) -> int:
    """Bytes of `workspace` for calls of up to `tokens` tokens, with selections of `topk` and with up to `max_n_vis`
    dense rows. `window_page` and `cmp_page` are rows per block of the caches."""
    need, bound = 0, family.scratch_bytes
    calls = [(0, 0, False), (topk, 0, False)]
    calls += [(0, dense, shared) for dense in sizes(max_n_vis) for shared in (False, True)]
    for picked, dense, shared in calls:
        call = Call(heads, window, window_page, cmp_page, picked, dense, record, shared)
        a_token, a_request = most_scratch(family, call, dtype.itemsize)
        if a_token or a_request:
            own = min(tokens * a_token, max(RUN * a_token, bound))
            need = max(need, own + min(bound, tokens // 2 * a_request) + 6 * ALIGNMENT)
    return need


def _chosen(family: Family, call: Call, tokens: int, itemsize: int) -> tuple[Config, Limits, Plan]:
    """The configuration of a call, its limits, and the launches that follow."""
    config = SPACE(
        family, tokens=tokens, dense=rounded(call.dense), heads=call.heads, window=call.window,
        window_page=call.window_page, cmp_page=call.cmp_page, picked=call.picked, record=call.record,
        shared=call.shared, bytes=itemsize,
    )  # fmt: skip
    limit = limits_of(config)
    return config, limit, plan(family, call, limit)


def sparse_attention(
    q: torch.Tensor,
    window_cache: torch.Tensor,
    window_table: torch.Tensor,
    sink: torch.Tensor,
    token_req: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    window: int = 128,
    cmp_cache: torch.Tensor | None = None,
    cmp_table: torch.Tensor | None = None,
    n_vis: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    max_n_vis: int | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention output [T, H, 512] in q's dtype.

    q [T, H, 512] bf16 or fp32, 1 to 128 heads. Caches [blocks, rows per block, 512] in q's dtype, pages at any
    stride. `window_table` [B, M] int32 maps position // rows per block, `cmp_table` entry // rows per block. `sink`
    [H] fp32 is a logit that is not scaled. `token_req`, `positions` [T] int32; position -1 is padding and gives a
    zero row.

    With `cmp_cache`: `indices` [T, K] int32 selects compressed rows (-1 is no row), or else rows 0..n_vis[t]-1
    (`n_vis` [T] int32) are all attended. At most `max_n_vis` of them are: pass the largest n_vis where the
    host knows it, since scratch and loops follow this bound (default: what `cmp_table` can hold). `workspace`:
    `_workspace.py` and `sparse_attention_workspace`. Raises ValueError or TypeError for arguments that do not fit
    together.
    """
    check_tensor(OP, "q", q, (None, None, HEAD_DIM), FLOATS)
    count, heads, _ = q.shape
    device = q.device
    if not 1 <= heads <= 128:
        raise ValueError(f"{OP}: q has {heads} heads, expected 1 to 128")
    if not 1 <= window <= 128:
        raise ValueError(f"{OP}: window is {window}, expected 1 to 128")
    check_rows(OP, "window_cache", window_cache, q.dtype, device)
    check_tensor(OP, "window_table", window_table, (None, None), torch.int32, device=device, layout="rows")
    check_tensor(OP, "sink", sink, (heads,), torch.float32, device=device)
    check_tensor(OP, "token_req", token_req, (count,), torch.int32, device=device)
    check_tensor(OP, "positions", positions, (count,), torch.int32, device=device)
    dense = 0
    if cmp_cache is None:
        if not (cmp_table is n_vis is indices is None):
            raise ValueError(f"{OP}: cmp_table, n_vis and indices need cmp_cache")
    else:
        check_rows(OP, "cmp_cache", cmp_cache, q.dtype, device)
        if is_record(cmp_cache) != is_record(window_cache):
            raise TypeError(f"{OP}: cmp_cache is {cmp_cache.dtype} but window_cache is {window_cache.dtype}")
        if cmp_table is None or (indices is None) == (n_vis is None):
            raise ValueError(f"{OP}: cmp_cache needs cmp_table and exactly one of n_vis and indices")
        check_tensor(OP, "cmp_table", cmp_table, (None, None), torch.int32, device=device, layout="rows")
        if indices is not None:
            check_tensor(OP, "indices", indices, (count, None), torch.int32, device=device)
        if n_vis is not None:
            check_tensor(OP, "n_vis", n_vis, (count,), torch.int32, device=device)
            dense = cmp_table.shape[1] * cmp_cache.shape[1]
            if max_n_vis is not None:
                dense = min(dense, max_n_vis)
    if workspace is not None:
        check_workspace(OP, workspace, device)
    out = output(OP, "out", out, q.shape, q.dtype, device)
    if count == 0:
        return out
    check_filled(OP, window_cache=window_cache, window_table=window_table)
    if indices is None and dense == 0:
        cmp_cache = cmp_table = n_vis = None
    check_filled(OP, cmp_cache=cmp_cache, cmp_table=cmp_table)
    family = family_of(device.type)
    requests = 0 if cmp_table is None else cmp_table.shape[0]
    call = Call(
        heads, window, window_cache.shape[1], 1 if cmp_cache is None else cmp_cache.shape[1],
        0 if indices is None else indices.shape[1], dense, is_record(window_cache),
        shared=dense > 0 and 2 * requests <= count,
    )  # fmt: skip
    config, limit, chosen = _chosen(family, call, count, q.element_size())
    if shared_rows(chosen, requests) * HEAD_DIM * q.element_size() > family.scratch_bytes:
        call = replace(call, shared=False)
        config, limit, chosen = _chosen(family, call, count, q.element_size())
    tokens = _Tokens(
        q, window_cache, window_table, token_req, positions, cmp_cache, cmp_table, n_vis, indices, sink, out, scale,
        call, family, limit, config.options,
    )  # fmt: skip
    if not chosen.gathered and not chosen.slots:
        tokens.run(chosen, Scratch())
        return out
    length = run_length(chosen, count, heads, q.dtype, family)
    parts = parts_of(chosen, requests, length, heads, q.dtype)
    scratch = Scratch(shared_rows(chosen, requests), **dict(zip(parts, carve(OP, workspace, device, parts.values()))))
    if scratch.rows is not None:
        scratch.own_rows = scratch.rows[scratch.shared_rows :].view(length, chosen.own, HEAD_DIM)
        if chosen.shared:
            assert cmp_cache is not None and cmp_table is not None and n_vis is not None
            together = scratch.rows[: scratch.shared_rows].view(requests, -1, HEAD_DIM)
            dense_rows(
                cmp_cache, cmp_table, token_req, n_vis, together, family, limit=dense, base=chosen.base,
                fill=1 if chosen.launches else chosen.chunk,
            )  # fmt: skip
    for run in tokens.runs(length):
        run.run(chosen, scratch.first(len(run.q)))
    return out
