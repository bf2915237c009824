"""Stand-ins for native NPU ops, with the ops' own schemas and in plain PyTorch from their public documentation.

They take what the documents let the ops take and nothing else; what an op leaves undefined is NaN or a wrong index. How
an NPU rounds inside an op is known of `npu_hc_pre_v2` alone, whose product is in HF32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.library import _scoped_library

from tests.bench import native_stand_ins_attention as attention

Tensor = torch.Tensor
NPU_SCHEMAS = (
    "npu_swiglu(Tensor input, int dim=-1) -> Tensor",
    "npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor",
    "npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu_transpose_batchmatmul(Tensor input, Tensor weight, *, Tensor? bias=None, Tensor? scale=None, "
    "int[]? perm_x1=None, int[]? perm_x2=None, int[]? perm_y=None, int? batch_split_factor=1) -> Tensor",
    "npu_moe_init_routing_v2(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, "
    "int active_num=-1, int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, "
    "int expert_tokens_num_type=0, bool expert_tokens_num_flag=False, int quant_mode=-1, "
    "int[2] active_expert_range=[], int row_idx_type=0, int? x_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)",
    "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, "
    "Tensor[]? offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, "
    "Tensor[]? per_token_scale=None, Tensor? group_list=None, Tensor[]? activation_input=None, "
    "Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? split_item=0, "
    "int? group_type=None, int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, "
    "int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None, "
    "int? per_token_scale_dtype=None) -> Tensor[]",
    "npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, "
    "bool padded_mode=False, int[]? restore_shape=None) -> Tensor",
)
ASCEND_SCHEMAS = (
    "npu_hc_post(Tensor x, Tensor residual, Tensor post, Tensor comb) -> (Tensor out)",
    "npu_hc_pre_v2(Tensor x, Tensor hc_fn, Tensor hc_scale, Tensor hc_base, int hc_mult, int hc_sinkhorn_iters, "
    "float norm_eps, float hc_eps) -> (Tensor out0, Tensor out1, Tensor out2)",
    "moe_gating_top_k_hash(Tensor x, int k, Tensor? bias=None, Tensor? input_ids=None, Tensor? tid2eid=None, "
    "int k_group=1, int group_count=1, float routed_scaling_factor=1.0, float eps=1e-20, int group_select_mode=0, "
    "int renorm=0, int norm_type=0, bool out_flag=False) -> (Tensor y, Tensor expert_idx, Tensor out)",
    *attention.SCHEMAS,
)


def npu_swiglu(input: Tensor, dim: int) -> Tensor:
    a, b = input.float().chunk(2, dim=dim)
    return (a * torch.sigmoid(a) * b).to(input.dtype)


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str, rotate: Tensor | None) -> Tensor:
    x = input
    assert x.dim() == 4 and rotate is None and x.dtype == r1.dtype == r2.dtype
    assert r1.shape == r2.shape == (1, x.shape[1], 1, x.shape[3]) and x.shape[0] * x.shape[2] < 1000, "BSND: 1S1D"
    if rotary_mode == "half":
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    else:
        assert rotary_mode == "interleave"
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return r1 * x + r2 * turned


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    assert gamma.dtype == input.dtype
    scale = torch.rsqrt(input.float().square().mean(-1, keepdim=True) + epsilon)
    return (input.float() * scale * gamma.float()).to(input.dtype), scale


def npu_transpose_batchmatmul(
    input: Tensor, weight: Tensor, perm_x1: list[int], perm_x2: list[int], perm_y: list[int], batch_split_factor: int,
    bias: None, scale: None,
) -> Tensor:  # fmt: skip
    assert input.dim() == weight.dim() == 3 and input.dtype == weight.dtype
    assert batch_split_factor == 1 and bias is None and scale is None
    y = input.permute(perm_x1).float() @ weight.permute(perm_x2).float()
    return y.permute(perm_y).to(input.dtype).contiguous()


def npu_moe_init_routing_v2(
    x: Tensor, expert_idx: Tensor, active_num: int, expert_num: int, active_expert_range: list[int], **rest: Any
) -> tuple[Tensor, ...]:
    ids = expert_idx
    assert x.dim() == ids.dim() == 2 and len(x) == len(ids) and ids.dtype == torch.int32
    assert int(ids.min()) >= 0 and int(ids.max()) < expert_num, "an expert's id is one of expert_num"
    assert active_num in (-1, 0, ids.numel()) and rest.pop("expert_tokens_num_type") == 1
    assert rest.pop("expert_tokens_num_flag") is True and rest.pop("quant_mode") == -1
    assert rest.pop("expert_capacity") == -1 and not any(rest.values())
    start, end = active_expert_range
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    order = order[(flat[order] >= start) & (flat[order] < end)]
    rows = x.new_full((flat.numel(), x.shape[1]), torch.nan)
    rows[: len(order)] = x[order // ids.shape[1]]
    places = torch.full_like(flat, -1)
    places[order] = torch.arange(len(order), dtype=torch.int32)
    return rows, places, torch.bincount(flat[order] - start, minlength=end - start), x.new_empty(0)


def npu_grouped_matmul(
    x: list[Tensor], weight: list[Tensor], group_list: Tensor, split_item: int, group_type: int, group_list_type: int,
    act_type: int, **none: Any,
) -> list[Tensor]:  # fmt: skip
    (rows,), (w,) = x, weight
    assert rows.dim() == 2 and w.dim() == 3 and rows.shape[1] == w.shape[1] and rows.dtype == w.dtype
    assert group_list.dtype == torch.int64 and len(group_list) == len(w) and split_item in (2, 3) and group_type == 0
    assert act_type == 0 and all(value is None for value in none.values())
    ends = group_list.cumsum(0) if group_list_type == 1 else group_list
    out = rows.new_full((len(rows), w.shape[2]), torch.nan)
    first = 0
    for expert, end in enumerate(ends.tolist()):
        out[first:end] = (rows[first:end].float() @ w[expert].float()).to(rows.dtype)
        first = end
    return [out]


def npu_moe_token_unpermute(
    permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor, padded_mode: bool, restore_shape: None
) -> Tensor:
    rows, places = permuted_tokens, sorted_indices
    assert rows.dim() == 2 and places.dtype == torch.int32 and places.shape == (len(rows),) and not padded_mode
    assert len(places.unique()) == len(rows) and int(places.min()) >= 0 and int(places.max()) < len(rows)
    return (rows[places.long()].float().unflatten(0, probs.shape) * probs.float()[..., None]).sum(1).to(rows.dtype)


def npu_hc_post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    b, s, hc, d = residual.shape
    assert x.shape == (b, s, d) and post.shape == (b, s, hc) and comb.shape == (b, s, hc, hc)
    assert x.dtype == residual.dtype and post.dtype == comb.dtype
    out = [
        post[..., k, None].float() * x.float()
        + sum(comb[..., j, k, None].float() * residual[..., j, :].float() for j in range(hc))
        for k in range(hc)
    ]
    return torch.stack(out, 2).to(x.dtype)


def _hf32(x: Tensor) -> Tensor:
    """10 bits of mantissa, rounded towards zero."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def npu_hc_pre_v2(
    x: Tensor, hc_fn: Tensor, hc_scale: Tensor, hc_base: Tensor, hc_mult: int, hc_sinkhorn_iters: int,
    norm_eps: float, hc_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    fn, scale, base = hc_fn, hc_scale, hc_base
    assert x.dim() == 3 and hc_mult == x.shape[1] == 4 and x.shape[2] in (4096, 7168) and x.dtype == torch.bfloat16
    assert fn.shape == (24, 4 * x.shape[2]) and scale.shape == (3,) and base.shape == (24,)
    assert fn.dtype == scale.dtype == base.dtype == torch.float32
    flat = x.float().reshape(len(x), -1)
    mixes = (_hf32(flat) @ _hf32(fn).T) / (flat.pow(2).mean(1, keepdim=True) + norm_eps).sqrt()
    pre = (mixes[:, :4] * scale[0] + base[:4]).sigmoid() + hc_eps
    post = (mixes[:, 4:8] * scale[1] + base[4:8]).sigmoid() * 2
    comb = (mixes[:, 8:] * scale[2] + base[8:]).reshape(-1, 4, 4).softmax(2) + hc_eps
    for turn in range(2 * hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(1 if turn % 2 == 0 else 2, keepdim=True) + hc_eps)
    return torch.einsum("th,thd->td", pre, x.float()).to(x.dtype), post, comb


