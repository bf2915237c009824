"""Offline compiles: statuses, diagnostics, memory plans, cores, library calls, and the cache."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsv4_triton.compiler import ascend, cache
from dsv4_triton.compiler.ascend import compile, compile_all, tools
from dsv4_triton.compiler.ascend.facts import Plan
from dsv4_triton.compiler.ascend.options import Options
from dsv4_triton.compiler.ascend.result import CompileResult
from dsv4_triton.compiler.ascend.tools import Overflow
from dsv4_triton.device import A2, A3, A5, HOST, KiB
from tests.compiler.ascend import kernels as k
from tests.compiler.ascend.kernels import ADD, FLASH, MATMUL, empty, launch

ROOT = Path(__file__).parents[3]


def compiled(wanted: k.Launch, family=A2, **options) -> CompileResult:
    return compile(wanted.kernel, wanted.signature, family, {**wanted.options, **options})


class TestOutcomes:
    @pytest.mark.parametrize("family", [A2, A3, A5], ids=lambda family: family.name)
    def test_ok(self, family):
        result = compiled(ADD(), family)
        assert (result.status, result.stage, result.message, result.missing) == ("ok", "", "", ())
        assert result.kernel == "add" and result.family == family.name and result.seconds > 0
        assert f"--target={family.target}" in result.flags
        assert '"hivm.hir.load"' in result.hivm and result.hivm.rstrip().endswith(": () -> ()")
        assert result.facts.core == "vector" and result.facts.workspace_bytes == 0
        assert not result.said.notes and not result.said.errors

    @pytest.mark.parametrize(
        ("wanted", "family", "overflow"),
        [
            (ADD(B=32768), A2, Overflow("UB", 262144, 192 * KiB)),
            (ADD(B=32768), A5, Overflow("UB", 262144, 248 * KiB)),
            (MATMUL(BM=256, BN=256), A2, Overflow("L0C", 262144, 128 * KiB)),
        ],
        ids=["vector", "vector A5", "cube"],
    )
    def test_overflow(self, wanted, family, overflow):
        """The first of two known sizes: 2 x 32768 fp32 values; an accumulator of 256 x 256 fp32."""
        result = compiled(wanted, family)
        assert (result.status, result.stage) == ("failed", "hivm")
        assert result.said.overflows == (overflow,) and str(overflow) in result.message
        assert result.facts is None and not result.hivm

    def test_feature_switched_off_is_a_note(self):
        """Two buffers of 128 KiB do not fit: the compiler drops the second and succeeds."""
        x = empty(2**20)
        result = compiled(launch(k.copy_persistently, x, x, 64, B=32768, grid=(48,)))
        assert result.ok and result.facts.used("UB") == 128 * KiB
        assert any("enable-auto-multi-buffer to false" in note for note in result.said.notes)

    def test_error_in_the_kernel(self):
        result = compiled(launch(k.undefined_name, empty(4)))
        line = k.undefined_name.fn.__code__.co_firstlineno + 2
        assert (result.status, result.stage) == ("failed", "frontend")
        assert f"kernel undefined_name ({k.__file__}:{line}): " in result.message and "no_such_name" in result.message

    def test_fp8_only_where_the_family_has_it(self):
        wanted = launch(k.convert, empty(256, dtype=torch.float8_e4m3fn), empty(256), N=256)
        result = compiled(wanted, A2)
        assert (result.status, result.stage) == ("failed", "frontend") and "fp8" in result.message
        assert compiled(wanted, A5).ok

    def test_family_without_an_offline_compile(self):
        with pytest.raises(ValueError, match="no offline compile for family 'host'; there is for a2, a3, a5"):
            compiled(ADD(), HOST)

    def test_unknown_option(self):
        wanted = ADD()
        with pytest.raises(ValueError, match=r"unknown compile options \['colour'\]; there are: .*multibuffer"):
            compile(wanted.kernel, wanted.signature, A2, {"colour": 1})

    def test_missing_compiler(self, monkeypatch):
        monkeypatch.setattr(tools.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(tools.ToolMissingError, match=r"bishengir-compile-a5 is missing: pip install"):
            compiled(ADD(), A5)


class TestFacts:
    def test_matmul(self):
        """A 128x64 and a 256x64 bf16 tile, the latter twice, the former four times; one fp32 accumulator."""
        facts = compiled(MATMUL()).facts
        assert facts.core == "cube" and facts.both_vector_cores is None and facts.workspace_bytes == 0
        assert facts.plan == (
            Plan("aic", "L1", 147456, 512 * KiB),
            Plan("aic", "L0C", 128 * 256 * 4, 128 * KiB),
        )
        assert facts.loads == {"aic": 4} and facts.stores == {"aic": 1}

    def test_flash(self):
        """Mixed and pipelined over four steps. A cube core hands over S and P V in fp32, and takes P in bf16."""
        facts = compiled(FLASH()).facts
        assert facts.core == "mixed" and facts.both_vector_cores is True and facts.pipelined == 4
        assert facts.workspace_bytes == 4 * (64 * 64 * 4 + 64 * 64 * 4 + 64 * 64 * 2)
        assert {plan.memory for plan in facts.plan} == {"UB", "L1", "L0C"}
        assert all(0 < plan.bytes <= plan.limit for plan in facts.plan)

    def test_pipeline_is_gone_without_multibuffer(self):
        facts = compiled(FLASH(), multibuffer=False).facts
        assert facts.pipelined == 0 and facts.workspace_bytes == 64 * 64 * (4 + 4 + 2)

    def test_one_vector_core(self):
        facts = compiled(FLASH(), A5).facts
        assert facts.both_vector_cores is False and facts.one_core_stores >= 1

    def test_a5_reports_the_same_ub_bytes(self, tmp_path):
        """The A5 compiler can print its UB size; ours is read from the planned addresses."""
        wanted = FLASH()
        facts = compiled(wanted, A5).facts
        printed = print_ub_bits(wanted, tmp_path)
        assert max(printed) == 8 * max(plan.bytes for plan in facts.plan if plan.memory == "UB")


def print_ub_bits(wanted: k.Launch, folder: Path) -> list[int]:
    from dsv4_triton.compiler import fixups, frontend

    options = Options()
    front = options.frontend(A5)
    text = frontend.lower_to_adapter("k", frontend.lower_to_ttir(wanted.kernel, wanted.signature, front), front)
    text = fixups.rewrite(re.sub(r', mix_mode = "\w+"', "", text), A5.arch)
    flags = [*options.flags(A5), "--enable-print-memory-allocated-size=true"]
    lowered = tools.lower(tools.tools_for(A5.arch), text, flags, folder, 60)
    return [int(bits) for bits in re.findall(r"UB size = (\d+) bits", "\n".join(lowered.said))]


class TestLibrary:
    def test_functions_that_the_shipped_library_lacks(self):
        """A5's library has no plain vector instructions; stray ones beside a vector function cannot be linked."""
        assert compiled(FLASH(), A5).missing == ("transpose_3d_without_last_axis_bfloat16_t", "vadd_1d_float")
        assert compiled(FLASH(), A2).missing == ()

    def test_a_switch_of_the_compiler_changes_the_calls(self):
        missing = compile(FLASH().kernel, FLASH().signature, A5, Options(disable_tight_coupled_buffer=True)).missing
        assert missing == ("vadd_1d_float",)


