"""Cases of the mixture of experts, whole on one device: all experts, their full inner size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from dsv4_triton.bench.registry.case import Entry, Inputs, Job, Minimum, Shape
from dsv4_triton.bench.registry.compare import BF16_ROUNDING, EXACT, Tolerance
from dsv4_triton.bench.registry.make import Maker
from dsv4_triton.bench.registry.models import Model
from dsv4_triton.bench.registry.steps import by_tokens
from dsv4_triton.reference.moe_plan import moe_plan, tile_capacity

BF16, FP32 = torch.bfloat16, torch.float32
_ROUTER = Tolerance(2e-6, 1e-30, "the same fp32 formula with another logarithm; ids are equal")
_EXPERTS = Tolerance(2**-6, 2e-2, "h is rounded to bf16 before w2, where some values go to their neighbour; so is y")
_PLANNERS = ("_moe_count_kernel", "_moe_place_kernel", "_plan_and_copy_kernel")
_GROUPED = Tolerance(1e-4, 1e-4, "fp32 sums of up to 7,168 terms in another order")


def _tokens(model: Model) -> list[Shape]:
    return [Shape(step) for step in by_tokens(model)]


def _variants(model: Model, *variants: str) -> list[Shape]:
    return [Shape(step, variant) for variant in variants for step in by_tokens(model)]


@cache
def _choices(tokens: int, padding: int, experts: int, k: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    popular = 0.2 * torch.randn(experts, generator=random)
    ids = (torch.rand(tokens, experts, generator=random) + popular).topk(k).indices.to(torch.int32)
    ids[tokens - padding :] = -1
    return ids


def choices(job: Job) -> torch.Tensor:
    """[T, k] int32: experts of each token, some more popular than others; -1 for padding. Fixed by the case."""
    return _choices(job.tokens, job.step.padding, job.model.experts, job.model.experts_per_token)


def _active(job: Job) -> int:
    """Experts that some token chose."""
    ids = choices(job)
    return len(ids[ids >= 0].unique())


def _pairs(job: Job) -> int:
    """Rows of the experts: pairs of a token that is not padding and one of its experts."""
    return job.live * job.model.experts_per_token


def _rows_per_tile(job: Job) -> int:
    from dsv4_triton.kernels.moe_plan import rows_per_tile

    return rows_per_tile(job.tokens * job.model.experts_per_token, job.model.experts, job.family.dot_rows)


@dataclass(frozen=True)
class _WithShared:
    """The experts as a layer uses them: the shared one stands last and is one more choice of every token."""

    ids: torch.Tensor
    experts: int
    block_rows: int
    active: int
    pairs: int

    @classmethod
    def of(cls, job: Job) -> _WithShared:
        from dsv4_triton.kernels.moe_plan import rows_per_tile

        routed = choices(job)
        last = torch.full_like(routed[:, :1], job.model.experts)
        last[routed[:, :1] < 0] = -1
        ids, experts = torch.cat((routed, last), dim=1), job.model.experts + 1
        live = ids[ids >= 0]
        block_rows = rows_per_tile(ids.numel(), experts, job.family.dot_rows)
        return cls(ids, experts, block_rows, len(live.unique()), len(live))


def _build_router(job: Job, make: Maker) -> dict[str, Any]:
    m = job.model
    arguments: dict[str, Any] = {
        "logits": make.data(job.tokens, m.experts, dtype=FP32),
        "k": m.experts_per_token,
        "routed_scaling_factor": m.routed_scaling,
    }
    if job.variant == "top-k":
        return arguments | {"bias": make.data(m.experts, dtype=FP32, std=0.1)}
    # The table is real: it holds indices. Rows are k neighbouring experts from a random first one.
    first = torch.randint(m.experts, (m.vocab, 1), generator=torch.Generator().manual_seed(0))
    table = (first + torch.arange(m.experts_per_token)) % m.experts
    ids = torch.randint(m.vocab, (job.tokens,), generator=torch.Generator().manual_seed(1))
    ids[job.live :] = -1
    return arguments | {"input_ids": make.to(ids.to(torch.int32)), "tid2eid": make.to(table.to(torch.int32))}


def _minimum_router(job: Job) -> Minimum:
    """Logits in, weights and ids out; by table also the token's id and its row."""
    m = job.model
    extra = 4 + m.experts_per_token * 4 if job.variant == "hash" else 0
    return Minimum(job.tokens * (m.experts * 4 + m.experts_per_token * 8 + extra))


def _build_plan(job: Job, make: Maker) -> dict[str, Any]:
    return {"ids": make.to(choices(job)), "num_experts": job.model.experts, "block_rows": _rows_per_tile(job)}


