"""Where native NPU ops are found, and what their translations share."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from dsv4_triton.bench.baselines import UnavailableError


def torch_npu() -> Any:
    """The package whose functions are named `npu_...` in the registry."""
    try:
        return import_module("torch_npu")
    except ImportError as error:
        raise UnavailableError(f"torch_npu cannot be imported: {error}") from error


def ascend(name: str) -> Callable[..., Any]:
    """The op `name` of vllm-ascend's compiled extension."""
    ops = torch.ops._C_ascend
    if not hasattr(ops, name):
        try:
            # The first sets the paths of the op libraries, but does nothing on A5.
            import_module("vllm_ascend.utils").enable_custom_op()
            import_module("vllm_ascend.vllm_ascend_C")
        except ImportError as error:
            raise UnavailableError(f"torch.ops._C_ascend.{name} is vllm_ascend's: {error}") from error
    if not hasattr(ops, name):
        raise UnavailableError(f"vllm_ascend.vllm_ascend_C has no {name}")
    op: Callable[..., Any] = getattr(ops, name)
    return op


def live_tokens(positions: torch.Tensor) -> int:
    """Tokens before the padding, which the ops do not get: what they would do with it is not documented."""
    return int((positions >= 0).sum())


def whole(rows: torch.Tensor, tokens: int) -> torch.Tensor:
    """`rows` of the live tokens, followed by zeros for the padding."""
    if len(rows) == tokens:
        return rows
    return torch.cat((rows, rows.new_zeros(tokens - len(rows), *rows.shape[1:])))
