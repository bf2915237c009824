"""Native NPU baselines, on stand-ins for the ops: which arguments these get and what becomes of their results.

This shows that the translations fit the documents that the stand-ins were written from, not that an NPU agrees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4_triton.bench import native, native_attention
from dsv4_triton.bench.baselines import UnavailableError, by_expert, implementation, names
from dsv4_triton.bench.registry import Case, MismatchError, cases, select
from dsv4_triton.bench.registry.attention import ratio_of
from dsv4_triton.bench.registry.case import EAGER, Converted, Inputs
from dsv4_triton.device import A2, A5, Family
from tests.bench import native_stand_ins

PLAIN = [
    ("rope", "npu_rotary_mul", "demo/prefill/t45/interleaved", A2),
    ("rope", "npu_rotary_mul", "flash/decode/b1/interleaved", A2),
    ("o_proj", "npu_transpose_batchmatmul", "demo/decode/b5", A2),
    ("o_proj", "npu_transpose_batchmatmul", "demo/prefill/t45", A2),
    ("swiglu", "npu_swiglu", "demo/prefill/t45/shared", A2),
    ("hc_pre", "npu_hc_pre_v2", "flash/decode/b16", A2),
    ("hc_pre", "npu_hc_pre_v2", "pro/decode/b1", A2),
    ("hc_post", "npu_hc_post", "demo/prefill/t45", A2),
    ("hc_post", "npu_hc_post", "flash/decode/b16", A2),
]
MOE = [
    ("moe_router", "moe_gating_top_k_hash", "demo/prefill/t45/top-k", A2),
    ("moe_router", "moe_gating_top_k_hash", "demo/prefill/t45/hash", A2),
    ("moe_router", "moe_gating_top_k_hash", "flash/decode/b16/top-k", A2),
    ("moe_router", "moe_gating_top_k_hash", "flash/decode/b16/hash", A2),
    ("moe_dispatch", "npu_moe_init_routing_v2", "demo/decode/b5", A2),
    ("moe_dispatch", "npu_moe_init_routing_v2", "demo/prefill/t45", A2),
    ("moe_experts", "npu_grouped_matmul", "demo/decode/b5", A2),
    ("moe_experts", "npu_grouped_matmul", "demo/prefill/t45", A2),
]
ATTENTION = [
    ("sparse_attention", name, case, family)
    for name, family in (("npu_sparse_attn_sharedkv", A2), ("npu_kv_quant_sparse_attn_sharedkv", A5))
    for case in (
        "demo/decode/b5/window",
        "demo/decode/b5/window/vllm-ascend",
        "demo/prefill/t45/c4-dense",
        "demo/prefill/t45/c4-dense/vllm-ascend",
        "demo/prefill/t45/c128/vllm-ascend",
        "flash/decode/b1/ctx32k/c4",
        "flash/decode/b1/ctx2k/c4-dense",
    )
]
REFUSED = [
    ("rope", "npu_rotary_mul", "demo/decode/b5/inverse", A2, "does not work in place"),
    ("o_proj", "npu_transpose_batchmatmul", "demo/decode/b5/mxfp8", A5, "no fp8 operands"),
    ("swiglu", "npu_swiglu", "demo/decode/b5/routed", A2, "no weights of rows"),
    ("hc_pre", "npu_hc_pre_v2", "demo/decode/b5", A2, "hidden size is 4096 or 7168, not 256"),
    ("sparse_attention", "npu_sparse_attn_sharedkv", "demo/decode/b5/window", A5, "those of the case are records"),
    ("sparse_attention", "npu_kv_quant_sparse_attn_sharedkv", "demo/decode/b5/window", A2, "are plain rows"),
    ("sparse_attention", "npu_sparse_attn_sharedkv", "demo/decode/b5/c128", A2, "those of cmp_cache 2"),
    ("sparse_attention", "npu_sparse_attn_sharedkv", "demo/decode/b5/c4", A2, "512 or 1024 entries, not 32"),
]


def one(op: str, name: str) -> Case:
    (case,) = select(kernel=op, case=name)
    return case


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with native_stand_ins.installed(monkeypatch):
        yield


@pytest.mark.parametrize(("op", "name", "case", "family"), [*PLAIN, *MOE, *ATTENTION])
def test_a_translation_does_the_job(op: str, name: str, case: str, family: Family, stand_ins: None) -> None:
    wanted = one(op, case)
    inputs = wanted.build(family)
    assert name in names(wanted)
    if op == "hc_pre":
        high, low = inputs.arguments["fn_parts"]
        low.copy_(torch.ldexp(high.sign(), torch.frexp(high.float()).exponent - 10))  # a bit that HF32 still has
    wanted.check(inputs, family, implementation(wanted, name, inputs.arguments))


def test_a_product_in_hf32_is_too_coarse(stand_ins: None) -> None:
    """As documented, `npu_hc_pre_v2` differs from the reference by more than the tolerance, which gives it no time."""
    case = one("hc_pre", "flash/decode/b16")
    inputs = case.build(A2)
    with pytest.raises(MismatchError, match="result 0"):
        case.check(inputs, A2, implementation(case, "npu_hc_pre_v2", inputs.arguments))


@pytest.mark.parametrize(("op", "name", "case", "family", "reason"), REFUSED)
def test_what_an_op_does_not_take_is_said(
    op: str, name: str, case: str, family: Family, reason: str, stand_ins: None
) -> None:
    refused = one(op, case)
    with pytest.raises(UnavailableError, match=reason):
        implementation(refused, name, refused.build(family, fill=False).arguments)


@pytest.mark.parametrize(
    "case", [c for c in select(kernel="sparse_attention") if c.model == "demo" or "/b1/" in c.name]
)
def test_attention_knows_the_ratio_of_the_layer(case: Case) -> None:
    assert native_attention._ratio(case.build(A2, fill=False).arguments) == max(1, ratio_of(case.variant))


def test_every_translation_is_checked() -> None:
    assert {(op, name) for op, name, *_ in (*PLAIN, *MOE, *ATTENTION)} == set(native.MAKERS)


def test_every_baseline_is_translated_or_has_a_reason() -> None:
    named = {(case.op, name) for case in cases() for name in case.baselines if name != EAGER}
    assert named == set(native.MAKERS) | set(native.NOT_THE_SAME) | {("indexer_topk", "torch.topk")}
    for op, name in native.NOT_THE_SAME:
        case = select(kernel=op, model="demo")[0]
        with pytest.raises(UnavailableError) as refusal:
            implementation(case, name, {})
        assert str(refusal.value) == native.NOT_THE_SAME[op, name]


@pytest.mark.parametrize(
    ("op", "name", "case", "missing"),
    [
        ("swiglu", "npu_swiglu", "demo/decode/b5/shared", "torch_npu cannot be imported"),
        ("hc_post", "npu_hc_post", "demo/decode/b5", "torch.ops._C_ascend.npu_hc_post is vllm_ascend's"),
    ],
)
def test_a_missing_package_is_named(op: str, name: str, case: str, missing: str) -> None:
    lacking = one(op, case)
    with pytest.raises(UnavailableError, match=missing):
        implementation(lacking, name, lacking.build(A2, fill=False).arguments)


def test_results_are_converted_for_the_check_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outcome of an op sees them in the launcher's form, whether it unpacks or indexes them."""
    case = one("moe_router", "demo/prefill/t45/top-k")
    inputs, calls = case.build(A2), []

    def run(**a: Any) -> Converted:
        results = case.reference(**a)
        return Converted(lambda: calls.append(1) or results)

    def outcome(of: Inputs, returned: Any) -> dict[str, torch.Tensor]:
        assert type(returned) is tuple and len(returned) == 2
        return {"ids": returned[1]}

    run(**inputs.arguments)
    assert not calls
    replace(case, entry=replace(case.entry, outcome=outcome)).check(inputs, A2, run)
    assert len(calls) == 1
    weights, ids = by_expert(torch.tensor([[0.25, 0.5, 0.125]]), torch.tensor([[7, 3, 5]])).convert()
    assert ids.tolist() == [[3, 5, 7]] and weights.tolist() == [[0.5, 0.125, 0.25]]


def test_a_request_without_tokens_is_refused(stand_ins: None) -> None:
    """Its length after the step is in none of the arguments."""
    case = one("sparse_attention", "demo/decode/b5/window")
    arguments = case.build(A2).arguments
    table = arguments["window_table"]
    for request in (0, 5):
        more = torch.cat((table[:request], table[:1], table[request:]))
        token_req = arguments["token_req"] + (arguments["token_req"] >= request).int()
        with pytest.raises(UnavailableError, match=f"request {request} has no token in the step"):
            implementation(
                case, "npu_sparse_attn_sharedkv", {**arguments, "window_table": more, "token_req": token_req}
            )
