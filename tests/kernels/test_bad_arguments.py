"""Every launcher names the op and the argument when a tensor argument does not fit, and launches nothing."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4_triton.compiler.launches import recording
from dsv4_triton.device import UnsupportedDeviceError
from dsv4_triton.kernels import __path__ as kernels_path
from dsv4_triton.kernels.moe_plan import tile_capacity

T, H, D, P, B = 3, 4, 64, 8, 2
"""Tokens, heads, features, rows of the RoPE table, requests of the calls below."""


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def scratch() -> torch.Tensor:
    return torch.zeros(1 << 24, dtype=torch.uint8)


def paged(width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return floats(5, 16, width, dtype=dtype)


_ROTATE = {"positions": ints(T), "cos_sin": floats(P, 64)}
_MIX = {"scale": floats(3), "base": floats(24), "norm_eps": 1e-6, "hc_eps": 1e-6, "norm_weight": floats(D)}
_FOLD = {
    "state_table": ints(B, 4), "token_req": ints(T), "slots": ints(T), **_ROTATE, "ratio": 4, "eps": 1e-6,
}  # fmt: skip
_WINDOW = {
    "window_cache": paged(512), "window_table": ints(B, 16), "token_req": ints(T), "positions": ints(T), "window": 128,
}  # fmt: skip
_DENSE = {"cmp_cache": paged(512), "cmp_table": ints(B, 4), "n_vis": ints(T)}
_PICKED = {"cmp_cache": paged(512), "cmp_table": ints(B, 4), "indices": ints(T, 32)}
_SCORE = {"block_table": ints(B, 4), "token_req": ints(T), "n_vis": ints(T), "max_entries": 40}
_INT8 = paged(128, torch.int8)

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("compressor_fold", {"state": paged(2048), "weight": floats(512), "cache": paged(512), **_FOLD}),
    ("compressor_fold", {"state": paged(512), "weight": floats(128), "cache": paged(128), **_FOLD}),
    ("compressor_fold", {"state": paged(512), "weight": floats(128), "out": floats(T, 128), **_FOLD}),
    ("compressor_fold_keys", {
        "state": paged(2048), "state_table": ints(B, 4), "slots": ints(T), "weight": floats(512), "cache": paged(512),
        "key_state": paged(512), "key_state_table": ints(B, 4), "key_slots": ints(T), "key_weight": floats(128),
        "hadamard": floats(128, 128), "key_cache": _INT8, "scale_cache": floats(5, 16, dtype=torch.float16),
        "token_req": ints(T), **_ROTATE, "eps": 1e-6}),
    ("compressor_state_insert", {
        "proj": floats(T, 64), "ape": floats(4, 32), "positions": ints(T), "state": paged(64), "slots": ints(T)}),
    ("gather_rows", {**_WINDOW, **_DENSE, "columns": 192}),
    ("gather_rows", {**_WINDOW, **_PICKED, "columns": 160, "rows": floats(T, 160, 512), "bias": floats(T, 160)}),
    ("grouped_matmul", {
        "x": floats(T, 32), "w": floats(4, 48, 32), "tiles": ints(3, 6), "num_tiles": ints(1), "block_rows": 4,
        "out": floats(T, 48)}),
    ("grouped_matmul_swiglu", {
        "x": floats(T, 32), "w13": floats(4, 32, 32), "tiles": ints(3, 6), "num_tiles": ints(1), "block_rows": 4,
        "limit": 10.0, "row_weights": floats(T), "out": floats(T, 16)}),
    ("hc_head", {
        "x": floats(T, 4, D), "fn_parts": floats(1, 4, 4 * D), **_MIX, "scale": floats(1), "base": floats(4),
        "out": floats(T, D), "workspace": scratch()}),
    ("hc_post", {
        "y": floats(T, D), "x": floats(T, 4, D), "post": floats(T, 4), "comb": floats(T, 4, 4),
        "out": floats(T, 4, D)}),
    ("hc_pre", {
        "x": floats(T, 4, D), "fn_parts": floats(1, 24, 4 * D), **_MIX, "y": floats(T, D), "post": floats(T, 4),
        "comb": floats(T, 4, 4), "wide": floats(T, D), "workspace": scratch()}),
    ("hc_post_pre", {
        "y": floats(T, D), "x": floats(T, 4, D), "post": floats(T, 4), "comb": floats(T, 4, 4),
        "fn_parts": floats(1, 24, 4 * D), **_MIX, "out": floats(T, 4, D), "wide": floats(T, D),
        "workspace": scratch()}),
    ("indexer_insert_k", {
        "e": floats(T, 128), "hadamard": floats(128, 128), "key_cache": _INT8, "slots": ints(T),
        "scale_cache": floats(5, 16, dtype=torch.float16)}),
    ("indexer_quant_q", {
        "q": floats(T, H, 128), **_ROTATE, "hadamard": floats(128, 128), "dtype": torch.int8,
        "q_out": floats(T, H, 128, dtype=torch.int8), "scale_out": floats(T, H, dtype=torch.float16)}),
    ("indexer_score", {
        "q": floats(T, H, 128, dtype=torch.int8), "q_scale": floats(T, H, dtype=torch.float16),
        "weights": floats(T, H), "key_cache": _INT8, "scale_cache": floats(5, 16, dtype=torch.float16), **_SCORE,
        "out": floats(T, 40)}),
    ("indexer_topk", {"scores": floats(T, 40), "n_vis": ints(T), "k": 8, "out": ints(T, 8), "workspace": scratch()}),
    ("kv_norm_rope_insert", {
        "kv": floats(T, 512), "weight": floats(512), **_ROTATE, "cache": paged(512), "slots": ints(T), "eps": 1e-6}),
    ("latent_norm_insert", {
        "latent": floats(T, 32), "latent_weight": floats(32), "kv": floats(T, 512), "kv_weight": floats(512),
        **_ROTATE, "cache": paged(512), "slots": ints(T), "eps": 1e-6, "proj": floats(T, 2048),
        "ape": floats(4, 1024), "state": paged(2048), "state_slots": ints(T), "index_proj": floats(T, 512),
        "index_ape": floats(4, 256), "index_state": paged(512), "index_slots": ints(T), "out": floats(T, 32)}),
    ("moe_dispatch", {
        "x": floats(T, 32), "weights": floats(T, 2), "ids": ints(T, 2), "num_experts": 4, "block_rows": 4,
        "rows": floats(2 * T, 32), "row_weights": floats(2 * T), "positions": ints(T, 2),
        "tiles": ints(3, tile_capacity(2 * T, 4, 4)), "num_tiles": ints(1), "workspace": scratch()}),
    ("moe_experts", {
        "x": floats(T, 32), "w13": floats(4, 32, 32), "w2": floats(4, 32, 16), "weights": floats(T, 2),
        "ids": ints(T, 2), "swiglu_limit": None, "out": floats(T, 32), "workspace": scratch()}),
    ("moe_plan", {
        "ids": ints(T, 2), "num_experts": 4, "block_rows": 4, "positions": ints(T, 2),
        "tiles": ints(3, tile_capacity(2 * T, 4, 4)), "num_tiles": ints(1), "workspace": scratch()}),
    ("moe_router", {
        "logits": floats(T, 8), "k": 2, "routed_scaling_factor": 1.0, "bias": floats(8), "weights": floats(T, 2),
        "ids": ints(T, 2)}),
    ("moe_router", {
        "logits": floats(T, 8), "k": 2, "routed_scaling_factor": 1.0, "input_ids": ints(T), "tid2eid": ints(9, 2)}),
    ("muls_add", {"x": floats(T, D), "y": floats(T, D), "scale": 1.0, "out": floats(T, D)}),
    ("o_proj", {
        "o": floats(T, H, 512), "wo_a": floats(2, 16, 1024), **_ROTATE, "out": floats(T, 32)}),
    ("o_proj", {
        "o": floats(T, H, 512), "wo_a": floats(2, 16, 1024, dtype=torch.float8_e4m3fn), "wo_scale": floats(2, 16),
        **_ROTATE, "workspace": scratch()}),
    ("q_norm_rope", {
        "q": floats(T, H, 512), **_ROTATE, "eps": 1e-6, "index_q": floats(T, H, 128), "out": floats(T, H, 512)}),
    ("rope", {"x": floats(T, H, D), **_ROTATE, "out": floats(T, H, D)}),
    ("sparse_attention", {
        "q": floats(T, H, 512), "sink": floats(H), "scale": 1.0, **_WINDOW, **_DENSE, "out": floats(T, H, 512),
        "workspace": scratch()}),
    ("sparse_attention", {"q": floats(T, H, 512), "sink": floats(H), "scale": 1.0, **_WINDOW, **_PICKED}),
    ("step_layout", {
        "query_start_loc": ints(B + 1), "seq_lens": ints(B), "num_tokens": T, "positions": ints(T),
        "token_req": ints(T), "n_vis4": ints(T), "n_vis128": ints(T)}),
    ("swiglu", {"x": floats(T, 2 * D), "limit": 10.0, "row_weights": floats(T), "out": floats(T, D)}),
    ("token_slots", {
        "positions": ints(T), "token_req": ints(T), "block_table": ints(B, 4), "rows_per_block": 16,
        "out": ints(T)}),
]  # fmt: skip
"""Calls that fit. Together they give every tensor argument of every op."""

OPS = sorted(path.stem for path in Path(kernels_path[0]).glob("[a-z]*.py"))


def launcher(op: str) -> Any:
    return getattr(importlib.import_module(f"dsv4_triton.kernels.{op}"), op)


def call(op: str, arguments: dict[str, Any]) -> list[Any]:
    """The launches of a call, of which none runs."""
    with recording() as launches:
        launcher(op)(**arguments)
    return launches


def wrong(value: torch.Tensor) -> dict[str, Any]:
    """What is given in place of a tensor."""
    return {
        "None": None,
        "list": value.flatten()[:4].tolist(),
        "number": 1.5,
        "array": value.float().numpy(),
        "meta tensor": value.to("meta"),
        "complex tensor": value.to(torch.complex64),
        "scalar tensor": value.flatten()[0].clone(),
        "tensor of one axis more": value[None].expand(1, *value.shape),
    }


def cases() -> Iterator[Any]:
    for number, (op, arguments) in enumerate(CALLS):
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                yield pytest.param(op, arguments, name, id=f"{op}-{number}-{name}")


@pytest.mark.parametrize("op", OPS)
def test_table_gives_every_tensor_argument(op: str) -> None:
    wanted = {name for name, p in inspect.signature(launcher(op)).parameters.items() if "Tensor" in str(p.annotation)}
    given = {name for other, call in CALLS if other == op for name, value in call.items() if value is not None}
    assert wanted <= given, f"add calls of {op} with {sorted(wanted - given)}"


@pytest.mark.parametrize(("op", "arguments"), CALLS, ids=[f"{op}-{i}" for i, (op, _) in enumerate(CALLS)])
def test_calls_of_the_table_fit(op: str, arguments: dict[str, Any]) -> None:
    assert call(op, arguments), "nothing was launched"


@pytest.mark.parametrize(("op", "arguments", "name"), list(cases()))
def test_wrong_argument_is_named(op: str, arguments: dict[str, Any], name: str) -> None:
    optional = inspect.signature(launcher(op)).parameters[name].default is None
    problems = []
    for what, value in wrong(arguments[name]).items():
        if (value is None and optional) or (op == "muls_add" and what in ("scalar tensor", "tensor of one axis more")):
            continue  # optional; any shape fits as long as both agree
        try:
            call(op, {**arguments, name: value})
            problems.append(f"{what}: accepted")
        except (TypeError, ValueError, UnsupportedDeviceError) as error:
            if not re.match(rf"{op}: .*\b{name}\b", str(error)):
                problems.append(f"{what}: {type(error).__name__}: {error}")
        except Exception as error:  # reported below
            problems.append(f"{what}: {type(error).__name__}: {error}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(("op", "arguments"), CALLS, ids=[f"{op}-{i}" for i, (op, _) in enumerate(CALLS)])
def test_device_without_kernels_is_named(op: str, arguments: dict[str, Any]) -> None:
    """All tensors on one device, which is not one that kernels run on."""
    moved = {name: v.to("meta") if isinstance(v, torch.Tensor) else v for name, v in arguments.items()}
    with pytest.raises(UnsupportedDeviceError, match=rf"^{op}: \w+ is on meta, .*'cpu' or 'npu'"):
        call(op, moved)
