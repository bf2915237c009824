"""Stand-ins for vllm-ascend's attention ops, from their READMEs; see `native_stand_ins`.

The plan of the cores is opaque. Here it holds what it was made for, so that attention can tell whether it fits.
"""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor
_TENSORS = (
    "Tensor? ori_kv=None, Tensor? cmp_kv=None, Tensor? ori_sparse_indices=None, Tensor? cmp_sparse_indices=None, "
    "Tensor? ori_block_table=None, Tensor? cmp_block_table=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_ori_kv=None, Tensor? cu_seqlens_cmp_kv=None, Tensor? seqused_q=None, "
    "Tensor? seqused_kv=None, Tensor? sinks=None, Tensor? metadata=None, "
)
_LENGTHS = (
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None, Tensor? cu_seqlens_cmp_kv=None, "
    "Tensor? seqused_q=None, Tensor? seqused_kv=None, int batch_size=0, int max_seqlen_q=0, int max_seqlen_kv=0, "
    "int ori_topk=0, int cmp_topk=0, "
)
_LAYOUTS = "int ori_win_right=0, str layout_q='BSND', str layout_kv='PA_ND', "
SCHEMAS = (
    f"npu_sparse_attn_sharedkv(Tensor q, *, {_TENSORS}float softmax_scale=0, int cmp_ratio=0, int ori_mask_mode=4, "
    f"int cmp_mask_mode=3, int ori_win_left=128, {_LAYOUTS}bool return_softmax_lse=False) "
    "-> (Tensor out, Tensor softmax_lse)",
    f"npu_sparse_attn_sharedkv_metadata(int num_heads_q, int num_heads_kv, int head_dim, {_LENGTHS}int cmp_ratio=4, "
    f"int ori_mask_mode=4, int cmp_mask_mode=3, int ori_win_left=128, {_LAYOUTS}bool has_ori_kv=True, "
    "bool has_cmp_kv=True, str device='npu') -> (Tensor metadata)",
    f"npu_kv_quant_sparse_attn_sharedkv(Tensor q, int kv_quant_mode, {_TENSORS}int tile_size=0, int rope_head_dim=0, "
    "float softmax_scale=0.0, int cmp_ratio=0, int ori_mask_mode=4, int cmp_mask_mode=3, int ori_win_left=127, "
    f"{_LAYOUTS}bool return_softmax_lse=False) -> (Tensor out, Tensor softmax_lse)",
    f"npu_kv_quant_sparse_attn_sharedkv_metadata(int num_heads_q, int num_heads_kv, int head_dim, int kv_quant_mode, "
    f"{_LENGTHS}int tile_size=0, int rope_head_dim=0, int cmp_ratio=-1, int ori_mask_mode=4, int cmp_mask_mode=3, "
    f"int ori_win_left=127, {_LAYOUTS}bool has_ori_kv=True, bool has_cmp_kv=True, str device='npu') -> Tensor",
)
_MASKS = {"ori_mask_mode": 4, "cmp_mask_mode": 3, "ori_win_left": 127, "ori_win_right": 0}
_LAYOUT = {"layout_q": "TND", "layout_kv": "PA_ND"}


def npu_sparse_attn_sharedkv_metadata(**a: Any) -> Tensor:
    assert (_MASKS | _LAYOUT).items() <= a.items()
    assert a["num_heads_kv"] == 1 and a["head_dim"] == 512 and a["has_ori_kv"]
    return _signature(
        a["num_heads_q"], a["cu_seqlens_q"], a["seqused_kv"], a["batch_size"], a["max_seqlen_q"], a["max_seqlen_kv"],
        a["cmp_ratio"], a["cmp_topk"], a["has_cmp_kv"],
    )  # fmt: skip


def npu_kv_quant_sparse_attn_sharedkv_metadata(**a: Any) -> Tensor:
    assert a["kv_quant_mode"] == 1
    return npu_sparse_attn_sharedkv_metadata(**a)


def _signature(heads: int, starts: Tensor, lengths: Tensor, *numbers: int) -> Tensor:
    plan = torch.zeros(1024, dtype=torch.int32)
    values = torch.cat((torch.tensor([heads, *map(int, numbers)]), starts, lengths))
    plan[: len(values)] = values
    return plan


