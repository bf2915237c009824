"""The table of fix-ups: each is still needed, and does what it is for."""

from __future__ import annotations

import pytest
import torch

from dsv4_triton.compiler import ascend, fixups, frontend
from dsv4_triton.compiler.ascend.options import Options
from dsv4_triton.compiler.fixups import FIXUPS
from dsv4_triton.device import A5
from tests.compiler.ascend import kernels as k
from tests.compiler.ascend.kernels import empty, launch

FP8 = empty(256, dtype=torch.float8_e4m3fn)
NEEDS = {
    "fp8 types": launch(k.convert, FP8, empty(256), N=256),
    "unsigned_src": launch(k.largest, empty(16, 64), empty(16), empty(16, dtype=torch.int32), M=16, N=64),
    "fp_to_fp": launch(k.convert, FP8, empty(256), N=256),
}
"""A launch for A5 that needs the entry of this name."""


def test_every_entry_is_tested_and_names_its_versions():
    assert {fixup.name for fixup in FIXUPS} == set(NEEDS)
    for fixup in FIXUPS:
        assert fixup.versions and fixup.reason
        assert fixup.applies, f"{fixup.name} is for {fixup.versions}, others are installed: is it still needed?"


@pytest.mark.parametrize("name", NEEDS)
def test_with_it_the_kernel_compiles(name):
    wanted = NEEDS[name]
    result = ascend.compile(wanted.kernel, wanted.signature, A5)
    assert result.ok, result.message


@pytest.mark.parametrize("name", [fixup.name for fixup in FIXUPS if fixup.rewrite is not None])
def test_without_it_the_compiler_refuses(name, monkeypatch):
    """When this fails, the installed versions work without the entry, and it can go."""
    wanted = NEEDS[name]
    whole = fixups.rewrite
    monkeypatch.setattr(fixups, "rewrite", lambda text, arch: whole(text, arch, without=name))
    job = ascend._job(wanted.kernel, wanted.signature, A5, Options(), 60.0)
    result = ascend._compile(job)
    assert not result.ok and result.stage == "hivm", f"the fix-up {name!r} is no longer needed"


def test_fp8_types_are_unknown_without_the_switch():
    wanted = NEEDS["fp8 types"]
    with pytest.raises(frontend.KernelCompileError, match="fp8"):
        frontend.lower_to_ttir(wanted.kernel, wanted.signature, frontend.FrontendOptions(fp8=False))


def test_an_entry_is_for_its_versions_alone(monkeypatch):
    monkeypatch.setattr(fixups.metadata, "version", lambda package: "3.2.9")
    assert not any(fixup.applies for fixup in FIXUPS)
    text = 'linalg.reduce {tie_break_left = "true"}'
    assert fixups.rewrite(text, "c310") == text


def test_an_entry_is_for_its_chip_alone():
    text = 'x {tie_break_left = "true"}\n%1 = tt.fp_to_fp %0 : tensor<4xf8E4M3FN> -> tensor<4xf32>\n'
    assert fixups.rewrite(text, "c220") == text
    reduction, cast = fixups.rewrite(text, "c310").splitlines()
    assert reduction == 'x {tie_break_left = "true", unsigned_src = "false"}'
    assert cast == "%1 = arith.extf %0 : tensor<4xf8E4M3FN> to tensor<4xf32>"
    assert fixups.rewrite(fixups.rewrite(text, "c310"), "c310") == fixups.rewrite(text, "c310")
