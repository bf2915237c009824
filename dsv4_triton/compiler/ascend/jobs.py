"""Work in processes of its own: a crash, a hang or a lack of memory of one piece is an outcome, not an accident.

Each piece of work is a function without arguments that returns bytes. It runs in a fork of this process, in a process
group of its own; what it started, work of its own included, is stopped with it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Outcome:
    """How a piece of work ended: `fate` is done, crash, memory or time; `body` is what it returned."""

    fate: str
    body: bytes = b""
    message: str = ""
    seconds: float = 0.0


class _Child:
    def __init__(self, work: Callable[[], bytes], seconds: float, guard: AbstractContextManager[Any]):
        self.begin = time.monotonic()
        self.limit = seconds
        context = multiprocessing.get_context("fork")
        self.receiver, sender = context.Pipe(duplex=False)
        with guard:
            # Not a daemon, which could not have such processes of its own.
            self.process = context.Process(target=_run, args=(work, sender), daemon=False)
            self.process.start()
        with suppress(OSError):  # the child does it too: whoever is first
            os.setpgid(self._pid, self._pid)
        sender.close()

    @property
    def _pid(self) -> int:
        return self.process.pid or 0

    @property
    def deadline(self) -> float:
        return self.begin + self.limit

    def collect(self) -> Outcome:
        """What the child returned, or what became of it."""
        try:
            outcome = Outcome("done", self.receiver.recv_bytes())
        except (EOFError, OSError):
            outcome = None
            # Until it is reaped, nobody else can get the number by which its group is stopped.
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        self.stop()
        if outcome is None:
            code = self.process.exitcode or 0
            ended = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            outcome = Outcome("memory" if code == -signal.SIGKILL else "crash", message=f"ended by {ended}")
        return Outcome(outcome.fate, outcome.body, outcome.message, time.monotonic() - self.begin)

    def expire(self) -> Outcome:
        self.stop()
        return Outcome("time", message=f"not done in {self.limit:g} s", seconds=time.monotonic() - self.begin)

    def stop(self) -> None:
        for pid in (*_descendants(self._pid), self._pid):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        self.process.join()
        self.receiver.close()


def _descendants(pid: int) -> list[int]:
    """Processes below `pid`, those of work that it shares out itself among them, which have groups of their own."""
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as children:
                for child in map(int, children.read().split()):
                    found += [*_descendants(child), child]
    return found


def _run(work: Callable[[], bytes], sender: Any) -> None:
    with suppress(OSError):
        os.setpgid(0, 0)
    # When the parent is killed, nobody waits for this process any more.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sender.send_bytes(work())
    sender.close()


def run_all(
    work: Sequence[Callable[[], bytes]], jobs: int, seconds: float, finish: Callable[[int, Outcome], None],
    guard: AbstractContextManager[Any],
) -> None:  # fmt: skip
    """Run every piece, at most `jobs` at once and each within `seconds`; `finish(index, outcome)` as they end.

    `guard` is held while a process forks: a lock of which the child must not find another thread's hold.
    """
    waiting = list(enumerate(work))[::-1]
    running: dict[Any, tuple[int, _Child]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                index, piece = waiting.pop()
                child = _Child(piece, seconds, guard)
                running[child.receiver] = index, child
            deadline = min(child.deadline for _, child in running.values())
            for receiver in connection.wait(list(running), max(0.0, deadline - time.monotonic())):
                index, child = running.pop(receiver)
                finish(index, child.collect())
            now = time.monotonic()
            for receiver, (index, child) in list(running.items()):
                if now > child.deadline:
                    del running[receiver]
                    finish(index, child.expire())
    finally:
        for _, child in running.values():
            child.stop()
