"""Serving the demo checkpoint: `vllm serve` with this plugin, driven by vLLM's own client, beside transformers.

The client is `vllm bench serve`: it sends random prompts to the completion endpoint, all requests at once, and reports
tokens per second, the time to the first token (TTFT) and the time per further token (TPOT). transformers' `generate`
runs the same checkpoint on all cores as one batch of as many prompts of the same length. Each side runs once untimed,
then `repeat` times in turn; medians count.

    dsv4-triton bench serve [--json FILE]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dsv4_triton.bench.run import error_line
from dsv4_triton.demo.checkpoint import DemoSettings, write_checkpoint
from dsv4_triton.demo.serve import (
    NAME,
    SERVER_ENV,
    Interrupts,
    Server,
    ServerFailedError,
    free_port,
    server_command,
    wait_until_ready,
)

CLIENT_SECONDS = 1200
DYING_SECONDS = 5.0
"""A server that answers no more has ended by then, or hangs."""
FIGURES = {
    "output_throughput": "output tokens/s",
    "mean_ttft_ms": "TTFT mean, ms",
    "p99_ttft_ms": "TTFT p99, ms",
    "mean_tpot_ms": "TPOT mean, ms",
    "p99_tpot_ms": "TPOT p99, ms",
}
"""What the client's result is read for."""


@dataclass(frozen=True)
class Load:
    """What each side does: `requests` at once, each of `prompt_tokens` random tokens and `new_tokens` more."""

    requests: int
    prompt_tokens: int
    new_tokens: int


@dataclass
class Report:
    """`runs` of the server as the client reported them; `transformers`: its output tokens per second, run by run."""

    dtype: str
    load: Load
    runs: list[dict[str, float]] = field(default_factory=list)
    transformers: list[float] = field(default_factory=list)

    def median(self, figure: str) -> float:
        return statistics.median(run[figure] for run in self.runs)

    @property
    def ratio(self) -> float | None:
        """The server's output rate over transformers'; None without a run of both."""
        if not self.runs or not self.transformers:
            return None
        return self.median("output_throughput") / statistics.median(self.transformers)

    def as_dict(self) -> dict[str, Any]:
        medians = {figure: self.median(figure) for figure in FIGURES} if self.runs else {}
        return {**asdict(self), "medians": medians, "ratio": self.ratio}


@contextmanager
def explained(server: Server) -> Iterator[None]:
    """What goes wrong inside becomes a `ServerFailedError` that says whether the server has ended, and its last words.

    Who talks to a server learns of its death first, and only that the connection is gone.
    """
    try:
        yield
    except Exception as error:
        said = str(error) if isinstance(error, ServerFailedError) else error_line(error)
        deadline = time.monotonic() + DYING_SECONDS
        try:
            while not server.ready() and time.monotonic() < deadline:
                time.sleep(0.2)
        except ServerFailedError as ended:
            said = str(ended) if said == str(ended) else f"{ended}; {said}"
        raise ServerFailedError("\n".join([said, *server.last_lines(12)])) from error


def client_command(url: str, directory: Path, load: Load, result: Path, seed: int) -> list[str]:
    """`vllm bench serve` for one run whose result goes to `result`."""
    return [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai", "--base-url", url,
        "--endpoint", "/v1/completions", "--model", NAME, "--tokenizer", str(directory), "--dataset-name", "random",
        "--num-prompts", str(load.requests), "--max-concurrency", str(load.requests),
        "--random-input-len", str(load.prompt_tokens), "--random-output-len", str(load.new_tokens),
        "--ignore-eos", "--temperature", "0", "--seed", str(seed), "--num-warmups", "0", "--disable-tqdm",
        "--percentile-metrics", "ttft,tpot", "--save-result", "--result-dir", str(result.parent),
        "--result-filename", result.name,
    ]  # fmt: skip


