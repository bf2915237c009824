"""Installations that cannot serve although everything imports, or that fail later in a way that names no cause."""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64encode
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path

from dsv4_triton.config import ConfigError

VLLM = "0.27"
"""The releases of vLLM whose classes are used here."""


def check(device_type: str | None) -> None:
    """ConfigError that names the first thing that is wrong with what is installed for this torch device type."""
    triton = find_spec("triton")
    folder = Path(next(iter(triton.submodule_search_locations or ()), "")) if triton else None
    if folder is None or not (folder / "backends" / "ascend").is_dir():
        what = "no module triton" if folder is None else f"the module triton in {folder} is upstream's"
        raise ConfigError(f"{what}: the kernels need triton-ascend, which takes its place; {_DOCTOR}")
    if _overwritten():
        raise ConfigError(
            f"another package, such as upstream's triton, lies over triton-ascend in {folder}: remove both and install "
            f"triton-ascend again; {_DOCTOR}"
        )
    vllm = _version("vllm")
    if vllm is not None and not vllm.startswith(f"{VLLM}."):
        raise ConfigError(f"vllm is {vllm}: this release of dsv4_triton works with vLLM {VLLM}; {_DOCTOR}")
    if device_type == "npu":
        torch, torch_npu = _version("torch"), _version("torch-npu")
        if torch is not None and torch_npu is not None and _minor(torch) != _minor(torch_npu):
            raise ConfigError(
                f"torch_npu {torch_npu} is made for torch {_minor(torch_npu)}, but torch is {torch}; {_DOCTOR}"
            )


_DOCTOR = "`dsv4-triton doctor` says what to install"


def _overwritten() -> bool:
    """Whether the module that triton-ascend installed is not the one that lies there, as far as its list of files says
    (a build in place has none)."""
    try:
        files = distribution("triton-ascend").files or ()
    except PackageNotFoundError:
        return False
    for file in files:
        if file.as_posix() == "triton/__init__.py" and file.hash is not None:
            digest = hashlib.new(file.hash.mode, file.read_binary()).digest()
            return urlsafe_b64encode(digest).decode().rstrip("=") != file.hash.value
    return False


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _minor(release: str) -> str:
    return ".".join(release.split("+")[0].split(".")[:2])
