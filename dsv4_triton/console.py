"""What the commands share: a bar, one line for an error, outputs that are known to be writable before work begins."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

Progress = Callable[[int, int, str], None]
"""Called with what is done, the total and a description."""


def command_group() -> typer.Typer:
    """A command with sub-commands that does something itself when none is named."""
    return typer.Typer(
        add_completion=False,
        invoke_without_command=True,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def print_error(console: Console, error: object, label: str = "error") -> None:
    """`error` on one line behind a red label."""
    console.print(f"[bold red]{label}:[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True)


def refuse_unwritable(targets: Iterable[Path | None]) -> None:
    """`OSError` for the first of `targets` that cannot be written; None stands for an output nobody asked for."""
    for target in targets:
        if target is not None and (
            target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK)
        ):
            raise OSError(f"{target} cannot be written")


@contextmanager
def progress_bar(console: Console) -> Iterator[Progress]:
    """A bar while it works, on terminals."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    times = TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
    columns = SpinnerColumn(), BarColumn(), MofNCompleteColumn(), *times, TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


@contextmanager
def progress_lines(console: Console, seconds: float = 10.0) -> Iterator[Progress]:
    """A line every `seconds` at most, for work of minutes where there is no terminal."""
    shown = float("-inf")

    def show(done: int, total: int, what: str) -> None:
        nonlocal shown
        if (now := time.monotonic()) - shown >= seconds:
            shown = now
            console.print(f"  {done} of {total}: {what}", highlight=False, markup=False, soft_wrap=True)

    yield show
