"""`tl.device_print` and `tl.device_assert` on the host."""

from __future__ import annotations

import io
import os
import re
import sys
import threading

import pytest
import torch

from dsv4_triton.compiler.frontend import KernelCompileError
from dsv4_triton.compiler.host.report import DeviceAssertionError
from tests.compiler.host import message_kernels as k
from tests.numeric import assert_equal

pytestmark = pytest.mark.usefixtures("host_driver")

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def printed(capsys):
    """What has been printed since the last call, as lines."""

    def lines() -> list[str]:
        text = capsys.readouterr().out
        assert not text or text.endswith("\n")
        return text.splitlines()

    return lines


def line_of(kernel, text: str) -> str:
    """`file:line` of the line of a kernel's source that holds a text."""
    code = kernel.fn.__code__
    number = next(i for i, line in enumerate(kernel.src.splitlines()) if text in line)
    return f"{code.co_filename}:{code.co_firstlineno + 1 + number}"


@pytest.mark.parametrize(("dtype", "values", "decimal", "bits"), [
    (torch.float32, [0.1, -0.0, NAN, -INF], "0.1 -0.0 nan -inf", "3dcccccd 80000000 7fc00000 ff800000"),
    (torch.float64, [0.1, 1e300], "0.1 1e+300", "3fb999999999999a 7e37e43c8800759c"),
    (torch.float16, [0.1, 65504.0], "0.099975586 65504.0", "2e66 7bff"),
    (torch.bfloat16, [1.5, -2.0, NAN, 3e38], "1.5 -2.0 nan 3.0040553e+38", "3fc0 c000 7fc0 7f62"),
    (torch.float8_e4m3fn, [448.0, -0.25, NAN, 0.0], "448.0 -0.25 nan 0.0", "7e a8 7f 00"),
    (torch.float8_e5m2, [57344.0, -0.25, INF, 0.0], "57344.0 -0.25 inf 0.0", "7b b4 7c 00"),
    (torch.int8, [-128, 127], "-128 127", "80 7f"),
    (torch.int16, [-(2**15), -1], "-32768 -1", "8000 ffff"),
    (torch.int32, [-(2**31), 2**31 - 1], "-2147483648 2147483647", "80000000 7fffffff"),
    (torch.int64, [-(2**63), 2**63 - 1], "-9223372036854775808 9223372036854775807",
     "8000000000000000 7fffffffffffffff"),
    (torch.uint8, [0, 255], "0 255", "00 ff"),
    (torch.uint16, [0, 2**16 - 1], "0 65535", "0000 ffff"),
    (torch.uint32, [0, 2**32 - 1], "0 4294967295", "00000000 ffffffff"),
    (torch.uint64, [0, 2**64 - 1], "0 18446744073709551615", "0000000000000000 ffffffffffffffff"),
    (torch.bool, [True, False], "1 0", "01 00"),  # Triton loads them as int8
], ids=lambda value: str(value).split(".")[-1] if isinstance(value, torch.dtype) else "")  # fmt: skip
def test_values_of_every_dtype(dtype, values, decimal, bits, printed):
    x = torch.tensor(values, dtype=torch.float32).to(dtype) if dtype.itemsize == 1 and dtype.is_floating_point else (
        torch.tensor(values, dtype=dtype)
    )  # fmt: skip
    k.show[(1,)](x, len(values), False)
    assert printed() == [f"pid (0, 0, 0) v: {decimal}"]
    k.show[(1,)](x, len(values), True)
    assert printed() == [f"pid (0, 0, 0) v: {' '.join('0x' + word for word in bits.split())}"]


def test_scalars(printed):
    k.show_scalars[(1,)](torch.tensor([-3], dtype=torch.int64), 2**40, 0.5, True, NAME=7)
    k.show_scalars[(1,)](torch.tensor([0.1], dtype=torch.bfloat16), -1, NAN, False, NAME=7)
    assert printed() == [
        "pid (0, 0, 0) one: -3",
        "pid (0, 0, 0) given: (operand 0) 1099511627776",
        "pid (0, 0, 0) given: (operand 1) 0.5",
        "pid (0, 0, 0) given: (operand 2) True",
        "pid (0, 0, 0) given: (operand 3) 7",
        "pid (0, 0, 0) one: 0.100097656",
        "pid (0, 0, 0) given: (operand 0) -1",
        "pid (0, 0, 0) given: (operand 1) nan",
        "pid (0, 0, 0) given: (operand 2) False",
        "pid (0, 0, 0) given: (operand 3) 7",
    ]


