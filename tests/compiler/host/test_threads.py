"""Atomics and memory when several threads share a grid."""

from __future__ import annotations

import os
import resource
import threading

import pytest
import torch

from dsv4_triton.compiler.host import runtime
from tests.compiler.host import feature_kernels as k
from tests.numeric import assert_equal

pytestmark = pytest.mark.usefixtures("host_driver", "four_threads")


@pytest.mark.parametrize("n", [16, 11])
def test_atomic_add_returns_the_old_value(n):
    x = torch.arange(16, dtype=torch.int32)
    v, o = torch.randint(0, 100, (16,), dtype=torch.int32), torch.full((16,), -9, dtype=torch.int32)
    before = x.clone()
    k.atomic_add[(1,)](x, v, o, n, 16)
    assert_equal(o[:n], before[:n])
    assert_equal(x[:n], before[:n] + v[:n])
    assert_equal(x[n:], before[n:])


def test_tickets_are_unique():
    counter, o = torch.zeros(1, dtype=torch.int32), torch.full((20000,), -1, dtype=torch.int32)
    k.atomic_ticket[(20000,)](counter, o)
    assert counter == 20000
    assert_equal(o.sort()[0], torch.arange(20000, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_no_addition_is_lost(dtype):
    h, index = torch.zeros(8, dtype=dtype), torch.randint(0, 8, (16 * 100,), dtype=torch.int32)
    k.atomic_histogram[(100,)](h, index, B=16)
    # Counts stay below 256 + a few, so bf16 counts exactly up to 256: compare those.
    expected = torch.bincount(index, minlength=8).to(dtype)
    assert_equal(h.clamp(max=256), expected.clamp(max=256))
    for _ in range(3):
        big, where = torch.zeros(8), torch.randint(0, 8, (16 * 3000,), dtype=torch.int32)
        k.atomic_histogram[(3000,)](big, where, B=16)
        assert_equal(big, torch.bincount(where, minlength=8).float())


def test_atomic_bits_and_extrema():
    x, o = torch.randint(0, 255, (16,), dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    before = x.clone()
    k.atomic_bits[(1,)](x, o, 16)
    assert_equal(o, (before & 60) | 3)
    assert_equal(x, ((before & 60) | 3) ^ 5)
    for dtype in (torch.int32, torch.float32):
        a, b, v = ((torch.randn(16) * 50).to(dtype) for _ in range(3))
        wanted = torch.maximum(a, v), torch.minimum(b, v)
        k.atomic_extrema[(1,)](a, b, v, 16)
        assert_equal(a, wanted[0])
        assert_equal(b, wanted[1])


def test_compare_and_swap_and_exchange():
    runtime.set_threads(1)
    x, y, o = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int32)
    k.atomic_exchange[(4,)](x, y, o)
    assert o.tolist() == [[0, 0], [1, 10], [2, 11], [3, 12]] and x == 4 and y == 13


def test_results_do_not_depend_on_the_number_of_threads():
    a, b = torch.randn(200, 64), torch.randn(64, 130)
    results = []
    for threads in (1, 2, 4):
        runtime.set_threads(threads)
        c = torch.empty(200, 130)
        k.matmul[(4, 3)](a, b, c, 200, 130, 64, BM=64, BN=64, BK=32)
        results.append(c)
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])


def test_several_python_threads_launch_at_once():
    problems = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(20):
            x, y = torch.randn(3000, generator=generator), torch.randn(3000, generator=generator)
            o = torch.empty(3000)
            k.add[(3,)](x, y, o, 3000, B=1024)
            if not torch.equal(o, x + y):
                problems.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_forked_child_runs_kernels():
    x, y, o = torch.randn(3000), torch.randn(3000), torch.empty(3000)
    k.add[(3,)](x, y, o, 3000, B=1024)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            o.fill_(0)
            k.add[(3,)](x, y, o, 3000, B=1024)
            status = 0 if torch.equal(o, x + y) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_memory_is_flat_over_a_million_programs():
    a, b, c = torch.randn(16, 64), torch.randn(64, 16), torch.empty(16, 16)
    x, o = torch.randn(32), torch.empty(32)
    counter, tickets = torch.zeros(1, dtype=torch.int32), torch.zeros(1_000_000, dtype=torch.int32)

    def burst():
        for _ in range(20):
            k.matmul[(1,)](a, b, c, 16, 16, 64, BM=16, BN=16, BK=16)
            k.carried_swap[(1,)](x, o, 1000, 16)
        counter.zero_()
        k.atomic_ticket[(1_000_000,)](counter, tickets)

    burst()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    burst()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert counter == 1_000_000
    assert grown < 4096, f"peak memory grew by {grown} KiB"


def test_thread_count_is_checked(monkeypatch):
    with pytest.raises(ValueError, match="at least 1"):
        runtime.set_threads(0)
    monkeypatch.setenv("DSV4_TRITON_THREADS", "many")
    runtime.set_threads(None)
    with pytest.raises(ValueError, match="DSV4_TRITON_THREADS is 'many'"):
        runtime.threads()
