"""Rewrites on tensors, between the adapter and bufferization."""

from __future__ import annotations

from dsv4_triton.compiler.mlir import Block, Module

_DROPPED = {"annotation.mark"}


def rewrite(module: Module, kernel_name: str) -> Module:
    """All rewrites of this module, in place."""
    for function in module.functions:
        for region in function.regions:
            for block in region:
                _rewrite_block(block, module)
    return module


def _rewrite_block(block: Block, module: Module) -> None:
    ops = []
    for op in block.ops:
        for region in op.regions:
            for nested in region:
                _rewrite_block(nested, module)
        if op.name in _DROPPED or (op.name == "func.call" and (op.props["callee"] or "").startswith("@triton_print")):
            continue
        ops.append(op)
    block.ops = ops