def test_tiles_row_by_row(printed):
    x = torch.arange(16, dtype=torch.int32).view(2, 4, 2)
    k.show_tile[(1,)](x, 2, 4, 2)
    tile = [f"idx ({a}, {b}, :) tile: {x[a, b, 0]} {x[a, b, 1]}" for a in range(2) for b in range(4)]
    turned = [f"idx ({b}, :) turned: {x[0, b].sum()} {x[1, b].sum()}" for b in range(4)]
    lines = ["idx (0, :) sum: 12 16", "idx (1, :) sum: 44 48", *turned, *tile]
    assert printed() == [f"pid (0, 0, 0) {line}" for line in lines]


def test_texts(printed):
    k.show_texts[(1,)](torch.tensor([2.0]))
    texts = [" plain", ' "quoted" \\ %d %s: 2.0', ": 2.0", " built-in: 2.0"]
    assert printed() == [f"pid (0, 0, 0){text}" for text in texts]


def test_order_within_a_program(printed):
    x = torch.ones(5, 2)
    k.show_steps[(1,)](x, 5, 2)
    expected = []
    for i in range(5):
        name = "odd" if i % 2 else "even"
        expected.append(f"pid (0, 0, 0) {name}: {'' if i % 2 else '(operand 0) '}{i}")
        if i % 2 == 0:
            expected.append(f"pid (0, 0, 0) even: (operand 1) {i + 1}.0 {i + 1}.0")
    assert printed() == expected
    assert x[0].tolist() == [5.0, 5.0]


@pytest.mark.parametrize("n", [0, 1, 4])
def test_masks(n, printed):
    k.show_masked[(1,)](torch.arange(4), n, 4)
    values, flags = [i if i < n else -7 for i in range(4)], [i < n for i in range(4)]
    assert printed() == [
        f"pid (0, 0, 0) masked: (operand {i}) {' '.join(map(str, row))}" for i, row in enumerate((values, flags))
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bfloat16], ids=str)
def test_values_that_were_used_before(dtype, printed):
    """The buffer of a value may be used again after its last use, and a message is one."""
    x, o = torch.arange(4).to(dtype), torch.zeros(4, dtype=dtype)
    with pytest.raises(DeviceAssertionError, match=r"w \[program \(0, 0, 0\), element \(2\), 2 of 4 elements\]"):
        k.show_after_use[(1,)](x, o, 4, 4, debug=True)
    rows = [x, x * 2 + 1, x * 2 + 1 < 4, torch.tensor([1, 3, -5, -7]).to(dtype)]
    assert printed() == [
        f"pid (0, 0, 0) v: (operand {i}) {' '.join(map(str, row.tolist()))}" for i, row in enumerate(rows)
    ]
    assert o.tolist() == [2, 4, -4, -6]


@pytest.mark.usefixtures("four_threads")
def test_whole_lines_from_many_threads(printed):
    x = torch.zeros(64 * 3, 16, dtype=torch.int32)
    k.show_program[(64, 3)](x, 16)
    lines = printed()
    pairs = list(zip(lines[::2], lines[1::2], strict=True))
    assert set(pairs) == {
        (
            f"pid ({a}, {b}, 0) i: (operand 0) {' '.join(str(a * 16 + i) for i in range(16))}",
            f"pid ({a}, {b}, 0) i: (operand 1) {b}",
        )
        for a in range(64)
        for b in range(3)
    }
    assert len(pairs) == 64 * 3
    assert_equal(x.flatten(), torch.arange(64 * 16, dtype=torch.int32).repeat(3))


