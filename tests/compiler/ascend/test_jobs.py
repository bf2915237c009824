"""Crashes, hangs and lack of memory of compiler processes are results, and leave no process behind."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dsv4_triton.compiler import ascend, frontend
from dsv4_triton.compiler.ascend import compile, compile_all, tools
from dsv4_triton.compiler.ascend.jobs import Outcome, run_all
from dsv4_triton.device import A2
from tests.compiler.ascend.kernels import ADD


def outcomes(*work, jobs=2, seconds=20.0) -> list[Outcome]:
    found: dict[int, Outcome] = {}
    run_all(work, jobs, seconds, lambda index, outcome: found.__setitem__(index, outcome), threading.RLock())
    return [found[i] for i in range(len(work))]


def die(number: int) -> bytes:
    faulthandler.disable()  # the test runner's, which would print a traceback
    os.kill(os.getpid(), number)
    return b""


def sleeper(folder: Path) -> bytes:
    """Starts a process of its own and hangs."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (folder / "pid").write_text(str(child.pid))
    time.sleep(600)
    return b""


def gone(pid: int) -> bool:
    """Whether a process ended, if need be after a moment."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


class TestProcesses:
    def test_bodies_come_back_in_order(self):
        done = outcomes(*(lambda n=n: bytes([n]) * 300_000 for n in range(5)))
        assert [(o.fate, o.body) for o in done] == [("done", bytes([n]) * 300_000) for n in range(5)]
        assert all(o.seconds > 0 for o in done)

    def test_crash_and_kill(self):
        crash, killed, raised, fine = outcomes(
            lambda: die(signal.SIGSEGV), lambda: die(signal.SIGKILL), lambda: bytes(-1), lambda: b"ok"
        )
        assert (crash.fate, crash.message) == ("crash", "ended by SIGSEGV")
        assert killed.fate == "memory" and raised.fate == "crash" and "exit status" in raised.message
        assert fine.body == b"ok"

    def test_hang_ends_with_everything_it_started(self, tmp_path):
        begin = time.monotonic()
        (hang,) = outcomes(lambda: sleeper(tmp_path), seconds=2.0)
        assert (hang.fate, hang.message) == ("time", "not done in 2 s")
        assert time.monotonic() - begin < 15
        assert gone(int((tmp_path / "pid").read_text()))

    def test_work_that_shares_out_work_ends_with_all_of_it(self, tmp_path):
        def outer() -> bytes:
            outcomes(lambda: sleeper(tmp_path), seconds=600.0)
            return b""

        (hang,) = outcomes(outer, seconds=3.0)
        assert hang.fate == "time"
        assert gone(int((tmp_path / "pid").read_text()))

    def test_an_interrupt_ends_all(self, tmp_path):
        def finish(index, outcome):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run_all([lambda: b"first", lambda: sleeper(tmp_path)], 2, 20.0, finish, threading.RLock())
        if (tmp_path / "pid").exists():
            assert gone(int((tmp_path / "pid").read_text()))

    def test_at_most_so_many_at_once(self, tmp_path):
        def work(n):
            (tmp_path / f"{n}").write_text("")
            seen = len(list(tmp_path.iterdir()))
            time.sleep(0.2)
            (tmp_path / f"{n}").unlink()
            return bytes([seen])

        done = outcomes(*(lambda n=n: work(n) for n in range(5)), jobs=2)
        assert max(o.body[0] for o in done) == 2


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """`tool(script)` puts a shell script in the compiler's place."""
    whole = tools.tools_for

    def replace_compiler(script: str) -> None:
        path = tmp_path / "compiler"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        found = whole(A2.arch)
        monkeypatch.setattr(ascend, "tools_for", lambda arch: tools.Tools(path, found.libraries, None))

    monkeypatch.setenv("DSV4_TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return replace_compiler


def compiled(seconds=30.0) -> ascend.CompileResult:
    wanted = ADD()
    return compile(wanted.kernel, wanted.signature, A2, seconds=seconds)


class TestCompiler:
    def test_crash(self, tool):
        tool('echo "kernel.mlir:3:1: error: about to fail" >&2; kill -SEGV $$')
        result = compiled()
        assert (result.status, result.stage) == ("crash", "hivm") and "about to fail" in result.message

    def test_failed_assertion(self, tool):
        tool('echo "x.cpp:7: void f(): Assertion \\`a == b\' failed." >&2; kill -ABRT $$')
        result = compiled()
        assert result.status == "crash" and "Assertion `a == b' failed" in result.message

    def test_hang(self, tool, tmp_path):
        tool(f"echo $$ > {tmp_path}/pid; sleep 600")
        result = compiled(seconds=3.0)
        assert result.status == "time" and "3 s" in result.message
        assert gone(int((tmp_path / "pid").read_text()))

    def test_out_of_memory(self, tool, monkeypatch):
        monkeypatch.setattr(tools, "MEMORY_BYTES", 2 << 30)
        tool(f"exec {sys.executable} -c 'import time; time.sleep(0.5); x = bytearray(4 << 30)'")
        assert compiled().status == "failed"  # Python reports its MemoryError
        tool('echo "LLVM ERROR: out of memory" >&2; kill -ABRT $$')
        assert compiled().status == "memory"

    def test_nothing_printed(self, tool):
        tool("exit 0")
        result = compiled()
        assert (result.status, result.stage) == ("failed", "hivm") and "exit status 0" in result.message

    def test_unreadable_hivm_is_no_success(self, tool):
        tool('printf "// -----// IR Dump Before X //----- //\\nnonsense\\n})\\n" >&2')
        result = compiled()
        assert (result.status, result.stage) == ("failed", "facts")

    def test_outcomes_that_may_change_are_not_kept(self, tool, tmp_path):
        tool("kill -SEGV $$")
        for _ in range(2):
            assert not compiled().cached
        assert not list((tmp_path / "cache" / "ascend").rglob("*.bin"))


def test_crash_of_the_front_end(monkeypatch, tmp_path):
    monkeypatch.setenv("DSV4_TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(frontend, "lower_to_ttir", lambda *_: die(signal.SIGSEGV))
    (result,) = compile_all([ADD()], A2)
    assert (result.status, result.stage) == ("crash", "frontend") and "SIGSEGV" in result.message


def test_crash_of_the_adapter(monkeypatch, tmp_path):
    monkeypatch.setenv("DSV4_TRITON_CACHE_DIR", str(tmp_path))
    adapter = tmp_path / "triton-adapter-opt"
    adapter.write_text(
        '#!/bin/sh\necho "triton-adapter-opt: /a/long/path/STLExtras.h:1273: T f() [with T = int]: '
        "Assertion 'a == b' failed.\nPLEASE submit a bug report\" >&2\nkill -ABRT $$\n"
    )
    adapter.chmod(0o755)
    compiler = frontend.triton_compiler()
    monkeypatch.setattr(compiler, "__file__", str(tmp_path / "compiler.py"))
    (result,) = compile_all([ADD()], A2)
    assert (result.status, result.stage) == ("crash", "adapter")
    assert result.message.endswith("triton-adapter-opt crashed (SIGABRT): STLExtras.h:1273: Assertion 'a == b' failed.")
