"""Copy the compressed rows that a request's tokens attend into one contiguous run per request.

    rows[b, j] = compressed row j of request b, decoded, for j below the largest n_vis of its tokens

For steps in which requests have several tokens, which then share the copy. Rows from there up to the last of a tile of
`fill` columns are zero (`base` columns that lie elsewhere come before row 0 in these tiles), and nothing is stored
beyond.

Grid: persistent over (request, block of columns), vector cores. Every item looks for its request's tokens, SCAN tokens
at a time with a few vector operations each.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton.autotune.space import Choices, Key, Space
from dsv4_triton.device import Family
from dsv4_triton.kernels._row_copies import copy_run
from dsv4_triton.kernels._rows import HEAD_DIM, is_record, record_views
from dsv4_triton.kernels.gather_rows import copy_candidates, copy_columns

SCAN = 1024

ALL = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _most_visible(req_ptr, n_vis_ptr, tokens, b, SCAN: tl.constexpr):
    """The largest n_vis of the tokens of request b."""
    most = 0
    for start in range(0, tokens, SCAN):
        t = start + tl.arange(0, SCAN)
        away = tl.load(req_ptr + t, mask=t < tokens, other=-1) - b
        mine = 1 - tl.minimum(tl.maximum(away, -away), 1)
        most = tl.maximum(most, tl.max(mine * tl.load(n_vis_ptr + t, mask=t < tokens, other=0), axis=0))
    return most


@triton.jit(do_not_specialize=[
    "tokens", "requests", "table_stride", "page_stride", "columns", "limit", "base", "fill",
])  # fmt: skip
def _dense_rows_kernel(
    cmp_ptr, cmp_byte_ptr, table_ptr, req_ptr, n_vis_ptr, rows_ptr,
    tokens, requests, table_stride, page_stride, columns, limit, base, fill,
    RECORD: tl.constexpr, PAGE: tl.constexpr, COLS: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """RECORD: the caches are bf16 and byte views."""
    for item in range(tl.program_id(0), requests * (columns // COLS), tl.num_programs(0)):
        b = item % requests
        column = item // requests * COLS
        count = tl.minimum(_most_visible(req_ptr, n_vis_ptr, tokens, b, SCAN), limit)
        if column < (base + count + fill - 1) // fill * fill - base:
            last = tl.maximum(count - 1, 0)
            first = tl.minimum(column, last // COLS * COLS)
            copy_run(
                cmp_ptr, cmp_byte_ptr, table_ptr + tl.cast(b, tl.int64) * table_stride, page_stride, first, last,
                count - column, rows_ptr + (tl.cast(b, tl.int64) * columns + column) * 512, True, RECORD, PAGE, COLS,
            )  # fmt: skip


def _default(family: Family, key: Key) -> dict[str, Any]:
    """COLS: columns of an item. SCAN: tokens that are looked through at once."""
    return {"COLS": copy_columns(key["record"]), "SCAN": SCAN, "multibuffer": None}


def _candidates(family: Family, key: Key) -> Choices:
    return {**copy_candidates(family, key["record"]), "SCAN": (256, 512, 1024, 2048, 4096)}


def _fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    columns, size = config["COLS"], 2 * config["COLS"] * HEAD_DIM * key["bytes"] + 16 * config["SCAN"]
    if key["columns"] % columns:
        return f"COLS {columns} does not divide {key['columns']} columns"
    return f"COLS {columns} takes {size} bytes, UB has {family.ub_bytes}" if size > family.ub_bytes else ""


SPACE = Space("dense_rows", default=_default, candidates=_candidates, fits=_fits, buckets=("tokens",))


def dense_rows(
    cmp_cache: torch.Tensor,
    cmp_table: torch.Tensor,
    token_req: torch.Tensor,
    n_vis: torch.Tensor,
    rows: torch.Tensor,
    family: Family,
    *,
    limit: int,
    base: int,
    fill: int,
) -> None:
    """Fill `rows` [B, columns, 512]; at most `limit` rows of a request. The caller has checked the arguments."""
    requests, columns, _ = rows.shape
    record = is_record(cmp_cache)
    config = SPACE(
        family, tokens=len(token_req), columns=columns, page=cmp_cache.shape[1], record=record,
        bytes=rows.element_size(),
    )  # fmt: skip
    _dense_rows_kernel[(min(requests * columns // config["COLS"], family.vector_cores),)](
        *record_views(cmp_cache), cmp_table, token_req, n_vis, rows,
        len(token_req), requests, cmp_table.stride(0), cmp_cache.stride(0), columns, limit, base, fill,
        RECORD=record, PAGE=cmp_cache.shape[1], COLS=config["COLS"], SCAN=config["SCAN"], **config.options,
    )  # fmt: skip
