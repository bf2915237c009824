"""Kernels compiled for the host, in the disk cache: `arena bytes | entry symbol | messages (JSON) | object code`."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

from dsv4_triton.compiler import cache
from dsv4_triton.compiler.frontend import HOST_OPTIONS, FrontendOptions, Signature
from dsv4_triton.compiler.host import llvm
from dsv4_triton.compiler.host.messages import Message

_HEADER = struct.Struct("<QII")


def _toolchain() -> str:
    """Everything but the kernel that decides the code: this package's compiler, the tools' versions and the CPU."""
    return cache.toolchain("host/*.py", "frontend.py", "mlir.py", "fixups.py") + "\n".join(llvm.cpu())


def key(kernel: Any, signature: Signature, slots: dict[str, int], options: FrontendOptions = HOST_OPTIONS) -> str:
    """Hex digest that names a specialisation whose arguments lie in these slots."""
    parts = [_toolchain(), *(f"{name}@{slot}" for name, slot in slots.items())]
    if options != HOST_OPTIONS:
        # Assertions name the source file.
        parts += [repr(options), kernel.fn.__code__.co_filename]
    return cache.key(kernel, signature, parts)


def _digest(name: str) -> str:
    return name if name.isalnum() else hashlib.sha256(f"{_toolchain()}{name}".encode()).hexdigest()


def load(name: str) -> llvm.HostObject | None:
    """The object cached under a key of `key` (or under a plain name), or None where there is none or it is damaged."""
    body = cache.load("host", _digest(name))
    if body is None:
        return None
    arena_bytes, symbol_bytes, messages_bytes = _HEADER.unpack_from(body)
    symbol_end = _HEADER.size + symbol_bytes
    messages_end = symbol_end + messages_bytes
    messages = tuple(Message.of(plain) for plain in json.loads(body[symbol_end:messages_end]))
    return llvm.HostObject(body[messages_end:], body[_HEADER.size : symbol_end].decode(), arena_bytes, messages)


def store(name: str, code: llvm.HostObject) -> None:
    """Write an object; problems with the directory are ignored."""
    symbol = code.symbol.encode()
    messages = json.dumps([message.plain() for message in code.messages]).encode()
    header = _HEADER.pack(code.arena_bytes, len(symbol), len(messages))
    cache.store("host", _digest(name), header + symbol + messages + code.code)
