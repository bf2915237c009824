"""`bench step`: its stages are what a layer of the model launches."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dsv4_triton.bench.launches import layer_launches
from dsv4_triton.bench.measure import Machine
from dsv4_triton.bench.registry import Case
from dsv4_triton.bench.run import OURS, Bench, Figure, Times, device_named
from dsv4_triton.bench.step import (
    KINDS,
    LayerRows,
    Product,
    Row,
    Stage,
    cases_of,
    estimated,
    layer,
    layers,
    measured,
    print_layer,
)
from dsv4_triton.cli import app
from dsv4_triton.device import A2
from dsv4_triton.offline import record
from dsv4_triton.offline.estimates import limit


def test_stages_are_what_a_layer_launches(host_driver) -> None:
    """Every Triton kernel of a decode step of Flash, and as many dense products."""
    modelled = {one.kind: one for one in layer_launches(family="a2") if one.router == "top-k"}
    for kind in KINDS:
        stages = layer("flash", "decode", kind)
        names = [
            launch.launch.kernel.fn.__name__
            for stage in stages
            if isinstance(stage.work, Case)
            for launch in record(stage.work, A2)
        ]
        expected = [one.name for one in modelled[kind].launches]
        assert Counter(names) == Counter(name for name in expected if name.startswith("_") or name == "attend_kernel")
        assert sum(isinstance(stage.work, Product) for stage in stages) == expected.count("mm")


def test_every_layer_has_its_cases() -> None:
    for model in ("flash", "pro", "demo"):
        found = layers(model)
        assert [(phase, kind) for phase, kind, _ in found] == [(p, k) for p in ("decode", "prefill") for k in KINDS]
        for phase, _, stages in found:
            tokens = {s.work.step.tokens for s in stages if isinstance(s.work, Case)}
            assert len(tokens) == 1 and all(s.work.phase == phase for s in stages if isinstance(s.work, Case))
            assert {s.work.rows for s in stages if isinstance(s.work, Product)} == tokens


def test_shared_stages_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Case] = []

    def measure(bench: Bench, case: Case) -> Figure:
        asked.append(case)
        if case.op == "o_proj":
            return Figure(case.op, case.name, "failed", "values differ")
        return Figure(case.op, case.name, "ok", "", 1, 1, 0.5, {OURS: Times(2, 2, 2, 3), "eager": Times(6, 6, 6, 3)})

    monkeypatch.setattr(Bench, "measure", measure)
    bench = Bench(device_named("host"), Machine(1e10, {"float32": 1e11}), 0.0)
    found = list(measured("demo", bench, lambda *_: None))
    assert asked == cases_of(layers("demo"))
    (row,) = [row for row in found[0].rows if row.stage.name == "moe_experts"]
    assert (row.seconds, row.eager, row.limit_seconds) == (2, 3, 1)
    assert not any(one.ok for one in found), "a stage that failed its check is a failure of the layer"
    (row,) = [row for row in found[0].rows if row.stage.name == "o_proj"]
    assert row.seconds == 0 and "values differ" in row.problem


def test_an_interrupt_keeps_the_stages_that_are_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of the layer in work, too. A product that fails and a case without an eager time cost their stage only."""
    asked: list[Case] = []

    def measure(bench: Bench, case: Case) -> Figure:
        asked.append(case)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return Figure(case.op, case.name, "ok", "", 1, 1, 0.5, {OURS: Times(2, 2, 2, 3)})

    def product(work: Product, bench: Bench) -> Times:
        raise MemoryError("no memory")

    monkeypatch.setattr(Bench, "measure", measure)
    monkeypatch.setattr("dsv4_triton.bench.step._product", product)
    monkeypatch.setattr("dsv4_triton.bench.measure.measure_machine", lambda device: Machine(1e10, {"float32": 1e11}))
    file = tmp_path / "r.json"
    result = CliRunner().invoke(app, ["bench", "step", "--seconds", "0", "--json", str(file)])
    assert result.exit_code == 130 and "ended early: interrupted" in result.output
    content = json.loads(file.read_text())
    (one,) = content["layers"]
    names = [row["stage"] for row in one["stages"]]
    expected = [stage.name for stage in layer("demo", "decode", "c4")]
    assert not one["whole"] and names == expected[: len(names)] and len(names) > 3
    assert "its first" in result.output and all(name in result.output for name in names)
    problems = {row["problem"] for row in one["stages"]}
    assert problems == {"", "failed: MemoryError: no memory"}
    assert all(row["eager"] is None for row in one["stages"]) and content["environment"]["chip"]


