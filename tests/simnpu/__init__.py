"""A simulated NPU: torch's device "npu" in host RAM, for tests on machines that have none.

What it is: an allocator with a memory limit that fills new memory with a pattern, streams and events, pinned memory and
generators, torch's CPU kernels run on the device's memory without copies, and graphs that are recorded and replayed.
While a graph is captured it refuses what a device cannot do then: values read on the host, blocking copies, waiting.

By itself everything runs when it is given, in that order. With SIMNPU_LATE work waits on its stream and is done as late
as events and waiting allow, and memory is used again as soon as it may be (`queue.h`), so that what nothing orders
comes out wrong.

What it is not: at most one piece of work runs at a time, and what a stream does is never seen half done; numbers are
those of a CPU; graphs keep all their intermediate tensors instead of sharing a pool.

`fake_torch_npu/` has the Python side, which a process gets with `environment()`, and metadata that call vLLM a build
without a device of its own, as it is on an NPU machine. Settings, as environment variables:
SIMNPU_LIBRARY (what `build` made), SIMNPU_SOC (chip, default Ascend910B2), SIMNPU_DEVICES (default 1),
SIMNPU_MEMORY_MB (of each device, default 4096), SIMNPU_FILL (byte of new memory, default 255: NaN, -1), SIMNPU_LATE
(default: work is done when it is given; `side`: work on other streams than the default one waits; `default`: the
default stream's; a number: any, by chance, with this seed).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
FAKE = SOURCES.parent / "fake_torch_npu"
ROOT = SOURCES.parents[1]


def compiler() -> str | None:
    """A C++20 compiler; None where there is none."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++"))), None)


def build() -> Path:
    """The simulator's library, compiled where that was not done yet for this torch and these sources."""
    import torch

    command = compiler()
    assert command is not None, "no C++ compiler"
    files = sorted(path for path in SOURCES.iterdir() if path.suffix in (".h", ".cpp"))
    digest = hashlib.sha256(torch.__version__.encode())
    for path in files:
        digest.update(path.read_bytes())
    library = Path(tempfile.gettempdir()) / f"simnpu-{os.getuid()}" / f"libsimnpu-{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    library.parent.mkdir(mode=0o700, exist_ok=True)
    torch_folder = Path(torch.__file__).parent
    unfinished = library.with_suffix(f".{os.getpid()}")
    run = subprocess.run(
        [
            *(command, "-std=c++20", "-O0", "-fPIC", "-shared", "-o", str(unfinished), str(SOURCES / "simnpu.cpp")),
            *(f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        ],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    unfinished.replace(library)  # test processes may build at once
    return library


def environment(library: Path, **settings: str | int) -> dict[str, str]:
    """The environment of a process that has the simulated NPU, with settings such as `SIMNPU_SOC`."""
    paths = [str(FAKE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "SIMNPU_LIBRARY": str(library),
        **{name: str(value) for name, value in settings.items()},
    }
