"""Expert choice and routing weights of the mixture of experts.

    s = sqrt(softplus(logit))
    ids = the k best of s + bias (of equal ones the lower expert) in ascending order, or tid2eid[token id]
    w = routed_scaling_factor * s[ids] / (sum s[ids] + 1e-20)          the bias chooses and never weighs

With a shared expert every token has one more choice, expert E with weight 1, so that the routed experts' product does
the shared one too. logits [T, E], bias [E], weights [T, k] fp32; ids [T, k] int32.

softplus(z) = max(z, 0) + log1p(exp(-|z|)), with log1p(u) = log(1 + u) + (u - ((1 + u) - 1)), accurate for u up to 1.
Grid: vector cores; a persistent loop over tiles of BT tokens. The k-th best score is read from the sorted rows of the
tile [BT, EB]; what is above it, and what equals it, is brought to the front by sorting positions. Where sorting is not
one instruction: k rounds of "take the maximum, then the lowest expert that has it". With a table the chosen logits are
gathered before they are scored. UB: 8 fp32 tiles. Source of the formula: `Gate` of the official DeepSeek inference
code; the 1e-20 is transformers'.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton.autotune.space import Choices, Key, Space, buffering
from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels._checks import check_tensor, output
from dsv4_triton.kernels._lang import extract_slice
from dsv4_triton.kernels._tiling import next_power_of_2

_TILE = 4096
_HASH_TOKENS = 32
"""Tokens of a tile with a table, at most; at least two, since the adapter breaks on gathered rows of one."""
_MAX_EXPERTS = 1024
_LOWEST = tl.constexpr(-3.0e38)
_GONE = tl.constexpr(-3.4e38)


@triton.jit
def _score(logit):
    """`sqrt(softplus(logit))`."""
    u = tl.exp(-tl.abs(logit))
    w = 1.0 + u
    log1p = tl.log(w) + (u - (w - 1.0))
    return tl.sqrt(tl.maximum(logit, 0.0, propagate_nan=tl.PropagateNan.ALL) + log1p)


@triton.jit
def _load_logits(logits_ptr, rows, live, E: tl.constexpr, EB: tl.constexpr):
    """[BT, EB] logits of these rows, zero where there are none; a mask over columns only where it is needed, since it
    costs UB."""
    expert = tl.arange(0, EB)[None, :]
    inside = live
    if E != EB:
        inside = live & (expert < E)
    return tl.load(logits_ptr + rows * E + expert, mask=inside, other=0.0)


@triton.jit
def _best_by_sort(key, left, rank, K: tl.constexpr, KB: tl.constexpr, EB: tl.constexpr):
    """Of the K best of each row of `key [BT, EB]` the values of `left`, EB - expert, in descending order; then 0."""
    BT: tl.constexpr = key.shape[0]
    kth = extract_slice(tl.sort(key, descending=True), (0, K - 1), (BT, 1), (1, 1))
    # What is above the k-th value comes first, then what equals it, each by expert.
    order = tl.where(key > kth, left + EB, tl.where(key == kth, left, 0.0))
    order = extract_slice(tl.sort(order, descending=True), (0, 0), (BT, KB), (1, 1))
    order = tl.where(rank < K, order, 0.0)
    return tl.sort(tl.where(order > EB, order - EB, order), descending=True)


@triton.jit
def _best_by_rounds(key, left, rank, K: tl.constexpr, KB: tl.constexpr, EB: tl.constexpr):
    """The same, one expert a round."""
    order = tl.zeros((key.shape[0], KB), tl.float32)
    for j in tl.static_range(K):
        top = tl.max(key, axis=1)[:, None]
        best = tl.max(tl.where(key == top, left, 0.0), axis=1)[:, None]
        order = tl.where(rank == j, best, order)
        key = tl.where(left == best, _GONE, key)
    return tl.sort(order, descending=True)


@triton.jit
def _finish(
    score, chosen, rank, rows, live, weights_ptr, ids_ptr, factor,
    E: tl.constexpr, K: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Normalise and store the scores [BT, KB] of the chosen experts (fp32 numbers); columns from K on are ignored."""
    weight = tl.where(rank < K, score, 0.0)
    weight = weight / (tl.sum(weight, axis=1)[:, None] + 1e-20) * factor
    if SHARED:
        chosen = tl.where(rank == K, 1.0 * E, chosen)
        weight = tl.where(rank == K, 1.0, weight)
    column = tl.arange(0, weight.shape[1])[None, :]
    target = rows * (K + SHARED) + column
    kept = live & (column < K + SHARED)
    tl.store(weights_ptr + target, weight, mask=kept)
    tl.store(ids_ptr + target, chosen.to(tl.int32), mask=kept)


