"""One server for all serving tests: the demo checkpoint in fp32 under `vllm serve`, as a user starts it but for the
warm-up, which would compile more than the tests use."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from dsv4_triton.demo.checkpoint import DemoSettings, write_checkpoint
from dsv4_triton.demo.serve import START_SECONDS, Server, free_port, server_command


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serving")
    write_checkpoint(folder / "model", DemoSettings(dtype="float32"))
    port = free_port()
    command = server_command(folder / "model", dtype="float32", port=port)
    command += ["--max-model-len", "2048", "--enable-prompt-tokens-details"]
    command += ["--additional-config", '{"dsv4_triton": {"warm_up": "off"}}']
    running = Server(command, port=port, log=folder / "server.log")
    try:
        deadline = time.monotonic() + START_SECONDS
        while not running.ready():
            assert time.monotonic() < deadline, "\n".join(running.last_lines(40))
            time.sleep(0.5)
        yield running
    finally:
        running.stop()