def npu_sparse_attn_sharedkv(q: Tensor, **a: Any) -> tuple[Tensor, Tensor]:
    for name in ("ori_kv", "cmp_kv"):
        assert a[name] is None or (a[name].dtype == q.dtype and a[name].shape[2:] == (1, 512))
    return _attend(q, a, lambda rows: rows.float())


def npu_kv_quant_sparse_attn_sharedkv(q: Tensor, kv_quant_mode: int, **a: Any) -> tuple[Tensor, Tensor]:
    assert kv_quant_mode == 1 and a.pop("tile_size") == a.pop("rope_head_dim") == 64
    for name in ("ori_kv", "cmp_kv"):
        assert a[name] is None or (a[name].dtype == torch.float8_e4m3fn and a[name].shape[2:] == (1, 640))
    return _attend(q, a, _decoded)


def _decoded(records: Tensor) -> Tensor:
    """[..., 512] of [..., 640]: 64 rotated bf16 values, 448 e4m3 values and 7 powers of two for 64 of them each."""
    data = records.contiguous().view(torch.uint8)
    rotated = data[..., :128].contiguous().view(torch.bfloat16).float()
    values = data[..., 128:576].contiguous().view(torch.float8_e4m3fn).float()
    scales = torch.exp2(data[..., 576:583].float() - 127)
    return torch.cat((values * scales.repeat_interleave(64, -1), rotated), -1)


def _attend(q: Tensor, a: dict[str, Any], decode: Any) -> tuple[Tensor, Tensor]:
    starts, lengths, table = a["cu_seqlens_q"], a["seqused_kv"], a["ori_block_table"]
    chosen, compressed, ratio = a["cmp_sparse_indices"], a["cmp_kv"], a["cmp_ratio"]
    assert (_MASKS | _LAYOUT).items() <= a.items() and not a["return_softmax_lse"] and a["seqused_q"] is None
    assert q.dim() == 3 and q.dtype == torch.bfloat16 and len(q) == int(starts[-1]) and q.shape[1] % 4 == 0
    assert a["sinks"].dtype == torch.float32 and a["sinks"].shape == q.shape[1:2]
    assert starts.dtype == lengths.dtype == table.dtype == torch.int32 and len(lengths) == len(table) == len(starts) - 1
    for cache in (a["ori_kv"], compressed):
        assert cache is None or (cache.shape[1] % 16 == 0 and cache.shape[1] <= 1024)
    assert ratio in ((1,) if compressed is None else (4, 128))
    if chosen is not None:
        assert chosen.dtype == torch.int32 and chosen.shape[:2] == (len(q), 1) and chosen.shape[2] in (512, 1024)
    expected = _signature(
        q.shape[1], starts, lengths, len(lengths), int(starts.diff().max()), int(lengths.max()), ratio,
        0 if chosen is None else chosen.shape[2], compressed is not None,
    )  # fmt: skip
    assert torch.equal(a["metadata"], expected), "the plan was made for another call"
    out = torch.full_like(q, torch.nan)
    for request, length in enumerate(lengths.tolist()):
        first, end = starts[request], starts[request + 1]
        for token in range(first, end):
            position = length - int(end) + token
            seen = torch.arange(max(0, position - 127), position + 1)
            rows = [_rows(a["ori_kv"], table[request], seen)]
            if compressed is not None:
                visible = (position + 1) // ratio
                entries = torch.arange(visible)
                if chosen is not None:
                    entries = chosen[token, 0]
                    count = int((entries >= 0).sum())
                    assert bool((entries[:count] >= 0).all()), "valid entries come first"
                    entries = entries[:count][entries[:count] < visible]
                rows.append(_rows(compressed, a["cmp_block_table"][request], entries))
            keys = decode(torch.cat(rows))
            scores = torch.cat((q[token].float() @ keys.T * a["softmax_scale"], a["sinks"][:, None]), 1)
            out[token] = (scores.softmax(1)[:, :-1] @ keys).to(q.dtype)
    return out, q.new_empty(0)


def _rows(cache: Tensor, blocks: Tensor, at: Tensor) -> Tensor:
    at = at.long()
    return cache[blocks[at // cache.shape[1]].long(), at % cache.shape[1], 0]
