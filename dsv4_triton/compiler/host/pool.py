"""A pool of native threads that share a grid.

The pool is LLVM IR over pthreads, so a worker never needs the interpreter lock and a launch costs one call. The
launching thread works too; all take chunks of program numbers from one atomic counter. A launch that finds the pool
busy runs alone.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

from dsv4_triton.compiler.host import llvm

# Byte offsets of the shared record. Zeroed memory is a valid mutex and condition variable on Linux.
_MUTEX, _WORK, _DONE, _GENERATION, _ACTIVE, _ENTRY, _ARGS, _COUNT, _CHUNK = 0, 64, 128, 192, 200, 208, 216, 224, 232
_GX, _GY, _GZ, _WORKERS, _ARENAS, _NEXT = 240, 244, 248, 256, 264, 320
_RECORD_BYTES = 384


def _field(name: str, offset: int) -> str:
    return f"  %{name} = getelementptr i8, ptr %pool, i64 {offset}\n"


_IR = f"""
declare i32 @pthread_mutex_lock(ptr)
declare i32 @pthread_mutex_unlock(ptr)
declare i32 @pthread_cond_wait(ptr, ptr)
declare i32 @pthread_cond_signal(ptr)
declare i32 @pthread_cond_broadcast(ptr)
declare i32 @pthread_create(ptr, ptr, ptr, ptr)
declare i32 @pthread_detach(i64)

define internal void @drain(ptr %pool, ptr %arena) {{
{_field("f.entry", _ENTRY)}{_field("f.args", _ARGS)}{_field("f.count", _COUNT)}{_field("f.chunk", _CHUNK)}
{_field("f.gx", _GX)}{_field("f.gy", _GY)}{_field("f.gz", _GZ)}{_field("f.next", _NEXT)}
  %entry = load ptr, ptr %f.entry
  %args = load ptr, ptr %f.args
  %count = load i64, ptr %f.count
  %chunk = load i64, ptr %f.chunk
  %gx = load i32, ptr %f.gx
  %gy = load i32, ptr %f.gy
  %gz = load i32, ptr %f.gz
  br label %head
head:
  %begin = atomicrmw add ptr %f.next, i64 %chunk monotonic
  %more = icmp slt i64 %begin, %count
  br i1 %more, label %body, label %end
body:
  %stop = add i64 %begin, %chunk
  %short = icmp slt i64 %stop, %count
  %last = select i1 %short, i64 %stop, i64 %count
  call void %entry(ptr %args, ptr %arena, i64 %begin, i64 %last, i32 %gx, i32 %gy, i32 %gz)
  br label %head
end:
  ret void
}}

define internal ptr @worker(ptr %start) {{
entry:
  %pool = load ptr, ptr %start
  %f.id = getelementptr i8, ptr %start, i64 8
  %id = load i64, ptr %f.id
  %f.seen = getelementptr i8, ptr %start, i64 16
  %first = load i64, ptr %f.seen
{_field("mutex", _MUTEX)}{_field("work", _WORK)}{_field("done", _DONE)}{_field("f.generation", _GENERATION)}
{_field("f.active", _ACTIVE)}{_field("f.workers", _WORKERS)}{_field("f.arenas", _ARENAS)}
  call i32 @pthread_mutex_lock(ptr %mutex)
  br label %check
check:
  %seen = phi i64 [ %first, %entry ], [ %seen, %sleep ], [ %generation, %go ], [ %generation, %leave ]
  %generation = load i64, ptr %f.generation
  %same = icmp eq i64 %generation, %seen
  br i1 %same, label %sleep, label %go
sleep:
  call i32 @pthread_cond_wait(ptr %work, ptr %mutex)
  br label %check
go:
  %workers = load i64, ptr %f.workers
  %mine = icmp ult i64 %id, %workers
  br i1 %mine, label %run, label %check
run:
  call i32 @pthread_mutex_unlock(ptr %mutex)
  %arenas = load ptr, ptr %f.arenas
  %f.arena = getelementptr ptr, ptr %arenas, i64 %id
  %arena = load ptr, ptr %f.arena
  call void @drain(ptr %pool, ptr %arena)
  call i32 @pthread_mutex_lock(ptr %mutex)
  %active = load i64, ptr %f.active
  %left = sub i64 %active, 1
  store i64 %left, ptr %f.active
  %idle = icmp eq i64 %left, 0
  br i1 %idle, label %notify, label %leave
notify:
  call i32 @pthread_cond_signal(ptr %done)
  br label %leave
leave:
  br label %check
}}

define i32 @dsv4_pool_start(ptr %start) {{
  %id = alloca i64
  %failed = call i32 @pthread_create(ptr %id, ptr null, ptr @worker, ptr %start)
  %ok = icmp eq i32 %failed, 0
  br i1 %ok, label %detach, label %end
detach:
  %thread = load i64, ptr %id
  call i32 @pthread_detach(i64 %thread)
  br label %end
end:
  ret i32 %failed
}}

