"""What the commands share: a bar, one line for an error, outputs that are known to be writable before work begins."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from json import dumps
from math import inf
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandFunctionType

Progress = Callable[[int, int, str], None]
"""Called with what is done, the total and a description."""
# Typer evaluates annotations, on Python 3.10 too.
File = Optional[Path]  # noqa: UP045
JsonFile = Annotated[File, typer.Option("--json", metavar="FILE", help="Write everything that is known to FILE.")]
Names = Optional[list[str]]  # noqa: UP045
Ops = Annotated[
    Names,
    typer.Option("--kernel", metavar="OP", help="An op of the registry; may be given several times. Without it: all."),
]
CaseNames = Annotated[
    Names,
    typer.Option(
        "--case", metavar="NAME", help="A case or a pattern such as '*/decode/b64*'; may be given several times."
    ),
]


class _Listing:
    """A command whose refusal of an unknown option names all that it has."""

    params: list[Any]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc]
        except Exception as error:
            # The class is click's own or one of Typer's, by version.
            if hasattr(error, "option_name") and hasattr(error, "possibilities"):
                names = (name for param in self.params for name in param.opts)
                error.possibilities = [name for name in names if name.startswith("--")]
            raise


class _Command(_Listing, TyperCommand):
    pass


class _Group(_Listing, TyperGroup):
    """A group that lists its commands where it has none of a name, and whose own options are not for them."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            found = super().resolve_command(ctx, args)
        except Exception as error:
            if hasattr(error, "message") and not args[0].startswith("-"):
                error.message += f" There are: {', '.join(self.list_commands(ctx))}"
            raise
        for param in self.params:
            if given(ctx, str(param.name)):
                says = f"stands before {args[0]!r}, which does not read it: its own options come after its name"
                raise typer.BadParameter(says, ctx=ctx, param_hint=param.opts[0])
        return found


class Commands(typer.Typer):
    """Commands that are printed alike."""

    def __init__(self, **settings: Any) -> None:
        names = {"help_option_names": ["-h", "--help"]}
        super().__init__(
            cls=_Group, add_completion=False, rich_markup_mode="rich", context_settings=names, **settings
        )  # fmt: skip

    def command(self, name: str | None = None, **settings: Any) -> Callable[[CommandFunctionType], CommandFunctionType]:
        return super().command(name, cls=_Command, **settings)


def command_group() -> Commands:
    """A command with sub-commands that does something itself when none is named."""
    return Commands(invoke_without_command=True)


def given(context: typer.Context, parameter: str) -> bool:
    """Whether the command line names a parameter of the command."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def print_line(console: Console, text: str = "", style: str | None = None) -> None:
    """`text` as it stands and not folded: a terminal folds it, and what reads a pipe gets whole sentences."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def print_error(console: Console, error: object, label: str = "error") -> None:
    """`error` on one line behind a red label."""
    console.print(f"[bold red]{label}:[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True)


@contextmanager
def reported(console: Console, *errors: type[Exception]) -> Iterator[None]:
    """Errors that a request can cause, `errors` beside ValueError and OSError, become one line and status 2."""
    kinds: tuple[type[Exception], ...] = (ValueError, OSError, *errors)
    try:
        yield
    except kinds as error:
        print_error(console, error)
        raise typer.Exit(2) from None


def known(kind: str, name: str, existing: Iterable[str]) -> None:
    """`ValueError` with what exists where `name` is none of it."""
    if name not in (names := tuple(existing)):
        raise ValueError(f"unknown {kind} {name!r}. There are: {', '.join(names)}")


def table_console() -> Console:
    """The terminal, or lines of 160 characters where there is none to fold tables for."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def quiet_console() -> Console:
    """`table_console` with quiet libraries.

    The environment is set before torch and vLLM are imported: vLLM's messages stand in nobody's way, and torch's
    threads sleep while a kernel's threads work.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return table_console()


def write_files(*outputs: tuple[Path | None, Any]) -> None:
    """Each content to its file, as JSON where it is not text, whatever becomes of the others; None stands for an output
    nobody asked for. `OSError` names those that could not be written."""
    problems = []
    for file, content in outputs:
        if file is None:
            continue
        try:
            file.write_text(content if isinstance(content, str) else dumps(content, indent=2) + "\n")
        except OSError as error:
            problems.append(f"{file} could not be written: {error.strerror or error}")
    if problems:
        raise OSError("; ".join(problems))


def refuse_unwritable(targets: Iterable[Path | None]) -> None:
    """`OSError` for the first of `targets` that cannot be written, ValueError for a file that is to hold two outputs;
    None stands for an output nobody asked for."""
    files = set()
    for target in targets:
        if target is None:
            continue
        if target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK):
            raise OSError(f"{target} cannot be written")
        file = target.resolve()
        if file in files:
            raise ValueError(f"{target} is given for two outputs; each needs a file of its own")
        if not target.exists() or target.is_file():  # a device or a pipe takes several
            files.add(file)


@contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """A polite end from outside keeps what is done, too, and leaves no process behind."""
    usual = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)


@contextmanager
def progress_bar(console: Console, seconds: float = inf) -> Iterator[Progress]:
    """A bar while it works, on terminals. The time left is by the work that is done, or that of `seconds` where those
    end first."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.text import Text

    end = time.monotonic() + seconds

    class Left(ProgressColumn):
        max_refresh = 0.5

        def render(self, task: Any) -> Text:
            work = inf if task.time_remaining is None else task.time_remaining
            left = min(work, max(0.0, end - time.monotonic()))
            return Text("-:--:--" if left == inf else str(timedelta(seconds=int(left))), "progress.remaining")

    times = TimeElapsedColumn(), TextColumn("left"), Left()
    columns = SpinnerColumn(), BarColumn(), MofNCompleteColumn(), *times, TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


@contextmanager
def progress_lines(console: Console, unit: str = "", seconds: float = 10.0) -> Iterator[Progress]:
    """A line every `seconds` at most, for work of minutes where there is no terminal; `unit` is that of the total."""
    shown = float("-inf")

    def show(done: int, total: int, what: str) -> None:
        nonlocal shown
        if (now := time.monotonic()) - shown >= seconds:
            shown = now
            print_line(console, f"  {done} of {total} {unit}".rstrip() + f": {what}")

    yield show
