"""Offline compile of kernels for A2, A3 and A5: how far each gets through the real compilers, and what they made of it.

    with acting_as(A2), recording() as launches:
        rope(x, positions, cos_sin)
    for result in compile_all(launches, A2, jobs=2):
        print(result.kernel, result.status, result.facts, result.missing)

A kernel goes through triton-ascend's front end and adapter and AscendNPU IR's compiler, with the flags of a launch on
that family. Where `hivmc` of CANN is on PATH it makes the binary, otherwise the compile ends before that last step and
`CompileResult.linked` is false. No device, CANN or torch_npu is needed.

Every compile runs in a process of its own, so that a crash, a hang or a lack of memory is a result like any other.
Results are kept on disk (`cache`), by the kernel's source, its specialisation, the options and the tools' versions.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from dsv4_triton.compiler import cache, fixups, frontend
from dsv4_triton.compiler.ascend.facts import facts_of
from dsv4_triton.compiler.ascend.jobs import Outcome, run_all
from dsv4_triton.compiler.ascend.library import missing_functions
from dsv4_triton.compiler.ascend.options import Options
from dsv4_triton.compiler.ascend.result import CompileResult
from dsv4_triton.compiler.ascend.tools import Diagnostics, Run, Tools, diagnostics, lower, make_binary, tools_for
from dsv4_triton.compiler.frontend import KernelCompileError, Signature
from dsv4_triton.device import Family

SECONDS = 300.0
"""Default time for one compile."""
_SOURCES = ("ascend/[!j]*.py", "hivm.py", "fixups.py", "frontend.py", "mlir.py")
"""What decides the result of a compile; `jobs` only says where it runs."""

Progress = Callable[[int, int, CompileResult], None]


class Compilable(Protocol):
    """What is compiled: a `launches.Launch`, or anything with these fields."""

    @property
    def kernel(self) -> Any: ...
    @property
    def signature(self) -> Signature: ...
    @property
    def options(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class _Job:
    kernel: Any
    signature: Signature
    options: Options
    family: Family
    tools: Tools
    seconds: float
    key: str


def compile(
    kernel: Any, signature: Signature, family: Family, options: Options | Mapping[str, Any] | None = None, *,
    seconds: float = SECONDS,
) -> CompileResult:  # fmt: skip
    """Compile one specialisation of a `triton.jit` kernel.

    `ValueError` for options or a family that do not exist, `ToolMissingError` when there is no compiler.
    """
    return _run([_job(kernel, signature, family, options, seconds)], 1, None)[0]


def compile_all(
    launches: Iterable[Compilable], family: Family, *, jobs: int | None = None, progress: Progress | None = None,
    seconds: float = SECONDS,
) -> list[CompileResult]:  # fmt: skip
    """Compile launches, at most `jobs` at once (default: the CPUs of this process); results in the launches' order.

    Equal specialisations are compiled once. `progress(done, total, result)` is called after each of them. Errors as
    in `compile`.
    """
    work = [_job(launch.kernel, launch.signature, family, launch.options, seconds) for launch in launches]
    return _run(work, jobs or len(os.sched_getaffinity(0)), progress)


def _job(
    kernel: Any, signature: Signature, family: Family, options: Options | Mapping[str, Any] | None, seconds: float
) -> _Job:
    chosen = options if isinstance(options, Options) else Options.of(options or {})
    flags = chosen.flags(family)
    tools = tools_for(family.arch)
    more = [cache.toolchain(*_SOURCES), family.name, *flags, repr(chosen.frontend(family))]
    for file in filter(None, (tools.compiler, tools.hivmc)):
        state = file.stat()
        more.append(f"{file} {state.st_size} {state.st_mtime_ns}")
    return _Job(kernel, signature, chosen, family, tools, seconds, cache.key(kernel, signature, more))


def _run(work: list[_Job], jobs: int, progress: Progress | None) -> list[CompileResult]:
    unique = {job.key: job for job in work}
    results: dict[str, CompileResult] = {}

    def finish(key: str, result: CompileResult) -> None:
        results[key] = result
        if progress is not None:
            progress(len(results), len(unique), result)

    waiting: list[_Job] = []
    for job in unique.values():
        stored = cache.load("ascend", job.key)
        if stored is None:
            waiting.append(job)
        else:
            finish(job.key, replace(CompileResult.decode(stored), cached=True))

    def ended(index: int, outcome: Outcome) -> None:
        job = waiting[index]
        if outcome.fate == "done":
            finish(job.key, CompileResult.decode(outcome.body))
        else:
            message = f"the compile was {outcome.message}" if outcome.fate != "time" else outcome.message
            finish(job.key, _start(job, outcome.fate, "frontend", message, outcome.seconds))

    limit = max((job.seconds for job in waiting), default=0.0)
    run_all([partial(_work, job) for job in waiting], jobs, limit, ended, frontend.triton_lock)
    return [results[job.key] for job in work]


def _work(job: _Job) -> bytes:
    result = _compile(job)
    body = result.encode()
    if _lasting(result):
        cache.store("ascend", job.key, body)
    return body


def _lasting(result: CompileResult) -> bool:
    """Whether another try would repeat it; only this is kept on disk. The frontend is Python code that other code of
    its process may have changed, and quick."""
    return result.ok or (result.status == "failed" and result.stage != "frontend")


def _start(job: _Job, status: str, stage: str, message: str, seconds: float = 0.0) -> CompileResult:
    return CompileResult(
        job.kernel.__name__, job.family.name, status, stage, message, seconds=seconds,
        flags=tuple(job.options.flags(job.family)),
    )  # fmt: skip


def _compile(job: _Job) -> CompileResult:
    """Compile in this process: every outcome short of its own crash is a result."""
    begin = time.monotonic()
    name, options = job.kernel.__name__, job.options.frontend(job.family)
    stage = "frontend"
    try:
        ttir = frontend.lower_to_ttir(job.kernel, job.signature, options)
        stage = "adapter"
        text = frontend.lower_to_adapter(name, ttir, options)
        # Cube and vector cores of A5 share memory, so that there loads cannot be told apart.
        mixed = 'mix_mode = "mix"' in text and job.family.arch == "c220"
        adapter = frontend.lower_to_adapter(name, ttir, options, generic=True) if mixed else ""
    except KernelCompileError as error:
        result = _start(job, "crash" if error.signal else "failed", stage, str(error))
    except Exception as error:
        # Triton's own code generator raises whatever its Python code happens to raise.
        result = _start(job, "failed", stage, f"kernel {name}: {type(error).__name__}: {error}")
    else:
        text = fixups.rewrite(re.sub(r', mix_mode\s*=\s*"[^"]*"', "", text), job.family.arch)
        with tempfile.TemporaryDirectory(prefix="dsv4-compile-") as folder:
            result = _lower(job, text, adapter, Path(folder), begin + job.seconds)
    return replace(result, seconds=time.monotonic() - begin)


def _lower(job: _Job, text: str, adapter: str, folder: Path, deadline: float) -> CompileResult:
    """ttadapter MLIR (`adapter`: of a mixed kernel, in generic form) through the HIVM compiler and, where it is
    installed, `hivmc`.
    """
    flags = job.options.flags(job.family)
    lowered = lower(job.tools, text, flags, folder, deadline - time.monotonic())
    said = diagnostics(lowered.said)
    if not lowered.hivm:
        return replace(_failure(job, "hivm", lowered.run, said, lowered.said), said=said)
    try:
        arguments = [name for name in job.signature.types if name not in job.signature.constants]
        facts = facts_of(lowered.hivm, job.family, adapter, arguments)
    except Exception as error:
        # What cannot be read cannot be judged: no success.
        message = f"kernel {job.kernel.__name__}: its HIVM cannot be read: {type(error).__name__}: {error}"
        return replace(_start(job, "failed", "facts", message), said=said, hivm=lowered.hivm)
    missing = missing_functions(lowered.module, job.tools.libraries)
    result = replace(_start(job, "ok", "", ""), said=said, facts=facts, missing=missing, hivm=lowered.hivm)
    if job.tools.hivmc is None:
        return result
    run, binary = make_binary(job.tools, text, flags, folder, deadline - time.monotonic())
    if binary is None:
        lines = [*run.stdout.splitlines(), *run.stderr.splitlines()]
        failure = _failure(job, "hivmc", run, diagnostics(lines), lines)
        return replace(result, status=failure.status, stage=failure.stage, message=failure.message)
    return replace(result, linked=True, binary=binary)


def _failure(job: _Job, stage: str, run: Run, said: Diagnostics, lines: list[str]) -> CompileResult:
    reason = "\n".join([*map(str, said.overflows), *said.errors[:3]] or lines[:3])
    if run.fate == "time":
        reason = f"not done in {run.seconds:.0f} s"
    elif not reason:
        reason = f"exit status {run.code}, nothing said"
    status = "failed" if run.fate == "exit" else run.fate
    return _start(job, status, stage, f"kernel {job.kernel.__name__}: {reason}")
