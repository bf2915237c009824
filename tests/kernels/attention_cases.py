"""Cases of the attention kernels: requests with positions, paged caches of NaN but for the rows that may be read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4_triton.reference.rows import pack
from tests.numeric import poisoned

DIM = 512
SCALE = DIM**-0.5


@dataclass(frozen=True)
class Case:
    """`requests`: the positions of each request's tokens, -1 for a padding token. `visible` is n_vis of position p."""

    requests: tuple[tuple[int, ...], ...]
    heads: int = 8
    dtype: torch.dtype = torch.float32
    page: int = 64
    compressed: str = "none"
    ratio: int = 4
    cmp_page: int = 64
    topk: int = 32
    sink: float | None = None
    window: int = 128
    gap: int = 0
    """Values between two pages of a cache."""
    record: bool = False

    def __str__(self) -> str:
        return (
            f"{self.compressed}-{'_'.join(str(len(r)) for r in self.requests)}t-h{self.heads}"
            f"-{str(self.dtype)[6:]}-page{self.page}.{self.cmp_page}-r{self.ratio}"
            f"{'-record' * self.record}"
        )

    def visible(self, position: int) -> int:
        return (position + 1) // self.ratio


def paged(
    rows: list[torch.Tensor], page: int, dtype: torch.dtype, gap: int = 0, record_rows: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cache and table that hold rows[b][i] as row i of request b; rows that are NaN stay as they are.

    Pages are in random order, block 0 is nobody's, table entries that no row needs are -1, and `gap` values of NaN lie
    between pages.
    """
    needed = [-(-len(r) // page) for r in rows]
    width = max(1, *needed) + 1
    order = torch.randperm(sum(needed)) + 1
    wide = 640 if record_rows else DIM
    storage = poisoned((sum(needed) + 1, page * wide + gap), dtype)
    if record_rows:
        storage = torch.full_like(storage, 0xFF, dtype=torch.uint8)
    cache = storage[:, : page * wide].unflatten(1, (page, wide))
    table = torch.full((len(rows), width), -1, dtype=torch.int32)
    for b, own in enumerate(rows):
        for i in range(needed[b]):
            block, order = int(order[0]), order[1:]
            table[b, i] = block
            part = own[i * page : (i + 1) * page]
            there = ~torch.isnan(part[:, 0])
            cache[block, : len(part)][there] = pack(part[there]) if record_rows else part[there].to(dtype)
    return cache, table


@dataclass
class Inputs:
    q: torch.Tensor
    window_cache: torch.Tensor
    window_table: torch.Tensor
    sink: torch.Tensor
    token_req: torch.Tensor
    positions: torch.Tensor
    compressed: dict[str, torch.Tensor]

    def args(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.window_cache, self.window_table, self.sink, self.token_req, self.positions

    def tokens(self, chosen) -> Inputs:
        """The same step with only some of its tokens."""
        per_token = {k: v[chosen] for k, v in self.compressed.items() if k in ("n_vis", "indices")}
        return Inputs(
            self.q[chosen], self.window_cache, self.window_table, self.sink, self.token_req[chosen],
            self.positions[chosen], {**self.compressed, **per_token},
        )  # fmt: skip


def build(case: Case) -> Inputs:
    positions = [p for request in case.requests for p in request]
    requests = [b if p >= 0 else -1 for b, request in enumerate(case.requests) for p in request]
    window_rows, entries = [], []
    for own in case.requests:
        live = [p for p in own if p >= 0]
        rows = torch.full((max(live, default=-1) + 1, DIM), float("nan"))
        for p in live:
            first = max(0, p - case.window + 1)
            absent = torch.isnan(rows[first : p + 1, 0])
            rows[first : p + 1][absent] = torch.randn(int(absent.sum()), DIM)
        window_rows.append(rows)
        entries.append(torch.randn(max((case.visible(p) for p in live), default=0), DIM))
    window_cache, window_table = paged(window_rows, case.page, case.dtype, case.gap, case.record)
    heads = case.heads
    sink = torch.randn(heads) if case.sink is None else torch.full((heads,), case.sink)
    q = (2 * torch.randn(len(positions), heads, DIM)).to(case.dtype)
    q[torch.tensor(positions) < 0] = float("nan")
    compressed: dict[str, torch.Tensor] = {}
    if case.compressed != "none":
        cache, table = paged(entries, case.cmp_page, case.dtype, case.gap, case.record)
        compressed = {"cmp_cache": cache, "cmp_table": table}
        visible = [case.visible(p) for p in positions]
        if case.compressed == "dense":
            compressed["n_vis"] = torch.tensor(visible, dtype=torch.int32)
        else:
            indices = torch.full((len(positions), case.topk), -1, dtype=torch.int32)
            for t, n in enumerate(visible):
                chosen = torch.randperm(n)[: case.topk].int()
                places = torch.arange(len(chosen))
                if case.compressed == "holes":
                    places = torch.randperm(case.topk)[: len(chosen) // 2]
                indices[t, places] = chosen[: len(places)]
            compressed["indices"] = indices
    return Inputs(
        q, window_cache, window_table, sink,
        torch.tensor(requests, dtype=torch.int32), torch.tensor(positions, dtype=torch.int32), compressed,
    )  # fmt: skip


EDGES = (0, 1, 3, 62, 63, 64, 126, 127, 128, 129, 255, 256)
MIXED = (tuple(range(60, 71)), (300,), (-1, -1), (0,), (127, 128))
