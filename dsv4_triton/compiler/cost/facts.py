"""The result of counting a launch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dsv4_triton.compiler.cost.ops import Key


class Counts(dict[Key, int]):
    """Counts by (kind, name); the kinds are listed in `cost.ops`. A key that is absent counts zero."""

    def __missing__(self, key: Key) -> int:
        return 0

    def total(self, kind: str) -> int:
        return sum(number for (k, _), number in self.items() if k == kind)

    def by(self, kind: str) -> dict[str, int]:
        """Name -> count of one kind."""
        return {name: number for (k, name), number in sorted(self.items()) if k == kind}


@dataclass(frozen=True)
class Core:
    """Counts of one kind of core: a row per evaluated program, over `keys`."""

    keys: tuple[Key, ...]
    rows: np.ndarray

    def program(self, row: int) -> Counts:
        return Counts({k: int(n) for k, n in zip(self.keys, self.rows[row]) if n})


@dataclass(frozen=True)
class Facts:
    """What a launch does. Core kinds: "aic" (cube), "aiv" (vector) or, in a mixed kernel, "aiv0" and "aiv1".

    blocks: numbers of the evaluated programs, as the device counts them; all rows of `cores` follow this order. One row
    for all programs where none differs from another; fewer than `programs` where a large grid is sampled (totals are
    then scaled).
    argument_bytes: sizes of the tensor arguments by name.
    unrolled: items that cube and vector cores of a mixed kernel pipeline, 0 for none.
    assumed: decisions on values that could not be known, with how often. unsupported: operations that are not counted.
    """

    programs: int
    blocks: tuple[int, ...]
    cores: dict[str, Core]
    argument_bytes: dict[str, int]
    workspace_bytes: int
    unrolled: int
    one_vector_core: bool
    uniform: bool
    assumed: dict[str, int] = field(default_factory=dict)
    unsupported: tuple[str, ...] = ()

    @property
    def mixed(self) -> bool:
        return "aic" in self.cores and len(self.cores) > 1

    @property
    def sampled(self) -> bool:
        return not self.uniform and len(self.blocks) < self.programs

    def program(self, block: int, core: str) -> Counts:
        """Counts of one evaluated program on one core; `KeyError` where that program was not evaluated."""
        if self.uniform and 0 <= block < self.programs:
            return self.cores[core].program(0)
        if block not in self.blocks:
            raise KeyError(f"program {block} was not evaluated")
        return self.cores[core].program(self.blocks.index(block))

    def launch(self, core: str | None = None) -> Counts:
        """Counts of the whole launch on one kind of core, or on all."""
        result = Counts()
        for name in self.cores if core is None else [core]:
            part = self.cores[name]
            total = part.rows.sum(axis=0)
            for key, number in zip(part.keys, total):
                scaled = int(number) * self.programs // len(self.blocks)
                if scaled:
                    result[key] = result[key] + scaled
        return result
