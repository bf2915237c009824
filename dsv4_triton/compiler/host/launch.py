"""Launching: arguments of `kernel[grid](...)` -> specialisation (`binding`) -> compiled entry -> run.

Compiled specialisations are found by the key that the kernel's binder makes of the arguments.
"""

from __future__ import annotations

import ast
import inspect
import os
import struct
import textwrap
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dsv4_triton.compiler.binding import Binder
from dsv4_triton.compiler.frontend import HOST_OPTIONS, FrontendOptions, KernelCompileError, Signature
from dsv4_triton.compiler.host import build, cache, report, runtime
from dsv4_triton.compiler.host.messages import Message

_SCALAR_FORMATS = {"i1": "?7x", "fp16": "e6x", "fp32": "f4x", "fp64": "d", "u64": "Q"}


class HostKernel:
    """One compiled specialisation."""

    def __init__(self, name: str, signature: Signature, key: tuple[Any, ...], pack: Callable[..., bytes]):
        self.name = name
        self.signature = signature
        self.key = key
        self.pack = pack
        self.entry: Any = None
        self.address = 0
        self.arena_bytes = 0
        self.messages: tuple[Message, ...] = ()
        # A running estimate of one program's time; the start makes the first launch a parallel one.
        self.program_ns = 1e5


def _debug_of_decorator(kernel: Any) -> bool:
    """Whether a kernel was made by `triton.jit(debug=True)`.

    triton-ascend 3.2.0 forgets that argument, so it is read from the source; releases that keep it need no such thing.
    """
    known = getattr(kernel, "debug", None)
    if known is not None:
        return bool(known)
    source = textwrap.dedent(inspect.getsource(kernel.fn))
    if "debug" not in source:
        return False
    for decorator in ast.parse(source).body[0].decorator_list:  # type: ignore[attr-defined]
        for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
            if keyword.arg == "debug":
                return bool(eval(compile(ast.Expression(keyword.value), "<debug>", "eval"), kernel.fn.__globals__))
    return False


class Launcher:
    """Binds, specialises, compiles on first use and runs one `triton.jit` kernel."""

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.name = kernel.__name__
        kernel.cache_key  # noqa: B018  (fills kernel.hash and kernel.used_global_vals)
        self.source_hash = kernel.hash
        self.cache: dict[tuple[Any, ...], HostKernel] = {}
        self.lock = threading.RLock()
        self.globals = [(name, value, scope) for (name, _), (value, scope) in kernel.used_global_vals.items()]
        self.binder = Binder(kernel)
        self.bind = self.binder.bind
        self.always_debug = os.environ.get("TRITON_DEBUG", "0") not in ("", "0")
        self.debug = self.always_debug or _debug_of_decorator(kernel)

    def __call__(self, grid: Any, warmup: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> HostKernel | None:
        kernel = self.kernel
        for hook in kernel.pre_run_hooks:
            hook(*args, **kwargs)
        key, values, extra = self.bind(*args, **kwargs)
        options = HOST_OPTIONS
        if extra or self.debug:
            options = self._options(extra)
            if options is not HOST_OPTIONS:
                key = (*key, options)
        compiled = self.cache.get(key)
        if compiled is None:
            compiled = self._compile(key, options, args, kwargs)
        for name, value, scope in self.globals:
            now = scope.get(name)
            if now is not value and now != value:
                raise RuntimeError(
                    f"kernel {self.name}: global {name} changed from {value} to {now} since it was compiled"
                )
        if warmup:
            return compiled
        x, y, z = self.binder.grid(grid, lambda: self.binder.named(*args, **kwargs))
        count = x * y * z
        if count == 0:
            return compiled
        if compiled.messages:
            report.run(compiled, values, count, x, y, z)
        else:
            runtime.run(compiled, compiled.pack(*values), count, x, y, z)
        return compiled

    def _options(self, extra: dict[str, Any]) -> FrontendOptions:
        """What a launch with these keywords asks of the front end."""
        given = self.binder.options(extra)
        if not (self.always_debug or given.get("debug", self.debug)):
            return HOST_OPTIONS
        return replace(HOST_OPTIONS, debug=True, sanitize_overflow=bool(given.get("sanitize_overflow", True)))

    def _compile(
        self, key: tuple[Any, ...], options: FrontendOptions, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> HostKernel:
        with self.lock:
            if key in self.cache:
                return self.cache[key]
            signature = self.binder.signature(key, self.binder.named(*args, **kwargs))
            slots = {name: i for i, name in enumerate(signature.types)}
            layout = "<" + "".join(
                "Q" if kind[0] == "*" else _SCALAR_FORMATS.get(kind, "q") for kind in signature.types.values()
            )
            digest = cache.key(self.kernel, signature, slots, options)
            try:
                code = cache.load(digest)
                if code is None:
                    code = build.build(self.kernel, signature, slots, f"k{digest[:24]}", options)
                    cache.store(digest, code)
            except KernelCompileError as error:
                missing = [p.name for i, p in enumerate(self.binder.runtime) if key[i] == "none"]
                if missing:
                    raise KernelCompileError(f"{error}\n(arguments that are None: {', '.join(missing)})") from error
                raise
            compiled = HostKernel(self.name, signature, key, struct.Struct(layout + "Q" * bool(code.messages)).pack)
            compiled.entry, compiled.address = runtime.load(code)
            compiled.arena_bytes = code.arena_bytes
            compiled.messages = code.messages
            self.cache[key] = compiled
            return compiled
