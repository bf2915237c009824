"""The commands `dsv4-triton tune ...`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from math import inf, isfinite
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Annotated, Literal, Optional, cast

import typer
from rich.console import Console

from dsv4_triton.console import (
    File,
    command_group,
    ended_like_ctrl_c,
    known,
    print_error,
    print_line,
    progress_bar,
    progress_lines,
    refuse_unwritable,
    reported,
    table_console,
    write_files,
)

if TYPE_CHECKING:
    from dsv4_triton.autotune.search import Found

app = command_group()

# Typer evaluates annotations, on Python 3.10 too.
Names = Optional[list[str]]  # noqa: UP045
Kernels = Annotated[
    Names,
    typer.Option(
        "--kernel", metavar="NAME", help="An op, or a kernel as `tune show` names it; may be given several times."
    ),
]
Listed = Annotated[
    Names, typer.Option("--kernel", metavar="NAME", help="A kernel with a config file; may be given several times.")
]
FamilyNames = Annotated[
    Names, typer.Option("--family", help="a2, a3, a5 or host; may be given several times. Without it: all.")
]
Jobs = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(min=1, metavar="N", help="Tries at once, offline. Default: the CPUs."),
]


def _finite(value: float | None) -> float | None:
    if value is not None and not isfinite(value):
        raise typer.BadParameter(f"{value} is no length of time")
    return value


Seconds = Annotated[float, typer.Option(min=1.0, callback=_finite, help="Time for one try.")]


@contextmanager
def _reported(console: Console) -> Iterator[None]:
    """Errors that a request can cause become one line and status 2; a lost device too, with status 1."""
    from dsv4_triton.autotune.run import BusyError
    from dsv4_triton.bench.run import DeviceLostError
    from dsv4_triton.compiler.ascend.tools import ToolMissingError

    try:
        with reported(console, BusyError, ToolMissingError):
            yield
    except DeviceLostError as error:
        print_error(console, f"{error}. What was found before is kept; go on with --resume")
        raise typer.Exit(1) from None


def _families(names: list[str] | None) -> list[str]:
    from dsv4_triton.device import FAMILIES

    for name in names or ():
        known("family", name, FAMILIES)
    return list(names or FAMILIES)


@app.callback()
def tune(
    context: typer.Context,
    family: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Needed: a2, a3, a5, or host for this machine's CPU."),
    ] = None,
    kernel: Kernels = None,
    model: Annotated[
        Names,
        typer.Option(help="flash, pro or demo; may be given several times. Without it and --case: flash and pro."),
    ] = None,
    case: Annotated[
        Names,
        typer.Option(metavar="NAME", help="A case or a pattern such as '*/decode/b64*'; may be given several times."),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            help="offline: rank by the estimate of the cost model, without a device. device: by time on an NPU. "
            "The host family is always timed."
        ),
    ] = "offline",
    budget: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            min=0.0, callback=_finite, metavar="MINUTES", help="Stop after so long. Default: when all is tried."
        ),
    ] = None,
    tries: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            min=1,
            metavar="N",
            help="At most so many configurations for each size; the default and what is on file for it are always "
            "tried. Default: the search ends it.",
        ),
    ] = None,
    jobs: Jobs = None,
    seconds: Seconds = 300.0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an earlier run of the same family.")] = False,
    out: Annotated[
        File, typer.Option(metavar="FOLDER", help="Where config files go. Default: the user's folder, see tune show.")
    ] = None,
    json: Annotated[File, typer.Option(metavar="FILE", help="Write every try to FILE as JSON.")] = None,
    html: Annotated[File, typer.Option(metavar="FILE", help="Write a page with pictures to FILE.")] = None,
) -> None:
    """Find the launch parameters of the kernels for a device family, and keep them for serving.

    [bold]  dsv4-triton tune --family a2 --kernel hc_post --model flash[/bold]

    Every configuration of a kernel's space that can fit is tried in a process of its own. It must compile for the
    family without a fallback, fit the memories, link, and give the reference's results on the host; then the fastest
    wins, if it is more than 1 % faster than the default and makes no more launches. Results are merged into config
    files that serving reads. Ctrl-C keeps what is done, and [bold]--resume[/bold] goes on from there. The exit status
    is 1 when not even the default of a kernel passed, and 130 after Ctrl-C.
    """
    if context.invoked_subcommand is not None:
        return
    from dsv4_triton.autotune import report, store
    from dsv4_triton.autotune.run import Settings, refuse_broken_files, run
    from dsv4_triton.autotune.search import named
    from dsv4_triton.autotune.trials import cores
    from dsv4_triton.bench.run import DeviceLostError
    from dsv4_triton.compiler.ascend.tools import tools_for
    from dsv4_triton.device import FAMILIES, HOST

    if family is None:
        raise typer.BadParameter("is needed: a2, a3, a5 or host", param_hint="--family")
    if mode not in ("offline", "device"):
        raise typer.BadParameter(f"{mode!r} is neither 'offline' nor 'device'", param_hint="--mode")
    console = table_console()
    with _reported(console):
        chosen = FAMILIES[_families([family])[0]]
        refuse_unwritable((json, html))
        folder = out or store.user_folder()
        _writable(folder / chosen.name)
        if chosen is not HOST:
            tools_for(chosen.arch)
            if mode == "device":
                _npu_there(chosen.name)
        if html is not None and find_spec("matplotlib") is None:
            raise ValueError("--html needs matplotlib; pip install matplotlib, or leave --html out")
        settings = Settings(
            chosen, cast(Literal["offline", "device"], mode), folder, jobs or cores(), budget, tries, seconds, resume
        )
        with progress_bar(console) as progress:
            wanted = named(kernel or (), model or (), case or (), chosen, progress)
        if not wanted:
            raise ValueError(
                f"no case that was asked for launches {', '.join(kernel or ['a kernel'])} on {chosen.title}"
            )
        refuse_broken_files(wanted, settings)
        with progress_bar(console, inf if budget is None else budget * 60) as progress:

            def say(done: int, what: str, found: Found | None) -> None:
                progress(done, len(wanted), what)
                if found is None:
                    return
                results.append(found)
                if found.finished and not console.is_terminal:
                    print_line(console, f"{done}/{len(wanted)} {found.target}: gain {found.gain:.2f}")

            results: list[Found] = []
            interrupted, broken = False, None
            try:
                with ended_like_ctrl_c():
                    run(wanted, settings, say)
            except KeyboardInterrupt:
                interrupted = True
            except (DeviceLostError, store.ConfigFileError, OSError) as error:
                broken = error
        console.print(report.table(results, settings))
        print_line(console, report.summary(results, settings))
        for one in results:
            if one.note:
                print_line(console, one.note, "yellow")
        finished = [one for one in results if one.finished]
        if left := len(wanted) - len(finished):
            says = f"{left} of {len(wanted)} are left; the same command with --resume goes on"
            print_line(console, says, "yellow")
        if any(one.file for one in results):
            print_line(console, f"config files: {folder / chosen.name}")
        page = report.as_html(results, settings) if html is not None else ""
        write_files((json, report.as_json(results, settings)), (html, page))
        if broken is not None:
            raise broken
    raise typer.Exit(130 if interrupted else 0 if all(one.winner is not None for one in finished) else 1)


def _writable(folder: Path) -> None:
    """`OSError` for a folder of config files that cannot be made or written, before minutes of work; it is tried, and
    nothing is left behind."""
    absent: list[Path] = []
    try:
        absent += [one for one in (folder, *folder.parents) if not one.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = error.strerror or error
        raise OSError(f"config files cannot be written to {folder}: {why}; choose a folder with --out") from None
    finally:
        for one in absent:
            with suppress(OSError):
                one.rmdir()


def _npu_there(name: str) -> None:
    """`ValueError` unless this machine has an NPU of the family."""
    from dsv4_triton.autotune.run import npu_name
    from dsv4_triton.device import family_of_soc

    if find_spec("torch_npu") is None:
        raise ValueError("--mode device needs torch_npu and an NPU; without one use --mode offline")
    try:
        found = family_of_soc(npu_name())
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    if found.name != name:
        raise ValueError(f"this machine's NPU is of family {found.name}, not {name}")


@app.command()
def show(
    family: FamilyNames = None,
    kernel: Listed = None,
    gains: Annotated[
        bool, typer.Option("--gains", help="One line a kernel: how many sizes, how many winners, what its op takes.")
    ] = False,
    json: Annotated[File, typer.Option(metavar="FILE", help="Write it to FILE as JSON too.")] = None,
) -> None:
    """List what config files hold: for which sizes, what changed, measured or estimated, and whether it is outdated."""
    from dataclasses import asdict

    from dsv4_triton.autotune import listing, shipped, store
    from dsv4_triton.autotune.search import spaces

    console = table_console()
    with _reported(console):
        refuse_unwritable((json,))
        families, kernels = _families(family), _kernels(kernel)
        found, problems = shipped.lines(families, kernels)
        sums = shipped.gains(found) if gains or json is not None else []
        console.print(listing.gains_table(sums) if gains else listing.entries_table(found))
        for problem in problems:
            print_error(console, problem, "not used")
        for name in families:
            there = {line.kernel for line in found if line.family == name}
            if without := ", ".join(k for k in kernels or spaces() if k not in there):
                said = f"{name}: no entry for {without}; where the family launches them, it is with computed defaults"
                print_line(console, said)
        outdated = sum(bool(line.old) for line in found)
        try:
            folder = f"the user's folder is {store.user_folder()}"
        except store.NoFolderError as error:
            folder = str(error)
        print_line(console, f"{len(found)} entries, {outdated} outdated; {folder}")
        rows = [{**asdict(line), "folder": str(line.folder)} for line in found]
        write_files((json, {"entries": rows, "gains": [asdict(one) for one in sums], "problems": problems}))
    raise typer.Exit(1 if problems else 0)


def _kernels(names: list[str] | None) -> list[str]:
    from dsv4_triton.autotune.search import spaces

    for name in names or ():
        known("kernel", name, spaces())
    return names or []


@app.command()
def verify(
    family: FamilyNames = None,
    kernel: Listed = None,
    jobs: Jobs = None,
    seconds: Seconds = 300.0,
) -> None:
    """Put every entry of the config files through all gates again, with the toolchain that is installed.

    The exit status is 1 when one fails: it no longer compiles, fits, links, or equals the reference, or its kernel has
    another default now; and 130 after Ctrl-C, with what was found until then.
    """
    from dsv4_triton.autotune import shipped
    from dsv4_triton.autotune.trials import cores
    from dsv4_triton.compiler.ascend.tools import tools_for

    console = table_console()
    with _reported(console):
        found, problems = shipped.lines(_families(family), _kernels(kernel))
        if not found and not problems:
            raise ValueError("there is nothing to verify: no config file has an entry for this")
        checked, lost = shipped.targets_of(line for line in found if not line.hidden)
        lost += [
            (line, why) for target, line in checked if (why := shipped.changed_default(line.entry, target.default))
        ]
        problems += [f"{line.family} {line.kernel} {line.entry.key}: {why}" for line, why in lost]
        for arch in {target.family.arch for target, _ in checked} - {""}:
            tools_for(arch)
        bar = partial(progress_bar, console) if console.is_terminal else partial(progress_lines, Console(stderr=True))
        number, interrupted = 0, False
        try:
            with bar() as progress, ended_like_ctrl_c():
                for line, verdict in shipped.verify(checked, jobs=jobs or cores(), seconds=seconds, progress=progress):
                    number += 1
                    if not verdict.ok:
                        what = f"{verdict.fate}: {verdict.message}"
                        problems.append(f"{line.family} {line.kernel} {line.entry.key}: {what}")
        except KeyboardInterrupt:
            interrupted = True
        for problem in problems:
            print_error(console, problem, "failed")
        print_line(console, f"{number} entries checked, {len(problems)} problems")
        if interrupted:
            print_line(console, f"{len(checked) - number} of {len(checked)} are left", "yellow")
    raise typer.Exit(130 if interrupted else 1 if problems else 0)


@app.command()
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write them.")],
    family: FamilyNames = None,
    source: Annotated[
        File, typer.Option("--from", metavar="FOLDER", help="Folder of config files. Default: the user's.")
    ] = None,
) -> None:
    """Write what was tuned on this machine to one file, to be carried to another."""
    from dsv4_triton.autotune import shipped, store

    console = table_console()
    with _reported(console):
        refuse_unwritable((file,))
        folder = source or store.user_folder()
        entries = shipped.exported(folder, _families(family))
        if not entries:
            asked = ", ".join(_families(family))
            where = f"no config file of {folder} (FAMILY/KERNEL.json)"
            raise ValueError(f"there is nothing to export: {where} has an entry of {asked}")
        write_files((file, {"schema": store.SCHEMA, "entries": entries}))
        print_line(console, f"{len(entries)} entries written to {file}")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `tune export` wrote.")],
    out: Annotated[File, typer.Option(metavar="FOLDER", help="Folder of config files. Default: the user's.")] = None,
) -> None:
    """Take results of another machine over into this one's config files."""
    from dsv4_triton.autotune import shipped, store

    console = table_console()
    with _reported(console):
        folder = out or store.user_folder()
        _writable(folder)
        for (family, kernel), (number, left) in shipped.import_from(file, folder).items():
            kept = f", {left} left out: what is there was measured, these are estimates" if left else ""
            print_line(console, f"{family} {kernel}: {number} entries{kept}")
        print_line(console, f"merged into {folder}")
