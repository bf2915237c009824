"""The host pipeline of one kernel specialisation: kernel -> TTIR -> ttadapter -> buffers -> LLVM dialect -> object
code.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from dsv4_triton.compiler import mlir
from dsv4_triton.compiler.frontend import (
    FrontendOptions,
    KernelCompileError,
    Signature,
    lower_to_adapter,
    lower_to_ttir,
    run_tool,
    source_line,
)
from dsv4_triton.compiler.host import llvm, memref, tensor
from dsv4_triton.compiler.host import messages as device_messages

_BUFFERIZE = [
    "--inline",
    "--convert-elementwise-to-linalg",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=bufferize-function-boundaries allow-return-allocs-from-loops "
    "function-boundary-type-conversion=identity-layout-map",
    "--canonicalize",
    "--cse",
    "--mlir-print-op-generic",
    "--mlir-print-local-scope",
]

_TO_LLVM_DIALECT = [
    "--linalg-generalize-named-ops",
    "--convert-linalg-to-loops",
    "--lower-affine",
    "--arith-expand=include-bf16=true",
    "--canonicalize",
    "--cse",
    "--loop-invariant-code-motion",
    "--convert-scf-to-cf",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-arith-to-llvm",
    "--convert-index-to-llvm",
    "--convert-cf-to-llvm",
    "--reconcile-unrealized-casts",
    "--canonicalize",
]


@lru_cache(maxsize=1)
def _opt() -> list[str]:
    """`bishengir-opt`, which registers the upstream MLIR passes, from the package ascendnpu-ir."""
    try:
        import ascendnpuir
    except ImportError as error:
        raise ImportError(
            "the package ascendnpu-ir is needed to run kernels (pip install ascendnpu-ir==1.2.0)"
        ) from error
    return [str(Path(ascendnpuir.__file__).parent / "bin" / "bishengir-opt"), "--allow-unregistered-dialect", "-"]


def build(
    kernel: Any, signature: Signature, slots: dict[str, int], symbol: str, options: FrontendOptions
) -> llvm.HostObject:
    """Compile a kernel for this machine.

    `slots` gives the argument slot of each run-time parameter; `symbol` names the entry point (host/llvm.py says what
    it takes). Raises `KernelCompileError`.
    """
    name = kernel.__name__
    ttir, messages = device_messages.extract(name, lower_to_ttir(kernel, signature, options))
    try:
        return _build(name, ttir, signature, slots, symbol, options, messages)
    except KernelCompileError as error:
        if not error.operation:
            raise
        place = source_line(name, ttir, options, error.operation)
        raise KernelCompileError(f"kernel {name}{place}: {error}", error.operation) from error


def _build(
    name: str,
    ttir: str,
    signature: Signature,
    slots: dict[str, int],
    symbol: str,
    options: FrontendOptions,
    messages: tuple[device_messages.Message, ...],
) -> llvm.HostObject:
    tensors = mlir.parse(lower_to_adapter(name, ttir, options, generic=True))
    device_messages.rewrite(tensors, name, messages)
    tensor.rewrite(tensors)
    buffers = mlir.parse(run_tool([*_opt(), *_BUFFERIZE], str(tensors), name))
    memref.rewrite(buffers)
    dialect = run_tool([*_opt(), *_TO_LLVM_DIALECT], str(buffers), name)
    runtime_types = [
        (slots[parameter], kind) for parameter, kind in signature.types.items() if parameter not in signature.constants
    ]
    record_slot = len(slots) if messages else None
    ir = llvm.to_llvm_ir(dialect, name)
    text, arena_bytes = llvm.add_entry(ir, name, runtime_types, symbol, record_slot)
    return llvm.HostObject(llvm.compile_ir(text, name), symbol, arena_bytes, messages)