@pytest.mark.usefixtures("four_threads")
def test_launches_from_several_python_threads(printed):
    def work(number):
        for _ in range(10):
            k.show_scalars[(2,)](torch.tensor([number]), number, 0.5, True, NAME=number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = printed()
    for number in range(3, 7):
        for program in range(2):
            assert lines.count(f"pid ({program}, 0, 0) one: {number}") == 10


def test_forked_child_prints(tmp_path):
    x = torch.tensor([2.0])
    k.show[(1,)](x, 1, False)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            sys.stdout = io.StringIO()
            k.show[(1,)](x, 1, False)
            status = 0 if sys.stdout.getvalue() == "pid (0, 0, 0) v: 2.0\n" else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("error", [BrokenPipeError, KeyboardInterrupt])
def test_trouble_with_standard_output_is_raised_by_the_launch(error, monkeypatch, printed):
    class Broken(io.StringIO):
        def write(self, text):
            raise error("closed")

    x = torch.zeros(64, 16, dtype=torch.int32)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Broken())
        with pytest.raises(error, match="closed"):
            k.show_program[(64, 1)](x, 16)
    k.show_program[(2, 1)](x, 16)
    assert len(printed()) == 4


@pytest.mark.parametrize(("kernel", "arguments", "place", "what"), [
    (k.show_pointer, (), 'print("x", x)', "tl.device_print of a pointer is not supported on the host"),
    (k.show_pointers, (8,), "device_print", "tl.device_print of a pointer is not supported on the host"),
    (k.show_in_reduction, (8,), "tl.reduce", "neither in a function that is not inlined"),
], ids=["pointer", "pointers", "reduction"])  # fmt: skip
def test_what_cannot_be_shown_is_refused(kernel, arguments, place, what):
    with pytest.raises(KernelCompileError) as caught:
        kernel[(1,)](torch.zeros(8), *arguments)
    assert f"kernel {kernel.__name__} ({line_of(kernel, place)})" in str(caught.value) and what in str(caught.value)


def test_function_that_is_not_inlined():
    with pytest.raises(KernelCompileError, match="show_in_separate_function"):
        k.show_in_separate_function[(1,)](torch.zeros(1))


