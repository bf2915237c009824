"""Loading object code into the process and running ranges of program instances."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import llvmlite.binding as llvm

from dsv4_triton.compiler.host_llvm import ALIGNMENT, HostObject, target_machine

_ENTRY_TYPE = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32
)

_lock = threading.Lock()
_jit: Any = None
_libraries: list[Any] = []
_local = threading.local()


def load(code: HostObject) -> Any:
    """The entry point of an object as a ctypes function (it releases the interpreter lock while it runs)."""
    global _jit
    with _lock:
        if _jit is None:
            _jit = llvm.create_lljit_compiler(target_machine())
        builder = llvm.JITLibraryBuilder().add_object_img(code.code).add_current_process().export_symbol(code.symbol)
        library = builder.link(_jit, f"{code.symbol}.{len(_libraries)}")
        # The library owns the code: it lives as long as the process.
        _libraries.append(library)
    return _ENTRY_TYPE(library[code.symbol])


def arena(size: int) -> int:
    """Address of this thread's scratch memory of at least `size` bytes; its contents never outlive a program instance."""
    try:
        if size <= _local.size:
            return _local.address
    except AttributeError:
        pass
    size = max(size, 1 << 16)
    _local.memory = ctypes.create_string_buffer(size + ALIGNMENT)
    _local.address = -(-ctypes.addressof(_local.memory) // ALIGNMENT) * ALIGNMENT
    _local.size = size
    return _local.address


def run(kernel: Any, arguments: bytes, count: int, x: int, y: int, z: int) -> None:
    """Run all `count` program instances of a grid."""
    kernel.entry(arguments, arena(kernel.arena_bytes), 0, count, x, y, z)
