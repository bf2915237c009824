"""Kernels compiled for the host, in the disk cache: `arena bytes | entry symbol | object code`."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

from dsv4_triton.compiler import cache, host_llvm
from dsv4_triton.compiler.frontend import Signature

_HEADER = struct.Struct("<QI")


def _toolchain() -> str:
    """Everything but the kernel that decides the code: this package's compiler, the tools' versions and the CPU."""
    return cache.toolchain("host*.py", "frontend.py", "mlir.py", "fixups.py") + "\n".join(host_llvm.cpu())


def key(kernel: Any, signature: Signature, slots: dict[str, int]) -> str:
    """Hex digest that names a specialisation whose arguments lie in these slots."""
    return cache.key(kernel, signature, [_toolchain(), *(f"{name}@{slot}" for name, slot in slots.items())])


def _digest(name: str) -> str:
    return name if name.isalnum() else hashlib.sha256(f"{_toolchain()}{name}".encode()).hexdigest()


def load(name: str) -> host_llvm.HostObject | None:
    """The object cached under a key of `key` (or under a plain name), or None where there is none or it is damaged."""
    body = cache.load("host", _digest(name))
    if body is None:
        return None
    arena_bytes, length = _HEADER.unpack_from(body)
    symbol = body[_HEADER.size : _HEADER.size + length].decode()
    return host_llvm.HostObject(body[_HEADER.size + length :], symbol, arena_bytes)


def store(name: str, code: host_llvm.HostObject) -> None:
    """Write an object; problems with the directory are ignored."""
    symbol = code.symbol.encode()
    cache.store("host", _digest(name), _HEADER.pack(code.arena_bytes, len(symbol)) + symbol + code.code)
