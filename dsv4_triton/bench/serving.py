"""Output tokens per second of `vllm serve` with this plugin against transformers' `generate`, side by side.

Both run the same checkpoint in the same dtype on all cores, greedy, with the same prompts and the same number of new
tokens: the server as 8 concurrent HTTP requests, transformers as one batch of 8. Each side runs once untimed, then
`--repeat` times, alternating; the median counts.

    python -m dsv4_triton.bench.serving [--json FILE]
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Optional

import torch
import typer
from rich.console import Console
from rich.table import Table

from dsv4_triton.bench import run_command
from dsv4_triton.demo.checkpoint import DemoSettings, write_checkpoint
from dsv4_triton.demo.serve import NAME, Server, free_port, server_command, wait_until_ready


@dataclass(frozen=True)
class ServingReport:
    """Medians over the repeats; rates in output tokens per second."""

    dtype: str
    requests: int
    prompt_tokens: int
    new_tokens: int
    server: float
    transformers: float
    server_runs: list[float]
    transformers_runs: list[float]

    @property
    def ratio(self) -> float:
        return self.server / self.transformers


def prompts(count: int, tokens: int, vocab: int) -> list[list[int]]:
    """Random prompts of equal length: transformers then needs no padding."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(16, vocab - 32, (count, tokens), generator=generator).tolist()


def server_run(url: str, batch: list[list[int]], new_tokens: int) -> Callable[[], None]:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=1200, max_retries=0)

    def one(prompt: list[int]) -> None:
        answer = client.completions.create(
            model=NAME, prompt=prompt, max_tokens=new_tokens, temperature=0, extra_body={"ignore_eos": True}
        )
        if answer.usage is None or answer.usage.completion_tokens != new_tokens:
            raise RuntimeError(f"the server answered with {answer.usage}, {new_tokens} tokens were asked for")

    def run() -> None:
        with ThreadPoolExecutor(len(batch)) as pool:
            list(pool.map(one, batch))

    return run


def transformers_run(directory: Path, batch: list[list[int]], new_tokens: int) -> Callable[[], None]:
    """transformers computes DeepSeek-V4 in fp32 only (in bf16 it stops with a dtype mismatch)."""
    from transformers import DeepseekV4ForCausalLM

    model: Any = DeepseekV4ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = torch.tensor(batch)

    def run() -> None:
        with torch.inference_mode():
            result = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        if result.shape[1] != ids.shape[1] + new_tokens:
            raise RuntimeError(f"transformers returned {tuple(result.shape)}")

    return run


def measure(
    *, requests: int, prompt_tokens: int, new_tokens: int, repeat: int, dtype: str, console: Console
) -> ServingReport:
    """Start the server, load transformers, run both alternately."""
    settings = DemoSettings(dtype="float32" if dtype == "float32" else "bfloat16")
    batch = prompts(requests, prompt_tokens, settings.vocab)
    with tempfile.TemporaryDirectory(prefix="dsv4-bench-") as folder:
        directory = Path(folder) / "model"
        write_checkpoint(directory, settings)
        port = free_port()
        command = server_command(directory, dtype=dtype, port=port)
        command += ["--no-enable-prefix-caching", "--max-model-len", str(prompt_tokens + new_tokens + 1)]
        server = Server(command, port=port, log=Path(folder) / "server.log")
        try:
            wait_until_ready(server, console)
            sides = {
                "server": server_run(server.url, batch, new_tokens),
                "transformers": transformers_run(directory, batch, new_tokens),
            }
            runs: dict[str, list[float]] = {name: [] for name in sides}
            for turn in range(repeat + 1):
                for name, run in sides.items():
                    with console.status(f"{name}: " + (f"run {turn} of {repeat}" if turn else "warm-up")):
                        began = time.perf_counter()
                        run()
                        seconds = time.perf_counter() - began
                    if turn:
                        runs[name].append(requests * new_tokens / seconds)
        finally:
            server.stop()
    return ServingReport(
        dtype=dtype,
        requests=requests,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        server=statistics.median(runs["server"]),
        transformers=statistics.median(runs["transformers"]),
        server_runs=runs["server"],
        transformers_runs=runs["transformers"],
    )


def main(
    requests: Annotated[int, typer.Option(min=1, help="Concurrent requests, and the batch of transformers.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 256,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens each request generates.")] = 128,
    repeat: Annotated[int, typer.Option(min=1, help="Timed runs of each side.")] = 3,
    dtype: Annotated[str, typer.Option(help="dtype of the server: float32 or bfloat16.")] = "float32",
    json_file: Annotated[
        Optional[Path],  # noqa: UP045  typer evaluates the annotation, on Python 3.10 too
        typer.Option("--json", metavar="FILE", help="Write the report to FILE as JSON too."),
    ] = None,
) -> None:
    """Compare the server's output rate with transformers' on the demo checkpoint."""
    if dtype not in ("float32", "bfloat16"):
        raise typer.BadParameter(f"{dtype!r} is neither float32 nor bfloat16", param_hint="--dtype")
    console = Console()
    report = measure(
        requests=requests,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        repeat=repeat,
        dtype=dtype,
        console=console,
    )
    table = Table(title=f"{requests} requests, {prompt_tokens} prompt tokens, {new_tokens} new tokens each")
    for column in ("side", "output tokens/s", "runs"):
        table.add_column(column, justify="left" if column == "side" else "right")
    for name, value, runs in (
        (f"vllm serve, {dtype}", report.server, report.server_runs),
        ("transformers generate, float32", report.transformers, report.transformers_runs),
    ):
        table.add_row(name, f"{value:.1f}", " ".join(f"{rate:.1f}" for rate in runs))
    console.print(table)
    console.print(f"ratio {report.ratio:.2f}")
    if json_file is not None:
        json_file.write_text(json.dumps({**asdict(report), "ratio": report.ratio}, indent=2) + "\n")


if __name__ == "__main__":
    run_command(main)
