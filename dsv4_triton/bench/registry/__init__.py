"""One registry of cases: every public op at the shapes of DeepSeek-V4-Flash and -Pro, and small ones for the host.

    from dsv4_triton.bench.registry import select

    for case in select(kernel="hc_post", model="flash"):
        inputs = case.build(A2, fill=False)          # arguments by name; fill=True to run and compare
        case.launcher(**inputs.arguments)

Compile, tests, tune and bench read it. A new kernel is one `Entry` in the module of its group; a new shape is one more
(step, variant) pair of an entry.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cache

from dsv4_triton.bench.registry.case import Case, Entry, Inputs, Minimum
from dsv4_triton.bench.registry.compare import MismatchError, Tolerance
from dsv4_triton.bench.registry.models import MODELS

__all__ = [
    "MODELS",
    "Case",
    "Inputs",
    "Minimum",
    "MismatchError",
    "RegistryError",
    "Tolerance",
    "cases",
    "ops",
    "select",
    "unknown",
]


class RegistryError(ValueError):
    """A kernel, model or case that does not exist; the message lists what does."""


@cache
def _entries() -> dict[str, Entry]:
    from dsv4_triton.bench.registry import attention, compressor, indexer, metadata, mhc, moe

    entries = [entry for group in (mhc, attention, compressor, indexer, moe, metadata) for entry in group.ENTRIES]
    return {entry.op: entry for entry in sorted(entries, key=lambda entry: entry.op)}


def ops() -> tuple[str, ...]:
    """The public ops that have cases, in alphabetical order."""
    return tuple(_entries())


@cache
def cases() -> tuple[Case, ...]:
    """All cases, by op and then in the order of models, steps and variants."""
    return tuple(case for entry in _entries().values() for case in entry.cases(MODELS.values()))


def select(
    kernel: str | Sequence[str] | None = None,
    model: str | Sequence[str] | None = None,
    case: str | Sequence[str] | None = None,
    between: bool = False,
) -> list[Case]:
    """The cases of these ops, models and names; None is all of them. Names may be patterns: `*/decode/*/ctx1m*`.

    Without a model or a name the demo cases are included. Steps between those that are reported are left out unless
    `between` asks for them or a name fits no others. `RegistryError` for what does not exist.
    """
    found = every = list(cases())
    if model is not None:
        wanted = _known("model", _several(model), tuple(MODELS))
        found = [c for c in found if c.model in wanted]
    of_models = found
    if kernel is not None:
        wanted = _known("kernel", _several(kernel), ops())
        found = [c for c in found if c.op in wanted]
    usual = [c for c in found if between or not c.step.between]
    if case is None:
        return usual
    chosen: set[tuple[str, str]] = set()
    for pattern in _several(case):
        fitting = [c for c in usual if fnmatchcase(c.name, pattern)]
        fitting = fitting or [c for c in found if fnmatchcase(c.name, pattern)]
        if not fitting:
            if others := {c.op: None for c in of_models if fnmatchcase(c.name, pattern)}:
                raise RegistryError(_elsewhere(pattern, "kernel", _several(kernel or ()), others))
            if others := {c.model: None for c in every if fnmatchcase(c.name, pattern)}:
                raise RegistryError(_elsewhere(pattern, "model", _several(model or ()), others))
            raise RegistryError(unknown("case", pattern, dict.fromkeys(c.name for c in usual)))
        chosen |= {(c.op, c.name) for c in fitting}
    return [c for c in found if (c.op, c.name) in chosen]


def _several(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _known(kind: str, names: list[str], existing: tuple[str, ...]) -> set[str]:
    for name in names:
        if name not in existing:
            raise RegistryError(unknown(kind, name, existing))
    return set(names)


def _elsewhere(pattern: str, kind: str, asked: list[str], others: Iterable[str]) -> str:
    return f"there is no case {pattern!r} of {kind} {', '.join(asked)}, only of {', '.join(others)}"


def unknown(kind: str, name: str, existing: Iterable[str]) -> str:
    """A sentence that says that `name` does not exist, and what does."""
    existing = list(existing)
    close = difflib.get_close_matches(name, existing, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"unknown {kind} {name!r}{hint} There are: {', '.join(existing) or 'none'}"
