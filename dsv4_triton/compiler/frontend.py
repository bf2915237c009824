"""The front end shared by every target: a Triton kernel and its specialisation -> TTIR -> ttadapter MLIR.

Both steps are triton-ascend's own. TTIR is built in this process; `triton-adapter-opt`, which ships beside
triton-ascend's compiler, turns it into linalg on tensors ("ttadapter"). What differs between device families is an
argument (`FrontendOptions`), nothing is read from the environment, and no driver is touched.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4_triton.compiler import fixups

triton_lock = threading.RLock()
"""Held while Triton's own front end runs: it is not made for several threads."""


class KernelCompileError(RuntimeError):
    """A kernel cannot be compiled. The message names the kernel, the operation and the source line where known.

    `operation` is the MLIR operation or library function that is not supported, where that is the reason; `signal` is
    the number of the signal that ended a tool which crashed.
    """

    def __init__(self, message: str, operation: str = "", signal: int = 0):
        super().__init__(message)
        self.operation = operation
        self.signal = signal


@dataclass(frozen=True)
class FrontendOptions:
    """What a device family changes in the lowering.

    fp8: accept fp8 types in the language front end (triton-ascend's "910_95" switch).
    adapter_910_95: lower for A5 in the adapter.
    named_ops: keep linalg's named elementwise operations (what the NPU compiler wants).
    select_analysis, nd2nz_on_vector, force_simt_template, linearize: the adapter's switches of the same names.

    And what a launch changes:
    debug: keep `tl.device_assert`, which is dropped otherwise.
    sanitize_overflow: with debug, assert that integer arithmetic of less than 64 bits does not overflow.
    """

    fp8: bool = False
    adapter_910_95: bool = False
    named_ops: bool = True
    select_analysis: bool = False
    nd2nz_on_vector: bool = False
    force_simt_template: bool = False
    linearize: bool = False
    debug: bool = False
    sanitize_overflow: bool = True


HOST_OPTIONS = FrontendOptions(fp8=True, named_ops=False)
"""The A5 front end, for its fp8 types, and the adapter without A5's own operations."""


@dataclass(frozen=True)
class Signature:
    """One specialisation of a kernel.

    types: parameter name -> Triton type (`"*bf16"`, `"i32"`), constexprs excluded, in order.
    constants: parameter name -> value, for constexprs and for arguments folded into the code.
    attrs: triton's attribute descriptor, or None.
    """

    types: dict[str, str]
    constants: dict[str, Any] = field(default_factory=dict)
    attrs: Any = None


def triton_compiler() -> Any:
    """The module `triton.backends.ascend.compiler`; an import error says which package is missing."""
    try:
        from triton.backends.ascend import compiler
    except ImportError as error:
        raise ImportError(
            "the package triton-ascend is needed to compile kernels (pip install triton-ascend==3.2.0)"
        ) from error
    return compiler


def lower_to_ttir(kernel: Any, signature: Signature, options: FrontendOptions) -> str:
    """TTIR text of a `triton.jit` kernel with source locations, after triton's own TTIR passes.

    Raises `KernelCompileError` with the kernel's name and source line when the kernel is not valid Triton.
    """
    compiler = triton_compiler()
    from triton._C.libtriton import ir
    from triton.compiler import ASTSource, CompilationError

    npu_options = compiler.NPUOptions(debug=options.debug, sanitize_overflow=options.sanitize_overflow)
    source = ASTSource(kernel, dict(signature.types), dict(signature.constants), signature.attrs)
    with triton_lock, fixups.fp8_types(options.fp8):
        context = ir.context()
        ir.load_dialects(context)
        try:
            module = source.make_ir(npu_options, {"min_dot_size": compiler.min_dot_size(None)}, {}, context)
            # Without `debug` here, which would write a dump and say so on standard output.
            module = compiler.make_ttir(module, {"hash": ""}, compiler.NPUOptions())
        except CompilationError as error:
            text = _first_lines(str(error))
            raise KernelCompileError(f"kernel {kernel.__name__}{_python_line(kernel, text)}: {text}") from error
        # A process that forks later must not inherit the context's thread pool.
        context.disable_multithreading()
        return str(module)


