"""torch_npu's ops of the experts: rows grouped by expert, products by group, and rows added up again.

As vllm-ascend serves unquantised experts: products are rounded to bf16 before SwiGLU, and routing weights are applied
behind the second product.
"""

from __future__ import annotations

from typing import Any

import torch

from dsv4_triton.bench.baselines import Run
from dsv4_triton.bench.native_ops import live_tokens, torch_npu, whole
from dsv4_triton.bench.registry.case import Converted
from dsv4_triton.reference.grouped_matmul_swiglu import gate_up
from dsv4_triton.reference.moe_plan import tile_capacity


def clamped(x: torch.Tensor, limit: float | None) -> torch.Tensor:
    """[gate | up] with the clamps of the model, which `npu_swiglu` does not have."""
    if not limit:
        return x
    gate, up = x.chunk(2, dim=-1)
    return torch.cat((gate.clamp(max=limit), up.clamp(-limit, limit)), dim=-1)


def _grouped(npu: Any, x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Rows of x [S, K] times weight [E, K, N] of their expert, in the dtype of both; `counts` [E] int64."""
    products: torch.Tensor = npu.npu_grouped_matmul(
        x=[x], weight=[weight], split_item=2, group_list_type=1, group_type=0, group_list=counts
    )[0]
    return products


def _route(npu: Any, x: torch.Tensor, ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, ...]:
    """Rows by expert, the place [T k] of each pair in them, and the rows [E] int64 of each expert."""
    rows, places, counts, _ = npu.npu_moe_init_routing_v2(
        x, ids, active_num=ids.numel(), expert_num=experts, expert_tokens_num_type=1, expert_tokens_num_flag=True,
        active_expert_range=[0, experts], quant_mode=-1,
    )  # fmt: skip
    return rows, places, counts


def init_routing(arguments: dict[str, Any]) -> Run:
    """Without weights of rows and tiles, which nobody needs who serves with these ops."""
    npu = torch_npu()
    live = live_tokens(arguments["ids"][:, 0])

    def run(**a: Any) -> Any:
        rows, places, counts = _route(npu, a["x"][:live], a["ids"][:live], a["num_experts"])
        return Converted(lambda: _dispatched(a, rows, places, counts))

    return run


def _dispatched(
    a: dict[str, Any], rows: torch.Tensor, places: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """What `moe_dispatch` returns."""
    weights, choices = a["weights"], a["ids"].shape[1]
    positions = torch.full_like(a["ids"], -1)
    positions.view(-1)[: len(places)] = places
    row_weights = weights.new_zeros(weights.numel())
    row_weights[places.long()] = weights.reshape(-1)[: len(places)]
    tiles = [
        (expert, first + row, min(a["block_rows"], count - row))
        for expert, (first, count) in enumerate(zip((counts.cumsum(0) - counts).tolist(), counts.tolist()))
        for row in range(0, count, a["block_rows"])
    ]
    runs = positions.new_zeros(3, tile_capacity(positions.numel(), a["num_experts"], a["block_rows"]))
    runs[:, : len(tiles)] = torch.tensor(tiles, dtype=torch.int32).reshape(-1, 3).T
    all_rows = whole(rows, len(weights) * choices)
    return all_rows, row_weights, positions, runs, positions.new_tensor([len(tiles)])


def _packed(w13: torch.Tensor) -> torch.Tensor:
    """[E, K, 2I] of w13 [E, 2I, K]: all gate columns, then all up columns."""
    return torch.cat(gate_up(w13), dim=1).transpose(1, 2).contiguous()


def experts(arguments: dict[str, Any]) -> Run:
    """`npu_moe_init_routing_v2`, both products with the clamps and `npu_swiglu` between them, and
    `npu_moe_token_unpermute`."""
    npu = torch_npu()
    up, down = _packed(arguments["w13"]), arguments["w2"].transpose(1, 2).contiguous()
    live = live_tokens(arguments["ids"][:, 0])

    def run(**a: Any) -> Any:
        rows, places, counts = _route(npu, a["x"][:live], a["ids"][:live], len(up))
        activated = npu.npu_swiglu(clamped(_grouped(npu, rows, up, counts), a["swiglu_limit"]), dim=-1)
        y = npu.npu_moe_token_unpermute(
            permuted_tokens=_grouped(npu, activated, down, counts), sorted_indices=places, probs=a["weights"][:live]
        )
        return Converted(lambda: (a["out"].copy_(whole(y, len(a["out"]))),))

    return run
