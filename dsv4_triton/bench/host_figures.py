"""Figures of the host driver, side by side in one run.

Three kernels are checked against PyTorch, then timed natively on one thread, in PyTorch on one thread and in Triton's
interpreter (one program there, times their number); a launch and cold builds are timed as well. Each figure is
printed with its goal. Native and PyTorch runs alternate, so that a busy machine slows both.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dsv4_triton.bench.measure import alternate, host_clock

INTERPRETER_GOAL = 100.0
TORCH_GOAL = 2.0
LAUNCH_GOAL_US = 80.0
BUILD_GOAL_S = 1.0
SECONDS = 1.0
"""How long a kernel and PyTorch take turns."""


class FigureError(RuntimeError):
    """A kernel's result is wrong, or there is nothing to compare its time with."""


@dataclass(frozen=True)
class Case:
    """One kernel at one shape: `run(grid)` fills `output`, `reference` computes the same, `tolerance` is absolute."""

    name: str
    grid: tuple[int, ...]
    run: Callable[[tuple[int, ...]], None]
    reference: Callable[[], torch.Tensor]
    output: torch.Tensor
    tolerance: float

    def launch(self) -> None:
        self.run(self.grid)


@dataclass(frozen=True)
class Row:
    """Milliseconds of one case, the 20th percentile of its turns, as whatever else runs here slows PyTorch's small
    operations most, and the cold build's seconds."""

    name: str
    native_ms: float
    torch_ms: float
    interpreter_ms: float
    build_s: float

    @property
    def of_torch(self) -> float:
        return self.native_ms / self.torch_ms

    @property
    def of_interpreter(self) -> float:
        return self.interpreter_ms / self.native_ms


def cases() -> list[Case]:
    """The cases of the figures; tensors are made here, from a fixed seed."""
    from dsv4_triton.bench import _host_kernels as kernels

    torch.manual_seed(0)
    a, b, c = torch.randn(256, 256), torch.randn(256, 256), torch.empty(256, 256)
    q, k, v = (torch.randn(1, 8, 512, 64).bfloat16() for _ in range(3))
    o = torch.empty_like(q)
    x, w = torch.randn(64, 4096).bfloat16(), torch.randn(4096).bfloat16()
    y = torch.empty_like(x)
    attention = torch.nn.functional.scaled_dot_product_attention
    return [
        Case(
            "matmul 256x256x256 fp32",
            (4, 4), lambda grid: kernels.matmul[grid](a, b, c, 256, 256, 256, BM=64, BN=64, BK=64),
            lambda: a @ b, c, 1e-4,
        ),
        Case(
            "flash attention 8x512x64 bf16",
            (4, 8), lambda grid: kernels.flash[grid](q, k, v, o, 512, 0.125, BM=128, BN=128, D=64),
            lambda: attention(q, k, v, scale=0.125), o, 1e-2,
        ),
        Case(
            "rms_norm 64x4096 bf16",
            (64,), lambda grid: kernels.rms_norm[grid](x, w, y, 4096, 1e-6, B=4096),
            lambda: torch.nn.functional.rms_norm(x, (4096,), w, 1e-6), y, 0.13,
        ),
    ]  # fmt: skip


def _check(case: Case) -> None:
    expected = case.reference()
    error = (case.output.float() - expected.float()).abs().max().item()
    if not error <= case.tolerance:
        raise FigureError(f"{case.name}: differs from PyTorch by {error:g}, allowed {case.tolerance:g}; no figures")


def _one_program(case: Case) -> float:
    """Milliseconds of one program; all programs of these grids do the same work, and the interpreter runs them in
    turn.
    """
    one = tuple(1 for _ in case.grid)
    return 1e3 * min(host_clock(lambda: case.run(one)) for _ in range(2))


def _interpreter_times() -> dict[str, float]:
    """Times in Triton's interpreter, which has to be chosen before kernels are decorated: another process."""
    command = [sys.executable, "-m", "dsv4_triton.bench.host_figures"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode != 0:
        raise FigureError(f"Triton's interpreter failed:\n{result.stderr[-2000:]}")
    return dict(json.loads(result.stdout.splitlines()[-1]))


def launch_microseconds() -> float:
    """Time of one launch of a kernel that does next to nothing, from `kernel[grid](...)` to its return."""
    from dsv4_triton.bench import _host_kernels as kernels

    x = torch.ones(16)

    def burst() -> None:
        for _ in range(1000):
            kernels.add[(1,)](x, x, x, 0, B=16)

    burst()
    return 1e3 * min(host_clock(burst) for _ in range(5))


def measure() -> tuple[list[Row], float]:
    """All rows, and the microseconds of a launch. `FigureError` when a result is wrong."""
    from dsv4_triton.compiler import host
    from dsv4_triton.compiler.host import runtime

    interpreter = _interpreter_times()
    threads = torch.get_num_threads()
    cache = os.environ.get("DSV4_TRITON_CACHE_DIR")
    rows = []
    with tempfile.TemporaryDirectory() as empty, host.installed():
        os.environ["DSV4_TRITON_CACHE_DIR"] = empty
        torch.set_num_threads(1)
        runtime.set_threads(1)
        try:
            launch = launch_microseconds()
            for case in cases():
                build = host_clock(case.launch)
                _check(case)
                times = alternate({"native": case.launch, "torch": case.reference}, SECONDS)
                native, reference = (1e3 * times[name].p20 for name in ("native", "torch"))
                rows.append(Row(case.name, native, reference, interpreter[case.name], build))
        finally:
            torch.set_num_threads(threads)
            runtime.set_threads(None)
            if cache is None:
                del os.environ["DSV4_TRITON_CACHE_DIR"]
            else:
                os.environ["DSV4_TRITON_CACHE_DIR"] = cache
    return rows, launch


def report(rows: list[Row], launch: float) -> str:
    """The figures as a table, each with its goal and whether it is met."""

    def mark(met: bool) -> str:
        return "ok" if met else "MISSED"

    heads = ("native ms", "torch ms", "interp. ms", "/ torch", "x interp.", "build s")
    lines = [f"{'one thread':32}" + "".join(f"{h:>{w}}" for h, w in zip(heads, (11, 11, 12, 9, 11, 9), strict=True))]
    for row in rows:
        lines.append(
            f"{row.name:32}{row.native_ms:11.3f}{row.torch_ms:11.3f}{row.interpreter_ms:12.1f}"
            f"{row.of_torch:9.2f}{row.of_interpreter:11.0f}{row.build_s:9.2f}"
        )
    lines.append(f"launch of an empty kernel: {launch:.1f} us")
    checks = [
        (f"at most {TORCH_GOAL:g} times PyTorch", all(r.of_torch <= TORCH_GOAL for r in rows)),
        (f"{INTERPRETER_GOAL:g} times faster than the interpreter", all(r.of_interpreter >= INTERPRETER_GOAL for r in
        rows)), (f"cold build under {BUILD_GOAL_S:g} s", all(r.build_s < BUILD_GOAL_S for r in rows)),
        (f"launch under {LAUNCH_GOAL_US:g} us", launch < LAUNCH_GOAL_US),
    ]  # fmt: skip
    lines += [f"{mark(met):7}{what}" for what, met in checks]
    return "\n".join(lines)


def as_dict(rows: list[Row], launch: float) -> dict[str, Any]:
    """The figures as `--json` has them."""
    return {"launch_us": launch, "rows": [asdict(row) for row in rows]}


if __name__ == "__main__":  # the process of `_interpreter_times`
    print(json.dumps({case.name: _one_program(case) * math.prod(case.grid) for case in cases()}))
