"""What is tuned, and in which order configurations are tried."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from dsv4_triton import kernels, offline
from dsv4_triton.autotune.space import DECLARED, Space, trial
from dsv4_triton.autotune.trials import GAIN, Target, Verdict, sizes
from dsv4_triton.bench.registry import Case, RegistryError, ops, select, unknown
from dsv4_triton.compiler.launches import recording
from dsv4_triton.device import HOST, Family

FULL = 24
"""Up to so many configurations are all tried; of more, one parameter is varied at a time."""
ROUNDS = 2
CHECK_BYTES = 3 << 29
"""Arguments of a case that a winner is held to the reference with."""


class OutOfTimeError(Exception):
    """The time for the whole run is used up."""


@dataclass
class Found:
    """What trying one target gave. `verdicts` are in the order of trying, the default's first; `dropped` configurations
    cannot fit by arithmetic, `space` is how many there are. `file` has the winner, or `note` says why none has. Of what
    is not `finished`, as the run ended in its midst, there are only the tries that ended."""

    target: Target
    verdicts: list[Verdict] = field(default_factory=list)
    winner: Verdict | None = None
    file: Path | None = None
    note: str = ""
    space: int = 0
    dropped: int = 0
    finished: bool = True

    @property
    def default(self) -> Verdict:
        config = self.target.default
        ended = (one for one in self.verdicts if one.config == config)
        return next(ended, Verdict(config, "unfinished", "the run ended before this try did"))

    @property
    def gain(self) -> float:
        """How many times faster than the default the winner is."""
        if self.winner is None or not self.default.ok:
            return 1.0
        return self.default.microseconds / self.winner.microseconds

    def reject(self, verdict: Verdict) -> None:
        """Put the verdict of a later gate in place of that of an earlier one."""
        self.verdicts = [verdict if one.config == verdict.config else one for one in self.verdicts]

    def ranked(self) -> list[Verdict]:
        """What is better than the default by enough, the best first. An estimate is of the work alone, so what makes
        more launches than the default, each with a start of its own, is not better."""
        good, default = [one for one in self.verdicts if one.ok and one.config != self.default.config], self.default
        if default.ok:
            good = [one for one in good if one.microseconds * GAIN < default.microseconds]
            good = [one for one in good if one.launches <= default.launches]
        return sorted(good, key=lambda one: (one.microseconds, one.effort))


def spaces() -> dict[str, Space]:
    """The spaces of all kernels by name, in alphabetical order."""
    for module in pkgutil.iter_modules(kernels.__path__):
        importlib.import_module(f"{kernels.__name__}.{module.name}")
    return dict(sorted(DECLARED.items()))


def targets(
    cases: Sequence[Case],
    family: Family,
    progress: Callable[[int, int, str], None],
    only: Container[str] | None = None,
) -> list[Target]:
    """Every kernel, or `only` those, at every bucket of sizes that the cases ask for; each once, with a case of the
    kernel's own op if one asks for it, even if it is none of `cases`: in the time of another op its own would be lost.
    """
    found: dict[str, Target] = {}
    cases = [case for case in cases if case.runs_on(family)]
    for number, case in enumerate(cases):
        progress(number, len(cases), f"asking {case}")
        for space, _, key in asked(case, family):
            if only is not None and space.name not in only:
                continue
            target = Target(space, family, key, case)
            present = found.get(target.name)
            if present is None or (present.case.op != space.name and case.op == space.name):
                found[target.name] = target
    return [_in_own_op(target) for target in found.values()]


def _in_own_op(target: Target) -> Target:
    """`target` with a case of the kernel's own op and as many tokens, if one asks for it."""
    name, family = target.space.name, target.family
    if target.case.op == name or name not in ops():
        return target
    for case in select(kernel=name, model=target.case.model, between=True):
        if case.step.tokens == target.case.step.tokens and case.runs_on(family):
            for space, _, key in asked(case, family):
                own = Target(space, family, key, case)
                if own.name == target.name:
                    return own
    return target


def named(
    names: Sequence[str],
    models: Sequence[str],
    cases: Sequence[str],
    family: Family,
    progress: Callable[[int, int, str], None],
) -> list[Target]:
    """The targets of these ops, and those of these kernels in the cases of any op; without a name all. Models and cases
    are those of `offline.choose`, steps between the reported ones included; `RegistryError` for what does not exist."""
    for name in names:
        if name not in ops() and name not in spaces():
            raise RegistryError(unknown("kernel", name, sorted({*ops(), *spaces()})))
    alone = {name for name in names if name not in ops()}
    of_ops = [name for name in names if name not in alone]
    reaching = [op for op in ops() if alone & launched(op)]
    chosen = offline.choose([*of_ops, *reaching], models, cases, between=True)
    found = targets([case for case in chosen if not names or case.op in of_ops], family, progress)
    if alone:
        there = {target.name for target in found}
        others = targets([case for case in chosen if case.op in reaching], family, progress, alone)
        found += [target for target in others if target.name not in there]
    return found


