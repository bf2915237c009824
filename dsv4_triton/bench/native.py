"""Baselines that are native NPU ops: of torch_npu (2.13.0), and of vllm-ascend's compiled extension.

Their signatures, dtypes and layouts are those of torch_npu's documentation and of vllm-ascend's csrc (op schemas,
definitions and READMEs); how they follow one another is what vllm-ascend's DeepSeek-V4 does. Nobody ran them here. A
maker refuses what an op is documented not to take. Where the documents disagree the op is called, and its own error
is the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dsv4_triton.bench import native_attention, native_moe
from dsv4_triton.bench.baselines import Run, UnavailableError, by_expert
from dsv4_triton.bench.native_ops import ascend, live_tokens, torch_npu, whole
from dsv4_triton.config import ROPE_DIM

_HC_SIZES = (4096, 7168)
"""Hidden sizes of `npu_hc_pre_v2`."""


def _angles(arguments: dict[str, Any], sign: int, interleaved: bool) -> list[torch.Tensor]:
    """cos and `sign` times sin [1, T, 1, 64] of the live tokens, each value at both features of its pair. A server
    gathers them once a step for all layers."""
    positions = arguments["positions"]
    rows = arguments["cos_sin"][positions[: live_tokens(positions)].long()]
    cos, sin = rows[:, : ROPE_DIM // 2], sign * rows[:, ROPE_DIM // 2 :]
    twice = [part.repeat_interleave(2, dim=1) if interleaved else part.repeat(1, 2) for part in (cos, sin)]
    return [part[None, :, None].contiguous() for part in twice]


def _rotary_mul(arguments: dict[str, Any]) -> Run:
    """The rotated features in fp32 and back, the others copied."""
    npu = torch_npu()
    if arguments.get("out") is not None:
        raise UnavailableError("it does not work in place")
    interleaved, sign = arguments.get("interleaved", False), -1 if arguments.get("inverse") else 1
    cos, sin = _angles(arguments, sign, interleaved)
    mode = "interleave" if interleaved else "half"

    def run(**a: Any) -> Any:
        x = a["x"][: cos.shape[1]]
        turned = npu.npu_rotary_mul(x[None, ..., -ROPE_DIM:].float(), cos, sin, rotary_mode=mode)[0]
        return whole(torch.cat((x[..., :-ROPE_DIM], turned.to(x.dtype)), dim=-1), len(a["x"]))

    return run


def _transpose_batchmatmul(arguments: dict[str, Any]) -> Run:
    """The inverse rotation by `npu_rotary_mul`, written back into o, then the grouped product. vllm-ascend rotates with
    an in-place op, which on A2 and A3 knows interleaved pairs only; those of the case are halves."""
    npu = torch_npu()
    if arguments.get("wo_scale") is not None:
        raise UnavailableError("it takes no fp8 operands")
    cos, sin = _angles(arguments, -1, False)
    groups = len(arguments["wo_a"])
    weight = arguments["wo_a"].transpose(1, 2).contiguous()

    def run(**a: Any) -> Any:
        o = a["o"][: cos.shape[1]]
        tail = o[..., -ROPE_DIM:]
        tail.copy_(npu.npu_rotary_mul(tail[None].float(), cos, sin, rotary_mode="half")[0])
        z = npu.npu_transpose_batchmatmul(
            o.view(len(o), groups, -1), weight, bias=None, scale=None, perm_x1=(1, 0, 2), perm_x2=(0, 1, 2),
            perm_y=(1, 0, 2), batch_split_factor=1,
        )  # fmt: skip
        return whole(z.reshape(len(o), -1), len(a["o"]))

    return run


def _swiglu(arguments: dict[str, Any]) -> Run:
    """The clamps in PyTorch, the rest by `npu_swiglu`: without row weights."""
    npu = torch_npu()
    if arguments.get("row_weights") is not None:
        raise UnavailableError("it takes no weights of rows")

    def run(**a: Any) -> Any:
        return npu.npu_swiglu(native_moe.clamped(a["x"], a["limit"]), dim=-1)

    return run


def _hc_pre(arguments: dict[str, Any]) -> Run:
    """`npu_hc_pre_v2`, whose product is in HF32, and `npu_rms_norm` behind it."""
    op, norm = ascend("npu_hc_pre_v2"), torch_npu().npu_rms_norm
    hidden = arguments["x"].shape[-1]
    if hidden not in _HC_SIZES:
        raise UnavailableError(f"its hidden size is {' or '.join(map(str, _HC_SIZES))}, not {hidden}")
    fn = arguments["fn_parts"].float().sum(0)

    def run(**a: Any) -> Any:
        x = a["x"]
        y, post, comb = op(x, fn, a["scale"], a["base"], x.shape[1], a["sinkhorn_iters"], a["norm_eps"], a["hc_eps"])
        return norm(y, a["norm_weight"], a["norm_eps"])[0], post, comb

    return run


def _hc_post(arguments: dict[str, Any]) -> Run:
    op = ascend("npu_hc_post")
    return lambda **a: op(a["y"][None], a["x"][None], a["post"][None], a["comb"][None])[0]


def _gating(arguments: dict[str, Any]) -> Run:
    """All experts as one group. The op takes sqrt(softplus) as `norm_type` 2."""
    op = ascend("moe_gating_top_k_hash")

    def run(**a: Any) -> Any:
        tokens = a.get("input_ids")
        weights, ids, _ = op(
            a["logits"], a["k"], bias=a.get("bias"), input_ids=None if tokens is None else tokens.clamp(min=0),
            tid2eid=a.get("tid2eid"), k_group=1, group_count=1, routed_scaling_factor=a["routed_scaling_factor"],
            eps=1e-20, group_select_mode=1, renorm=0, norm_type=2, out_flag=False,
        )  # fmt: skip
        return by_expert(weights, ids) if tokens is None else (weights, ids)

    return run


MAKERS: dict[tuple[str, str], Callable[[dict[str, Any]], Run]] = {
    ("hc_post", "npu_hc_post"): _hc_post,
    ("hc_pre", "npu_hc_pre_v2"): _hc_pre,
    ("moe_dispatch", "npu_moe_init_routing_v2"): native_moe.init_routing,
    ("moe_experts", "npu_grouped_matmul"): native_moe.experts,
    ("moe_router", "moe_gating_top_k_hash"): _gating,
    ("o_proj", "npu_transpose_batchmatmul"): _transpose_batchmatmul,
    ("rope", "npu_rotary_mul"): _rotary_mul,
    ("sparse_attention", "npu_kv_quant_sparse_attn_sharedkv"): native_attention.of_records,
    ("sparse_attention", "npu_sparse_attn_sharedkv"): native_attention.of_values,
    ("swiglu", "npu_swiglu"): _swiglu,
}
"""By op and name of the baseline."""

NOT_THE_SAME: dict[tuple[str, str], str] = {
    ("compressor_fold", "torch.ops._C_ascend.compressor"): (
        "it starts from hidden states and multiplies them by the compressor's weights; the case starts from the states"
    ),
    ("grouped_matmul", "npu_grouped_matmul"): "of bf16 operands it gives bf16 products; the case's are fp32",
    ("grouped_matmul_swiglu", "npu_grouped_matmul_swiglu_quant"): (
        "it takes int8 rows and weights and gives int8 rows; those of the case are bf16"
    ),
    ("indexer_score", "npu_vllm_quant_lightning_indexer"): (
        "it gives the indices of the best entries and no scores (return_value must be False)"
    ),
}
"""Why a native op of the same place in the model does not do the case's job."""