def moe_gating_top_k_hash(
    x: Tensor, k: int, bias: Tensor | None, input_ids: Tensor | None, tid2eid: Tensor | None, k_group: int,
    group_count: int, routed_scaling_factor: float, eps: float, group_select_mode: int, renorm: int, norm_type: int,
    out_flag: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert k_group == group_count == 1 and renorm == 0 and not out_flag and eps > 0
    assert bias is None or (bias.shape == x.shape[1:] and bias.dtype == x.dtype)
    norms: dict[int, Callable[[], Tensor]] = {
        0: lambda: x.softmax(1),
        1: x.sigmoid,
        2: lambda: torch.nn.functional.softplus(x).sqrt(),
    }
    norm = norms[norm_type]()
    if tid2eid is None:
        chosen = (norm if bias is None else norm + bias).topk(k, dim=1).indices
    else:
        assert input_ids is not None and input_ids.numel() == len(x) and int(input_ids.min()) >= 0
        chosen = tid2eid[input_ids.long()].long()
    picked = norm.gather(1, chosen)
    return picked / (picked.sum(1, keepdim=True) + eps) * routed_scaling_factor, chosen.to(torch.int32), x.new_empty(0)


def _by_name(schema: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """`implementation` with every argument of the schema by its name; the dispatcher leaves out defaults."""
    arguments = torch._C.parse_schema(schema).arguments
    defaults = {argument.name: argument.default_value for argument in arguments}

    def call(*args: Any, **kwargs: Any) -> Any:
        return implementation(**(defaults | dict(zip(defaults, args)) | kwargs))

    return call


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The ops of both packages, under their names."""
    package = ModuleType("torch_npu")
    package.__spec__ = ModuleSpec("torch_npu", None)
    with ExitStack() as stack:
        for namespace, schemas in (("npu", NPU_SCHEMAS), ("_C_ascend", ASCEND_SCHEMAS)):
            library = stack.enter_context(_scoped_library(namespace, "FRAGMENT"))
            for schema in schemas:
                name = library.define(schema)
                implementation = globals().get(name) or getattr(attention, name)
                library.impl(name, _by_name(schema, implementation), "CompositeExplicitAutograd")
                setattr(package, name, getattr(getattr(torch.ops, namespace), name))
        monkeypatch.setitem(sys.modules, "torch_npu", package)
        yield