@cache
def launched(op: str) -> frozenset[str]:
    """The spaces that an op can ask: those declared in its module, and in the modules that it has functions of."""
    declared: dict[str, set[str]] = {}
    for name, space in spaces().items():
        declared.setdefault(space.default.__module__, set()).add(name)
    found: set[str] = set()
    waiting, seen = [f"{kernels.__name__}.{op}"], set[str]()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        found |= declared.get(module, set())
        for value in vars(importlib.import_module(module)).values():
            used = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(used, str) and used.startswith(f"{kernels.__name__}."):
                waiting.append(used)
    return frozenset(found)


def asked(case: Case, family: Family) -> list[Any]:
    """What the launchers of a case ask their spaces; nothing runs but the op's planners."""
    with trial() as tried:
        if family is HOST:
            inputs = case.build(family, fill=False)
            with recording():
                case.launcher(**inputs.arguments)
        else:
            offline.record(case, family)
    return tried.asked


def search(
    target: Target, seeds: Iterable[Mapping[str, Any]], evaluate: Callable[..., list[Verdict]],
    tries: int | None = None, *, own: Iterable[Mapping[str, Any]] = (), fixed: Container[str] = (),
) -> Found:  # fmt: skip
    """Try the default together with `own`, which the result takes the place of, then `seeds`, then the space: whole
    where it is small, else one parameter after the other from the best so far; at most `tries`, `own` whatever that is.
    The space is without other values of the parameters `fixed`, which stay as the default or a seed has them.
    `evaluate(configs)` gives their verdicts; `OutOfTimeError` of it ends the search, and what is known by then counts.
    """
    space, family, key = target.space, target.family, target.key
    found, seen = Found(target), set[str]()

    def attempt(configs: Iterable[Mapping[str, Any]], limit: int | None = None) -> None:
        fresh = []
        for config in configs:
            name = json.dumps(config, sort_keys=True)
            if name not in seen and not space.fits(family, key, config):
                seen.add(name)
                fresh.append(dict(config))
        if limit is not None:
            fresh = fresh[: max(0, limit - len(found.verdicts))]
        if fresh:
            found.verdicts += evaluate(fresh)

    def usual(configs: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        completed = (space.completed(family, key, config) for config in configs)
        return (config for config in completed if not space.unlike(family, key, config))

    usable: list[dict[str, Any]] = []
    for config, problem in space.configs(family, key, fixed):
        found.space += 1
        found.dropped += bool(problem)
        if not problem and len(usable) <= FULL:
            usable.append(config)
    default = target.default
    try:
        attempt([default, *usual(own)])
        attempt(usual(seeds), tries)
        if found.space - found.dropped <= FULL:
            attempt(sorted(usable, key=partial(_changes, default)), tries)
        else:
            choices = {name: v for name, v in space.candidates(family, key).items() if name not in fixed}
            for _ in range(ROUNDS):
                before = len(found.verdicts)
                for name, values in choices.items():
                    attempt(({**_best(found, default), name: value} for value in values), tries)
                if len(found.verdicts) == before:
                    break
    except OutOfTimeError:
        if not found.verdicts:
            raise
    return found


def _changes(default: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, int]:
    """How many options of the compiler are not the default's, and how many parameters at all: a search that is cut
    short has varied tile sizes first, one at a time."""
    changed = [name for name, value in config.items() if value != default[name]]
    return sum(not name.isupper() for name in changed), len(changed)


def _best(found: Found, default: dict[str, Any]) -> dict[str, Any]:
    ranked = found.ranked()
    return ranked[0].config if ranked else default


def check_cases(target: Target) -> Iterator[Case]:
    """Cases on which a winner is held to the reference, in the order of trying: of the same op, model and kind, with
    several tokens and the fewest bytes, its own among them; then those of the demo checkpoint."""
    case = target.case
    variants = [other for other in select(kernel=case.op, model=case.model) if other.variant == case.variant]
    sized = []
    for other in {one.name: one for one in (*variants, case)}.values():
        if other.runs_on(target.family):
            size, _ = sizes(other, target.family)
            sized.append((other.step.tokens < 5, size, other.step.tokens, other))
    yield from (entry[-1] for entry in sorted(sized, key=lambda entry: entry[:3]) if entry[1] <= CHECK_BYTES)
    yield from (other for other in select(kernel=case.op, model="demo") if other.runs_on(target.family))


def spaces_of(found: Iterable[Found]) -> dict[Space, list[Found]]:
    """Results by kernel, in the order of their names."""
    groups: dict[Space, list[Found]] = {}
    for one in sorted(found, key=lambda one: one.target.space.name):
        groups.setdefault(one.target.space, []).append(one)
    return groups