class TestAssertions:
    def test_off_unless_debugging(self):
        x = torch.zeros(8)
        k.scatter[(2,)](x, torch.tensor([3, 7]), 4)
        assert x[7] == 1

    def test_failure_ends_its_program_only(self):
        x, index = torch.full((8,), -1.0), torch.arange(8)
        # An index that would crash the process, and one that would be a silent error.
        index[2], index[5] = 2**44, -1
        with pytest.raises(DeviceAssertionError) as caught:
            k.scatter[(8,)](x, index, 8, debug=True)
        place = line_of(k.scatter, "device_assert")
        assert (
            str(caught.value)
            == f"kernel scatter ({place}): index out of range [program (2, 0, 0), and 1 other program]"
        )
        error = caught.value
        assert (error.kernel, error.text, error.program, error.index) == (
            "scatter",
            "index out of range",
            (2, 0, 0),
            (),
        )
        assert x.tolist() == [0, 1, -1, 3, 4, -1, 6, 7]
        k.scatter[(8,)](x, torch.arange(8), 8, debug=True)
        assert x.tolist() == list(range(8))

    @pytest.mark.usefixtures("four_threads")
    def test_many_threads_and_programs(self):
        for _ in range(5):
            x, index = torch.full((3000,), -1.0), torch.arange(3000)
            index[7::5] = 2**44
            with pytest.raises(DeviceAssertionError, match=r"program \(7, 0, 0\), and 598 other programs") as caught:
                k.scatter[(3000,)](x, index, 3000, debug=True)
            assert caught.value.program == (7, 0, 0)
            expected = torch.arange(3000.0)
            expected[7::5] = -1
            assert_equal(x, expected)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.uint8], ids=str)
    def test_condition_on_a_tile(self, dtype):
        x = torch.ones(4, 8).to(dtype)
        k.require[(1,)](x, 100, 4, 8, debug=True)
        x[2, 3] = x[3, 1] = 101
        message = r"too large \[program \(0, 0, 0\), element \(2, 3\), 2 of 32 elements\]"
        with pytest.raises(DeviceAssertionError, match=message) as caught:
            k.require[(1,)](x, 100, 4, 8, debug=True)
        assert caught.value.index == (2, 3)

    def test_nan_fails_a_comparison(self):
        x = torch.zeros(1, 8)
        x[0, 6] = NAN
        with pytest.raises(DeviceAssertionError, match=r"element \(0, 6\), 1 of 8"):
            k.require[(1,)](x, 100.0, 1, 8, debug=True)

    def test_flags_and_masks(self):
        flags = torch.tensor([True, False, True, False])
        k.require_flags[(1,)](flags, 1, 4, debug=True)
        k.require_flags[(1,)](flags, 0, 4, debug=True)
        with pytest.raises(DeviceAssertionError, match=r"\): assertion failed \[.*element \(1\), 2 of 4 elements"):
            k.require_flags[(1,)](flags, 4, 4, debug=True)

    def test_scalars_and_the_assert_statement(self):
        k.require_scalar[(1,)](True, 4, debug=True)
        with pytest.raises(DeviceAssertionError, match=r"flag \[program \(0, 0, 0\)\]"):
            k.require_scalar[(1,)](False, 4, debug=True)
        with pytest.raises(DeviceAssertionError, match=r"n is three \["):
            k.require_scalar[(1,)](True, 3, debug=True)

    def test_place_of_an_inlined_function(self):
        with pytest.raises(DeviceAssertionError) as caught:
            k.require_in_helper[(1,)](torch.zeros(4), 4, debug=True)
        inner, outer = line_of(k._positive, "device_assert"), line_of(k.require_in_helper, "_positive")
        assert f"kernel require_in_helper ({inner}, called at {outer}): not positive" in str(caught.value)

    def test_in_a_loop(self):
        x = torch.zeros(1)
        with pytest.raises(DeviceAssertionError, match="counted too far"):
            k.count_down[(1,)](x, 7, debug=True)
        assert x == 7

    def test_integer_overflow(self):
        x = torch.tensor([1, 2**31 - 1], dtype=torch.int32)
        with pytest.raises(DeviceAssertionError, match=r"int32 overflow detected for operation add .*element \(1\)"):
            k.add_one[(1,)](x.clone(), 2, debug=True)
        for options in ({"debug": True, "sanitize_overflow": False}, {}):
            wrapped = x.clone()
            k.add_one[(1,)](wrapped, 2, **options)
            assert wrapped.tolist() == [2, -(2**31)]

    def test_places_survive_the_cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("DSV4_TRITON_CACHE_DIR", str(tmp_path))
        messages = []
        for _ in range(2):
            k.scatter.__dict__.pop("_host_launcher", None)
            with pytest.raises(DeviceAssertionError) as caught:
                k.scatter[(1,)](torch.zeros(4), torch.tensor([9]), 4, debug=True)
            messages.append(str(caught.value))
        assert messages[0] == messages[1] and len(list(tmp_path.rglob("*.bin"))) == 1


class TestDebug:
    """Which launches check assertions."""

    @pytest.fixture(autouse=True)
    def _fresh(self):
        yield
        for kernel in (k.scatter, k.scatter_checked):
            kernel.__dict__.pop("_host_launcher", None)

    def checks(self, kernel, **options) -> bool:
        x = torch.zeros(8)
        try:
            kernel[(1,)](x, torch.tensor([5]), 4, **options)
        except DeviceAssertionError:
            return True
        return False

    def test_launch(self):
        assert [self.checks(k.scatter, **o) for o in ({}, {"debug": False}, {"debug": True}, {})] == [0, 0, 1, 0]

    def test_decorator(self):
        assert self.checks(k.scatter_checked)
        assert not self.checks(k.scatter_checked, debug=False)

    @pytest.mark.parametrize(("value", "on"), [("1", True), ("true", True), ("0", False), ("", False)])
    def test_environment(self, value, on, monkeypatch, capsys):
        monkeypatch.setenv("TRITON_DEBUG", value)
        k.scatter.__dict__.pop("_host_launcher", None)
        assert self.checks(k.scatter) == on
        assert self.checks(k.scatter, debug=False) == on
        assert not re.search("dump", capsys.readouterr().out, re.IGNORECASE)


def test_kernels_without_messages_have_none():
    compiled = k.add_one[(1,)](torch.zeros(4), 4)
    assert compiled.messages == ()
    assert k.scatter[(1,)](torch.zeros(4), torch.tensor([0]), 4).messages == ()
    assert len(k.scatter[(1,)](torch.zeros(4), torch.tensor([0]), 4, debug=True).messages) == 1
