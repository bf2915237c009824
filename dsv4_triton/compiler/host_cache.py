"""Compiled kernels on disk: one file per specialisation, written whole or not at all.

A file is `magic | sha256 of the rest | arena bytes | entry symbol | object code`. It is written beside its final name
and renamed, so several processes may build the same kernel at once; a truncated or foreign file fails its checksum
and is rebuilt. A cache directory that cannot be written only costs time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import tempfile
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from dsv4_triton.compiler import host_llvm
from dsv4_triton.compiler.frontend import Signature

_MAGIC = b"dsv4-host-1\n"
_HEADER = struct.Struct("<QI")


def directory() -> Path:
    """Where compiled kernels live: `DSV4_TRITON_CACHE_DIR`, else `~/.cache/dsv4_triton`."""
    configured = os.environ.get("DSV4_TRITON_CACHE_DIR")
    return Path(configured) if configured else Path.home() / ".cache" / "dsv4_triton"


@lru_cache(maxsize=1)
def _toolchain() -> str:
    """Everything but the kernel that decides the code: this package's compiler, the tools' versions and the CPU."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    for package in ("triton-ascend", "ascendnpu-ir", "llvmlite"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            digest.update(f"{package}=={metadata.version(package)}\n".encode())
    digest.update("\n".join(host_llvm.cpu()).encode())
    return digest.hexdigest()


def _value_key(value: Any) -> str:
    source = getattr(value, "cache_key", None)
    return f"{type(value).__name__}:{value!r}:{source or ''}"


def key(kernel: Any, signature: Signature, slots: dict[str, int]) -> str:
    """Hex digest that names a specialisation: source with called functions and globals, types, constants, toolchain,
    CPU.
    """
    parts = [_toolchain(), kernel.cache_key, kernel.__name__]
    parts += [f"{name}={_value_key(value)}" for (name, _), (value, _) in kernel.used_global_vals.items()]
    parts += [f"{name}:{kind}@{slots[name]}" for name, kind in signature.types.items()]
    parts += [f"{name}={_value_key(value)}" for name, value in sorted(signature.constants.items())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _path(digest: str) -> Path:
    if not digest.isalnum():
        digest = hashlib.sha256(f"{_toolchain()}{digest}".encode()).hexdigest()
    return directory() / "host" / digest[:2] / f"{digest}.bin"


def load(digest: str) -> host_llvm.HostObject | None:
    """The object cached under a key of `key` (or under a plain name), or None where there is none or it is damaged."""
    try:
        data = _path(digest).read_bytes()
    except OSError:
        return None
    body = data[len(_MAGIC) + 32 :]
    if not data.startswith(_MAGIC) or hashlib.sha256(body).digest() != data[len(_MAGIC) : len(_MAGIC) + 32]:
        return None
    arena_bytes, length = _HEADER.unpack_from(body)
    symbol = body[_HEADER.size : _HEADER.size + length].decode()
    return host_llvm.HostObject(body[_HEADER.size + length :], symbol, arena_bytes)


def store(digest: str, code: host_llvm.HostObject) -> None:
    """Write an object; problems with the directory are ignored."""
    symbol = code.symbol.encode()
    body = _HEADER.pack(code.arena_bytes, len(symbol)) + symbol + code.code
    path = _path(digest)
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(body).digest() + body)
        os.replace(temporary, path)
    except OSError:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
