"""Expert choice and routing weights of the mixture of experts.

    s = sqrt(softplus(logit))
    ids = the k best of s + bias (higher first, then the lower expert), or tid2eid[token id]
    w = routed_scaling_factor * s[ids] / (sum s[ids] + 1e-20)          the bias chooses and never weighs

With a shared expert every token has one more choice, expert E with weight 1, so that the routed experts' product does
the shared one too. logits [T, E], bias [E], weights [T, k] fp32; ids [T, k] int32.

softplus(z) = max(z, 0) + log1p(exp(-|z|)), with log1p(u) = u log(1 + u) / ((1 + u) - 1), accurate for any z. Grid:
vector cores; a persistent loop over tiles of BT tokens, k rounds of "take the maximum, then the lowest expert that has
it" on the tile [BT, EB] (UB: 8 fp32 tiles); with a table, a loop over tokens, where the choices meet the scores in one
tile [KB, EB]. Source of the formula: `Gate` of the official DeepSeek inference code; the 1e-20 is transformers'.
"""

import torch
import triton
import triton.language as tl

from dsv4_triton.device import family_of
from dsv4_triton.kernels._checks import check_tensor, output
from dsv4_triton.kernels._tiling import next_power_of_2

_TILE = 4096
_MAX_EXPERTS = 1024
_LOWEST = tl.constexpr(-3.0e38)
_GONE = tl.constexpr(-3.4e38)
_FAR = tl.constexpr(1.0e9)


@triton.jit
def _score(logit):
    """`sqrt(softplus(logit))`."""
    u = tl.exp(-tl.abs(logit))
    w = 1.0 + u
    log1p = tl.where(w == 1.0, u, tl.log(w) * (u / (w - 1.0)))
    return tl.sqrt(tl.maximum(logit, 0.0, propagate_nan=tl.PropagateNan.ALL) + log1p)


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
):
    lane = tl.arange(0, BT)
    expert = tl.arange(0, EB)
    number = expert.to(tl.float32)[None, :]
    choice = tl.arange(0, KB)
    rank = choice.to(tl.float32)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(T, BT), tl.num_programs(0)):
        first = tile * BT
        live = (lane < T - first)[:, None]
        rows = (first.to(tl.int64) + lane)[:, None]
        logit = tl.load(logits_ptr + rows * E + expert[None, :], mask=live & (expert < E)[None, :], other=0.0)
        score = _score(logit)
        key = score
        if bias_ptr is not None:
            key += tl.load(bias_ptr + expert, mask=expert < E, other=0.0)[None, :]
        key = tl.where(key > _LOWEST, key, _LOWEST)
        if E != EB:
            key = tl.where(number < E, key, _GONE)
        chosen = tl.zeros((BT, KB), tl.float32)
        weight = tl.zeros((BT, KB), tl.float32)
        for j in tl.static_range(K):
            top = tl.max(key, axis=1)
            best = tl.min(tl.where(key == top[:, None], number, _FAR), axis=1)[:, None]
            hit = number == best
            chosen = tl.where(rank == j, best, chosen)
            weight = tl.where(rank == j, tl.sum(tl.where(hit, score, 0.0), axis=1)[:, None], weight)
            key = tl.where(hit, _GONE, key)
        weight = weight / (tl.sum(weight, axis=1)[:, None] + 1e-20) * factor
        if SHARED:
            chosen = tl.where(rank == K, 1.0 * E, chosen)
            weight = tl.where(rank == K, 1.0, weight)
        kept = live & (choice < K + SHARED)[None, :]
        target = rows * (K + SHARED) + choice[None, :]
        tl.store(weights_ptr + target, weight, mask=kept)
        tl.store(ids_ptr + target, chosen.to(tl.int32), mask=kept)


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
):
    expert = tl.arange(0, EB)
    number = expert.to(tl.float32)[None, :]
    choice = tl.arange(0, KB)
    for t in range(tl.program_id(0), T, tl.num_programs(0)):
        row = tl.cast(t, tl.int64)
        score = _score(tl.load(logits_ptr + row * E + expert, mask=expert < E, other=0.0))
        token = tl.load(token_ptr + row).to(tl.int64)
        token = tl.where((token >= 0) & (token < V), token, 0)
        chosen = tl.load(table_ptr + token * K + choice, mask=choice < K, other=-1).to(tl.int32)
        hit = chosen.to(tl.float32)[:, None] == number
        weight = tl.sum(tl.where(hit, score[None, :], 0.0), axis=1)
        weight = weight / (tl.sum(weight, axis=0) + 1e-20) * factor
        if SHARED:
            last = choice.to(tl.float32) == K
            chosen = tl.where(last, E, chosen)
            weight = tl.where(last, 1.0, weight)
        target = row * (K + SHARED) + choice
        tl.store(weights_ptr + target, weight, mask=choice < K + SHARED)
        tl.store(ids_ptr + target, chosen, mask=choice < K + SHARED)


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

    Without a table, the k best of score plus `bias [E]` (fp32, optional); a NaN score ranks last. With `tid2eid [V,
    k]` and `input_ids [T]` (int32 or int64 each), the table's experts in table order and no bias: token ids outside
    0..V-1, such as -1 of padding rows, count as token 0, and that the table holds experts 0..E-1 is its loader's
    duty. E is at most 1024.
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
    shape = {"E": E, "EB": -(-E // 16) * 16, "K": k, "KB": next_power_of_2(columns), "SHARED": int(shared_expert)}
    factor = float(routed_scaling_factor)
    cores = family_of(logits.device.type).vector_cores
    if tid2eid is not None:
        _moe_hash_router_kernel[(min(T, cores),)](
            logits, input_ids, tid2eid, weights, ids, T, len(tid2eid), factor, **shape
        )
        return weights, ids
    block_t = min(next_power_of_2(triton.cdiv(T, cores)), max(1, _TILE // next_power_of_2(E)))
    grid = (min(triton.cdiv(T, block_t), cores),)
    _moe_router_kernel[grid](logits, bias, weights, ids, T, factor, **shape, BT=block_t)
    return weights, ids
