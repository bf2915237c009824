"""Exact static facts of a kernel launch from its final HIVM, and a time estimate from them.

    facts = count(result.hivm, A2, launch.grid, arguments_of(launch))
    estimate(facts, A2, minimum)

`count` evaluates the scalar code of every program with the launch's real arguments and counts what each program makes
the cube, the vector units and the transfer engines do. Nothing is measured: docs/cost_model.md says what is assumed.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from dsv4_triton.compiler.cost.emit import Emitter
from dsv4_triton.compiler.cost.estimate import Estimate, Work, estimate
from dsv4_triton.compiler.cost.exec import Machine
from dsv4_triton.compiler.cost.facts import Core, Counts, Facts
from dsv4_triton.compiler.cost.ops import Counter, Key
from dsv4_triton.compiler.cost.program import Program, identifier, namespace
from dsv4_triton.compiler.cost.rules import Rules
from dsv4_triton.compiler.cost.slice import Slice
from dsv4_triton.compiler.hivm import CostError, Function, Kernel
from dsv4_triton.device import Family

__all__ = ["Counts", "Estimate", "Facts", "Work", "arguments_of", "count", "estimate", "scratch_of"]

_EVALUATION_BUDGET = 1_500_000
"""Loop iterations that are evaluated before programs are sampled: a few seconds."""
_PROGRAM_WORK = 10
"""What a program costs besides its loops, in iterations."""
_MIN_SAMPLE = 4


def scratch_of(launch: Any, kept: Iterable[torch.Tensor]) -> set[str]:
    """Names of a recorded launch's tensors that share no memory with `kept`, an op's own arguments and results."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in kept}
    return {
        name
        for name, value in arguments_of(launch).items()
        if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in storages
    }


_lock = threading.Lock()
"""Generated functions count in cells that they share."""


class _Compiled:
    """Generated functions of one HIVM module."""

    def __init__(self, text: str):
        self.kernel = Kernel(text)
        self.parts: dict[str, Slice] = {}
        self.programs: dict[str, Program] = {}
        self.scopes: dict[str, dict[str, Any]] = {}
        for core, entry in self.kernel.entries.items():
            self._compile(core, entry)

    def _compile(self, core: str, entry: Function) -> None:
        program = Program()
        hidden = hidden_arguments(entry)
        names = [""] * len(hidden) + [f"#{i}" for i in range(len(entry.args) - len(hidden))]
        workspace = hidden.index("workspace") if "workspace" in hidden else -1
        wanted: dict[str, list[tuple[int, str]]] = {}
        for name, function in self.kernel.vector.items():
            part = Slice(function, Counter(function, Rules(function), [], -2), self.kernel.vector, {})
            wanted[name] = part.arguments()
            Emitter(program, part).emit(identifier(name))
        part = Slice(entry, Counter(entry, Rules(entry), names, workspace), self.kernel.vector, wanted)
        Emitter(program, part).emit(identifier(entry.name))
        self.parts[core] = part
        self.programs[core] = program
        self.scopes[core] = namespace(program)

    def depends(self, core: str, operation: str) -> bool:
        part = self.parts[core]
        return any(
            value in part.function.defined and part.function.defined[value][0].name == operation
            for value, _ in part.needed
        )


@lru_cache(maxsize=64)
def _compiled(text: str) -> _Compiled:
    return _Compiled(text)


def arguments_of(launch: Any) -> dict[str, Any]:
    """The run-time arguments of a recorded launch (`launches.Launch`), for `count`."""
    signature = launch.signature
    return {name: launch.arguments[name] for name in signature.types if name not in signature.constants}


def hidden_arguments(entry: Function) -> list[str]:
    """Kinds of the arguments that the compiler puts before the kernel's own (workspace, lock, base address)."""
    attributes = re.findall(r"\{[^{}]*\}", entry.op.props.get("arg_attrs") or "")
    kinds = [re.search(r"hacc.arg_type<(\w+)>", text) for text in attributes]
    hidden = [kind[1] if kind else "" for kind in kinds]
    return hidden[: next((i for i, kind in enumerate(hidden) if not kind), len(hidden))]