def _minimum_plan(job: Job) -> Minimum:
    pairs = job.tokens * job.model.experts_per_token
    return Minimum(pairs * 8 + tile_capacity(pairs, job.model.experts, _rows_per_tile(job)) * 12)


def _expert_weights(make: Maker, ids: torch.Tensor, experts: int, rows: int, columns: int) -> torch.Tensor:
    """[experts, rows, columns]; only experts that some token chose are filled, the others are never read."""
    weights = Maker(make.device, False, 0).data(experts, rows, columns)
    if make.fill:
        one = make.data(rows, columns, std=columns**-0.5)
        for expert in ids[ids >= 0].unique().tolist():
            weights[expert] = one.roll(expert, 1)
    return weights


def _product(job: Job) -> tuple[int, int]:
    """(N, K) of a grouped product: gate and up, or down."""
    m = job.model
    return (2 * m.moe_intermediate, m.hidden) if job.variant == "gate-up" else (m.hidden, m.moe_intermediate)


def _build_grouped(job: Job, make: Maker) -> dict[str, Any]:
    N, K = _product(job)
    block_rows = _rows_per_tile(job)
    _, tiles, num_tiles = moe_plan(choices(job), job.model.experts, block_rows=block_rows)
    return {
        "x": make.data(job.tokens * job.model.experts_per_token, K),
        "w": _expert_weights(make, choices(job), job.model.experts, N, K),
        "tiles": make.to(tiles),
        "num_tiles": make.to(num_tiles),
        "block_rows": block_rows,
    }


def _products(inputs: Inputs, returned: Any) -> dict[str, torch.Tensor]:
    """Rows that belong to a tile."""
    tiles, count = inputs.arguments["tiles"], int(inputs.arguments["num_tiles"])
    return {"rows": returned[: int(tiles[2, :count].sum())]}


def _minimum_grouped(job: Job) -> Minimum:
    """The weights of every chosen expert and the rows in, fp32 products out."""
    N, K = _product(job)
    return Minimum(_active(job) * N * K * 2 + _pairs(job) * (K * 2 + N * 4), _pairs(job) * N * K, BF16)


def _touched_product(job: Job) -> dict[str, int]:
    """The matrices of experts that some token chose."""
    N, K = _product(job)
    return {"w": _active(job) * N * K * 2}


def _touched_experts(job: Job) -> dict[str, int]:
    m = job.model
    one = _WithShared.of(job).active * m.moe_intermediate * m.hidden * 2
    return {"w13": 2 * one, "w2": one}


def _build_dispatch(job: Job, make: Maker) -> dict[str, Any]:
    shared = _WithShared.of(job)
    T, k = shared.ids.shape
    return {
        "x": make.data(T, job.model.hidden),
        "weights": make.data(T, k, dtype=FP32, mean=0.3, std=0.05),
        "ids": make.to(shared.ids),
        "num_experts": shared.experts,
        "block_rows": shared.block_rows,
    }


def _dispatched(inputs: Inputs, returned: Any) -> dict[str, torch.Tensor]:
    """Rows that belong to a pair, and the plan."""
    rows, row_weights, positions, tiles, num_tiles = returned
    count = int((positions >= 0).sum())
    return {
        "rows": rows[:count],
        "row_weights": row_weights[:count],
        "positions": positions,
        "tiles": tiles,
        "num_tiles": num_tiles,
    }


def _minimum_dispatch(job: Job) -> Minimum:
    """The plan, a row of x in for each token that is not padding, a row and a weight out for each pair."""
    shared = _WithShared.of(job)
    pairs, row = shared.ids.numel(), job.model.hidden * 2
    plan = pairs * 8 + tile_capacity(pairs, shared.experts, shared.block_rows) * 12
    return Minimum(plan + job.live * row + shared.pairs * (row + 8))


def _build_gate_up(job: Job, make: Maker) -> dict[str, Any]:
    m, shared = job.model, _WithShared.of(job)
    _, tiles, num_tiles = moe_plan(shared.ids, shared.experts, block_rows=shared.block_rows)
    return {
        "x": make.data(shared.ids.numel(), m.hidden),
        "w13": _expert_weights(make, shared.ids, shared.experts, 2 * m.moe_intermediate, m.hidden),
        "tiles": make.to(tiles),
        "num_tiles": make.to(num_tiles),
        "block_rows": shared.block_rows,
        "limit": m.swiglu_limit,
        "row_weights": make.data(shared.ids.numel(), dtype=FP32, mean=0.3, std=0.05),
    }


