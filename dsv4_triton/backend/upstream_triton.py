"""What vLLM 0.27.1 takes from Triton and triton-ascend 3.2.0 does not have, or has under another name.

vLLM asks for it where it finds one active Triton driver and is no CPU build: on every NPU machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

MODULES = ("triton.experimental", "triton.experimental.gluon", "triton.experimental.gluon.language")


def complete() -> None:
    """Give Triton the names that `vllm.triton_utils` imports, where they are missing. What is missing serves other
    devices alone: the modules are empty, and the decorator ends the import of what it decorates."""
    for name in MODULES:
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            parent, _, last = name.rpartition(".")
            sys.modules[name] = ModuleType(name)
            setattr(sys.modules[parent], last, sys.modules[name])
    core: Any = import_module("triton.language.core")
    if not hasattr(core, "_aggregate"):
        core._aggregate = _aggregate


def _aggregate(of: type) -> NoReturn:
    raise NotImplementedError(f"{of.__qualname__} needs triton.language.core._aggregate, which triton-ascend lacks")


def print_tuning() -> None:
    """Let Triton say what it tunes from now on, unless TRITON_PRINT_AUTOTUNING says otherwise."""
    os.environ.setdefault("TRITON_PRINT_AUTOTUNING", "1")


def watch_compilation(tell: Callable[[str, dict[str, Any]], None]) -> None:
    """Call `tell` with the name of each kernel that Triton compiles from now on, and with what its hook is given; the
    hook before it is called afterwards. An error of `tell` is raised by the launch."""
    from triton.runtime.jit import JITFunction

    former = JITFunction.compiled_hook

    def compiled(**what: Any) -> Any:
        tell(what["fn"].name, what)
        return None if former is None else former(**what)

    JITFunction.compiled_hook = compiled
