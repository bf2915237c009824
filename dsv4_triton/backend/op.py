"""`torch.ops.vllm.triton_dsa_forward(hidden, wide, output, layer_name)`: a layer's attention as one node of a graph."""

from __future__ import annotations

from functools import cache

import torch

from dsv4_triton.backend.compat import attention_metadata, layer_of, register_op

OP_NAME = "triton_dsa_forward"
"""vllm-ascend has an op `dsa_forward`."""


def dsa_forward(hidden: torch.Tensor, wide: torch.Tensor, output: torch.Tensor, layer_name: str) -> None:
    """Attention of `hidden` [T, D] into `output` [T, G R], from the first projections to the grouped one of the output.

    `wide` is `hidden` in fp32, for the projections that are fp32; the same tensor where the model is.
    A profiling run has no metadata: the output is zero, no cache is touched, and as much memory is held as in a step.
    """
    # The forward pass needs vLLM's layers, which a process that only looks the op up does not.
    from dsv4_triton.backend import attention

    layer, metadata = layer_of(layer_name), attention_metadata()
    if metadata is None:
        attention.rehearse(layer, hidden, wide, output)
    else:
        attention.attend(layer, hidden, wide, output, metadata)


def dsa_forward_fake(hidden: torch.Tensor, wide: torch.Tensor, output: torch.Tensor, layer_name: str) -> None:
    """Shape propagation: the result is `output`, whose shape the caller chose."""


@cache
def register_ops() -> None:
    """Define the op in this process, once."""
    register_op(OP_NAME, dsa_forward, dsa_forward_fake, mutates=["output"])
