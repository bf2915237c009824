"""Compile options become the flags that triton-ascend itself would pass."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest

from dsv4_triton.compiler.ascend.options import Options
from dsv4_triton.device import A2, A3, A5

GIVEN = [
    {},
    {"multibuffer": False, "enable_auto_bind_sub_block": False},
    {"multibuffer": True, "tile_mix_vector_loop": 1, "tile_mix_cube_loop": 2, "set_workspace_multibuffer": 4},
    {"unit_flag": True, "sync_solver": True, "inject_barrier_all": False, "inject_block_all": True},
    {"enable_hivm_auto_cv_balance": False, "limit_auto_multi_buffer_only_for_local_buffer": True},
    {"limit_auto_multi_buffer_of_local_buffer": "no-l0c", "disable_auto_inject_block_sync": True},
]
FAMILIES = pytest.mark.parametrize("family", [A2, A3, A5], ids=lambda family: family.name)
IR = 'module { func.func @k() attributes {mix_mode = "aiv", parallel_mode = "simd"} { return } }'


class _StopHereError(Exception):
    pass


@FAMILIES
@pytest.mark.parametrize("given", GIVEN, ids=lambda given: "+".join(given) or "none")
def test_flags_are_those_of_triton_ascend(family, given, monkeypatch):
    """triton-ascend's own function is run up to its call of the compiler."""
    from triton.backends.ascend import compiler

    commands = []

    def run(command, **_):
        commands.append(command)
        raise _StopHereError

    a5 = family is A5
    options = compiler.NPUOptions(
        **{"compile_on_910_95": a5, "multibuffer": not a5, "enable_auto_bind_sub_block": not a5} | given
    )
    monkeypatch.setattr(compiler, "NPUUtils", lambda: SimpleNamespace(get_arch=lambda: family.target))
    monkeypatch.setattr(compiler, "_get_npucompiler_path", lambda: "/somewhere/bishengir-compile")
    for name, value in {"_check_bishengir_api_change": True, "_check_bishengir_is_regbased": False}.items():
        monkeypatch.setattr(compiler, name, lambda value=value: value)
    monkeypatch.setattr(compiler.subprocess, "run", run)
    lower = compiler.linalg_to_bin_enable_npu_compile_910_95 if a5 else compiler.linalg_to_bin_enable_npu_compile_A2_A3
    metadata = {**vars(options), "target": SimpleNamespace(arch=family.target)}
    with pytest.raises(_StopHereError):
        lower(IR, metadata, options)
    ((_, _, *theirs),) = commands
    monkeypatch.undo()
    assert subprocess.run is not run
    assert [flag.lower() for flag in Options.of(given).flags(family)] == [flag.lower() for flag in theirs[:-2]]


@FAMILIES
def test_defaults_of_the_family(family):
    front = Options().frontend(family)
    a5 = family is A5
    assert (front.fp8, front.adapter_910_95, front.select_analysis, front.named_ops) == (a5, a5, a5, True)
    assert f"--enable-auto-multi-buffer={not a5}" in Options().flags(family)


def test_every_launch_option_is_known_or_without_effect():
    """What a launch accepts is followed, or refused where the offline compile does not follow it."""
    from triton.backends.ascend.compiler import NPUOptions

    refused = {"compile_on_910_95", "parallel_mode", "force_simt_only", "extern_libs"}
    for name, value in vars(NPUOptions()).items():
        if name in refused:
            with pytest.raises(ValueError, match=name):
                Options.of({name: value})
        else:
            Options.of({name: value})


def test_compile_modes():
    assert Options.of({"compile_mode": "unstructured_in_simt"}).frontend(A5).force_simt_template
    with pytest.raises(ValueError, match="compile_mode is 'simt_only'"):
        Options.of({"compile_mode": "simt_only"})


def test_an_option_of_one_compiler():
    options = Options(disable_tight_coupled_buffer=True)
    assert "--disable-tight-coupled-buffer=true" in options.flags(A5)
    with pytest.raises(ValueError, match="A5's compiler, not of a2's"):
        options.flags(A2)
