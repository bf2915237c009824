"""A decoder layer of each kind, stage by stage: the cases and the plain products that a layer is made of.

A stage is a case of the registry at the layer's shapes, or a dense projection, which is PyTorch's own product. Stages
are measured one by one, each on inputs of its own, so their sum leaves out what a layer does between them.

    dsv4-triton bench step [--estimate --family a2]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dsv4_triton.backend.geometry import overlap
from dsv4_triton.bench.measure import Times, alternate
from dsv4_triton.bench.registry import MODELS, Case, Minimum, select
from dsv4_triton.bench.registry.case import EAGER
from dsv4_triton.bench.results import readable
from dsv4_triton.bench.run import OURS, Bench, driver_for, error_line
from dsv4_triton.config import HEAD_DIM, INDEX_DIM, ModelSettings

KINDS = {"c4": 4, "c128": 128, "window": 0}
"""Compression ratio by the kind of a layer."""
PHASES = ("decode", "prefill")
CONTEXT = 32768
"""Longest request of the steps of Flash and Pro."""
TOKENS = {"decode": 16, "prefill": 4096}
BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Product:
    """A dense projection of `rows` tokens, from `inputs` features to `outputs`."""

    rows: int
    inputs: int
    outputs: int
    dtype: torch.dtype

    @property
    def minimum(self) -> Minimum:
        size = self.rows * (self.inputs + self.outputs) + self.inputs * self.outputs
        return Minimum(size * self.dtype.itemsize, self.rows * self.inputs * self.outputs, self.dtype)


@dataclass(frozen=True)
class Stage:
    """One step of a layer: its part of the layer, its name, and what is done."""

    part: str
    name: str
    work: Case | Product


def layer(model: str, phase: str, kind: str) -> list[Stage]:
    """The stages of a layer in their order; routers by top-k (one that goes by token id costs the router alone)."""
    found = _Cases(model, phase)
    s = MODELS[model].settings
    rows, ratio = found.tokens, KINDS[kind]

    def dense(part: str, name: str, inputs: int, outputs: int, dtype: torch.dtype = BF16) -> Stage:
        return Stage(part, name, Product(rows, inputs, outputs, dtype))

    def case(part: str, op: str, variant: str = "") -> Stage:
        return Stage(part, op, found.case(op, variant))

    stages = [case("mHC", "hc_post_pre"), dense("dense", "wq_a, wkv", s.hidden, s.q_lora + HEAD_DIM)]
    if ratio:
        stages.append(dense("dense", "compressor", s.hidden, _compressor_rows(s, ratio), FP32))
    stages += [
        case("attention", "latent_norm_insert", kind),
        dense("dense", "wq_b", s.q_lora, s.heads * HEAD_DIM),
    ]
    if ratio == 4:
        stages.append(dense("dense", "indexer wq_b", s.q_lora, s.index_heads * INDEX_DIM))
    stages.append(case("attention", "q_norm_rope", "c4" if ratio == 4 else ""))
    if ratio == 4:
        stages += [
            case("attention", "compressor_fold_keys", "c4"),
            *(case("attention", op) for op in ("indexer_quant_q", "indexer_score", "indexer_topk")),
        ]
    elif ratio:
        stages.append(case("attention", "compressor_fold", "c128"))
    return [
        *stages,
        case("attention", "sparse_attention", kind),
        case("attention", "o_proj"),
        dense("dense", "wo_b", s.o_groups * s.o_lora, s.hidden),
        case("mHC", "hc_post_pre"),
        dense("MoE", "router gate", s.hidden, s.experts, FP32),
        case("MoE", "moe_router", "top-k"),
        case("MoE", "moe_experts"),
    ]


def _compressor_rows(s: ModelSettings, ratio: int) -> int:
    """Outputs of a layer's fp32 projection: two matrices a compressor, and the weights of the indexer's heads."""
    rows = 2 * overlap(ratio) * HEAD_DIM
    return rows + 2 * overlap(ratio) * INDEX_DIM + s.index_heads if ratio == 4 else rows


class _Cases:
    """The registry's cases of one step of a model."""

    def __init__(self, model: str, phase: str) -> None:
        self._all = [case for case in select(model=model) if case.phase == phase and case.shape.geometry == "fine"]
        if not MODELS[model].demo:
            self._all = [case for case in self._all if case.step.tokens == TOKENS[phase]]
        self.tokens = self._all[0].step.tokens

    def case(self, op: str, variant: str) -> Case:
        """The case of an op, with the longest context that is no more than CONTEXT."""
        fitting = [c for c in self._all if (c.op, c.variant) == (op, variant) and c.step.longest <= CONTEXT]
        return max(fitting, key=lambda c: c.step.longest)


@dataclass(frozen=True)
class Row:
    """A stage with its time and its roofline's, in seconds, or what is wrong with it.

    eager: how many times as long eager PyTorch takes; None where there is no such figure. binding: what an estimate
    waits for.
    """

    stage: Stage
    seconds: float = 0.0
    limit_seconds: float = 0.0
    eager: float | None = None
    binding: str = ""
    problem: str = ""

    def as_dict(self) -> dict[str, Any]:
        case = self.stage.work.name if isinstance(self.stage.work, Case) else ""
        return {
            "part": self.stage.part, "stage": self.stage.name, "case": case, "seconds": self.seconds,
            "limit_seconds": self.limit_seconds, "eager": self.eager, "binding": self.binding, "problem": self.problem,
        }  # fmt: skip