def _minimum_gate_up(job: Job) -> Minimum:
    """The matrices of every chosen expert, its rows and their weights in, activations out."""
    m, shared = job.model, _WithShared.of(job)
    matrix = 2 * m.moe_intermediate * m.hidden
    rows = shared.pairs * ((m.hidden + m.moe_intermediate) * 2 + 4)
    return Minimum(shared.active * matrix * 2 + rows, shared.pairs * matrix, BF16)


def _build_experts(job: Job, make: Maker) -> dict[str, Any]:
    m, shared = job.model, _WithShared.of(job)
    T, k = shared.ids.shape
    return {
        "x": make.data(T, m.hidden),
        "w13": _expert_weights(make, shared.ids, shared.experts, 2 * m.moe_intermediate, m.hidden),
        "w2": _expert_weights(make, shared.ids, shared.experts, m.hidden, m.moe_intermediate),
        "weights": make.data(T, k, dtype=FP32, mean=0.3, std=0.05),
        "ids": make.to(shared.ids),
        "swiglu_limit": m.swiglu_limit,
        "out": make.data(T, m.hidden),
    }


def _minimum_experts(job: Job) -> Minimum:
    """The weights of every chosen expert and a row of x in, a row out; zeros for padding."""
    m, shared = job.model, _WithShared.of(job)
    one = 3 * m.moe_intermediate * m.hidden
    return Minimum(shared.active * one * 2 + (job.live + job.tokens) * m.hidden * 2, shared.pairs * one, BF16)


def _build_swiglu(job: Job, make: Maker) -> dict[str, Any]:
    """`shared`: bf16 products of the shared expert; `routed`: fp32 products of the experts with their weights."""
    m = job.model
    if job.variant == "shared":
        return {"x": make.data(job.tokens, 2 * m.moe_intermediate), "limit": m.swiglu_limit}
    rows = job.tokens * m.experts_per_token
    return {
        "x": make.data(rows, 2 * m.moe_intermediate, dtype=FP32),
        "limit": m.swiglu_limit,
        "row_weights": make.data(rows, dtype=FP32, mean=0.3, std=0.05),
        "out": make.data(rows, m.moe_intermediate),
    }


def _minimum_swiglu(job: Job) -> Minimum:
    inner = job.model.moe_intermediate
    if job.variant == "shared":
        return Minimum(job.tokens * 6 * inner)
    return Minimum(job.tokens * job.model.experts_per_token * (10 * inner + 4))


def _build_muls_add(job: Job, make: Maker) -> dict[str, Any]:
    T, D = job.tokens, job.model.hidden
    return {"x": make.data(T, D, dtype=FP32), "y": make.data(T, D), "scale": 1.0}


def _minimum_muls_add(job: Job) -> Minimum:
    return Minimum(job.tokens * job.model.hidden * 8)


ENTRIES = (
    Entry(
        "moe_router",
        lambda model: _variants(model, "top-k", "hash"),
        _build_router,
        _minimum_router,
        _ROUTER,
        baselines=("moe_gating_top_k_hash",),
    ),
    Entry(
        "moe_plan",
        _tokens,
        _build_plan,
        _minimum_plan,
        EXACT,
        planners=_PLANNERS,
    ),
    Entry(
        "grouped_matmul",
        lambda model: _variants(model, "gate-up", "down"),
        _build_grouped,
        _minimum_grouped,
        _GROUPED,
        outcome=_products,
        baselines=("npu_grouped_matmul",),
        touched=_touched_product,
    ),
    Entry(
        "grouped_matmul_swiglu",
        _tokens,
        _build_gate_up,
        _minimum_gate_up,
        Tolerance(2**-7, 1e-5, "fp32 sums of up to 7,168 terms in another order, then one rounding to bf16"),
        outcome=_products,
        baselines=("npu_grouped_matmul_swiglu_quant",),
        touched=_touched_experts,
    ),
    Entry(
        "moe_dispatch",
        _tokens,
        _build_dispatch,
        _minimum_dispatch,
        EXACT,
        outcome=_dispatched,
        baselines=("npu_moe_init_routing_v2",),
        planners=_PLANNERS,
    ),
    Entry(
        "moe_experts",
        _tokens,
        _build_experts,
        _minimum_experts,
        _EXPERTS,
        written=("out",),
        baselines=("npu_grouped_matmul",),
        planners=_PLANNERS,
        touched=_touched_experts,
    ),
    Entry(
        "swiglu",
        lambda model: _variants(model, "shared", "routed"),
        _build_swiglu,
        _minimum_swiglu,
        BF16_ROUNDING,
        written=("out",),
        baselines=("npu_swiglu",),
    ),
    Entry("muls_add", _tokens, _build_muls_add, _minimum_muls_add, BF16_ROUNDING),
)
