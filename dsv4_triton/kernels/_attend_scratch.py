"""Scratch of `sparse_attention`: what its launches hand to each other."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import torch

from dsv4_triton.device import Family
from dsv4_triton.kernels._attend_plan import HEAD_DIM, Plan
from dsv4_triton.kernels._workspace import Part

_ALIGNED = 8
"""Runs of tokens are a multiple of this, so that each run stays aligned."""
RUN = 16
"""A run has at least as many tokens."""


@dataclass
class Scratch:
    """Gathered rows, of which `shared_rows` belong to requests and the others to tokens, and the bias of the tokens';
    scores and weights of the split chain; partial values and the logs of their denominators. Each only where the plan
    uses it."""

    shared_rows: int = 0
    rows: torch.Tensor | None = None
    own_rows: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    values: torch.Tensor | None = None
    lse: torch.Tensor | None = None

    def target(self, out: torch.Tensor, unused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where values and denominators go: `out`, which needs none, or the partial results."""
        return (out, unused) if self.values is None or self.lse is None else (self.values, self.lse)

    def first(self, tokens: int) -> Scratch:
        """The part of the first tokens."""
        own = (self.own_rows, self.bias, self.scores, self.weights, self.values, self.lse)
        return Scratch(self.shared_rows, self.rows, *(None if part is None else part[:tokens] for part in own))


def parts_of(plan: Plan, requests: int, run: int, heads: int, dtype: torch.dtype) -> dict[str, Part]:
    """Shapes and dtypes of the scratch of `run` tokens by name."""
    parts: dict[str, Part] = {}
    if plan.gathered:
        parts["rows"] = (shared_rows(plan, requests) + run * plan.own, HEAD_DIM), dtype
    if plan.own and plan.bias:
        parts["bias"] = (run, plan.own), torch.float32
    if not plan.launches:
        parts["scores"] = (run, heads, plan.gathered), torch.float32
        parts["weights"] = (run, heads, plan.gathered), dtype
    if plan.slots:
        parts["values"] = (run, plan.slots, heads, HEAD_DIM), torch.float32
        parts["lse"] = (run, plan.slots, heads), torch.float32
    return parts


def shared_rows(plan: Plan, requests: int) -> int:
    """Rows that are copied once for all tokens of their request."""
    return requests * (plan.gathered - plan.base) if plan.shared else 0


def run_length(plan: Plan, tokens: int, heads: int, dtype: torch.dtype, family: Family) -> int:
    """Tokens whose scratch fits the family's bound, at least 16; the same number for every core where that is close."""
    fit = family.scratch_bytes // max(1, plan.scratch(heads, dtype.itemsize))
    step = lcm(_ALIGNED, family.cube_cores)
    even = fit // step * step
    return min(tokens, even if 4 * even >= 3 * fit > 0 else max(RUN, fit // RUN * RUN))
