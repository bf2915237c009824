"""Installing, specialising, caching and error messages of the host driver."""

from __future__ import annotations

import os
import sys
import threading

import pytest
import torch
import triton
import triton.language as tl

from dsv4_triton.compiler import host
from dsv4_triton.compiler.binding import KernelArgumentError
from dsv4_triton.compiler.cache import directory
from dsv4_triton.compiler.frontend import KernelCompileError
from dsv4_triton.compiler.host import cache as host_cache
from tests.compiler.host import feature_kernels as k
from tests.numeric import assert_equal


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache directory, and kernels that nothing has compiled yet."""
    monkeypatch.setenv("DSV4_TRITON_CACHE_DIR", str(tmp_path))
    forget(k.in_place)
    yield tmp_path
    forget(k.in_place)


def forget(kernel):
    kernel.__dict__.pop("_host_launcher", None)


def run_in_place():
    x = torch.randn(64)
    expected = x * 2 + 1
    k.in_place[(1,)](x, x, 64)
    assert_equal(x, expected)


def test_installing_is_reversible_and_nests():
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    active, run, depth = driver.active, JITFunction.run, host._depth
    host.install()
    with host.installed():
        assert host.is_installed()
    assert host.is_installed()
    host.uninstall()
    assert (driver.active, JITFunction.run, host._depth) == (active, run, depth)


class TestRefusals:
    @pytest.fixture(autouse=True)
    def _not_installed(self, monkeypatch):
        from triton.runtime import driver

        monkeypatch.setattr(host, "_depth", 0)
        monkeypatch.setattr(driver, "active", driver.default)

    def test_another_triton_driver(self, monkeypatch):
        from triton.runtime import driver

        monkeypatch.setattr(driver, "active", object())
        with pytest.raises(host.HostDriverError, match="another Triton driver is active"):
            host.install()

    def test_real_device(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        with pytest.raises(host.HostDriverError, match="a real cuda device is available"):
            host.install()

    def test_interpreter(self, monkeypatch):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        with pytest.raises(host.HostDriverError, match="TRITON_INTERPRET=1"):
            host.install()

    def test_uninstall_without_install(self):
        with pytest.raises(RuntimeError, match="not installed"):
            host.uninstall()


@pytest.mark.usefixtures("host_driver")
class TestArguments:
    def test_tensor_on_another_device(self):
        with pytest.raises(KernelArgumentError, match=r"kernel in_place: argument 'o' is on device 'meta'"):
            k.in_place[(1,)](torch.zeros(64), torch.zeros(64, device="meta"), 64)

    def test_unsupported_dtype(self):
        with pytest.raises(KernelArgumentError, match=r"argument 'x' has dtype torch\.complex64"):
            k.in_place[(1,)](torch.zeros(64, dtype=torch.complex64), torch.zeros(64), 64)

    def test_null_pointer(self):
        x = torch.zeros(64)
        x.untyped_storage().resize_(0)
        with pytest.raises(KernelArgumentError, match="argument 'x' is a tensor without storage"):
            k.in_place[(1,)](x, torch.zeros(64), 64)

    def test_none_for_a_pointer_that_is_used(self):
        with pytest.raises(KernelCompileError, match=r"(?s)kernel in_place .*arguments that are None: x"):
            k.in_place[(1,)](None, torch.zeros(64), 64)

    def test_something_else(self):
        with pytest.raises(KernelArgumentError, match="argument 'x' has type str"):
            k.in_place[(1,)]("x", torch.zeros(64), 64)

    def test_scalar_out_of_the_annotated_range(self):
        with pytest.raises(KernelArgumentError, match=r"argument 'b' is 256, outside .*uint8"):
            k.annotated[(1,)](torch.zeros(8, dtype=torch.int64), 1, 256, 1, 1, 1, 1, 1, 1)

    def test_missing_and_unknown_arguments(self):
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            k.in_place[(1,)](torch.zeros(64), torch.zeros(64))
        with pytest.raises(KeyError, match="colour"):
            k.in_place[(1,)](torch.zeros(64), torch.zeros(64), 64, colour=1)

    def test_npu_options_are_accepted(self):
        x, o = torch.randn(64), torch.empty(64)
        k.in_place[(1,)](x, o, 64, num_warps=8, multibuffer=True)
        assert_equal(o, x * 2 + 1)

    def test_empty_grid_runs_nothing(self):
        k.in_place[(0,)](torch.empty(0), torch.empty(0), 64)
        with pytest.raises(ValueError, match="negative"):
            k.in_place[(-1,)](torch.empty(4), torch.empty(4), 64)

    @pytest.mark.parametrize("grid", [(), (1, 1, 1, 2), (1.5,), 1], ids=str)
    def test_grid_that_is_none(self, grid):
        x = torch.randn(64)
        with pytest.raises(TypeError, match=r"in_place.*grid is .*one to three integers"):
            k.in_place[grid](x, x, 64)

    def test_array_of_another_library(self):
        x = torch.randn(64)
        with pytest.raises(KernelArgumentError, match=r"in_place.*has type ndarray"):
            k.in_place[(1,)](x.numpy(), x, 64)

    def test_grid_from_a_function(self):
        x, y, o = torch.randn(3000), torch.randn(3000), torch.empty(3000)
        k.add[lambda meta: (triton.cdiv(meta["n"], meta["B"]),)](x, y, o, 3000, B=256)
        assert_equal(o, x + y)

    def test_parameter_and_reinterpreted_tensor(self):
        x, o = torch.nn.Parameter(torch.randn(64)), torch.empty(64)
        k.in_place[(1,)](x, o, 64)
        assert_equal(o, x.detach() * 2 + 1)
        codes = torch.arange(64, dtype=torch.uint8)
        k.cast[(1,)](triton.reinterpret(codes, tl.float8e5), o, 64)
        assert_equal(o, codes.view(torch.float8_e5m2).float())


@triton.jit
def _syntax_error(x):
    tl.store(x, undefined_name)  # noqa: F821


@triton.jit
def _wrong_shapes(x):
    tl.store(x + tl.arange(0, 8), tl.arange(0, 8) + tl.arange(0, 16))


@triton.jit
def _unsupported(x):
    i = tl.arange(0, 16)
    v = tl.load(x + i).to(tl.int32)
    v = tl.inline_asm_elementwise("nop $0, $1;", "=r,r", [v], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(x + i, v.to(tl.float32))


@pytest.mark.usefixtures("host_driver")
@pytest.mark.parametrize(("kernel", "line", "message"), [
    (_syntax_error, 1, "undefined_name"),
    (_wrong_shapes, 1, "incompatible dimensions"),
    (_unsupported, 3, "inline assembly is not supported on the host"),
], ids=["name", "shapes", "operation"])  # fmt: skip
def test_compile_errors_name_kernel_and_line(kernel, line, message, cache):
    with pytest.raises(KernelCompileError) as caught:
        kernel[(1,)](torch.zeros(256))
    first = kernel.fn.__code__.co_firstlineno + 1
    assert f"kernel {kernel.__name__} ({__file__}:{first + line}): " in str(caught.value)
    assert message in str(caught.value)
    assert not list(cache.rglob("*.bin")), "a failed build left something in the cache"


@pytest.mark.usefixtures("host_driver")
class TestCache:
    def test_second_build_comes_from_disk(self, cache, monkeypatch):
        run_in_place()
        assert len(list(cache.rglob("*.bin"))) >= 1
        forget(k.in_place)
        from dsv4_triton.compiler.host import build as host_build

        monkeypatch.setattr(host_build, "build", lambda *a, **kw: pytest.fail("compiled again"))
        run_in_place()

    @pytest.mark.parametrize("damage", [b"", b"garbage", None])
    def test_damaged_file_is_rebuilt(self, cache, damage):
        run_in_place()
        (file,) = cache.rglob("*.bin")
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
        forget(k.in_place)
        run_in_place()
        assert host_cache.load(file.stem) is not None

    def test_unwritable_directory_only_costs_time(self, cache, monkeypatch):
        blocker = cache / "file"
        blocker.write_text("")
        monkeypatch.setenv("DSV4_TRITON_CACHE_DIR", str(blocker / "below"))
        run_in_place()

    def test_a_user_without_a_home_only_loses_time(self, cache, monkeypatch):
        for name in ("DSV4_TRITON_CACHE_DIR", "HOME"):
            monkeypatch.delenv(name)
        monkeypatch.setattr(os, "getuid", lambda: 1 << 30)
        with pytest.raises(OSError, match="no home: name a folder for compiled kernels with DSV4_TRITON_CACHE_DIR"):
            directory()
        run_in_place()

    def test_key_depends_on_types_values_and_called_functions(self):
        from dsv4_triton.compiler.frontend import Signature

        base = Signature({"x": "*fp32", "o": "*fp32"}, {"N": 64})
        slots = {"x": 0, "o": 1}
        keys = {
            host_cache.key(k.in_place, base, slots),
            host_cache.key(k.in_place, Signature({"x": "*bf16", "o": "*fp32"}, {"N": 64}), slots),
            host_cache.key(k.in_place, Signature({"x": "*fp32", "o": "*fp32"}, {"N": 128}), slots),
            host_cache.key(k.in_place, Signature({"x": "*fp32", "o": "*fp32"}, {"N": 64.0}), slots),
            host_cache.key(k.copy, base, slots),
        }
        assert len(keys) == 5

    def test_threads_building_the_same_kernel_at_once(self, cache):
        problems = []

        def work():
            try:
                run_in_place()
            except Exception as error:  # reported below
                problems.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems


@pytest.mark.usefixtures("host_driver")
def test_processes_building_the_same_kernel_at_once(cache):
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                run_in_place()
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    assert len(list(cache.rglob("*.bin"))) == 1 and not list(cache.rglob("*.tmp"))


@pytest.mark.usefixtures("host_driver")
def test_autotune_and_heuristics():
    @triton.autotune(configs=[triton.Config({"B": 256}), triton.Config({"B": 1024})], key=["n"])
    @triton.heuristics({"EVEN": lambda args: args["n"] % 2 == 0})
    @triton.jit
    def tuned(x, o, n, B: tl.constexpr, EVEN: tl.constexpr):
        i = tl.program_id(0) * B + tl.arange(0, B)
        v = tl.load(x + i, mask=i < n)
        tl.store(o + i, v + 1 if EVEN else v - 1, mask=i < n)

    for n in (3000, 3001):
        x, o = torch.randn(n), torch.empty(n)
        tuned[lambda meta: (triton.cdiv(meta["n"], meta["B"]),)](x, o, n)
        assert_equal(o, x + 1 if n % 2 == 0 else x - 1)


SCALE = tl.constexpr(2.0)


@triton.jit
def _scaled(x):
    tl.store(x, tl.load(x) * SCALE)


@pytest.mark.usefixtures("host_driver")
def test_changed_global_is_noticed(monkeypatch):
    x = torch.ones(1)
    _scaled[(1,)](x)
    assert x.item() == 2
    monkeypatch.setattr(sys.modules[__name__], "SCALE", tl.constexpr(3.0))
    with pytest.raises(RuntimeError, match="global SCALE changed"):
        _scaled[(1,)](x)
