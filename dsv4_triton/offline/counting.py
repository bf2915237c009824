"""Compiled cases counted in processes of their own: what fails or takes too long is a finding about its case."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from dsv4_triton.bench.registry import Case
from dsv4_triton.compiler.ascend.jobs import Outcome, run_all
from dsv4_triton.offline import Compiled, Progress

_TOGETHER = 8
"""Cases that one process counts: it costs as much to start as to count one. Where it fails, each is counted alone."""
_SECONDS = 600.0


@dataclass(frozen=True)
class Counted:
    """A case, its compiled launches, and what was found of them; `problem` says why there is nothing."""

    case: Case
    launches: Sequence[Compiled]
    found: Any = None
    problem: str = ""


def problems_of(one: Compiled) -> list[str]:
    """What is wrong with a compiled launch: what its compile came to and why, or its faults and then its losses."""
    if one.launch is None or not one.result.ok:
        return [text for text in (one.result.status, one.result.message) if text]
    return [*one.result.faults, *one.result.losses]


def counted(
    compiled: Sequence[Compiled], count: Callable[[Case, Sequence[Compiled]], Any], *, jobs: int | None = None,
    progress: Progress | None = None,
) -> list[Counted]:  # fmt: skip
    """What `count` says of each case, in their order: anything that JSON can hold. `progress(done, total, what)`."""
    cases = [(case, list(group)) for case, group in groupby(compiled, lambda one: one.case)]
    ended: dict[int, Counted] = {}
    alone: list[range] = []

    def work(part: range) -> Callable[[], bytes]:
        return lambda: _encoded(count, [cases[index] for index in part])

    def run(parts: Sequence[range]) -> None:
        def finish(which: int, outcome: Outcome) -> None:
            part = parts[which]
            if outcome.fate == "done":
                for index, found in zip(part, json.loads(outcome.body), strict=True):
                    ended[index] = Counted(*cases[index], found)
            elif len(part) > 1:
                alone.extend(range(index, index + 1) for index in part)
            else:
                ended[part[0]] = Counted(*cases[part[0]], problem=f"not counted: {outcome.message or outcome.fate}")
            if progress is not None:
                progress(len(ended), len(cases), f"counted {cases[part[-1]][0]}")

        run_all([work(part) for part in parts], jobs or len(os.sched_getaffinity(0)), _SECONDS, finish, nullcontext())

    every = range(len(cases))
    run([every[first : first + _TOGETHER] for first in every[::_TOGETHER]])
    run(alone)
    return [ended[index] for index in every]


def _encoded(count: Callable[[Case, Sequence[Compiled]], Any], cases: Sequence[tuple[Case, list[Compiled]]]) -> bytes:
    """In a forked process: torch's own threads have stayed behind in its parent, and whatever is touched of the
    parent's objects is copied."""
    gc.disable()
    torch.set_num_threads(1)
    return json.dumps([count(case, group) for case, group in cases]).encode()
