"""What a case is: an op, a model and a step; how its arguments are built and its result is checked."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from dsv4_triton.backend.geometry import Layout, layout
from dsv4_triton.bench.registry.compare import Tolerance, compare
from dsv4_triton.bench.registry.make import Maker
from dsv4_triton.bench.registry.models import Model
from dsv4_triton.bench.registry.steps import Step
from dsv4_triton.config import ModelSettings
from dsv4_triton.device import Family
from dsv4_triton.options import BLOCK_SIZES, Choices, Geometry

EAGER = "eager"
"""The baseline every case has: its reference in plain PyTorch."""


class Shape(NamedTuple):
    """A step, and where an op has several the kind of layer or of call; `geometry` is that of the caches, and `fp8`
    says that there is no such call on a family without fp8."""

    step: Step
    variant: str = ""
    geometry: Geometry = "fine"
    fp8: bool = False


def of_each_geometry(shapes: list[Shape]) -> list[Shape]:
    """`shapes`, and those with 16 requests and the demo's with the caches of geometry `vllm-ascend` too."""
    again = [shape for shape in shapes if "/b16" in shape.step.name or (shape.step.tokens < 64 and shape.step.padding)]
    return [*shapes, *(shape._replace(geometry="vllm-ascend") for shape in again)]


@dataclass(frozen=True)
class Job:
    """What the builder and the formulas of an entry read."""

    model: ModelSettings
    shape: Shape
    family: Family

    @property
    def step(self) -> Step:
        return self.shape.step

    @property
    def variant(self) -> str:
        return self.shape.variant

    @property
    def tokens(self) -> int:
        return self.step.tokens

    @property
    def live(self) -> int:
        """Tokens that are not padding."""
        return self.step.tokens - self.step.padding

    @cached_property
    def layout(self) -> Layout:
        """The pages of all caches in the family's formats."""
        family, geometry = self.family, self.shape.geometry
        choices = Choices(
            family=family,
            kv_fake_quant=False,
            index_format=family.index_format,
            geometry=geometry,
            block_size=BLOCK_SIZES[geometry][0],
        )
        return layout(choices, self.model.ratios, family.row_format, torch.bfloat16)


@dataclass(frozen=True)
class Minimum:
    """The least a job needs: `bytes` to and from memory with every value moved once, `macs` multiply-accumulates.
    Rows of padding count where they must be read or written, such as results that are zero there.

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
        """The same arguments, with tensors of their own where the op writes; what was one tensor stays one."""
        own = {id(self.arguments[name]): _clone(self.arguments[name]) for name in self.written}
        return Inputs({name: own.get(id(value), value) for name, value in self.arguments.items()}, self.written)

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
class Converted:
    """Results that a baseline has in another form than the launcher: `convert` makes those of the launcher. The check
    calls it and a timed run does not, for who serves with the baseline uses them as they come."""

    convert: Callable[[], tuple[Any, ...]]


@dataclass(frozen=True)
class Entry:
    """One op of the registry.

    `shapes` lists what a model does with it.
    `build` makes the arguments, `minimum` is the formula of the least work. `outcome` prepares what is compared where
    the plain results cannot be (quantised values are compared after dequantisation). `baselines` are names of other
    implementations of the same job. `planners` are names of the op's kernels whose results decide what its later
    kernels do; they need none of the inputs that stay unwritten without `fill`. `touched` are the bytes that the step
    can touch of arguments, by name, where that is less than all of them.
    """

    op: str
    shapes: Callable[[Model], Iterable[Shape]]
    build: Callable[[Job, Maker], dict[str, Any]]
    minimum: Callable[[Job], Minimum]
    tolerance: Tolerance | Callable[[Job], Tolerance]
    written: tuple[str, ...] = ()
    outcome: Callable[[Inputs, Any], dict[str, torch.Tensor]] = outcome
    baselines: tuple[str, ...] = ()
    planners: tuple[str, ...] = ()
    touched: Callable[[Job], dict[str, int]] = lambda job: {}

    def cases(self, models: Iterable[Model]) -> list[Case]:
        return [Case(self, model, shape) for model in models for shape in self.shapes(model)]


@dataclass(frozen=True)
class Case:
    """One op doing one step of one model."""

    entry: Entry = field(repr=False)
    of: Model = field(repr=False)
    shape: Shape

    @property
    def op(self) -> str:
        return self.entry.op

    @property
    def model(self) -> str:
        return self.of.name

    @property
    def step(self) -> Step:
        return self.shape.step

    @property
    def variant(self) -> str:
        return self.shape.variant

    @property
    def phase(self) -> str:
        """What the step does: decode or prefill."""
        return self.step.name.split("/")[0]

    @property
    def name(self) -> str:
        """Such as `flash/decode/b64/ctx32k`, or with a variant `pro/prefill/t4096/c4-dense`; one case of an op each."""
        geometry = "" if self.shape.geometry == "fine" else self.shape.geometry
        return "/".join(part for part in (self.model, self.step.name, self.variant, geometry) if part)

    def __str__(self) -> str:
        return f"{self.op} {self.name}"

    def runs_on(self, family: Family) -> bool:
        """Whether `family` has what the case is about; its `build` is only for such families."""
        return family.fp8 or not self.shape.fp8

    def job(self, family: Family) -> Job:
        return Job(self.of.settings, self.shape, family)

    def build(self, family: Family, *, fill: bool = True, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
        """The arguments in the formats of `family`. Without `fill` large tensors are unwritten and cost nothing: good
        for recording launches, not for running them."""
        arguments = self.entry.build(self.job(family), Maker(device, fill, seed))
        return Inputs(arguments, tuple(name for name in self.entry.written if name in arguments))

    @property
    def launcher(self) -> Callable[..., Any]:
        return getattr(importlib.import_module(f"dsv4_triton.kernels.{self.op}"), self.op)

    @property
    def reference(self) -> Callable[..., Any]:
        return getattr(importlib.import_module(f"dsv4_triton.reference.{self.op}"), self.op)

    def minimum(self, family: Family) -> Minimum:
        return self.entry.minimum(self.job(family))

    @property
    def baselines(self) -> tuple[str, ...]:
        return (EAGER, *self.entry.baselines)

    def tolerance(self, family: Family) -> Tolerance:
        wanted = self.entry.tolerance
        return wanted if isinstance(wanted, Tolerance) else wanted(self.job(family))

    def check(self, inputs: Inputs, family: Family, run: Callable[..., Any] | None = None) -> None:
        """Run the launcher, or `run` in its place, and the reference on copies of `inputs`, which were built for
        `family`; `MismatchError` says where they differ.

        Kernels run on the inputs' device; on the CPU that needs `compiler.host.installed()`.
        """
        mine, theirs = inputs.copy(), inputs.copy()
        returned = (run or self.launcher)(**mine.arguments)
        got = self.entry.outcome(mine, returned.convert() if isinstance(returned, Converted) else returned)
        expected = self.entry.outcome(theirs, self.reference(**theirs.arguments))
        for name in expected:
            compare(f"{self}: {name}", got[name], expected[name], self.tolerance(family))
