"""Lightning indexer scores: a relu of dot products with every visible key, weighted over the heads.

    score[t, s] = key_scale[s] * sum_h weights[t, h] * q_scale[t, h] * relu(<q[t, h], key[s]>)   for s < n_vis[t]
    score[t, s] = -inf                                                                           otherwise

q [T, HI, 128] and key_cache [blocks, rows, 128] share a dtype: int8 (fp16 scales; int32 dot products, the relu is an
integer maximum), float8_e4m3fn (fp32 scales), bf16 or fp32 (no scales). weights [T, HI] fp32 carry every constant
factor. Entry s is row s % rows of block table[req, s // rows]. Scores are fp32; nothing is rounded before the sum.

A tile is BLOCK rows of one page: q [HI, 128] times K^T [128, BLOCK]; the other way round A5 transposes on the vector
core, with a function that its device library lacks. Tiles from n_vis on are not read; rows from n_vis on inside the
last tile are computed, and replaced if the caller wants them hidden. Grid: one program per cube core at most,
persistent over (group of tiles, token), tokens first: short requests then leave no core idle. L0C bytes:
BLOCK * HI * 4. UB bytes: about BLOCK * HI * 8. On A2 and A3 `tile_mix_vector_loop` divides the vector work between both
vector cores, and a single store per tile keeps matrix and vector work overlapped; hence a second kernel for the rest of
the row.
Families: all (e4m3 where the matrix unit has it: A5, host). Source: docs/model.md, section 6.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton.autotune.space import MIXED, Choices, Key, Space, mixing
from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels._checks import check_filled, check_tensor, output
from dsv4_triton.kernels._index_quant import FORMATS, SCALE_DTYPES

OP = "indexer_score"
DIM = 128
MAX_TILE_ROWS = 128
MIN_TILES_PER_GROUP = 8
MAX_TILES_PER_GROUP = 48
GROUPS_PER_CORE = 4
HIDE_WIDTH = 2048


@triton.jit(do_not_specialize=["items", "tokens", "group", "max_entries", "table_stride"])
def _indexer_score_kernel(
    q_ptr,
    q_scale_ptr,
    weights_ptr,
    keys_ptr,
    key_scale_ptr,
    table_ptr,
    token_req_ptr,
    n_vis_ptr,
    out_ptr,
    items,
    tokens,
    group,
    max_entries,
    weights_stride,
    table_stride,
    key_stride,
    scale_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    HIDE: tl.constexpr,
):
    """Item i is group `i // tokens` of token `i % tokens`, `group` tiles; tile j covers entries j * BLOCK on."""
    head = tl.arange(0, H)
    row = tl.arange(0, BLOCK)
    feature = tl.arange(0, D)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        token = item % tokens
        begin = (item // tokens) * group
        end = tl.minimum(begin + group, tl.cdiv(max_entries, BLOCK))
        visible = tl.minimum(tl.load(n_vis_ptr + token), max_entries)
        table = table_ptr + tl.maximum(tl.load(token_req_ptr + token), 0).to(tl.int64) * table_stride
        source = q_ptr + tl.cast(token, tl.int64) * (H * D)
        q = tl.load(source + head[:, None] * D + feature[None, :])
        weight = tl.load(weights_ptr + tl.cast(token, tl.int64) * weights_stride + head)
        if SCALED:
            weight = weight * tl.load(q_scale_ptr + token * H + head).to(tl.float32)
        target = out_ptr + tl.cast(token, tl.int64) * max_entries
        for tile in range(begin, tl.minimum(end, tl.cdiv(visible, BLOCK))):
            entry = tile * BLOCK
            block = tl.maximum(tl.load(table + entry // ROWS), 0).to(tl.int64)
            first = entry % ROWS
            keys = tl.load(keys_ptr + block * key_stride + first * D + row[:, None] * D + feature[None, :])
            score = tl.sum(_relu(tl.dot(q, tl.trans(keys))) * weight[:, None], axis=0)
            if SCALED:
                score = score * tl.load(key_scale_ptr + block * scale_stride + first + row).to(tl.float32)
            if HIDE:
                score = tl.where(row < visible - entry, score, float("-inf"))
            tl.store(target + entry + row, score, mask=row < max_entries - entry)


@triton.jit(do_not_specialize=["tokens", "max_entries"])
def _hide_kernel(n_vis_ptr, out_ptr, tokens, max_entries, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """-inf from the first tile without a visible entry to the end of each row."""
    column = tl.arange(0, WIDTH)
    hidden = tl.full((WIDTH,), float("-inf"), tl.float32)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        visible = tl.maximum(tl.load(n_vis_ptr + token), 0)
        target = out_ptr + tl.cast(token, tl.int64) * max_entries
        for start in range(tl.cdiv(visible, BLOCK) * BLOCK, max_entries, WIDTH):
            tl.store(target + start + column, hidden, mask=column < max_entries - start)


@triton.jit
def _relu(x):
    """max(x, 0) as fp32; integers are clipped before the cast, which is one instruction less per score."""
    if x.dtype == tl.int32:
        return tl.maximum(x, 0).to(tl.float32)
    else:
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


def tiles_per_group(tokens: int, tiles: int, cores: int) -> int:
    """Tiles that a program takes with one load of a token's queries, for `tiles` tiles of the longest row."""
    share = triton.cdiv(tokens * tiles, cores)
    return max(min(share, MIN_TILES_PER_GROUP), min(triton.cdiv(share, GROUPS_PER_CORE), MAX_TILES_PER_GROUP))


def _default(family: Family, key: Key) -> dict[str, Any]:
    """BLOCK: rows of a tile. GROUP: tiles of an item."""
    tile = min(key["rows"], MAX_TILE_ROWS)
    group = tiles_per_group(key["tokens"], triton.cdiv(key["entries"], tile), family.cube_cores)
    return {"BLOCK": tile, "GROUP": group, **MIXED}


