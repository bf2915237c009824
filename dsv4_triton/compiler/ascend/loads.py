"""Loads that a mixed kernel's vector cores owe: arguments that vector code uses, compared with those they load.

The adapter's IR says of which pointer arguments vector code reads tiles: those that not only matrix products consume.
In the final HIVM the vector cores must load from each of them; where they do not, the compiler lost a load.
"""

from __future__ import annotations

import re

from dsv4_triton.compiler import mlir
from dsv4_triton.compiler.ascend.view import View
from dsv4_triton.compiler.hivm import Function
from dsv4_triton.compiler.mlir import Op

_VIEWS = {
    "tensor.cast", "tensor.extract_slice", "tensor.expand_shape", "tensor.collapse_shape", "linalg.transpose",
    "bufferization.to_tensor", "memref.cast", "memref.subview", "memref.reinterpret_cast", "memref.collapse_shape",
    "memref.expand_shape",
}  # fmt: skip
"""Operations whose result is their first operand, seen differently: a cube core's load does these on its way."""
_NOT_VECTOR = {
    "linalg.matmul", "linalg.batch_matmul", "memref.copy", "memref.load", "annotation.mark", "tensor.insert_slice",
    "tensor.extract", "memref.store", "tensor.dim", "memref.dim",
}  # fmt: skip
_READS = {"hivm.hir.load", "hivm.hir.copy", "hivm.hir.nd2nz", "memref.load"}


def _leading(function: Function) -> int:
    """Arguments that the compiler puts before the kernel's own."""
    attributes = re.findall(r"\{[^{}]*\}", function.op.props.get("arg_attrs") or "")
    kinds = [re.search(r"hacc.arg_type<(\w+)>", text) for text in attributes]
    known = next((i for i, kind in enumerate(kinds) if not kind), len(kinds))
    return known or (2 if "WorkspaceArgIdx" in function.op.attrs else 0)


def _origins(function: Function, value: str, views: set[str], copies: dict[str, str]) -> set[str]:
    """The function's arguments that a value is a piece of, through views, copies, loops and branches."""
    arguments = {name for name, _ in function.args}
    found: set[str] = set()
    seen, todo = {value}, [value]
    while todo:
        at = todo.pop()
        if at in arguments:
            found.add(at)
            continue
        for source in _sources(function, at, views, copies):
            if source not in seen:
                seen.add(source)
                todo.append(source)
    return found


def _sources(function: Function, value: str, views: set[str], copies: dict[str, str]) -> list[str]:
    if value in copies:
        return [copies[value]]
    if value in function.defined:
        op, position = function.defined[value]
        if op.name in views:
            return op.operands[:1]
        if op.name == "arith.select":
            return op.operands[1:3]
        if op.name == "scf.if":
            return [block.terminator.operands[position] for region in op.regions for block in region[-1:]]
        return []
    if value in function.block_args:
        owner, _, position = function.block_args[value]
        if owner.name == "scf.for" and position > 0:
            return [owner.operands[2 + position], owner.body.terminator.operands[position - 1]]
    return []


def _indices(function: Function, names: set[str]) -> set[int]:
    order = [name for name, _ in function.args]
    return {order.index(name) - _leading(function) for name in names}


def read_by_vector_code(adapter: str) -> set[int]:
    """Indices of the kernel's arguments of which vector code reads tiles, from ttadapter MLIR in generic form."""
    op = next(op for op in mlir.parse(adapter).functions if "global_kernel" in op.attrs)
    function = Function(op, "", "", False)
    nested = function.inside[id(op)]
    copies = {op.operands[1]: op.operands[0] for op in nested if op.name == "memref.copy"}
    used: set[str] = set()
    for consumer in nested:
        if consumer.name in _VIEWS | _NOT_VECTOR or consumer.name.startswith(("scf.", "func.", "bufferization.")):
            continue
        for value, kind in zip(consumer.operands, consumer.types):
            if kind.startswith("tensor<"):
                used |= _origins(function, value, _VIEWS, copies)
    return _indices(function, used)


def read_by_vector_cores(view: View) -> set[int]:
    """Indices of the kernel's arguments from which a compiled vector function loads."""
    views = {"memref.view", *_VIEWS}
    found: set[str] = set()
    for op in view.ops:
        if op.name in _READS or op.name == "func.call":
            for value in _inputs(op):
                if view.space(value) == "gm":
                    found |= _origins(view.function, value, views, {})
    return _indices(view.function, found)


def _inputs(op: Op) -> list[str]:
    return op.operands if op.name == "func.call" else op.operands[:1]
