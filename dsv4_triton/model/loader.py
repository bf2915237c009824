"""Strict loading: every tensor of the checkpoint has exactly one place, and every place gets its tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

DRAFT_PREFIX = "mtp."
"""Tensors of the draft module, which the model itself does not hold."""
_NAMES_SHOWN = 8


Store = Callable[[torch.Tensor], None]
"""Puts one checkpoint tensor, in the checkpoint's layout, where the model keeps it."""


class CheckpointError(ValueError):
    """The checkpoint does not fit the model; the message names the tensors."""


@dataclass(frozen=True)
class Slot:
    """Where one tensor of the checkpoint goes: its shape on disk and the function that stores it."""

    shape: tuple[int, ...]
    store: Store
    integer: bool = False


def copy_into(parameter: nn.Parameter) -> Store:
    """Store by copying whole, cast to the parameter's dtype."""

    def store(tensor: torch.Tensor) -> None:
        parameter.data.copy_(tensor)

    return store


def into_layer(layer: nn.Module, shard: int | None = None) -> Store:
    """Store through the weight loader of a vLLM layer, which picks this rank's part; `shard` is the matrix of a merged
    layer."""

    def store(tensor: torch.Tensor) -> None:
        parameter: Any = layer.weight
        if shard is None:
            parameter.weight_loader(parameter, tensor)
        else:
            parameter.weight_loader(parameter, tensor, shard)

    return store


def prefixed(prefix: str, slots: Mapping[str, Slot]) -> dict[str, Slot]:
    """`slots` with `prefix` and a dot before each name."""
    return {f"{prefix}.{name}": slot for name, slot in slots.items()}


def load_strict(
    weights: Iterable[tuple[str, torch.Tensor]], slots: Mapping[str, Slot], skipped: str | tuple[str, ...] = ()
) -> None:
    """Store each tensor of `weights` in its slot, but those whose names start with (one of) `skipped`.

    Raises CheckpointError for a tensor without a slot, of another shape or kind of dtype or given twice, and for slots
    that got none. Everything that can be checked is checked before the tensor is stored.
    """
    missing = dict.fromkeys(slots)
    for name, tensor in weights:
        if name.startswith(skipped):
            continue
        slot = slots.get(name)
        if slot is None:
            hint = " (quantised checkpoints are not supported)" if name.endswith(".scale") else ""
            raise CheckpointError(f"checkpoint tensor {name!r} is not part of the model{hint}")
        if name not in missing:
            raise CheckpointError(f"checkpoint tensor {name!r} is given twice")
        if tuple(tensor.shape) != slot.shape:
            raise CheckpointError(
                f"checkpoint tensor {name!r} has shape {tuple(tensor.shape)}, the model expects {slot.shape}"
            )
        plain = tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
        if not (plain or (slot.integer and tensor.dtype in (torch.int32, torch.int64))) or (plain and slot.integer):
            wanted = "int32 or int64" if slot.integer else "float32, bfloat16 or float16"
            raise CheckpointError(f"checkpoint tensor {name!r} has dtype {tensor.dtype}, the model expects {wanted}")
        slot.store(tensor)
        del missing[name]
    if missing:
        shown = ", ".join(list(missing)[:_NAMES_SHOWN])
        more = f" and {len(missing) - _NAMES_SHOWN} more" if len(missing) > _NAMES_SHOWN else ""
        raise CheckpointError(f"the checkpoint lacks {len(missing)} tensors: {shown}{more}")