class TestCache:
    @pytest.fixture
    def empty_cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("DSV4_TRITON_CACHE_DIR", str(tmp_path))
        return tmp_path / "ascend"

    def test_second_compile_comes_from_disk(self, empty_cache, monkeypatch):
        first = compiled(ADD())
        monkeypatch.setattr(ascend, "_compile", lambda job: pytest.fail("compiled again"))
        second = compiled(ADD())
        assert not first.cached and second.cached
        assert second == CompileResult(**{**vars(first), "cached": True})

    @pytest.mark.parametrize("damage", [b"", b"garbage", None])
    def test_damaged_entry_is_rebuilt(self, empty_cache, damage):
        compiled(ADD())
        (file,) = empty_cache.rglob("*.bin")
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
        assert not compiled(ADD()).cached and file.stat().st_size > len(whole) // 2
        assert compiled(ADD()).cached

    def test_what_a_compiler_refused_is_kept_and_what_the_frontend_did_is_not(self, empty_cache):
        """The frontend is Python code: what else its process did to Triton may be at fault."""
        for wanted, kept in ((ADD(B=32768), True), (launch(k.undefined_name, empty(4)), False)):
            assert compiled(wanted).status == "failed"
            assert compiled(wanted).cached == kept

    def test_unwritable_directory_only_costs_time(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("DSV4_TRITON_CACHE_DIR", str(tmp_path / "file" / "below"))
        assert compiled(ADD()).ok and not compiled(ADD()).cached

    def test_key_depends_on_all_that_matters(self, monkeypatch):
        def key(wanted: k.Launch, family=A2, **options) -> str:
            return ascend._job(wanted.kernel, wanted.signature, family, {**wanted.options, **options}, 1.0).key

        x = empty(2**16)
        unaligned = launch(k.add, x[1:], x, x, 2**16, B=1024)
        odd = launch(k.add, x, x, x, 2**16 - 1, B=1024)
        keys = [
            key(ADD()), key(ADD(B=512)), key(ADD(), A3), key(ADD(), A5), key(ADD(), multibuffer=False),
            key(ADD(), tile_mix_vector_loop=1), key(ADD(), enable_linearize=True), key(unaligned), key(odd),
        ]  # fmt: skip
        assert len(set(keys)) == len(keys)
        assert key(ADD()) == key(ADD(), num_warps=8) == key(ADD(), multibuffer=True)
        monkeypatch.setattr(cache, "toolchain", lambda *sources: "another version")
        assert key(ADD()) not in keys

    def test_results_survive_their_form_on_disk(self):
        for result in (compiled(FLASH()), compiled(ADD(B=32768)), CompileResult("x", "a2", binary=b"\x00elf")):
            assert CompileResult.decode(result.encode()) == result
            assert "hivm" not in json.loads(json.dumps(result.as_dict()))


class TestMany:
    def test_results_keep_the_order_and_equal_launches_compile_once(self, tmp_path, monkeypatch):
        monkeypatch.setenv("DSV4_TRITON_CACHE_DIR", str(tmp_path))
        calls = []
        wanted = [ADD(), launch(k.undefined_name, empty(4)), ADD(), ADD(B=512)]
        results = compile_all(wanted, A2, jobs=2, progress=lambda *call: calls.append(call))
        assert [(r.kernel, r.status) for r in results] == [
            ("add", "ok"), ("undefined_name", "failed"), ("add", "ok"), ("add", "ok"),
        ]  # fmt: skip
        assert results[0] is results[2] and results[0] != results[3]
        assert [(done, total) for done, total, _ in calls] == [(1, 3), (2, 3), (3, 3)]
        assert not list(tmp_path.rglob("*.tmp"))

    def test_nothing_to_do(self):
        assert compile_all([], A2) == []


WITHOUT_DEVICE = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch_npu", "acl", "tbe", "te", "vllm", "vllm_ascend"}:
            raise ModuleNotFoundError("blocked for the test: " + name)

sys.meta_path.insert(0, Block())
from triton.backends.ascend import driver
from triton.runtime import driver as active

def touched(*_, **__):
    raise AssertionError("a device was asked")

driver.NPUUtils.__new__ = touched
active.default._init_fn = touched
from dsv4_triton.compiler.ascend import compile_all
from dsv4_triton.device import A2, A5
from tests.compiler.ascend.kernels import FLASH

for family in (A2, A5):
    (result,) = compile_all([FLASH()], family)
    assert result.ok and not result.linked, result.message
"""


def test_needs_neither_cann_nor_torch_npu_nor_a_device(monkeypatch):
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", os.defpath)
    run = subprocess.run([sys.executable, "-c", WITHOUT_DEVICE], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr


class TestHivmc:
    """Where CANN's last step is installed it is used. Here a script plays it."""

    @pytest.fixture
    def hivmc(self, tmp_path, monkeypatch):
        def install(script: str) -> None:
            folder = tmp_path / "cann"
            folder.mkdir(exist_ok=True)
            (folder / "hivmc").write_text(f"#!/bin/sh\n{script}\n")
            (folder / "hivmc").chmod(0o755)
            monkeypatch.setenv("PATH", str(folder), prepend=":")

        monkeypatch.setenv("DSV4_TRITON_CACHE_DIR", str(tmp_path / "cache"))
        return install

    def test_binary_is_kept(self, hivmc):
        hivmc(
            "while [ $# -gt 1 ]; do\n"
            '  if [ "$1" = -o ]; then printf "an ELF file" > "$2.o"; printf "an ELF file" > "$2"; fi\n  shift\ndone'
        )
        for _ in range(2):
            result = compiled(ADD())
            assert result.ok and result.linked and result.binary == b"an ELF file"
        assert result.cached

    def test_failure_of_the_last_step(self, hivmc):
        hivmc('[ "$1" = --version ] && exit 0; echo "hivmc: error: no such instruction" >&2; exit 3')
        result = compiled(ADD())
        assert (result.status, result.stage, result.linked) == ("failed", "hivmc", False)
        assert "no such instruction" in result.message and result.facts is not None
