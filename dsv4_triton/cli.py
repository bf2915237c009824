"""The command line `dsv4-triton`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Optional, cast

import typer
from rich.console import Console

from dsv4_triton import __version__
from dsv4_triton.autotune.cli import app as tune_app
from dsv4_triton.cli_bench import app as bench_app
from dsv4_triton.console import (
    CaseNames,
    Commands,
    File,
    JsonFile,
    Names,
    Ops,
    print_error,
    print_line,
    progress_bar,
    refuse_unwritable,
    reported,
    table_console,
    write_files,
)

if TYPE_CHECKING:
    from dsv4_triton.demo.checkpoint import DemoSettings
    from dsv4_triton.demo.serve import Interrupts

app = Commands(
    name="dsv4-triton",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help=(
        "DeepSeek-V4 with Triton kernels for Huawei Ascend, as a vLLM plugin.\n\n"
        "Serving itself is vLLM's own command; the plugin is found by itself once it is installed:\n\n"
        "[bold]  vllm serve MODEL[/bold]\n\n"
        "Start here:\n\n"
        "[bold]  dsv4-triton doctor[/bold]               what is installed, what is missing\n\n"
        "[bold]  dsv4-triton demo DIR --serve[/bold]     write a small random model, talk to it\n\n"
        "[bold]  dsv4-triton compile --family a2[/bold]  compile every kernel for an NPU, without one"
    ),
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dsv4-triton {__version__}")
        raise typer.Exit()


app.add_typer(bench_app, name="bench")
app.add_typer(tune_app, name="tune")


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def doctor(
    json: JsonFile = None,
) -> None:
    """Say what is installed, which device family this is, and what is missing for serving.

    Each problem comes with the command that fixes it. The exit status is 1 when serving cannot work.
    """
    from dsv4_triton import doctor as doctor_module

    console = Console()
    with console.status("looking at packages, compilers and devices"):
        report = doctor_module.examine()
    doctor_module.render(report, console)
    with reported(console):
        write_files((json, report.as_json()))
    raise typer.Exit(0 if report.can_serve else 1)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 0,4,128", param_hint="--ratios") from None


@app.command()
def demo(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of the checkpoint: new, empty or an earlier demo.")
    ],
    serve: Annotated[
        bool, typer.Option("--serve", help="Then start `vllm serve` on 127.0.0.1, ask it twice, and keep it running.")
    ] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="With --serve: stop after the two answers.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --serve: the port; 0 takes a free one.")] = 0,
    layers: Annotated[int, typer.Option(min=1, max=1000, help="Decoder layers, of all kinds in turn.")] = 6,
    ratios: Annotated[
        str, typer.Option(metavar="LIST", help="Instead of --layers: the compress ratio of each layer, e.g. 0,4,128.")
    ] = "",
    experts: Annotated[int, typer.Option(min=1, help="Routed experts a layer.")] = 16,
    hash_layers: Annotated[int, typer.Option(min=0, help="Leading layers that route by token id.")] = 2,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 256,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 8,
    vocab: Annotated[int, typer.Option(help="Tokens in the vocabulary.")] = 512,
    context: Annotated[int, typer.Option(help="Longest sequence, in tokens.")] = 16384,
    mtp: Annotated[bool, typer.Option("--mtp/--no-mtp", help="With a multi-token-prediction block.")] = True,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights.")] = 0,
) -> None:
    """Write a small random DeepSeek-V4 checkpoint with every kind of layer, and serve it if asked to.

    The files, field names and tensor names are the official ones; vLLM and transformers load it as it is. The weights
    are random, so the model answers with words but without sense.
    """
    from dsv4_triton.demo.checkpoint import DemoError, DemoSettings, default_ratios
    from dsv4_triton.demo.serve import Interrupts

    if (smoke or port) and not serve:
        raise typer.BadParameter("needs --serve", param_hint="--smoke" if smoke else "--port")
    console, interrupts = Console(), Interrupts()
    kinds = _numbers(ratios) if ratios else default_ratios(layers)
    try:
        settings = DemoSettings(
            ratios=kinds,
            experts=experts,
            hash_layers=min(hash_layers, len(kinds)),
            hidden=hidden,
            heads=heads,
            vocab=vocab,
            context=context,
            mtp_layers=int(mtp),
            dtype=cast(Literal["bfloat16", "float32"], dtype),  # DemoSettings checks it
            seed=seed,
        )
        with interrupts.watched():
            status = _write_and_serve(directory, settings, serve, port, smoke, console, interrupts)
    except (Exception, KeyboardInterrupt) as error:
        if interrupts.pending:
            print_line(console, "interrupted")
            raise typer.Exit(130) from None
        if not isinstance(error, (DemoError, OSError)):
            raise
        print_error(console, error)
        status = 2
    raise typer.Exit(status)


def _write_and_serve(
    directory: Path,
    settings: DemoSettings,
    serve: bool,
    port: int,
    smoke: bool,
    console: Console,
    interrupts: Interrupts,
) -> int:
    """Write the checkpoint, say so, and serve it if asked to; the exit status."""
    from dsv4_triton.demo.checkpoint import write_checkpoint
    from dsv4_triton.demo.serve import run_demo

    with console.status(f"writing {len(settings.ratios)} layers to {directory}"):
        written = write_checkpoint(directory, settings)
    interrupts.check()
    size = sum(file.stat().st_size for file in directory.iterdir()) / 2**20
    done = "wrote" if written else "already there with these settings:"
    what = f"{size:.0f} MiB, {settings.dtype}, compress ratios {list(settings.ratios)}"
    print_line(console, f"{done} {directory} ({what})")
    if serve:
        return run_demo(directory, dtype=settings.dtype, port=port, smoke=smoke, console=console, interrupts=interrupts)
    flag = " --dtype float32" if settings.dtype == "float32" else ""
    print_line(console, f"serve it with: vllm serve {directory}{flag}")
    return 0


@app.command("compile")
def compile_kernels(
    family: Annotated[
        Optional[str],  # noqa: UP045  typer evaluates the annotation, on Python 3.10 too
        typer.Option(help="a2, a3 or a5. With --report also none, for all three."),
    ] = None,
    kernel: Ops = None,
    model: Annotated[
        Names,
        typer.Option(help="flash, pro or demo; may be given several times. Without it and --case: flash and pro."),
    ] = None,
    case: CaseNames = None,
    jobs: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, metavar="N", help="Compiles at once. Default: the CPUs."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time for one compile.")] = 300.0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail for what is merely slow, too: notes, element loops, idle cores.")
    ] = False,
    json: Annotated[
        File, typer.Option(metavar="FILE", help="Write everything that is known to FILE as JSON; needs --family.")
    ] = None,
    report: Annotated[
        File,
        typer.Option(metavar="FILE", help="Count every case too, and write the static report to FILE as Markdown."),
    ] = None,
    against: Annotated[
        File,
        typer.Option(metavar="FILE", help="With --report: fail where a case is worse than in this earlier report."),
    ] = None,
) -> None:
    """Compile kernels for a device family, without a device: every op at the shapes of the models.

    Kernels go through triton-ascend and the HIVM compiler, their memory is planned and their calls are looked up in the
    device library. The exit status is 1 when one fails or would be wrong, 2 for a request that makes no sense.
    A report is made with the shipped launch parameters, whatever the user's folder holds.
    """
    from dsv4_triton import offline
    from dsv4_triton.autotune import store
    from dsv4_triton.compiler.ascend.tools import ToolMissingError
    from dsv4_triton.offline import report as reports

    for needs, given, option in (
        ("--family a2, a3 or a5", family is None and (report is None or json is not None), "--family"),
        ("--report", against is not None and report is None, "--against"),
    ):
        if given:
            raise typer.BadParameter(f"needs {needs}", param_hint=option)
    console = table_console()
    with reported(console, ToolMissingError, reports.ReportError):
        families = offline.families() if family is None else [offline.family_named(family)]
        cases = offline.choose(kernel or (), model or (), case or ())
        refuse_unwritable((json, report))
        earlier = None if against is None else reports.parse(against.read_text())
        good, found, content, page = True, [], "", ""
        with store.shipped_only() if report is not None else nullcontext():
            for chosen in families:
                with progress_bar(console) as progress:
                    compiled = offline.compile_cases(cases, chosen, jobs=jobs, seconds=seconds, progress=progress)
                    if report is not None:
                        found += reports.lines(compiled, chosen, jobs=jobs, progress=progress)
                if json is not None:  # which is for one family
                    content = offline.as_json(compiled, chosen)
                if report is None:
                    console.print(offline.table(compiled, chosen))
                print_line(console, offline.summary(compiled, chosen))
                if note := store.hidden_by(chosen.name):
                    print_error(console, note, "note")
                good = good and offline.succeeded(compiled, strict=strict)
            if report is not None:
                with console.status("counting the launches of decoder layers"):
                    launches = reports.launch_table(chosen.name for chosen in families)
                page = reports.markdown(found, launches)
        problems = [] if earlier is None else reports.regressions(found, earlier)
        for problem in problems:
            print_error(console, problem, "worse")
        write_files((json, content), (report, page))
    raise typer.Exit(0 if good and not problems else 1)


if __name__ == "__main__":
    app()