def test_a_problem_is_printed_as_it_is() -> None:
    """Compilers name files in brackets, which are no markup."""
    row = Row(layer("demo", "decode", "window")[0], problem="failed: [/some/a.mlir]")
    console = Console(width=200)
    with console.capture() as printed:
        print_layer(LayerRows("decode", "window", 7, (row,)), "demo", "host", console)
    assert "failed: [/some/a.mlir]" in printed.get()


def test_estimates_say_so() -> None:
    def row(stage: Stage) -> Row:
        seconds = limit(stage.work.minimum, A2)[0] if isinstance(stage.work, Product) else 1.0
        return Row(stage, seconds, 0.5)

    found = estimated("flash", row)
    assert all(one.estimated and one.ok for one in found)
    by_name = [{row.stage.name: row for row in one.rows} for one in found]
    # 16 rows of weights in bf16 are bound by memory, 4,096 rows by the cubes.
    size = (16 * (8192 + 4096) + 8192 * 4096) * 2
    assert by_name[0]["wo_b"].seconds == pytest.approx(size / 1.6e12)
    assert limit(by_name[0]["wo_b"].stage.work.minimum, A2)[1] == "memory in"
    assert by_name[3]["wo_b"].seconds == pytest.approx(4096 * 8192 * 4096 / (4096 * 1.8e9 * 24))
    assert limit(by_name[3]["wo_b"].stage.work.minimum, A2)[1] == "cube"


def test_bad_requests(tmp_path: Path) -> None:
    for arguments, says in (
        (["--model", "large"], "There are: flash, pro, demo"),
        (["--estimate"], "--estimate and --family go together"),
        (["--family", "a2"], "--estimate and --family go together"),
        (["--estimate", "--family", "a4"], "There are: a2, a3, a5"),
        (["--json", str(tmp_path)], "cannot be written"),
    ):
        result = CliRunner().invoke(app, ["bench", "step", *arguments])
        assert result.exit_code == 2 and says in result.output.replace("\n", " "), result.output


def test_estimate_of_cases(tmp_path: Path) -> None:
    """Facts and an estimate for each launch, named as such."""
    file = tmp_path / "e.json"
    arguments = ["--estimate", "--family", "a2", "--kernel", "hc_pre", "--case", "flash/decode/b16"]
    result = CliRunner().invoke(app, ["bench", *arguments, "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "ESTIMATE for Atlas A2" in result.output and "nothing ran on a device" in result.output
    content = json.loads(file.read_text())
    assert (content["kind"], content["family"]) == ("estimate", "a2")
    where = content["environment"]
    assert where["family"] == "host" and where["chip"] and where["commit"] and where["versions"]["triton-ascend"]
    (case,) = content["cases"]
    assert len(case["launches"]) == 2 and case["launch_seconds"] == pytest.approx(2 * 3e-6)
    assert case["seconds"] == pytest.approx(sum(one["seconds"] for one in case["launches"]))
    # 24 mixes of 4 * 4096 values for 16 tokens, with fn in two parts; the minimum has fn in one.
    assert case["macs"] == 16 * 24 * 4 * 4096 and case["launches"][0]["macs"] >= 2 * case["macs"]
    assert case["binding"] == "launch", "both kernels together take less than their starts"
    for one in case["launches"]:
        assert one["seconds"] >= max(one["resources"].values()) > 0
        assert one["binding"] in ("cube", "vector", "scalar", "memory in", "memory out")