def _candidates(family: Family, key: Key) -> Choices:
    """On the host a sum over heads is one operation for any tile."""
    tile = min(key["rows"], 2 * MAX_TILE_ROWS)
    blocks = [b for b in (tile, tile // 2, tile // 4) if b >= 16] or [tile]
    group = _default(family, key)["GROUP"]
    groups = sorted({group, *(g for g in (1, 2, 4, 8, 16, 32, 64, 128) if group < 4 * g and g <= 4 * group)})
    if not family.arch:
        return {"BLOCK": blocks, "GROUP": groups}
    return {"BLOCK": blocks, "GROUP": groups, **mixing(family)}


def _fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    """A tile is part of a page; its scores fit the accumulators, and three times their share vector memory."""
    block, scores = config["BLOCK"], config["BLOCK"] * key["heads"] * 4
    if block & (block - 1) or key["rows"] % block:
        return f"BLOCK {block} is no power of two that divides the {key['rows']} rows of a page"
    if not family.arch:
        return ""
    if scores > family.l0c_bytes:
        return f"BLOCK {block}: scores take {scores} bytes, L0C has {family.l0c_bytes}"
    vector = 3 * scores // (1 if family.vector_registers else 2)
    return f"BLOCK {block}: scores take {vector} bytes, UB has {family.ub_bytes}" if vector > family.ub_bytes else ""


SPACE = Space(OP, default=_default, candidates=_candidates, fits=_fits, buckets=("tokens", "entries"))


def indexer_score(
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    weights: torch.Tensor,
    key_cache: torch.Tensor,
    scale_cache: torch.Tensor | None,
    block_table: torch.Tensor,
    token_req: torch.Tensor,
    n_vis: torch.Tensor,
    *,
    max_entries: int,
    hide: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores [T, max_entries] fp32 of the entries 0..n_vis[t]-1 of each token's request; -inf from n_vis[t] on, or
    with `hide=False` anything, which saves a launch: `indexer_topk` never reads it.

    q [T, HI, 128] and key_cache [blocks, rows, 128] (any block stride) are both int8, float8_e4m3fn, bf16 or fp32;
    int8 and e4m3 need q_scale [T, HI] and scale_cache [blocks, rows] (fp16 and fp32), the others take None.
    weights [T, HI] fp32 (rows of any stride); block_table [B, M] int32; token_req and n_vis [T] int32 (0 visible
    entries for padding). The rows of a block must be a power of two, or a multiple of 128. TypeError or ValueError
    names the argument.
    """
    check_tensor(OP, "q", q, (None, None, DIM), tuple(FORMATS))
    tokens, heads, _ = q.shape
    device = q.device
    check_tensor(OP, "weights", weights, (tokens, heads), torch.float32, device=device, layout="rows")
    check_tensor(OP, "key_cache", key_cache, (None, None, DIM), q.dtype, device=device, layout="page")
    check_tensor(OP, "block_table", block_table, (None, None), torch.int32, device=device, layout="rows")
    for name, vector in (("token_req", token_req), ("n_vis", n_vis)):
        check_tensor(OP, name, vector, (tokens,), torch.int32, device=device)
    blocks, rows, _ = key_cache.shape
    scaled = q.dtype in SCALE_DTYPES
    for name, scale in (("q_scale", q_scale), ("scale_cache", scale_cache)):
        if (scale is not None) != scaled:
            raise ValueError(f"{OP}: {name} is {'missing' if scaled else 'given'} for q of dtype {q.dtype}")
    if q_scale is not None and scale_cache is not None:
        dtype = SCALE_DTYPES[q.dtype]
        check_tensor(OP, "q_scale", q_scale, (tokens, heads), dtype, device=device)
        check_tensor(OP, "scale_cache", scale_cache, (blocks, rows), dtype, device=device, layout="page")
    if rows % min(rows, MAX_TILE_ROWS) or (rows < MAX_TILE_ROWS and rows & (rows - 1)):
        raise ValueError(f"{OP}: key_cache has {rows} rows in a block, expected a power of two or a multiple of 128")
    capacity = block_table.shape[1] * rows
    if max_entries > capacity:
        raise ValueError(f"{OP}: max_entries is {max_entries}, the block table holds at most {capacity}")
    out = output(OP, "out", out, (tokens, max_entries), torch.float32, device)
    if out.numel() == 0:
        return out
    check_filled(OP, key_cache=key_cache, block_table=block_table)
    family = family_of(device.type)
    config = SPACE(family, tokens=tokens, entries=max_entries, heads=heads, rows=rows, dtype=q.dtype)
    tile, group = config["BLOCK"], config["GROUP"]
    items = tokens * triton.cdiv(max_entries, tile * group)
    key_scales = key_cache if scale_cache is None else scale_cache
    if hide:
        grid = (min(tokens, family.vector_cores),)
        _hide_kernel[grid](n_vis, out, tokens, max_entries, BLOCK=tile, WIDTH=HIDE_WIDTH)
    grid = (min(items, family.cube_cores),)
    _indexer_score_kernel[grid](
        q,
        weights if q_scale is None else q_scale,
        weights,
        key_cache,
        key_scales,
        block_table,
        token_req,
        n_vis,
        out,
        items,
        tokens,
        group,
        max_entries,
        weights.stride(0),
        block_table.stride(0),
        key_cache.stride(0),
        key_scales.stride(0),
        H=heads,
        D=DIM,
        ROWS=rows,
        BLOCK=tile,
        SCALED=scaled,
        HIDE=hide,
        **config.options,
    )
    return out
