"""What compilers made, kept on disk: one file an entry, written whole or not at all.

A file is `magic | sha256 of the rest | body`. It is written beside its final name and renamed, so several processes may
build the same entry at once; a truncated or foreign file fails its checksum and counts as absent. A directory that
cannot be written only costs time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from dsv4_triton.compiler.frontend import Signature

_MAGIC = b"dsv4-cache-1\n"
PACKAGES = ("triton-ascend", "ascendnpu-ir", "llvmlite")


def directory() -> Path:
    """Where entries live: `DSV4_TRITON_CACHE_DIR`, else `~/.cache/dsv4_triton`. OSError where there is no home."""
    configured = os.environ.get("DSV4_TRITON_CACHE_DIR")
    if configured:
        return Path(configured)
    try:
        return Path.home() / ".cache" / "dsv4_triton"
    except RuntimeError:
        missing = "this user has no home: name a folder for compiled kernels with DSV4_TRITON_CACHE_DIR"
        raise FileNotFoundError(missing) from None


@functools.cache
def toolchain(*sources: str) -> str:
    """Digest of what turns kernels into code: modules of this folder (glob patterns), and the tools' versions."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for file in sorted({file for pattern in sources for file in folder.glob(pattern)}):
        digest.update(file.read_bytes())
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            digest.update(f"{package}=={metadata.version(package)}\n".encode())
    return digest.hexdigest()


def _value_key(value: Any) -> str:
    source = getattr(value, "cache_key", None)
    return f"{type(value).__name__}:{value!r}:{source or ''}"


def key(kernel: Any, signature: Signature, more: Iterable[str] = ()) -> str:
    """Hex digest that names a specialisation: its source with called functions and globals, types, constants,
    attributes, and whatever else decides the result (`more`).
    """
    parts = [kernel.cache_key, kernel.__name__]
    parts += [f"{name}={_value_key(value)}" for (name, _), (value, _) in kernel.used_global_vals.items()]
    parts += [f"{name}:{kind}" for name, kind in signature.types.items()]
    parts += [f"{name}={_value_key(value)}" for name, value in sorted(signature.constants.items())]
    if signature.attrs is not None:
        parts += [f"{name}@{list(where)}" for name, where in sorted(signature.attrs.arg_properties.items())]
    parts += more
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _path(kind: str, digest: str) -> Path:
    return directory() / kind / digest[:2] / f"{digest}.bin"


def load(kind: str, digest: str) -> bytes | None:
    """The body stored under a digest, or None where there is none or it is damaged."""
    try:
        data = _path(kind, digest).read_bytes()
    except OSError:
        return None
    body = data[len(_MAGIC) + 32 :]
    if not data.startswith(_MAGIC) or hashlib.sha256(body).digest() != data[len(_MAGIC) : len(_MAGIC) + 32]:
        return None
    return body


def store(kind: str, digest: str, body: bytes) -> None:
    """Write an entry; problems with the directory are ignored."""
    temporary = ""
    try:
        path = _path(kind, digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(body).digest() + body)
        os.replace(temporary, path)
    except OSError:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