@dataclass(frozen=True)
class LayerRows:
    """The stages of one layer. `estimated` says that times are the cost model's and products their roofline, `whole`
    that no stage is left out because the measurement ended early."""

    phase: str
    kind: str
    tokens: int
    rows: tuple[Row, ...]
    estimated: bool = False
    whole: bool = True

    @property
    def seconds(self) -> float:
        return sum(row.seconds for row in self.rows)

    @property
    def ok(self) -> bool:
        return not any(row.problem for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        return {
            "phase": self.phase, "kind": self.kind, "tokens": self.tokens, "seconds": self.seconds, "whole": self.whole,
            "times": "estimate" if self.estimated else "measured", "stages": [row.as_dict() for row in self.rows],
        }  # fmt: skip


def layers(model: str) -> list[tuple[str, str, list[Stage]]]:
    """Phase, kind and stages of every layer, decode first."""
    return [(phase, kind, layer(model, phase, kind)) for phase in PHASES for kind in KINDS]


def cases_of(stages: Sequence[tuple[str, str, list[Stage]]]) -> list[Case]:
    """The different cases of several layers."""
    return list(dict.fromkeys(s.work for _, _, each in stages for s in each if isinstance(s.work, Case)))


def measured(model: str, bench: Bench, progress: Callable[[int, int, str], None]) -> Iterator[LayerRows]:
    """The layers as they are done; a stage that several layers share is measured once. What ends the measurement, such
    as Ctrl-C, is raised after the stages that the layer in work has."""
    wanted = layers(model)
    works = list(dict.fromkeys(stage.work for _, _, stages in wanted for stage in stages))
    known: dict[Case | Product, Row] = {}
    with driver_for(bench.device), torch.no_grad():
        for phase, kind, stages in wanted:
            rows: list[Row] = []
            try:
                for stage in stages:
                    if stage.work not in known:
                        progress(len(known), len(works), f"{phase}, {kind}: {stage.name}")
                        known[stage.work] = _measured(stage, bench)
                    rows.append(replace(known[stage.work], stage=stage))
            except BaseException:
                if rows:
                    yield LayerRows(phase, kind, _tokens(stages), tuple(rows), whole=False)
                raise
            yield LayerRows(phase, kind, _tokens(stages), tuple(rows))


def _measured(stage: Stage, bench: Bench) -> Row:
    work = stage.work
    if isinstance(work, Product):
        try:
            seconds = _product(work, bench).median
        except Exception as error:
            # Such as too little memory: no reason to lose the other stages.
            return Row(stage, problem=f"failed: {error_line(error)}")
        return Row(stage, seconds, bench.machine.seconds(work.minimum))
    figure = bench.measure(work)
    if figure.status != "ok":
        return Row(stage, problem=f"{figure.status}: {figure.message}")
    seconds = figure.times[OURS].median
    return Row(stage, seconds, figure.share * seconds, figure.ratio(EAGER) if EAGER in figure.times else None)


def _product(work: Product, bench: Bench) -> Times:
    x = torch.randn(work.rows, work.inputs, device=bench.device).to(work.dtype)
    w = torch.randn(work.outputs, work.inputs, device=bench.device).to(work.dtype)
    run = {OURS: lambda: torch.nn.functional.linear(x, w)}
    return alternate(run, bench.seconds, bench.clock)[OURS]


def _tokens(stages: Sequence[Stage]) -> int:
    return next(stage.work.rows for stage in stages if isinstance(stage.work, Product))


def estimated(model: str, row: Callable[[Stage], Row]) -> list[LayerRows]:
    """The layers with the estimate `row` of each stage."""
    return [
        LayerRows(phase, kind, _tokens(stages), tuple(map(row, stages)), estimated=True)
        for phase, kind, stages in layers(model)
    ]


def print_layer(one: LayerRows, model: str, where: str, console: Console) -> None:
    """One layer as a table, with each stage's share of the sum."""
    kind = "ESTIMATE, nothing ran on a device; products by their roofline" if one.estimated else "measured"
    if not one.whole:
        kind += f", its first {len(one.rows)} stages only"
    table = Table(title=f"{one.phase} of {one.tokens} tokens, {one.kind} layer, {model} on {where}: {kind}", box=None)
    for heading in ("part", "stage"):
        table.add_column(heading)
    for heading in ("time", "share", "roofline", "waits for" if one.estimated else "eager takes"):
        table.add_column(heading, justify="right")
    for row in one.rows:
        if row.problem and not row.seconds:
            table.add_row(row.stage.part, row.stage.name, Text(row.problem, "red"))
            continue
        share = f"{100 * row.seconds / one.seconds:.0f} %"
        roofline = f"{100 * row.limit_seconds / row.seconds:.0f} %"
        last = row.binding if row.eager is None else f"{row.eager:.2f} x"
        table.add_row(row.stage.part, row.stage.name, readable(row.seconds), share, roofline, last)
    table.add_row("", "sum", readable(one.seconds), style="bold")
    console.print(table)
    console.print()
