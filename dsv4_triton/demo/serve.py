"""`vllm serve` on the demo checkpoint: start, wait, ask, tell the user how to ask, stop without leaving a process."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

from dsv4_triton.console import print_line

NAME = "dsv4-demo"
"""The model name that clients send."""
START_SECONDS = 900
"""The first start compiles every kernel; a machine that needs longer than this is stuck."""
STOP_SECONDS = 20
SERVER_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; unset, start-up asks for nearly all memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the default pins the worker to one core
    "TORCHDYNAMO_DISABLE": "1",  # kernels are compiled by Triton; dynamo costs half a minute and gains nothing
}


class ServerFailedError(RuntimeError):
    """The server ended or did not become ready."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server_command(directory: Path, *, dtype: str, port: int) -> list[str]:
    return [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(directory),
        "--host", "127.0.0.1", "--port", str(port), "--served-model-name", NAME,
        "--dtype", dtype, "--max-num-seqs", "32", "--enforce-eager",
    ]  # fmt: skip


class Server:
    """A `vllm serve` process with its children in a process group of their own, its output in a log file.

    Its environment is SERVER_ENV, overridden by `defaults`, overridden by this process's own, without the variables in
    `unset`.
    """

    def __init__(
        self,
        command: list[str],
        *,
        port: int,
        log: Path,
        defaults: Mapping[str, str] = MappingProxyType({}),
        unset: Sequence[str] = (),
    ) -> None:
        environment = {**SERVER_ENV, **defaults, **os.environ}
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={name: value for name, value in environment.items() if name not in unset},
                start_new_session=True,
            )

    def ready(self) -> bool:
        """Whether it answers; ServerFailedError once the process has ended."""
        if (status := self.process.poll()) is not None:
            raise ServerFailedError(f"the server ended with status {status}{self._cause()}")
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _cause(self) -> str:
        """The first exception of the log, which is the engine's: the last one says that an engine did not start."""
        found = re.search(r"\b\w*Error: .+", self.log.read_text(errors="replace"))
        return f"; {found[0]}" if found else ""

    def last_lines(self, count: int) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()[-count:]

    def message(self) -> str:
        """The last thing that vLLM told of its progress, without process, time and place: no warning, and not that it
        has no Triton for a GPU."""
        told = (re.search(r"\bINFO .*?\] (?!Triton)(.*)", line) for line in reversed(self.last_lines(40)))
        return next((found[1].strip() for found in told if found), "")

    def stop(self) -> None:
        """Ask the server to end, then its group, then end the group by force. Safe to call more than once."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not self._signal_group(number):
                break
            deadline = time.monotonic() + STOP_SECONDS / 4
            while time.monotonic() < deadline and self._signal_group(0):
                time.sleep(0.1)
        self.process.wait()

    def _signal_group(self, number: int) -> bool:
        """Signal what is left of the process group; False when nothing is."""
        self.process.poll()
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True


class Interrupts:
    """SIGTERM and SIGHUP end the demo the way Ctrl-C does, and none of them strikes where it would lose a process.

    An interrupt may strike inside an import or a callback, where it is swallowed or turned into another error; so it
    stays `pending`, and loops `check` for it.
    """

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._held = False
        self.pending = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.pending = True
        if not self._held:
            raise KeyboardInterrupt

    @contextmanager
    def watched(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._handle) for number in self.NUMBERS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def hold(self) -> None:
        self._held = True

    def release(self) -> None:
        """Let interrupts through again; one that came in between is raised now."""
        self._held = False
        self.check()

    def check(self) -> None:
        if self.pending:
            raise KeyboardInterrupt


def wait_until_ready(server: Server, console: Any, interrupts: Interrupts | None = None) -> float:
    """Show the seconds and the last log line until the server answers; returns the seconds it took."""
    from rich.markup import escape

    began = time.monotonic()
    shown = 0.0
    with console.status("starting") as status:
        while not server.ready():
            if interrupts is not None:
                interrupts.check()
            seconds = time.monotonic() - began
            if seconds > START_SECONDS:
                raise ServerFailedError(f"the server was not ready after {START_SECONDS} s")
            line = server.message()[:80] or "no message yet"
            status.update(f"starting, {seconds:.0f} s: {escape(line)}")
            if not console.is_terminal and seconds - shown >= 15:
                print_line(console, f"  {seconds:.0f} s: {line}")
                shown = seconds
            time.sleep(0.5)
    return time.monotonic() - began


def ask(server: Server) -> Iterator[tuple[str, str]]:
    """One chat and one completion request; each question with its answer."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)
    question = "What does the machine do?"
    chat = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": question}], max_tokens=24, temperature=0
    )
    yield f"chat: {question}", chat.choices[0].message.content or ""
    start = "The machine reads the words and"
    completion = client.completions.create(model=NAME, prompt=start, max_tokens=24, temperature=0)
    yield f"completion: {start}", completion.choices[0].text


def curl_command(server: Server) -> str:
    body = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 24, "temperature": 0}
    return (
        f"curl -s {server.url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body))}"
    )


def run_demo(
    directory: Path, *, dtype: str, port: int, smoke: bool, console: Any, interrupts: Interrupts | None = None
) -> int:
    """Serve `directory` and ask twice; then wait for Ctrl-C unless `smoke`. Returns the exit status.

    `interrupts` are the caller's, where it watches for them already.
    """
    port = port or free_port()
    command = server_command(directory, dtype=dtype, port=port)

    say = partial(print_line, console)
    with ExitStack() as stack:
        if interrupts is None:
            interrupts = Interrupts()
            stack.enter_context(interrupts.watched())
        interrupts.hold()
        log = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dsv4-demo-"))) / "server.log"
        say(f"starting the server (output in {log}):")
        say(f"  {shlex.join(command)}")
        server = Server(command, port=port, log=log)
        try:
            interrupts.release()
            _talk(server, console, say, interrupts, smoke=smoke)
            return 0
        except (Exception, KeyboardInterrupt) as error:
            if interrupts.pending:
                say()
                say("stopping the server")
                return 130 if smoke else 0
            say(f"error: {error}", "bold red")
            say("the server's last lines:")
            for line in server.last_lines(40):
                say(f"  {line}")
            return 1
        finally:
            interrupts.hold()
            server.stop()
            say("server stopped")


def _talk(server: Server, console: Any, say: Callable[..., None], interrupts: Interrupts, *, smoke: bool) -> None:
    """Wait for the server, ask it twice, and unless `smoke` say how to ask it and wait until it ends."""
    seconds = wait_until_ready(server, console, interrupts)
    say(f"ready after {seconds:.0f} s at {server.url}")
    for question, answer in ask(server):
        interrupts.check()
        if not answer.strip():
            raise ServerFailedError(f"empty answer to {question!r}")
        say()
        say(question, "bold")
        say(f"  {answer.strip()}")
    say()
    say("The weights are random: the words mean nothing, the work behind them is real.")
    if smoke:
        return
    say("Talk to it:")
    say(f"  {curl_command(server)}")
    say("Ctrl-C stops the server.")
    while server.process.poll() is None:
        interrupts.check()
        time.sleep(0.2)
    server.ready()  # ServerFailedError: it has ended
