"""Recorded launches: what they hold, and that recording leaves no trace."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from dsv4_triton.compiler import host
from dsv4_triton.compiler.binding import KernelArgumentError
from dsv4_triton.compiler.launches import is_recording, recording
from dsv4_triton.device import A2, A5, HOST, acting_as, family_of
from tests.compiler.host import feature_kernels as k
from tests.numeric import assert_equal


@triton.jit
def _kernel(x, y, n, m, one, scale, wide: tl.int64, loose, B: tl.constexpr, DTYPE: tl.constexpr = tl.float32):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + i, (i + n + m + one + loose).to(DTYPE) * scale, mask=i < wide)


def launch(*args, grid=(4,), **kwargs):
    with recording() as launches:
        _kernel[grid](*args, **kwargs)
    return launches


class TestContents:
    def test_signature_is_that_of_a_triton_launch(self):
        x = torch.empty(64, dtype=torch.bfloat16)
        (recorded,) = launch(x[1:], None, 32, 33, 1, 0.5, 48, 2**40, 64, multibuffer=False)
        assert recorded.kernel is _kernel
        assert recorded.signature.types == {
            "x": "*bf16", "y": "*i8", "n": "i32", "m": "i32", "one": "i32", "scale": "fp32", "wide": "i64",
            "loose": "i64",
        }  # fmt: skip
        assert recorded.signature.constants == {"B": 64, "DTYPE": tl.float32, "y": None, "one": 1}
        # x[1:] is 2 bytes off, y is a null pointer, 33 is odd, 2**40 is a multiple of 16.
        assert recorded.signature.attrs.arg_properties == {"tt.divisibility": [1, 2, 6, 7, 8], "tt.equal_to": [4]}
        assert (recorded.grid, recorded.options) == ((4, 1, 1), {"multibuffer": False})
        assert list(recorded.arguments) == list(recorded.signature.types)
        assert recorded.arguments["x"].data_ptr() == x.data_ptr() + 2
        assert recorded.arguments["loose"] == 2**40

    def test_same_as_tritons_own_specialisation(self):
        """The types, constants and attributes that triton-ascend's `JITFunction.run` computes for these arguments."""
        from triton.backends.ascend.compiler import AscendAttrsDescriptor
        from triton.runtime.jit import mangle_type

        x = torch.empty(64, dtype=torch.float8_e4m3fn)
        values = (x, torch.empty(1, dtype=torch.int8), 16, 2**31, 1, 0.0, 1, 0, 64, tl.float32)
        (recorded,) = launch(*values)
        attrs = AscendAttrsDescriptor(_kernel.params, values)
        equal_to_one = attrs.get_constants()
        for p, value in zip(_kernel.params, values):
            if not p.is_constexpr:
                assert recorded.signature.types[p.name] == (p.annotation_type or mangle_type(value)), p.name
            constant = p.is_constexpr or p.num in equal_to_one or value is None
            assert (p.name in recorded.signature.constants) == constant, p.name
        assert recorded.signature.attrs.hash() == attrs.hash()

    def test_grid_function_and_empty_grid(self):
        x = torch.empty(64)
        assert launch(x, x, 2, 2, 2, 2.0, 2, 2, B=64, grid=lambda meta: (meta["n"], meta["B"]))[0].grid == (2, 64, 1)
        assert launch(x, x, 2, 2, 2, 2.0, 2, 2, B=64, grid=(0, 3)) == []

    def test_contents_are_never_read(self):
        huge = torch.empty(2**33, dtype=torch.int8)  # 8 GiB of addresses, no memory
        (recorded,) = launch(huge, huge, 2, 2, 2, 2.0, 2, 2, B=64)
        assert recorded.arguments["x"] is huge

    def test_wrong_launches_are_refused(self):
        x = torch.empty(64)
        with pytest.raises(KernelArgumentError, match="argument 'x' is on device 'meta'"):
            launch(torch.empty(4, device="meta"), x, 2, 2, 2, 2.0, 2, 2, B=64)
        with pytest.raises(KeyError, match="colour"):
            launch(x, x, 2, 2, 2, 2.0, 2, 2, B=64, colour=1)
        with pytest.raises(TypeError, match="grid is 3"):
            launch(x, x, 2, 2, 2, 2.0, 2, 2, B=64, grid=3)
        assert not is_recording()


def test_autotune_and_heuristics_record_one_launch():
    def no_benchmark(*_, **__):
        pytest.fail("a recorded launch was timed")

    def hook(*_, **__):
        pytest.fail("a hook ran")

    @triton.autotune(
        configs=[triton.Config({"B": 256}, multibuffer=False, pre_hook=hook), triton.Config({"B": 1024})],
        key=["n"], do_bench=no_benchmark, reset_to_zero=["o"],
    )  # fmt: skip
    @triton.heuristics({"EVEN": lambda args: args["n"] % 2 == 0})
    @triton.jit
    def tuned(x, o, n, B: tl.constexpr, EVEN: tl.constexpr):
        tl.store(o, tl.load(x))

    with recording() as launches:
        tuned[lambda meta: (triton.cdiv(meta["n"], meta["B"]),)](torch.empty(8), torch.empty(8), 3000)
    (recorded,) = launches
    assert recorded.signature.constants == {"B": 256, "EVEN": True}
    assert recorded.grid == (12, 1, 1) and recorded.options["multibuffer"] is False
    assert not tuned.cache


class TestRestoring:
    def test_runs_again_afterwards(self, host_driver):
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        before = driver.active, JITFunction.run
        x = torch.randn(64)
        o = torch.full((64,), float("nan"))
        with recording() as launches:
            k.in_place[(1,)](x, o, 64)
        assert o.isnan().all() and len(launches) == 1
        assert (driver.active, JITFunction.run) == before
        k.in_place[(1,)](x, o, 64)
        assert_equal(o, x * 2 + 1)

    def test_after_an_error(self):
        from triton.runtime.jit import JITFunction

        before = JITFunction.run
        with pytest.raises(ZeroDivisionError), recording():
            _ = 1 / 0
        assert JITFunction.run is before and not is_recording()

    def test_neither_nests_nor_takes_the_host_driver_inside(self, monkeypatch):
        monkeypatch.setattr(host, "_depth", 0)
        with recording():
            with pytest.raises(RuntimeError, match="recorded already"), recording():
                pass
            with pytest.raises(host.HostDriverError, match="being recorded"):
                host.install()
            assert is_recording()


class TestActingAs:
    def test_family_of_cpu_tensors(self):
        assert family_of("cpu") is HOST
        with acting_as(A2):
            assert family_of("cpu") is A2
            with acting_as(A5):
                assert family_of("cpu") is A5
            assert family_of("cpu") is A2
        with pytest.raises(ZeroDivisionError), acting_as(A5):
            _ = 1 / 0
        assert family_of("cpu") is HOST

    def test_an_op_is_launched_as_the_family_would(self):
        from dsv4_triton.kernels.muls_add import muls_add

        x = torch.empty(2**20)
        grids = {}
        for family in (A2, A5):
            with acting_as(family), recording() as launches:
                muls_add(x, x, 2.0)
            grids[family.name] = launches[0].grid
        assert grids == {"a2": (A2.vector_cores, 1, 1), "a5": (A5.vector_cores, 1, 1)}