def count(
    hivm: str,
    family: Family,
    grid: tuple[int, ...],
    arguments: Mapping[str, Any],
    *,
    unwritten: Iterable[str] = (),
) -> Facts:
    """Facts of one launch.

    hivm: the module printed before `convert-hivm-to-std`. grid: programs along x, y, z. arguments: the run-time
    parameters by name, in the kernel's order and without those that its specialisation folded: CPU tensors and
    numbers. Integer tensors are read, unless `unwritten` names them. `CostError` when the text cannot be counted, is
    for other cores than the family's, or the arguments are not the kernel's.
    """
    cores = re.search(r'"CUBE_CORE_COUNT", (\d+)', hivm)
    if cores and int(cores[1]) != family.cube_cores:
        raise CostError(f"the HIVM text is for {cores[1]} cube cores, family {family.name} has {family.cube_cores}")
    with _lock:
        return _count(hivm, grid, arguments, set(unwritten))


def _count(hivm: str, grid: tuple[int, ...], arguments: Mapping[str, Any], unwritten: set[str]) -> Facts:
    compiled = _compiled(hivm)
    x, y, z = (*grid, 1, 1)[:3]
    grid3 = (x, y, z)
    programs = x * y * z
    cores: dict[str, Core] = {}
    assumed: dict[str, int] = {}
    plan = _Plan(compiled, arguments, grid3, unwritten)
    uniform = not any(compiled.depends(core, "hivm.hir.get_block_idx") for core in compiled.kernel.entries)
    blocks = [0] if uniform else plan.choose(programs)
    for core in compiled.kernel.entries:
        subs = (0, 1) if core == "aiv" and compiled.kernel.mix else (0,)
        for sub in subs:
            label = f"{core}{sub}" if len(subs) == 2 else core
            cores[label] = plan.run(core, blocks, sub)
    for machine in plan.machines.values():
        for what, number in machine.assumed.items():
            assumed[what] = assumed.get(what, 0) + number
    unsupported = sorted({name for core in cores.values() for kind, name in core.keys if kind == "unsupported"})
    return Facts(
        programs=programs, blocks=tuple(blocks), cores=cores,
        argument_bytes={n: v.numel() * v.element_size() for n, v in arguments.items() if isinstance(v, torch.Tensor)},
        workspace_bytes=compiled.kernel.workspace_bytes, unrolled=compiled.kernel.unrolled,
        one_vector_core=compiled.kernel.one_vector_core, uniform=uniform, assumed=assumed,
        unsupported=tuple(unsupported),
    )  # fmt: skip


def _named(key: Key, names: list[str]) -> Key:
    """`("read", "#2")` with the argument's name."""
    kind, name = key
    if name.startswith("#") and int(name[1:]) < len(names):
        return kind, names[int(name[1:])]
    return key


class _Plan:
    """One launch of compiled functions."""

    def __init__(
        self, compiled: _Compiled, arguments: Mapping[str, Any], grid: tuple[int, int, int], unwritten: set[str]
    ):
        self.compiled = compiled
        self.names = list(arguments)
        self.machines: dict[str, Machine] = {}
        for core, entry in compiled.kernel.entries.items():
            hidden = hidden_arguments(entry)
            values = [0] * len(hidden) + list(arguments.values()) + list(grid)
            if len(values) != len(entry.args):
                own = len(entry.args) - len(hidden) - len(grid)
                raise CostError(
                    f"kernel {entry.name} has {own} run-time arguments, got {len(arguments)}: {', '.join(arguments)}"
                )
            for (_, kind), (name, value) in zip(entry.args[len(hidden) :], arguments.items()):
                if kind.startswith("memref<") == isinstance(value, (int, float)):
                    raise CostError(f"kernel {entry.name}: argument {name} is {type(value).__name__}, not {kind}")
            skip = {len(hidden) + i for i, name in enumerate(arguments) if name in unwritten}
            self.machines[core] = Machine(compiled.programs[core], compiled.scopes[core], values, skip)

    def choose(self, programs: int) -> list[int]:
        """The programs to evaluate: all, or an even sample where that would take too long."""
        ticks = _PROGRAM_WORK
        for core, entry in self.compiled.kernel.entries.items():
            ticks += self.machines[core].run(entry.name, 0, 0)[1]
        number = max(_MIN_SAMPLE, _EVALUATION_BUDGET // ticks)
        if programs <= number:
            return list(range(programs))
        return sorted({i * (programs - 1) // (number - 1) for i in range(number)})

    def run(self, core: str, blocks: list[int], sub_block: int) -> Core:
        """Counts of programs on one kind of core."""
        machine, entry = self.machines[core], self.compiled.kernel.entries[core].name
        rows = [machine.run(entry, block, sub_block)[0] for block in blocks]
        keys = tuple(dict.fromkeys(key for row in rows for key in row))
        table = np.array([[row[key] for key in keys] for row in rows], dtype=np.int64).reshape(len(rows), len(keys))
        return Core(tuple(_named(key, self.names) for key in keys), table)
