"""The commands `dsv4-triton bench serve` and `bench load`: a server of the demo checkpoint, driven by clients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dsv4_triton.console import (
    JsonFile,
    known,
    print_error,
    print_line,
    progress_bar,
    progress_lines,
    quiet_console,
    refuse_unwritable,
    reported,
    write_files,
)

if TYPE_CHECKING:
    from dsv4_triton.demo.serve import Interrupts


def serve(
    requests: Annotated[int, typer.Option(min=1, help="Concurrent requests, and the batch of transformers.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 256,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens each request generates.")] = 128,
    repeat: Annotated[int, typer.Option(min=1, help="Timed runs of each side.")] = 3,
    dtype: Annotated[str, typer.Option(help="dtype of the server: float32 or bfloat16.")] = "float32",
    beside: Annotated[
        bool, typer.Option("--transformers/--no-transformers", help="Run transformers in turn with the server.")
    ] = True,
    json: JsonFile = None,
) -> None:
    """Serve the demo checkpoint on 127.0.0.1, drive it with `vllm bench serve`: tokens per second, TTFT, TPOT."""
    console = quiet_console()
    with reported(console):
        known("dtype", dtype, ("float32", "bfloat16"))
        refuse_unwritable((json,))
        from dsv4_triton.bench.serve import Load, Report, measure, table

        report = Report(dtype, Load(requests, prompt_tokens, new_tokens))
        status, ended = _driven(lambda interrupts: measure(report, repeat, beside, console, interrupts), console)
        if report.runs:
            console.print(table(report))
            if report.ratio is not None:
                print_line(console, f"ratio {report.ratio:.2f}")
        _write(json, report.as_dict(), ended)
    raise typer.Exit(status)


def load(
    clients: Annotated[int, typer.Option(min=1, help="Clients at once.")] = 64,
    minutes: Annotated[float, typer.Option(min=0.0, help="How long they ask.")] = 10.0,
    drafts: Annotated[int, typer.Option(min=0, max=3, help="Tokens that the MTP block drafts, 0: no speculation.")] = 2,
    new_tokens: Annotated[int, typer.Option(min=2, max=256, help="Longest answer.")] = 64,
    leaving: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of clients that go away early.")] = 0.15,
    cache_mib: Annotated[int, typer.Option(min=8, help="Memory of the KV cache, MiB: little makes preemption.")] = 256,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths and departures.")] = 0,
    json: JsonFile = None,
) -> None:
    """Load a server of the demo checkpoint for minutes and hold every answer to the one its request got alone.

    Prompts share prefixes, clients go away in the middle, drafts are on. The status is 1 when an answer differs, a
    request fails, memory grows, or something is left running at the end.
    """
    console = quiet_console()
    with reported(console):
        refuse_unwritable((json,))
        from dsv4_triton.bench.load import Plan, Report, measure, table

        report = Report(Plan(clients, minutes, drafts, new_tokens, leaving, cache_mib, seed))
        lines = partial(progress_lines, Console(stderr=True), unit="minutes")
        bar = partial(progress_bar, console) if console.is_terminal else lines
        status, ended = _driven(lambda interrupts: measure(report, console, interrupts, bar), console)
        console.print(table(report))
        for problem in report.problems[:20]:
            print_error(console, problem, "problem")
        _write(json, report.as_dict(), ended)
    raise typer.Exit(status or int(bool(report.problems)))


def _write(file: Path | None, content: dict[str, Any], ended: str) -> None:
    """A report with where it was made: this machine's platform, as the server finds it."""
    from vllm.platforms import current_platform

    from dsv4_triton.bench.results import recorded

    write_files((file, recorded({"ended": ended, **content}, current_platform.device_type)))


def _driven(measure: Callable[[Interrupts], None], console: Console) -> tuple[int, str]:
    """Run `measure`, which starts a server and stops it; the exit status, and what ended it early, if something did.
    Whatever that was, what it had found is kept."""
    from dsv4_triton.bench.run import error_line
    from dsv4_triton.demo.serve import Interrupts, ServerFailedError

    interrupts = Interrupts()
    try:
        with interrupts.watched():
            measure(interrupts)
    except (Exception, KeyboardInterrupt) as error:
        said = str(error) if isinstance(error, ServerFailedError) else error_line(error)
        ended = "interrupted" if interrupts.pending else said
        print_error(console, ended)
        return 130 if interrupts.pending else 1, ended
    return 0, ""