@triton.jit(do_not_specialize=["T", "factor"])
def _moe_router_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    T,
    factor,
    E: tl.constexpr,
    EB: tl.constexpr,
    K: tl.constexpr,
    KB: tl.constexpr,
    SHARED: tl.constexpr,
    BT: tl.constexpr,
    BY_SORT: tl.constexpr,
):
    lane = tl.arange(0, BT)
    expert = tl.arange(0, EB)
    left = (EB - expert).to(tl.float32)[None, :]
    rank = tl.arange(0, KB).to(tl.float32)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(T, BT), tl.num_programs(0)):
        first = tile * BT
        live = (lane < T - first)[:, None]
        rows = (first.to(tl.int64) + lane)[:, None]
        score = _score(_load_logits(logits_ptr, rows, live, E, EB))
        key = score
        if bias_ptr is not None:
            if E == EB:
                key += tl.load(bias_ptr + expert)[None, :]
            else:
                key += tl.load(bias_ptr + expert, mask=expert < E, other=0.0)[None, :]
        key = tl.where(key > _LOWEST, key, _LOWEST)
        if E != EB:
            key = tl.where(left > EB - E, key, _GONE)
        if BY_SORT:
            order = _best_by_sort(key, left, rank, K, KB, EB)
        else:
            order = _best_by_rounds(key, left, rank, K, KB, EB)
        chosen = EB - order
        at = tl.minimum(chosen, EB - 1.0, propagate_nan=tl.PropagateNan.ALL).to(tl.int32)
        _finish(tl.gather(score, at, 1), chosen, rank, rows, live, weights_ptr, ids_ptr, factor, E, K, SHARED)


@triton.jit(do_not_specialize=["T", "V", "factor"])
def _moe_hash_router_kernel(
    logits_ptr,
    token_ptr,
    table_ptr,
    weights_ptr,
    ids_ptr,
    T,
    V,
    factor,
    E: tl.constexpr,
    EB: tl.constexpr,
    K: tl.constexpr,
    KB: tl.constexpr,
    SHARED: tl.constexpr,
    BT: tl.constexpr,
):
    lane = tl.arange(0, BT)
    choice = tl.arange(0, KB)
    rank = choice.to(tl.float32)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(T, BT), tl.num_programs(0)):
        first = tile * BT
        live = (lane < T - first)[:, None]
        rows = (first.to(tl.int64) + lane)[:, None]
        logit = _load_logits(logits_ptr, rows, live, E, EB)
        token = tl.load(token_ptr + first + lane, mask=lane < T - first, other=0)
        # Times a flag: with a select in this place triton-adapter-opt 3.2.0 crashes in a few of a hundred runs.
        token = (token.to(tl.int32) * ((token >= 0) & (token < V)).to(tl.int32)).to(tl.int64)
        table = table_ptr + token[:, None] * K + choice[None, :]
        chosen = tl.load(table, mask=(choice < K)[None, :], other=0).to(tl.int32)
        number = chosen.to(tl.float32)
        known = (number >= 0.0) & (number < E)
        score = _score(tl.gather(logit, tl.where(known, number, 0.0).to(tl.int32), 1))
        score = tl.where(known, score, 0.0)
        _finish(score, number, rank, rows, live, weights_ptr, ids_ptr, factor, E, K, SHARED)


