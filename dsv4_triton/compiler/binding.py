"""Arguments of `kernel[grid](...)` -> the kernel's specialisation, as Triton's own launch makes it.

A launch has to cost tens of microseconds, so each kernel gets a generated Python function that classifies its arguments
without loops; the classes form the key of a specialisation. The host driver and the recorder of offline compiles share
this module.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from dsv4_triton.compiler.frontend import Signature

_POINTERS = {
    torch.bool: "*i1", torch.int8: "*i8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
    torch.uint8: "*u8", torch.uint16: "*u16", torch.uint32: "*u32", torch.uint64: "*u64",
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5",
}  # fmt: skip


@lru_cache(maxsize=1)
def _options() -> frozenset[str]:
    """Keyword arguments of a launch that are options of the NPU compiler."""
    from triton.backends.ascend.compiler import NPUOptions

    return frozenset(NPUOptions.__dataclass_fields__) | {"maxnreg", "stream"}


class KernelArgumentError(TypeError):
    """An argument that a kernel cannot take; the message names kernel and argument."""


class Binder:
    """Binds and classifies the arguments of one `triton.jit` kernel.

    bind(*args, **kwargs) -> (key, values, extra): the classes of all arguments, addresses and numbers of the run-time
    arguments, and keywords that are no parameters. named(*args, **kwargs) -> {parameter: value}, defaults included.
    """

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.name = kernel.__name__
        self.runtime = [p for p in kernel.params if not p.is_constexpr]
        self.constexpr = [p for p in kernel.params if p.is_constexpr]
        self.bind = self._generate_bind()

    def _generate_bind(self) -> Callable[..., Any]:
        """`bind(*args, **kwargs) -> (key, values, extra keywords)`, with every parameter spelled out."""
        names = [p.name for p in self.kernel.params]
        scope: dict[str, Any] = {"classify": self._classify, "Tensor": torch.Tensor, "Parameter": torch.nn.Parameter}
        head, lines = [], []
        for p in self.kernel.params:
            if p.default is inspect.Parameter.empty:
                head.append(p.name)
            else:
                scope[f"default_{p.name}"] = p.default
                head.append(f"{p.name}=default_{p.name}")
        keys, values = [], []
        for i, p in enumerate(self.runtime):
            specialise = not p.do_not_specialize
            lines += [
                f"    t = type({p.name})",
                f"    if (t is Tensor or t is Parameter) and {p.name}.is_cpu:",
                f"        k{i} = {p.name}.dtype; v{i} = {p.name}.data_ptr()",
                f"        if not v{i}: k{i}, v{i} = classify({i}, {p.name})",
            ]
            if not p.annotation_type:
                one = f" and {p.name} != 1" if specialise else ""
                lines += [
                    f"    elif t is int and -0x80000000 <= {p.name} <= 0x7fffffff{one}:",
                    f"        k{i} = 'i32'; v{i} = {p.name}",
                    "    elif t is float:",
                    f"        k{i} = 'fp32'; v{i} = {p.name}",
                ]
            lines += ["    else:", f"        k{i}, v{i} = classify({i}, {p.name})"]
            keys.append(f"k{i}")
            values.append(f"v{i}")
        for p in self.constexpr:
            keys.append(f"({p.name} if type({p.name}) is int else (type({p.name}), {p.name}))")
        arguments = ", ".join([*head, "**extra"])
        body = "\n".join(lines)
        key = "".join(f"{k}, " for k in keys)
        value = "".join(f"{v}, " for v in values)
        # The function has the kernel's name, so that Python's own message for a missing argument names the kernel.
        source = f"def {self.name}({arguments}):\n{body}\n    return ({key}), ({value}), extra\nbind = {self.name}\n"
        source += f"def named({arguments}):\n    return {{{', '.join(f'{n!r}: {n}' for n in names)}}}\n"
        exec(compile(source, f"<launcher of {self.name}>", "exec"), scope)
        self.named: Callable[..., dict[str, Any]] = scope["named"]
        return scope["bind"]

    def _error(self, index: int, problem: str) -> KernelArgumentError:
        return KernelArgumentError(f"kernel {self.name}: argument {self.runtime[index].name!r} {problem}")

    def _classify(self, index: int, value: Any) -> tuple[Any, Any]:
        """Key part and slot value of an argument that the generated code does not handle itself."""
        parameter = self.runtime[index]
        if value is None:
            return "none", 0
        if hasattr(value, "data_ptr") and hasattr(value, "dtype"):
            base = getattr(value, "base", value)
            if isinstance(base, torch.Tensor) and base.device.type != "cpu":
                raise self._error(index, f"is on device {str(base.device)!r}; CPU tensors are needed")
            kind = value.dtype
            if kind not in _POINTERS:
                from triton.runtime.jit import type_canonicalisation_dict

                name = type_canonicalisation_dict.get(str(kind).split(".")[-1])
                if name is None:
                    raise self._error(index, f"has dtype {kind}, which Triton kernels cannot take")
                kind = f"*{name}"
            pointer = value.data_ptr()
            if pointer == 0 and isinstance(base, torch.Tensor) and base.numel() > 0:
                raise self._error(index, "is a tensor without storage (null pointer)")
            return kind, pointer
        annotated = parameter.annotation_type
        if isinstance(value, bool):
            return annotated or "i1", value
        if isinstance(value, float) and not annotated:
            return "fp32", value
        if hasattr(value, "__index__") and not hasattr(value, "__len__"):
            number = value.__index__()
            if annotated:
                return self._annotated(index, annotated, number)
            if number == 1 and not parameter.do_not_specialize:
                return ("one", "i32"), 1
            if -(2**31) <= number < 2**31:
                return "i32", number
            if -(2**63) <= number < 2**63:
                return "i64", number
            if number < 2**64:
                return "u64", number
            raise self._error(index, f"is {number}, which needs more than 64 bits")
        if hasattr(value, "__float__") and not hasattr(value, "__len__"):
            return "fp32", float(value)
        raise self._error(index, f"has type {type(value).__name__}; a tensor, a number or None is needed")

    def _annotated(self, index: int, kind: str, number: int) -> tuple[Any, int]:
        bits = int(kind[1:])
        low, high = (0, 2**bits) if kind[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1))
        if not low <= number < high:
            raise self._error(index, f"is {number}, outside {self.runtime[index].annotation}")
        if number == 1 and not self.runtime[index].do_not_specialize:
            return ("one", kind), 1
        return kind, number

    def options(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Options of the NPU compiler among a launch's keywords; `KeyError` for anything else."""
        if not extra.keys() <= _options():
            unknown = sorted(extra.keys() - _options())
            raise KeyError(f"kernel {self.name}: keyword arguments {unknown} are neither parameters nor options")
        return extra

    def grid(self, grid: Any, named: Callable[[], dict[str, Any]]) -> tuple[int, int, int]:
        """The extents of a launch, all at least 0; `named()` is called where the grid is a function."""
        if callable(grid):
            grid = grid(named())
        try:
            x, y, z = (*map(operator.index, grid), 1, 1)[: max(3, len(grid))]
        except (TypeError, ValueError):
            problem = f"grid is {grid!r}, it must be a tuple of one to three integers"
            raise TypeError(f"kernel {self.name}: {problem}") from None
        if min(x, y, z) < 0:
            raise ValueError(f"kernel {self.name}: grid {(x, y, z)} has a negative extent")
        return x, y, z

    def signature(self, key: tuple[Any, ...], named: dict[str, Any], attrs: Any = None) -> Signature:
        """The specialisation that a key of `bind` stands for."""
        types: dict[str, str] = {}
        constants: dict[str, Any] = {p.name: named[p.name] for p in self.constexpr}
        for i, p in enumerate(self.runtime):
            kind = key[i]
            if isinstance(kind, tuple):
                constants[p.name] = 1
                kind = kind[1]
            elif kind == "none":
                constants[p.name] = None
                kind = "*i8"
            elif isinstance(kind, torch.dtype):
                if kind not in _POINTERS:
                    raise self._error(i, f"has dtype {kind}, which Triton kernels cannot take")
                kind = _POINTERS[kind]
            types[p.name] = kind
        return Signature(types, constants, attrs)