def client_run(server: Server, directory: Path, load: Load, seed: int) -> dict[str, float]:
    """One run of the client; `ServerFailedError` with its last words when it fails or loses a request."""
    result = directory.parent / f"client-{seed}.json"
    command = client_command(server.url, directory, load, result, seed)
    environment = {**SERVER_ENV, **os.environ}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=CLIENT_SECONDS)
    except subprocess.TimeoutExpired:
        raise ServerFailedError(f"vLLM's client was not done after {CLIENT_SECONDS} s") from None
    if done.returncode != 0 or not result.exists():
        words = "\n".join((done.stdout + done.stderr).splitlines()[-12:])
        raise ServerFailedError(f"vLLM's client ended with status {done.returncode}:\n{words}")
    content = json.loads(result.read_text())
    wanted = load.requests * load.new_tokens
    if content["completed"] != load.requests or content["total_output_tokens"] != wanted:
        raise ServerFailedError(
            f"{content['completed']} of {load.requests} requests came back, with {content['total_output_tokens']} of "
            f"{wanted} tokens"
        )
    return {figure: float(content[figure]) for figure in FIGURES}


def transformers_run(directory: Path, load: Load, vocab: int) -> Callable[[], float]:
    """transformers computes DeepSeek-V4 in fp32 only (in bf16 it stops with a dtype mismatch)."""
    from transformers import DeepseekV4ForCausalLM

    model: Any = DeepseekV4ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    # Prompts of equal length need no padding.
    ids = torch.randint(16, vocab - 32, (load.requests, load.prompt_tokens), generator=generator)

    def run() -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            result = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=load.new_tokens,
                min_new_tokens=load.new_tokens, do_sample=False, pad_token_id=0,
            )  # fmt: skip
        if result.shape[1] != ids.shape[1] + load.new_tokens:
            raise RuntimeError(f"transformers returned {tuple(result.shape)}")
        return load.requests * load.new_tokens / (time.perf_counter() - began)

    return run


def measure(report: Report, repeat: int, beside: bool, console: Console, interrupts: Interrupts) -> None:
    """Start the server on 127.0.0.1, run the client and, if `beside`, transformers in turn, and stop the server.

    Fills `report` run by run, so that an interrupt keeps what is done, and so does a `ServerFailedError`, which is what
    all that goes wrong becomes.
    """
    load = report.load
    settings = DemoSettings(dtype="float32" if report.dtype == "float32" else "bfloat16")
    with tempfile.TemporaryDirectory(prefix="dsv4-bench-") as folder:
        directory = Path(folder) / "model"
        write_checkpoint(directory, settings)
        port = free_port()
        command = server_command(directory, dtype=report.dtype, port=port)
        command += ["--no-enable-prefix-caching", "--max-model-len", str(load.prompt_tokens + load.new_tokens + 64)]
        interrupts.hold()
        server = Server(command, port=port, log=Path(folder) / "server.log")
        try:
            with explained(server):
                interrupts.release()
                wait_until_ready(server, console, interrupts)
                other = transformers_run(directory, load, settings.vocab) if beside else None
                for turn in range(repeat + 1):
                    said = f"run {turn} of {repeat}" if turn else "warm-up"
                    with console.status(f"vllm serve: {said}"):
                        ours = client_run(server, directory, load, turn)
                    interrupts.check()
                    if turn:
                        report.runs.append(ours)
                    if other is not None:
                        with console.status(f"transformers: {said}"):
                            rate = other()
                        interrupts.check()
                        if turn:
                            report.transformers.append(rate)
        finally:
            interrupts.hold()
            server.stop()


def table(report: Report) -> Table:
    """The medians of both sides."""
    load = report.load
    what = f"{load.requests} requests at once, {load.prompt_tokens} prompt tokens, {load.new_tokens} new tokens each"
    result = Table(title=f"demo checkpoint: {what}")
    result.add_column("side")
    for heading in FIGURES.values():
        result.add_column(heading, justify="right")
    result.add_column("output tokens/s, run by run", justify="right")
    if report.runs:
        medians = [f"{report.median(figure):.1f}" for figure in FIGURES]
        rates = " ".join(f"{run['output_throughput']:.1f}" for run in report.runs)
        result.add_row(f"vllm serve, {report.dtype}", *medians, rates)
    if report.transformers:
        rates = " ".join(f"{rate:.1f}" for rate in report.transformers)
        median = f"{statistics.median(report.transformers):.1f}"
        result.add_row("transformers generate, float32", median, *[""] * (len(FIGURES) - 1), rates)
    return result
