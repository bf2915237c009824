"""The HIVM compilers as processes: finding them, running them with a stand-in for `hivmc`, reading what they say.

`hivmc`, which turns the final IR into a binary, is part of CANN and not of the Python packages. A stand-in script in
the compile's temporary folder takes its place and keeps the module that it was given.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEMORY_BYTES = 12 << 30
"""Address space that one compiler process may take."""

_NAMES = {"c220": ("bishengir-compile", "hivmc", ""), "c310": ("bishengir-compile-a5", "hivmc-a5", ".c310")}
"""Instruction set -> compiler, its last step, and the suffix of the device libraries that the compiler links."""
_STAND_IN = """#!/bin/sh
previous=
for argument in "$@"; do
    case $argument in *.mlir) cp "$argument" "{kept}" ;; esac
    if [ "$previous" = -o ]; then : > "$argument"; fi
    previous=$argument
done
"""
_MEMORIES = {"ub": "UB", "cbuf": "L1", "cc": "L0C"}
_OVERFLOW = re.compile(r"(\w+) overflow, requires (\d+) bits while (\d+) bits available")
_PLACE = re.compile(r'^(loc\("[^"]*":\d+:\d+\): |\S*kernel\.mlir:\d+:\d+: )+')
_GENERAL = re.compile(r"Failed to run \w+ pipeline")
_DUMP = "// -----// IR Dump Before "


class ToolMissingError(RuntimeError):
    """A compiler that an offline compile needs is not installed; the message says what to install."""


@dataclass(frozen=True)
class Tools:
    """The tools for one instruction set; libraries by kind of core. hivmc is None where CANN is not installed."""

    compiler: Path
    libraries: dict[str, Path]
    hivmc: Path | None


def tools_for(arch: str) -> Tools:
    """The installed tools, found without importing their package; `ToolMissingError` when there are none."""
    name, last, suffix = _NAMES[arch]
    spec = importlib.util.find_spec("ascendnpuir")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise ToolMissingError(f"{name} is missing: pip install --no-deps ascendnpu-ir==1.2.0")
    compiler = Path(folders[0]) / "bin" / name
    if not os.access(compiler, os.X_OK):
        raise ToolMissingError(f"{compiler} is missing or not executable: reinstall the package ascendnpu-ir")
    libraries = {core: Path(folders[0]) / "lib" / f"meta_op.{core.lower()}{suffix}.bc" for core in ("AIV", "AIC")}
    found = shutil.which(last)
    return Tools(compiler, libraries, Path(found) if found else None)


@dataclass(frozen=True)
class Run:
    """How a process ended: `fate` is exit, crash, memory or time."""

    fate: str
    code: int
    stdout: str
    stderr: str
    seconds: float


def run(command: list[str], folder: Path, environment: dict[str, str], seconds: float) -> Run:
    """Run a tool in `folder`, within a time and MEMORY_BYTES; it stays in the caller's process group."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with contextlib.suppress(ProcessLookupError, PermissionError):
        resource.prlimit(process.pid, resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    fate = "exit"
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        fate = "time"
    taken = time.perf_counter() - begin
    if fate == "exit" and process.returncode < 0:
        starved = process.returncode == -signal.SIGKILL or re.search(r"bad_alloc|out of memory", stderr, re.IGNORECASE)
        fate = "memory" if starved else "crash"
    return Run(fate, process.returncode, stdout, stderr, taken)


@dataclass(frozen=True)
class Lowered:
    """What a compiler made of one kernel: planned and synchronised HIVM, and the module for `hivmc` ("" where it did
    not get there), both in generic form.
    """

    run: Run
    hivm: str
    module: str
    said: list[str]


def lower(tools: Tools, text: str, flags: list[str], folder: Path, seconds: float) -> Lowered:
    """ttadapter MLIR through the HIVM compiler, with a stand-in for `hivmc`."""
    source, kept, stand_ins = folder / "kernel.mlir", folder / "module.mlir", folder / "stand-in"
    source.write_text(text)
    stand_ins.mkdir()
    for _, name, _ in _NAMES.values():
        (stand_ins / name).write_text(_STAND_IN.format(kept=kept))
        (stand_ins / name).chmod(0o755)
    dump = ["--mlir-print-ir-before=convert-hivm-to-std", "--mlir-disable-threading", "--mlir-print-op-generic"]
    command = [str(tools.compiler), str(source), *flags, *dump, "-o", str(folder / "kernel")]
    environment = _environment(folder)
    environment["PATH"] = f"{stand_ins}{os.pathsep}{environment.get('PATH', os.defpath)}"
    done = run(command, folder, environment, seconds)
    dumps, said = split_dumps(done.stderr)
    success = done.fate == "exit" and done.code == 0 and bool(dumps)
    return Lowered(
        done, dumps[-1] if success else "", kept.read_text() if success and kept.exists() else "",
        [*done.stdout.splitlines(), *said],
    )  # fmt: skip


def make_binary(tools: Tools, text: str, flags: list[str], folder: Path, seconds: float) -> tuple[Run, bytes | None]:
    """The kernel's binary by the real `hivmc`, with exactly the flags of a launch."""
    source, output = folder / "kernel.mlir", folder / "binary"
    source.write_text(text)
    output.mkdir()
    command = [str(tools.compiler), str(source), *flags, "-o", str(output / "kernel")]
    done = run(command, folder, _environment(folder), seconds)
    for name in ("kernel.o", "kernel_reloc.o", "kernel"):
        if done.fate == "exit" and done.code == 0 and (output / name).is_file():
            return done, (output / name).read_bytes()
    return done, None


def _environment(folder: Path) -> dict[str, str]:
    """The tools put their own temporary files into the compile's folder, and write no crash reports elsewhere."""
    return {**os.environ, "TMPDIR": str(folder), "MLIR_DISABLE_CRASH_REPORTER": "1"}


def split_dumps(stderr: str) -> tuple[list[str], list[str]]:
    """The modules that `--mlir-print-ir-before` printed, and all other lines."""
    first, *parts = stderr.split(_DUMP)
    dumps, said = [], first.splitlines()
    for part in parts:
        module, end, rest = part.partition("\n})")
        attributes, _, rest = rest.partition("\n")
        dumps.append(module.partition("\n")[2] + end + attributes + "\n")
        said += rest.splitlines()
    return dumps, [line for line in said if line.strip()]


@dataclass(frozen=True)
class Overflow:
    """A memory that a kernel's buffers did not fit."""

    memory: str
    needed_bytes: int
    available_bytes: int

    def __str__(self) -> str:
        return f"{self.memory} overflow: {self.needed_bytes} bytes needed, {self.available_bytes} available"


@dataclass(frozen=True)
class Diagnostics:
    """What a compiler said. notes: features that it switched off to succeed; overflows also of attempts that a later
    one made good.
    """

    overflows: tuple[Overflow, ...] = ()
    notes: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()

    @classmethod
    def of(cls, values: dict[str, Any]) -> Diagnostics:
        """The reverse of `dataclasses.asdict`, from JSON."""
        overflows = tuple(Overflow(**overflow) for overflow in values["overflows"])
        return cls(overflows, tuple(values["notes"]), tuple(values["errors"]))


def diagnostics(said: list[str], limit: int = 20) -> Diagnostics:
    """Overflows, notes and errors among the lines of a compiler, each once and without places in the adapter's text.

    That a pipeline failed is only an error when nothing else is.
    """
    overflows: dict[Overflow, None] = {}
    notes: dict[str, None] = {}
    errors: dict[str, None] = {}
    for line in said:
        line = _PLACE.sub("", line.strip())
        if found := _OVERFLOW.search(line):
            memory = _MEMORIES.get(found[1].lower(), found[1])
            overflows[Overflow(memory, int(found[2]) // 8, int(found[3]) // 8)] = None
        elif "[NOTE]" in line:
            notes[line.partition("[NOTE]")[2].strip()] = None
        elif re.search(r"error:|\[ERROR\]|Assertion|LLVM ERROR", line):
            errors[line[:500]] = None
    special = [error for error in errors if not _GENERAL.search(error)]
    shown = special if special or overflows else list(errors)
    return Diagnostics(tuple(overflows), tuple(notes), tuple(shown[:limit]))