define void @dsv4_pool_run(ptr %pool, ptr %entry, ptr %args, ptr %arena, i64 %count, i64 %chunk, i64 %workers,
                           i32 %gx, i32 %gy, i32 %gz) {{
{_field("mutex", _MUTEX)}{_field("work", _WORK)}{_field("done", _DONE)}{_field("f.generation", _GENERATION)}
{_field("f.active", _ACTIVE)}{_field("f.workers", _WORKERS)}
{_field("f.entry", _ENTRY)}{_field("f.args", _ARGS)}{_field("f.count", _COUNT)}{_field("f.chunk", _CHUNK)}
{_field("f.gx", _GX)}{_field("f.gy", _GY)}{_field("f.gz", _GZ)}{_field("f.next", _NEXT)}
  call i32 @pthread_mutex_lock(ptr %mutex)
  store ptr %entry, ptr %f.entry
  store ptr %args, ptr %f.args
  store i64 %count, ptr %f.count
  store i64 %chunk, ptr %f.chunk
  store i32 %gx, ptr %f.gx
  store i32 %gy, ptr %f.gy
  store i32 %gz, ptr %f.gz
  store i64 0, ptr %f.next
  store i64 %workers, ptr %f.workers
  store i64 %workers, ptr %f.active
  %old = load i64, ptr %f.generation
  %new = add i64 %old, 1
  store i64 %new, ptr %f.generation
  call i32 @pthread_cond_broadcast(ptr %work)
  call i32 @pthread_mutex_unlock(ptr %mutex)
  call void @drain(ptr %pool, ptr %arena)
  call i32 @pthread_mutex_lock(ptr %mutex)
  br label %check
check:
  %active = load i64, ptr %f.active
  %busy = icmp sgt i64 %active, 0
  br i1 %busy, label %sleep, label %end
sleep:
  call i32 @pthread_cond_wait(ptr %done, ptr %mutex)
  br label %check
end:
  call i32 @pthread_mutex_unlock(ptr %mutex)
  ret void
}}
"""


def default_threads() -> int:
    """`DSV4_TRITON_THREADS`, else the CPUs this process may run on."""
    configured = os.environ.get("DSV4_TRITON_THREADS")
    if configured:
        if not configured.isdigit() or int(configured) < 1:
            raise ValueError(f"DSV4_TRITON_THREADS is {configured!r}; it takes a number of threads, at least 1")
        return int(configured)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Pool:
    """Threads beside the caller's. Workers are added on demand and live as long as the process, as does their
    memory.
    """

    _LIMIT = 1024

    def __init__(self, symbols: dict[str, int]):
        self._start = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(symbols["dsv4_pool_start"])
        pointer, long, word = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        run_type = ctypes.CFUNCTYPE(
            None, pointer, pointer, ctypes.c_char_p, pointer, long, long, long, word, word, word
        )
        self._run = run_type(symbols["dsv4_pool_run"])
        self._memory = ctypes.create_string_buffer(_RECORD_BYTES + 64)
        self._record = -(-ctypes.addressof(self._memory) // 64) * 64
        self._table = (ctypes.c_void_p * self._LIMIT)()
        ctypes.c_void_p.from_address(self._record + _ARENAS).value = ctypes.addressof(self._table)
        self._arenas: list[Any] = []
        self._arena_bytes = 1 << 16
        self._starts: list[Any] = []
        self._busy = threading.Lock()

    def run(
        self,
        entry: int,
        arguments: bytes,
        arena: int,
        arena_bytes: int,
        count: int,
        workers: int,
        x: int,
        y: int,
        z: int,
    ) -> bool:
        """Run a grid on the caller's thread and up to `workers` others; False (nothing done) when the pool is busy."""
        if not self._busy.acquire(blocking=False):
            return False
        try:
            workers = min(workers, count - 1)
            if arena_bytes > self._arena_bytes or workers > len(self._arenas):
                workers = self._grow(arena_bytes, workers)
            chunk = max(1, count // ((workers + 1) * 8))
            self._run(self._record, entry, arguments, arena, count, chunk, workers, x, y, z)
        finally:
            self._busy.release()
        return True

    def _grow(self, arena_bytes: int, workers: int) -> int:
        """Make sure of `workers` threads with large enough arenas; how many there are of the threads asked for."""
        if arena_bytes > self._arena_bytes:
            self._arena_bytes = arena_bytes
            for i in range(len(self._arenas)):
                self._arenas[i] = self._new_arena(i)
        generation = ctypes.c_int64.from_address(self._record + _GENERATION).value
        while len(self._arenas) < min(workers, self._LIMIT):
            number = len(self._arenas)
            memory = self._new_arena(number)
            start = (ctypes.c_int64 * 3)(self._record, number, generation)
            if self._start(ctypes.addressof(start)) != 0:
                break
            self._starts.append(start)
            self._arenas.append(memory)
        return min(workers, len(self._arenas))

    def _new_arena(self, number: int) -> Any:
        alignment = llvm.ALIGNMENT
        memory = ctypes.create_string_buffer(self._arena_bytes + alignment)
        self._table[number] = -(-ctypes.addressof(memory) // alignment) * alignment
        return memory


def native_code() -> bytes:
    """Object code of the pool."""
    return llvm.compile_ir(_IR, "thread_pool")


SYMBOLS = ("dsv4_pool_start", "dsv4_pool_run")
