"""The commands `dsv4-triton bench ...`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.console import Console

from dsv4_triton.cli_bench_serve import load, serve
from dsv4_triton.console import (
    CaseNames,
    File,
    JsonFile,
    Names,
    Ops,
    command_group,
    ended_like_ctrl_c,
    given,
    known,
    print_error,
    print_line,
    progress_bar,
    quiet_console,
    refuse_unwritable,
    reported,
    write_files,
)

if TYPE_CHECKING:
    from dsv4_triton.bench.registry import Case
    from dsv4_triton.bench.step import LayerRows

app = command_group()

# Typer evaluates annotations, on Python 3.10 too.
FamilyName = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="With --estimate: a2, a3 or a5."),
]
EstimateFlag = Annotated[
    bool,
    typer.Option(
        "--estimate",
        help="Measure nothing: compile for --family, which it needs, count, and print what the cost model says.",
    ),
]


@contextmanager
def _reported(console: Console) -> Iterator[None]:
    """Errors that a request can cause become one line and status 2."""
    from dsv4_triton.bench.results import ResultsError
    from dsv4_triton.bench.run import DeviceMissingError
    from dsv4_triton.compiler.ascend.tools import ToolMissingError

    with reported(console, ResultsError, DeviceMissingError, ToolMissingError):
        yield


@app.callback()
def bench(
    context: typer.Context,
    kernel: Ops = None,
    model: Annotated[
        Names,
        typer.Option(
            metavar="NAME",
            help="flash, pro or demo; may be given several times. Without it and without --case: demo on the host, "
            "flash on a device and with --estimate.",
        ),
    ] = None,
    case: CaseNames = None,
    device: Annotated[str, typer.Option(help="host, npu or cuda.")] = "host",
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Time for a case, shared by its implementations; three rounds at least.")
    ] = 0.5,
    interpreter: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Limit for a case in Triton's interpreter; 0 leaves it out. Default: 2 where ops or cases are named.",
        ),
    ] = None,
    baseline: Annotated[
        File, typer.Option(metavar="FILE", help="Compare with this earlier --json; worse times are status 1.")
    ] = None,
    threshold: Annotated[
        float, typer.Option(min=0.0, help="With --baseline: by which share a median may grow.")
    ] = 0.15,
    json: JsonFile = None,
    html: Annotated[
        File, typer.Option("--html", metavar="FILE", help="Write one self-contained page with bars.")
    ] = None,
    estimate: EstimateFlag = False,
    family: FamilyName = None,
) -> None:
    """Measure ops against their baselines, or estimate them for an NPU; sub-commands measure larger things.

    Every op is compared with its reference first; one that differs gets no time, and the status is 1. Implementations
    take turns. On the host the default are the cases of the demo model: those of Flash and Pro take minutes each.
    """
    if context.invoked_subcommand is not None:
        return
    _refuse(
        ("--family", family is not None and not estimate, "needs --estimate"),
        ("--estimate", estimate and family is None, "needs --family a2, a3 or a5"),
        *((f"--{name}", estimate and given(context, name), "is not for --estimate") for name in _MEASURED),
        ("--threshold", baseline is None and given(context, "threshold"), "needs --baseline"),
        ("--interpreter", device != "host" and given(context, "interpreter"), "needs --device host"),
    )
    console = quiet_console()
    with _reported(console):
        refuse_unwritable((json, html))
        if estimate:
            assert family is not None
            status = _estimate(_cases(kernel, model, case, "flash"), family, json, console)
        else:
            if interpreter is None:
                interpreter = 2.0 if kernel or case else 0.0
            status = _measure(
                (kernel, model, case), device, seconds, interpreter, baseline, threshold, json, html, console
            )
    raise typer.Exit(status)


_MEASURED = ("device", "seconds", "interpreter", "baseline", "threshold", "html")
"""Options of a measurement."""


def _refuse(*options: tuple[str, bool, str]) -> None:
    """`typer.BadParameter` for the first option that is wrong, with what to say of it."""
    for option, wrong, says in options:
        if wrong:
            raise typer.BadParameter(says, param_hint=option)


def _cases(kernel: Names, model: Names, case: Names, default: str) -> list[Case]:
    from dsv4_triton.bench.registry import select

    chosen = model or (None if case else [default])
    if not (found := select(kernel=kernel or None, model=chosen, case=case or None)):
        raise ValueError(f"{', '.join(kernel or ())}: no such case of {', '.join(chosen or ())}")
    return found


def _measure(
    wanted: tuple[Names, Names, Names],
    device: str,
    seconds: float,
    interpreter: float,
    baseline: Path | None,
    threshold: float,
    json: Path | None,
    html: Path | None,
    console: Console,
) -> int:
    from dsv4_triton.bench import results
    from dsv4_triton.bench.baselines import Interpreter
    from dsv4_triton.bench.measure import clock_of, measure_machine
    from dsv4_triton.bench.registry import cases as all_cases
    from dsv4_triton.bench.run import Bench, DeviceLostError, device_named, driver_for, measure_cases

    cases = _cases(*wanted, "demo" if device == "host" else "flash")
    where = device_named(device)
    earlier = None if baseline is None else results.Results.read(baseline)
    with console.status("measuring a copy and a product"):
        machine = measure_machine(where)
    with driver_for(where):  # a GPU has a family only meanwhile
        found = results.Results(results.environment(where), machine)
    interprets = Interpreter(interpreter) if interpreter and device == "host" else None
    status = 0
    try:
        with ended_like_ctrl_c(), progress_bar(console) as progress, interprets or nullcontext():
            for figure in measure_cases(cases, Bench(where, machine, seconds, interprets, clock_of(where)), progress):
                found.figures.append(figure)
    except KeyboardInterrupt:
        found.ended, status = "interrupted", 130
    except DeviceLostError as error:
        found.ended, status = str(error), 2
    compared = [] if earlier is None else results.changes(earlier, found, threshold)
    console.print(results.table(found))
    print_line(console, results.summary(found))
    if found.ended:
        print_error(console, f"{found.ended}; {len(found.figures)} of {len(cases)} cases are done", "ended early")
    if earlier is not None:
        for difference in results.unlike(earlier, found):
            print_error(console, difference, "another machine")
        for case in results.unmatched(earlier, found, {(case.op, case.name) for case in all_cases()}):
            print_error(console, case, "not compared")
        worse = results.regressions(compared)
        for change in worse:
            print_error(console, change, "worse")
        print_line(console, f"{len(compared)} pairs compared, {len(worse)} worse by more than {threshold:.0%}")
        if not compared:
            print_error(console, f"no case that was measured is in {baseline}")
        status = status or int(bool(worse) or not compared)
    write_files((json, found.as_json()), (html, results.as_html(found, compared)))
    return status or int(not found.ok)


_TOGETHER = 8
"""Cases for each processor that are estimated together: an interruption loses no others."""


def _estimate(cases: list[Case], family: str, json: Path | None, console: Console) -> int:
    """Status 1 where a launch could not be counted for what it is."""
    from dsv4_triton import offline
    from dsv4_triton.autotune.store import hidden_by
    from dsv4_triton.bench.results import recorded
    from dsv4_triton.offline import estimates

    chosen = offline.family_named(family)
    if not (wanted := [case for case in cases if case.runs_on(chosen)]):
        raise ValueError(f"no case of this runs on {chosen.name}: {chosen.title} has no fp8")
    found: list[estimates.CaseEstimate] = []
    ended, status, together = "", 0, _TOGETHER * len(os.sched_getaffinity(0))
    try:
        with ended_like_ctrl_c(), progress_bar(console) as progress:

            def report(_done: int, _of: int, what: str) -> None:
                progress(len(found), len(wanted), what)

            for first in range(0, len(wanted), together):
                found.extend(estimates.estimates(wanted[first : first + together], chosen, progress=report))
    except KeyboardInterrupt:
        ended, status = "interrupted", 130
    console.print(estimates.table(found, chosen))
    print_line(
        console,
        "Estimates by docs/cost_model.md from counts of the compiled code. limit: the least bytes or products of the"
        " job at the chip's rates. starts: the launches' own, beside the estimate.",
    )
    if ended:
        print_error(console, f"{ended}; {len(found)} of {len(wanted)} cases are done", "ended early")
    if note := hidden_by(chosen.name):
        print_error(console, note, "note")
    write_files((json, recorded({"ended": ended, **estimates.as_dict(found, chosen)})))
    return status or int(any(case.problem for case in found))


@app.command()
def step(
    context: typer.Context,
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="flash, pro or demo; without it demo, and with --estimate flash."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="Time for each stage, shared with eager PyTorch.")] = 0.5,
    estimate: EstimateFlag = False,
    family: FamilyName = None,
    json: JsonFile = None,
) -> None:
    """A decode step and a prefill chunk of a decoder layer of each kind, stage by stage, on the host or estimated."""
    _refuse(
        ("--family", estimate == (family is None), "--estimate and --family go together"),
        ("--seconds", estimate and given(context, "seconds"), "is not for --estimate"),
    )
    console = quiet_console()
    status = 0
    with _reported(console):
        from dsv4_triton.bench import step as steps
        from dsv4_triton.bench.results import recorded

        name = model or ("flash" if estimate else "demo")
        known("model", name, tuple(steps.MODELS))
        refuse_unwritable((json,))
        found: list[steps.LayerRows] = []
        try:
            with ended_like_ctrl_c():
                made = _estimated_layers(name, family, console) if family else _measured_layers(name, seconds, console)
                for one in made:
                    found.append(one)
        except KeyboardInterrupt:
            status = 130
            print_error(console, "interrupted", "ended early")
        for one in found:
            steps.print_layer(one, name, family or "host", console)
        content = {"model": name, "where": family or "host", "layers": [one.as_dict() for one in found]}
        write_files((json, recorded(content)))
    raise typer.Exit(status or int(not all(one.ok for one in found)))


def _measured_layers(model: str, seconds: float, console: Console) -> Iterator[LayerRows]:
    from dsv4_triton.bench.measure import measure_machine
    from dsv4_triton.bench.run import Bench, device_named
    from dsv4_triton.bench.step import measured

    where = device_named("host")
    with console.status("measuring a copy and a product"):
        machine = measure_machine(where)
    with progress_bar(console) as progress:
        yield from measured(model, Bench(where, machine, seconds), progress)


def _estimated_layers(model: str, family: str, console: Console) -> list[LayerRows]:
    from dsv4_triton import offline
    from dsv4_triton.bench.step import Case, Row, Stage, cases_of, estimated, layers
    from dsv4_triton.offline.estimates import estimates, limit

    chosen = offline.family_named(family)
    cases = cases_of(layers(model))
    with progress_bar(console) as progress:
        found = dict(zip(cases, estimates(cases, chosen, progress=progress), strict=True))

    def row(stage: Stage) -> Row:
        if not isinstance(stage.work, Case):
            seconds, binding = limit(stage.work.minimum, chosen)
            return Row(stage, seconds, seconds, binding=binding)
        one = found[stage.work]
        return Row(stage, one.seconds, one.limit_seconds, binding=one.binding, problem=one.problem)

    return estimated(model, row)


@app.command()
def launches(
    model: Annotated[str, typer.Option(help="flash, pro or demo.")] = "flash",
    family: Annotated[str, typer.Option(help="a2, a3, a5 or host.")] = "a2",
    tokens: Annotated[int, typer.Option(min=1, help="Requests in the step, one token each.")] = 16,
    context: Annotated[int, typer.Option(min=256, help="Length of the requests.")] = 32768,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    detail: Annotated[bool, typer.Option("--detail", help="Name every launch.")] = False,
    json: JsonFile = None,
) -> None:
    """How many launches a decode step makes in a layer of each kind: recorded, nothing runs."""
    console = quiet_console()
    with _reported(console):
        from dsv4_triton.bench.registry import MODELS
        from dsv4_triton.device import FAMILIES

        known("family", family, FAMILIES)
        known("model", model, MODELS)
        refuse_unwritable((json,))
        from dsv4_triton.bench.launches import as_dicts, layer_launches, print_layers
        from dsv4_triton.bench.results import recorded

        what: dict[str, Any] = {"model": model, "family": family, "tokens": tokens, "context": context, "dtype": dtype}
        layers = layer_launches(**what)
        title = f"launches of a decode step, {model} on {family}, {tokens} tokens at {context}, {dtype}"
        print_layers(layers, title, detail, console)
        write_files((json, recorded({**what, "layers": as_dicts(layers)})))


@app.command()
def metadata(
    repeat: Annotated[int, typer.Option(min=1, help="Timed steps for each batch size.")] = 200,
    json: JsonFile = None,
) -> None:
    """Time to plan a decode step of 1, 64 and 256 sequences, beside the PyTorch references, and of a look-up."""
    console = quiet_console()
    with _reported(console):
        refuse_unwritable((json,))
        from dsv4_triton.bench.metadata import run
        from dsv4_triton.bench.results import recorded

        write_files((json, recorded(run(repeat, console))))


@app.command("host-figures")
def host_figures(json: JsonFile = None) -> None:
    """The host driver's own figures: native kernels, a launch and cold builds, each beside its goal."""
    console = quiet_console()
    from dsv4_triton.bench.host_figures import FigureError, as_dict, measure, report
    from dsv4_triton.bench.results import recorded

    with reported(console, FigureError):
        refuse_unwritable((json,))
        rows, launch = measure()
        print_line(console, report(rows, launch))
        write_files((json, recorded(as_dict(rows, launch))))


app.command()(serve)
app.command()(load)
