"""Benchmarks, each beside a baseline in the same run."""

from __future__ import annotations

from collections.abc import Callable


def run_command(main: Callable[..., None]) -> None:
    """Run the command line of a benchmark module, whose options are the annotated parameters of `main`."""
    import typer

    app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
    app.command()(main)
    app()