def lower_to_adapter(
    kernel_name: str, ttir: str, options: FrontendOptions, *, generic: bool = False, locations: bool = False
) -> str:
    """ttadapter MLIR (linalg on tensors) of TTIR text, in MLIR's pretty or generic form, without or with locations.

    Raises `KernelCompileError` naming operation, kernel and line when the adapter does not support something.
    """
    switches = f"compile-on-910-95={options.adapter_910_95} force-simt-template={options.force_simt_template}"
    command = [
        str(Path(triton_compiler().__file__).parent / "triton-adapter-opt"),
        "-",
        *(["--triton-linearize"] if options.linearize else []),
        f"--discrete-mask-access-conversion={switches}",
        "--triton-to-annotation",
        f"--triton-to-unstructure={switches}",
        "--triton-to-hivm",
        "--triton-to-hfusion",
        "--triton-to-llvm",
        "--bubble-up-operation",
        f"--triton-to-linalg=global-kernel=false named-ops={options.named_ops} "
        f"enable-nd2nz-on-vector={options.nd2nz_on_vector} enable-select-analysis={options.select_analysis} "
        f"compile-on-910-95={options.adapter_910_95}",
        *(["--mlir-print-op-generic"] if generic else []),
        *(["--mlir-print-debuginfo"] if locations else []),
    ]
    return run_tool(command, ttir, kernel_name)


def source_line(kernel_name: str, ttir: str, options: FrontendOptions, operation: str) -> str:
    """` (file:line)` of the first use of an operation in the adapter's output; empty where that cannot be found."""
    text = lower_to_adapter(kernel_name, ttir, options, locations=True)
    places = locations(text)
    for line in text.splitlines():
        if operation in line and "func.func" not in line and (alias := re.search(r"loc\((#loc\d*)\)$", line.strip())):
            found = places.get(alias[1], ())
            # The kernel's own line is the last one.
            return f" ({found[-1]})" if found else ""
    return ""


def locations(text: str) -> dict[str, tuple[str, ...]]:
    """For each location alias of a module `file:line` of the operation, of the inlined call it is from, and so on."""
    aliases = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.MULTILINE))
    places = {}
    for alias, place in aliases.items():
        while nested := re.search(r"#loc\d*", place):
            place = place.replace(nested[0], aliases.get(nested[0], ""), 1)
        places[alias] = tuple(f"{file}:{line}" for file, line in re.findall(r'"([^"]+)":(\d+):\d+', place))
    return places


_ATTEMPTS = 3
"""Runs of a tool that crashes: triton-adapter-opt 3.2.0 crashes at random on some kernels, and not the next time."""


def run_tool(command: list[str], text: str, kernel_name: str) -> str:
    """Run an MLIR tool from standard input to standard output; `KernelCompileError` with its own message if it
    fails.
    """
    environment = {**os.environ, "MLIR_DISABLE_CRASH_REPORTER": "1"}
    for _ in range(_ATTEMPTS):
        result = subprocess.run(command, input=text, capture_output=True, text=True, env=environment)
        if result.returncode >= 0:
            break
    if result.returncode < 0:
        name = f"{Path(command[0]).name} crashed ({signal.Signals(-result.returncode).name})"
        raise KernelCompileError(
            f"kernel {kernel_name}: {name}: {_tool_error(result.stderr, text)}", signal=-result.returncode
        )
    if result.returncode > 0:
        raise KernelCompileError(
            f"kernel {kernel_name}: {_tool_error(result.stderr, text) or f'exit {result.returncode}'}"
        )
    return result.stdout


def _tool_error(stderr: str, text: str) -> str:
    """The failed assertion or the error lines of an MLIR tool, with the offending line of `text` where one is named."""
    if assertion := re.search(r"([\w.]+:\d+): .*(Assertion .*)", stderr):
        return f"{assertion[1]}: {assertion[2]}"
    lines = [line for line in stderr.splitlines() if "error:" in line]
    if not lines:
        return "\n".join(stderr.splitlines()[:5])
    message = []
    source = text.splitlines()
    for line in lines[:3]:
        place = re.match(r"(?:<stdin>|-):(\d+):\d+: ", line)
        if place and int(place[1]) <= len(source):
            line = f"{line[place.end() :]} (in `{source[int(place[1]) - 1].strip()[:160]}`)"
        message.append(line)
    return "\n".join(message)


def _python_line(kernel: Any, message: str) -> str:
    """` (file:line)` for triton's `at line:column`, which counts from the kernel's `def`."""
    from triton.runtime.jit import get_jit_fn_file_line

    file, first = get_jit_fn_file_line(kernel)
    relative = re.match(r"at (\d+):\d+", message)
    return f" ({file}:{first + int(relative[1]) - 1})" if relative else ""


def _first_lines(text: str, count: int = 12) -> str:
    return "\n".join(text.strip().splitlines()[:count])
