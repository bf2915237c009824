"""vllm-ascend's attention over a window, compressed rows and a sink, for bf16 rows (A2, A3) and for records (A5).

Both read pages [blocks, rows, 1, width] with any stride between blocks. A request's tokens are its last ones, so that
its length says how much of its past each of them sees.
"""

from __future__ import annotations

from typing import Any

import torch

from dsv4_triton.bench.baselines import Run, UnavailableError
from dsv4_triton.bench.native_ops import ascend, live_tokens, whole

_ROW_STEP, _MOST_ROWS = 16, 1024
"""Rows of a page: a multiple, and at most."""
_SELECTED = (512, 1024)
"""Entries of `cmp_sparse_indices`."""
_WINDOW_MASK, _CAUSAL_MASK = 4, 3


def of_values(arguments: dict[str, Any]) -> Run:
    """`npu_sparse_attn_sharedkv`."""
    name = "npu_sparse_attn_sharedkv"
    op, plan = ascend(name), ascend(f"{name}_metadata")
    if arguments["window_cache"].dtype != arguments["q"].dtype:
        raise UnavailableError("it takes rows in the dtype of q; those of the case are records")
    return _attention(arguments, op, plan, {}, {"device": str(arguments["q"].device)})


def of_records(arguments: dict[str, Any]) -> Run:
    """`npu_kv_quant_sparse_attn_sharedkv`: per row 64 rotated values in bf16, 448 in e4m3 with a scale for each 64."""
    name = "npu_kv_quant_sparse_attn_sharedkv"
    op, plan = ascend(name), ascend(f"{name}_metadata")
    if arguments["window_cache"].dtype != torch.uint8:
        raise UnavailableError("it takes records; those of the case are plain rows")
    quantised = {"kv_quant_mode": 1}
    return _attention(arguments, op, plan, {**quantised, "tile_size": 64, "rope_head_dim": 64}, quantised)


def _attention(
    arguments: dict[str, Any], op: Any, plan: Any, of_op: dict[str, Any], of_plan: dict[str, Any]
) -> Run:  # fmt: skip
    """Lengths, the plan of the cores and dense selections are made once: a server makes them once a step."""
    q, window = arguments["q"], arguments["window"]
    live = live_tokens(arguments["positions"])
    starts, lengths = _lengths(arguments, live)
    _check_pages(arguments)
    compressed, ratio, chosen = arguments.get("cmp_cache") is not None, _ratio(arguments), _chosen(arguments, live)
    shared = {
        "cu_seqlens_q": starts,
        "seqused_kv": lengths,
        "cmp_ratio": ratio,
        "ori_mask_mode": _WINDOW_MASK,
        "cmp_mask_mode": _CAUSAL_MASK,
        "ori_win_left": window - 1,
        "ori_win_right": 0,
        "layout_q": "TND",
        "layout_kv": "PA_ND",
    }
    metadata = plan(
        num_heads_q=q.shape[1],
        num_heads_kv=1,
        head_dim=q.shape[2],
        batch_size=len(lengths),
        max_seqlen_q=int(starts.diff().max()),
        max_seqlen_kv=int(lengths.max()),
        cmp_topk=0 if chosen is None else chosen.shape[2],
        has_ori_kv=True,
        has_cmp_kv=compressed,
        **shared,
        **of_plan,
    )

    def run(**a: Any) -> Any:
        rest: dict[str, Any] = {}
        if compressed:
            rest = {"cmp_kv": _pages(a["cmp_cache"]), "cmp_block_table": a["cmp_table"], "cmp_sparse_indices": chosen}
        out = op(
            a["q"][:live],
            ori_kv=_pages(a["window_cache"]),
            ori_block_table=a["window_table"],
            sinks=a["sink"],
            metadata=metadata,
            softmax_scale=a["scale"],
            **shared,
            **rest,
            **of_op,
        )[0]
        return whole(out, len(a["q"]))

    return run


def _lengths(arguments: dict[str, Any], live: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First rows [B + 1] of the requests, and their tokens [B] after the step, int32."""
    requests = len(arguments["window_table"])
    of_token = arguments["token_req"][:live].long()
    new = torch.bincount(of_token, minlength=requests)
    if not bool(new.all()):
        raise UnavailableError(
            f"the ops take the length of each request, and request {int(new.argmin())} has no token in the step"
        )
    starts = torch.nn.functional.pad(new.cumsum(0), (1, 0)).to(torch.int32)
    return starts, arguments["positions"][(starts[1:] - 1).long()] + 1


def _check_pages(arguments: dict[str, Any]) -> None:
    for name in ("window_cache", "cmp_cache"):
        cache = arguments.get(name)
        if cache is not None and (cache.shape[1] % _ROW_STEP or cache.shape[1] > _MOST_ROWS):
            raise UnavailableError(
                f"its pages have a multiple of {_ROW_STEP} rows, at most {_MOST_ROWS}; those of {name} {cache.shape[1]}"
            )


def _ratio(arguments: dict[str, Any]) -> int:
    """Tokens of a compressed entry; 1 without."""
    if arguments.get("indices") is not None:
        return 4
    visible = arguments.get("n_vis")
    if visible is None:
        return 1
    return 4 if torch.equal(visible, ((arguments["positions"] + 1) // 4).to(visible.dtype)) else 128


def _chosen(arguments: dict[str, Any], live: int) -> torch.Tensor | None:
    """[T, 1, K] int32: a c4 layer's selection, all visible entries where there is none; c128 layers have none."""
    if _ratio(arguments) != 4:
        return None
    indices = arguments.get("indices")
    if indices is None:
        width = min((k for k in _SELECTED if k >= arguments["max_n_vis"]), default=0)
        entry = torch.arange(width, dtype=torch.int32, device=arguments["n_vis"].device)
        indices = torch.where(entry < arguments["n_vis"][:, None], entry, -1)
    if indices.shape[1] not in _SELECTED:
        raise UnavailableError(
            f"it selects {' or '.join(map(str, _SELECTED))} entries, not {indices.shape[1] or 'all'}"
        )
    return indices[:live, None].contiguous()


def _pages(cache: torch.Tensor) -> torch.Tensor:
    """A cache as the ops see it: with one head; records as fp8 values."""
    values = cache.view(torch.float8_e4m3fn) if cache.dtype == torch.uint8 else cache
    return values.unsqueeze(2)
