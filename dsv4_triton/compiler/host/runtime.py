"""Loading object code into the process and running grids of program instances."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import llvmlite.binding as llvm

from dsv4_triton.compiler.host import cache, pool
from dsv4_triton.compiler.host.llvm import ALIGNMENT, HostObject, target_machine

if TYPE_CHECKING:
    from dsv4_triton.compiler.host.launch import HostKernel

_ENTRY_TYPE = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_void_p, *[ctypes.c_int64] * 2, *[ctypes.c_int32] * 3
)  # fmt: skip
_PARALLEL_NS = 80_000.0
"""A grid estimated to take less runs on the launching thread alone: waking the others would cost more than it saves."""

_lock = threading.Lock()
_jit: Any = None
_libraries: list[Any] = []
_local = threading.local()
_pool: pool.Pool | None = None
_threads: int | None = None


def _link(code: bytes, symbols: tuple[str, ...]) -> dict[str, int]:
    global _jit
    with _lock:
        if _jit is None:
            _jit = llvm.create_lljit_compiler(target_machine())
        builder = llvm.JITLibraryBuilder().add_object_img(code).add_current_process()
        for symbol in symbols:
            builder.export_symbol(symbol)
        library = builder.link(_jit, f"{symbols[0]}.{len(_libraries)}")
        # The library owns the code: it lives as long as the process.
        _libraries.append(library)
    return {symbol: library[symbol] for symbol in symbols}


def load(code: HostObject) -> tuple[Any, int]:
    """The entry point of an object, as a ctypes function (which releases the interpreter lock) and as an address."""
    address = _link(code.code, (code.symbol,))[code.symbol]
    return _ENTRY_TYPE(address), address


def arena(size: int) -> int:
    """Address of this thread's scratch memory of at least `size` bytes; its contents never outlive a program
    instance.
    """
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


def set_threads(count: int | None) -> None:
    """Let `count` threads share a grid (None: the default of `pool.default_threads`)."""
    global _threads
    if count is not None and count < 1:
        raise ValueError(f"a grid needs at least 1 thread, got {count}")
    _threads = count


def threads() -> int:
    """How many threads share a grid."""
    global _threads
    if _threads is None:
        _threads = pool.default_threads()
    return _threads


def _shared_pool() -> pool.Pool:
    global _pool
    if _pool is None:
        code = cache.load("thread_pool")
        if code is None:
            code = HostObject(pool.native_code(), pool.SYMBOLS[0], 0)
            cache.store("thread_pool", code)
        symbols = _link(code.code, pool.SYMBOLS)
        with _lock:
            if _pool is None:
                _pool = pool.Pool(symbols)
    return _pool


def _after_fork() -> None:
    """A forked child has none of its parent's threads, and locks in an unknown state."""
    global _pool, _lock
    _pool = None
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def run(kernel: HostKernel, arguments: bytes, count: int, x: int, y: int, z: int) -> None:
    """Run all `count` program instances of a grid, on several threads when it is large enough."""
    scratch = arena(kernel.arena_bytes)
    begin = time.perf_counter_ns()
    if (
        count > 1
        and kernel.program_ns * count >= _PARALLEL_NS
        and (available := _threads or threads()) > 1
        and _shared_pool().run(kernel.address, arguments, scratch, kernel.arena_bytes, count, available - 1, x, y, z)
    ):
        used = min(available, count)
    else:
        kernel.entry(arguments, scratch, 0, count, x, y, z)
        used = 1
    kernel.program_ns += 0.25 * ((time.perf_counter_ns() - begin) * used / count - kernel.program_ns)
