"""What a case is: an op, a model and a step; how its arguments are built and its result is checked."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4_triton.bench.registry.compare import Tolerance, compare
from dsv4_triton.bench.registry.make import Maker
from dsv4_triton.bench.registry.models import Model
from dsv4_triton.bench.registry.steps import Step
from dsv4_triton.config import ModelSettings
from dsv4_triton.device import Family

EAGER = "eager"
"""The baseline every case has: its reference in plain PyTorch."""


@dataclass(frozen=True)
class Job:
    """What the builder and the formulas of an entry read."""

    model: ModelSettings
    step: Step
    variant: str
    family: Family

    @property
    def tokens(self) -> int:
        return self.step.tokens


@dataclass(frozen=True)
class Minimum:
    """The least a job needs: `bytes` to and from memory with every value moved once, `macs` multiply-accumulates.

    `operands` is the dtype of the products' inputs in memory; none for jobs without a matrix product.
    """

    bytes: int
    macs: int = 0
    operands: torch.dtype | None = None


@dataclass(frozen=True)
class Inputs:
    """Arguments by name, for the launcher and the reference alike; `written` are those that the op writes in place."""

    arguments: dict[str, Any]
    written: tuple[str, ...] = ()

    def copy(self) -> Inputs:
        """The same arguments, with tensors of their own where the op writes."""
        return Inputs(self.arguments | {name: _clone(self.arguments[name]) for name in self.written}, self.written)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self.arguments.items() if isinstance(value, torch.Tensor)}


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of the original."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def outcome(inputs: Inputs, returned: Any) -> dict[str, torch.Tensor]:
    """What a call left behind: the tensors it returned and those it wrote."""
    results = returned if isinstance(returned, tuple) else (returned,)
    left = {f"result {i}": tensor for i, tensor in enumerate(results) if tensor is not None}
    return left | {name: inputs.arguments[name] for name in inputs.written}


@dataclass(frozen=True)
class Entry:
    """One op of the registry.

    `shapes` lists the (step, variant) pairs of a model; a variant is a kind of layer or of call, "" for the only one.
    `build` makes the arguments, `minimum` is the formula of the least work. `outcome` prepares what is compared where
    the plain results cannot be (quantised values are compared after dequantisation). `baselines` are names of other
    implementations of the same job.
    """

    op: str
    shapes: Callable[[Model], Iterable[tuple[Step, str]]]
    build: Callable[[Job, Maker], dict[str, Any]]
    minimum: Callable[[Job], Minimum]
    tolerance: Tolerance
    written: tuple[str, ...] = ()
    outcome: Callable[[Inputs, Any], dict[str, torch.Tensor]] = outcome
    baselines: tuple[str, ...] = ()

    def cases(self, models: Iterable[Model]) -> list[Case]:
        return [Case(self, model, step, variant) for model in models for step, variant in self.shapes(model)]


@dataclass(frozen=True)
class Case:
    """One op doing one step of one model."""

    entry: Entry = field(repr=False)
    of: Model = field(repr=False)
    step: Step = field(repr=False)
    variant: str = ""

    @property
    def op(self) -> str:
        return self.entry.op

    @property
    def model(self) -> str:
        return self.of.name

    @property
    def phase(self) -> str:
        """What the step does: decode or prefill."""
        return self.step.name.split("/")[0]

    @property
    def name(self) -> str:
        """Such as `flash/decode/b64/ctx32k`, or with a variant `pro/prefill/t4096/c4-dense`; one case of an op each."""
        return "/".join((self.model, self.step.name, *([self.variant] if self.variant else [])))

    def __str__(self) -> str:
        return f"{self.op} {self.name}"

    def job(self, family: Family) -> Job:
        return Job(self.of.settings, self.step, self.variant, family)

    def build(self, family: Family, *, fill: bool = True, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
        """The arguments in the formats of `family`. Without `fill` large tensors are unwritten and cost nothing: good
        for recording launches, not for running them."""
        return Inputs(self.entry.build(self.job(family), Maker(device, fill, seed)), self.entry.written)

    @property
    def launcher(self) -> Callable[..., Any]:
        return getattr(importlib.import_module(f"dsv4_triton.kernels.{self.op}"), self.op)

    @property
    def reference(self) -> Callable[..., Any]:
        return getattr(importlib.import_module(f"dsv4_triton.reference.{self.op}"), self.op)

    def minimum(self, family: Family) -> Minimum:
        return self.entry.minimum(self.job(family))

    def minimal_bytes(self, family: Family) -> int:
        return self.minimum(family).bytes

    def minimal_macs(self, family: Family) -> int:
        return self.minimum(family).macs

    @property
    def baselines(self) -> tuple[str, ...]:
        return (EAGER, *self.entry.baselines)

    @property
    def tolerance(self) -> Tolerance:
        return self.entry.tolerance

    def check(self, inputs: Inputs) -> None:
        """Run the launcher and the reference on copies of `inputs`; `MismatchError` says where they differ.

        Kernels run on the inputs' device; on the CPU that needs `compiler.host.installed()`.
        """
        mine, theirs = inputs.copy(), inputs.copy()
        got = self.entry.outcome(mine, self.launcher(**mine.arguments))
        expected = self.entry.outcome(theirs, self.reference(**theirs.arguments))
        for name in expected:
            compare(f"{self}: {name}", got[name], expected[name], self.tolerance)
