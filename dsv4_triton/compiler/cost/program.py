"""What is generated from a kernel to count it, and the counts that its executions stand for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dsv4_triton.compiler.cost.facts import Counts
from dsv4_triton.compiler.cost.ops import FUNCTIONS, Key
from dsv4_triton.compiler.hivm import Function, Memref
from dsv4_triton.compiler.mlir import Op


class Program:
    """The generated functions of one kernel: cells C with the counts they stand for, tallies, and executed calls."""

    def __init__(self) -> None:
        self.cells: list[dict[Key, int]] = []
        self.tallies: list[Tally] = []
        self.calls: list[Call] = []
        self.deferred: dict[str, int] = {}
        """Vector functions without arguments that matter: cells of K, expanded once at the end."""
        self.sources: list[str] = []

    def cell(self) -> int:
        self.cells.append({})
        return len(self.cells) - 1

    def expand(self, cells: list[int], tallies: list[dict[Any, int]], known: Callable[[Any], Any]) -> Counts:
        """The counts that cells and tallies stand for; `known` replaces unknown numbers."""
        counts = Counts()
        for cell, executions in zip(self.cells, cells):
            for key, number in cell.items() if executions else ():
                counts[key] += number * executions
        for tally, met in zip(self.tallies, tallies):
            function = FUNCTIONS[tally.function]
            for arguments, executions in met.items():
                results = function(*known(arguments))
                for position, key in tally.keys:
                    if results[position]:
                        counts[key] += results[position] * executions
        return counts


@dataclass
class Tally:
    """How often a counting function meets which arguments, and the counts that its results go to."""

    function: str
    keys: list[tuple[int, Key]]


class Call:
    """An operation to execute, and for each operand its memref type with the kernel argument it belongs to, or None."""

    def __init__(self, op: Op, operands: list[tuple[Memref, int] | None], callee: Function | None):
        self.op = op
        self.operands = operands
        self.callee = callee


def identifier(name: str) -> str:
    return "f_" + "".join(c if c.isalnum() else "_" for c in name)


def namespace(program: Program) -> dict[str, Any]:
    """Compiled functions of a program; the caller adds what they call (`cost.exec.Machine.bind`)."""
    scope: dict[str, Any] = {
        "C": [0] * len(program.cells), "K": [0] * len(program.deferred),
        **{f"T{i}": defaultdict(int) for i in range(len(program.tallies))},
    }  # fmt: skip
    exec(compile("\n".join(program.sources), "<counts>", "exec"), scope)
    return scope