def _default(family: Family, key: Key) -> dict[str, Any]:
    """BT tokens a tile; BY_SORT: the best by sorting."""
    most = _HASH_TOKENS if key["table"] else _TILE // next_power_of_2(key["experts"])
    share = next_power_of_2(triton.cdiv(key["tokens"], family.vector_cores))
    return {"BT": max(2, min(share, most)), "BY_SORT": family.vector_sort, **dict.fromkeys(buffering(family))}


def _candidates(family: Family, key: Key) -> Choices:
    even = {triton.cdiv(key["tokens"], family.vector_cores * rounds) for rounds in range(1, 9)}
    tokens = sorted({min(max(2, t), 64) for t in even} | {4, 8, 16, 32})
    if not family.arch:
        return {"BT": tokens}
    return {"BT": tokens, "BY_SORT": (True,) if key["table"] else (False, True), **buffering(family)}


def _fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    """Two fp32 tiles."""
    block_t, lanes = config["BT"], _expert_lanes(key["experts"])
    return "" if block_t * lanes * 8 <= family.ub_bytes else f"{block_t} rows of {lanes} scores do not fit"


SPACE = Space("moe_router", default=_default, candidates=_candidates, fits=_fits)


def _expert_lanes(num_experts: int) -> int:
    return -(-num_experts // 32) * 32


def moe_router(
    logits: torch.Tensor,
    k: int,
    *,
    routed_scaling_factor: float,
    bias: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    shared_expert: bool = False,
    weights: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(weights [T, k] fp32, ids [T, k] int32)` of the router logits `[T, E]` fp32; with `shared_expert` one more
    column of expert E and weight 1.

    Without a table, the k best of score plus `bias [E]` (fp32, optional) in ascending order of the expert; a NaN score
    ranks last. With `tid2eid [V, k]` and `input_ids [T]` (int32 or int64 each), the table's experts in table order and
    no bias: token ids outside 0..V-1, such as -1 of padding rows, count as token 0, and that the table holds experts
    0..E-1 is its loader's duty. E is at most 1024.
    """
    check_tensor("moe_router", "logits", logits, (None, None), torch.float32)
    T, E = logits.shape
    if not 1 <= k <= E <= _MAX_EXPERTS:
        raise ValueError(f"moe_router: k is {k} of {E} experts, expected 1 <= k <= E <= {_MAX_EXPERTS}")
    if bias is not None:
        check_tensor("moe_router", "bias", bias, (E,), torch.float32, device=logits.device)
    if (input_ids is None) != (tid2eid is None) or (bias is not None and tid2eid is not None):
        raise ValueError("moe_router: give input_ids and tid2eid together, and no bias with them")
    if input_ids is not None and tid2eid is not None:
        integers = (torch.int32, torch.int64)
        check_tensor("moe_router", "input_ids", input_ids, (T,), integers, device=logits.device)
        check_tensor("moe_router", "tid2eid", tid2eid, (None, k), integers, device=logits.device)
        if not len(tid2eid):
            raise ValueError("moe_router: tid2eid has no rows")
    columns = k + shared_expert
    weights = output("moe_router", "weights", weights, (T, columns), torch.float32, logits.device)
    ids = output("moe_router", "ids", ids, (T, columns), torch.int32, logits.device)
    if T == 0:
        return weights, ids
    family = family_of(logits.device.type)
    cores, factor = family.vector_cores, float(routed_scaling_factor)
    shape = {
        "E": E, "EB": _expert_lanes(E), "K": k, "KB": next_power_of_2(columns), "SHARED": int(shared_expert),
    }  # fmt: skip
    config = SPACE(family, tokens=T, experts=E, k=k, shared=shared_expert, table=tid2eid is not None)
    shape |= {"BT": config["BT"], **config.options}
    grid = (min(triton.cdiv(T, config["BT"]), cores),)
    if tid2eid is not None:
        _moe_hash_router_kernel[grid](
            logits, input_ids, tid2eid, weights, ids, T, len(tid2eid), factor, **shape
        )  # fmt: skip
    else:
        _moe_router_kernel[grid](logits, bias, weights, ids, T, factor, BY_SORT=config["BY_SORT"], **shape)
    return weights, ids
