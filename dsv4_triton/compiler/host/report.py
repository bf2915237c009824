"""What running kernels report (host/messages.py): prints on standard output, failed assertions as exceptions.

The threads that run a grid call back into Python, for prints and for assertions that failed. What goes wrong in there,
such as an interrupt or a closed standard output, ends the programs that still report something and is raised by the
launch.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dsv4_triton.compiler.host import runtime
from dsv4_triton.compiler.host.messages import Message, Value

if TYPE_CHECKING:
    from dsv4_triton.compiler.host.launch import HostKernel

_NUMPY = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
_TORCH = {"bf16": torch.bfloat16, "f8E4M3FN": torch.float8_e4m3fn, "f8E5M2": torch.float8_e5m2}
_launches: dict[int, _Launch] = {}
_tokens = itertools.count()
_output = threading.Lock()


class DeviceAssertionError(AssertionError):
    """`tl.device_assert` failed in at least one program of a launch.

    kernel: its name. text: the assertion's message. program: (x, y, z) of the first program, in the order of the grid,
    where it failed. index: the first false element of the condition there; empty for a scalar.
    """

    def __init__(
        self, message: str, kernel: str, text: str, program: tuple[int, int, int], index: tuple[int, ...]
    ) -> None:
        super().__init__(message)
        self.kernel, self.text, self.program, self.index = kernel, text, program, index


class _Launch:
    """What has been reported by the programs of one launch."""

    def __init__(self, kernel: HostKernel):
        self.kernel = kernel
        self.error: BaseException | None = None
        self.failed: dict[tuple[int, int, int], tuple[Message, np.ndarray]] = {}

    def receive(self, table: int) -> bool:
        """Take the report at an address; whether its program is to end."""
        if self.error is not None:
            return True
        number, x, y, z = (ctypes.c_int64 * 4).from_address(table)
        message = self.kernel.messages[number]
        addresses = (ctypes.c_int64 * len(message.values)).from_address(table + 32)
        data = [_array(value, address) for value, address in zip(message.values, addresses, strict=True)]
        if message.asserts:
            self.failed[z, y, x] = message, data[0]
            return True
        text = "".join(_lines(message, f"pid ({x}, {y}, {z})", data))
        with _output:
            sys.stdout.write(text)
            sys.stdout.flush()
        return False

    def finish(self) -> None:
        """Raise what went wrong."""
        if self.error is not None:
            raise self.error
        if not self.failed:
            return
        (z, y, x), (message, condition) = min(self.failed.items(), key=lambda item: item[0])
        where = " (" + ", called at ".join(message.place) + ")" if message.place else ""
        text = f"kernel {self.kernel.name}{where}: {message.text or 'assertion failed'} [program ({x}, {y}, {z})"
        index: tuple[int, ...] = ()
        if condition.ndim:
            index = tuple(int(i) for i in np.argwhere(~condition)[0])
            text += (
                f", element ({', '.join(map(str, index))}), {np.count_nonzero(~condition)} of {condition.size} elements"
            )
        if len(self.failed) > 1:
            text += f", and {len(self.failed) - 1} other program{'s' * (len(self.failed) > 2)}"
        raise DeviceAssertionError(f"{text}]", self.kernel.name, message.text, (x, y, z), index)


def _array(value: Value, address: int) -> np.ndarray:
    """A copy of a value's elements: numbers, or the bits of types that numpy lacks."""
    bits = 8 if value.element == "i1" else int("".join(c for c in value.element[1:].split("E")[0] if c.isdigit()))
    kind = _NUMPY.get(value.element, f"{'i' if value.signed and value.element not in _TORCH else 'u'}{bits // 8}")
    dtype = np.dtype(bool if value.element == "i1" else kind)
    size = dtype.itemsize * int(np.prod(value.shape, dtype=np.int64))
    return np.frombuffer(ctypes.string_at(address, size), dtype).reshape(value.shape)


def _words(value: Value, row: np.ndarray, as_hex: bool) -> Iterator[str]:
    """The elements of a row (or a scalar): bits, or the fewest digits that tell a value from other fp32 ones."""
    row = row.reshape(-1)
    if as_hex:
        if value.element == "i1":
            return (f"0x{bit:x}" for bit in row)
        digits = 2 * row.dtype.itemsize
        return (f"0x{bits:0{digits}x}" for bits in row.view(f"u{row.dtype.itemsize}"))
    if value.element in _TORCH:
        row = torch.from_numpy(row.copy()).view(_TORCH[value.element]).float().numpy()
    return (str(number) for number in (row.astype(np.float32) if row.dtype == np.float16 else row))


def _lines(message: Message, program: str, data: list[np.ndarray]) -> Iterator[str]:
    if not data:
        yield f"{program}{message.text}\n"
    for operand, (value, array) in enumerate(zip(message.values, data, strict=True)):
        which = f"(operand {operand}) " if len(data) > 1 else ""
        for index in np.ndindex(array.shape[:-1]):
            row = f" idx ({', '.join(map(str, index))}, :)" if index else ""
            yield f"{program}{row}{message.text}{which}{' '.join(_words(value, array[index], message.hex))}\n"


@ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p)
def _receive(token: int, table: int) -> int:
    launch = _launches[token]
    try:
        return launch.receive(table)
    except BaseException as error:
        launch.error = error
        return 1


_address = ctypes.cast(_receive, ctypes.c_void_p).value or 0


def run(kernel: HostKernel, values: tuple[Any, ...], count: int, x: int, y: int, z: int) -> None:
    """Run the grid of a kernel with messages: print what it prints, raise `DeviceAssertionError` for what failed.

    A program ends where its assertion fails; the other programs run to their end.
    """
    token = next(_tokens)
    launch = _launches[token] = _Launch(kernel)
    record = (ctypes.c_int64 * 2)(_address, token)
    try:
        runtime.run(kernel, kernel.pack(*values, ctypes.addressof(record)), count, x, y, z)
    finally:
        del _launches[token]
    launch.finish()


def _after_fork() -> None:
    """Another thread of the parent may have been printing."""
    global _output
    _output = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
