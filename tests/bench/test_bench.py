"""`dsv4-triton bench`: no time without a check, turns, comparison with an earlier run, bad requests, interruption."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dsv4_triton.bench import host_figures, measure, results, run
from dsv4_triton.bench.baselines import Interpreter, UnavailableError, implementation
from dsv4_triton.bench.measure import Machine, Times, alternate
from dsv4_triton.bench.metadata import lookup_seconds
from dsv4_triton.bench.registry import Case, Minimum, select
from dsv4_triton.bench.results import Results, ResultsError
from dsv4_triton.bench.run import OURS, Bench, DeviceLostError, Figure
from dsv4_triton.cli import app
from dsv4_triton.device import HOST, Family
from dsv4_triton.offline.estimates import CaseEstimate, LaunchEstimate

MACHINE = Machine(1e10, {"float32": 1e11, "bfloat16": 1e9})
CPU = torch.device("cpu")
QUICK = ["--kernel", "muls_add", "--kernel", "step_layout", "--seconds", "0", "--interpreter", "0"]
"""Four cases."""


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "measure_machine", lambda device: MACHINE)


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments])


def wrong(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """The reference of one op disagrees with its kernel from now on."""
    honest = Case.reference.fget
    assert honest is not None

    def reference(case: Case) -> Any:
        return (lambda **a: honest(case)(**a) + 1) if case.op == op else honest(case)

    monkeypatch.setattr(Case, "reference", property(reference))


def figure(median: float, op: str = "rope", status: Any = "ok") -> Figure:
    times = {OURS: Times(median, median, median, 3), "eager": Times(2.0, 2.0, 2.0, 3)} if status == "ok" else {}
    return Figure(op, "demo/decode/b5", status, "", 10, 0, 0.5, times)


def run_of(*figures: Figure, **where: Any) -> Results:
    environment = {"device": "cpu", "family": "host", "chip": "a CPU", "threads": 2, "versions": {}, "commit": ""}
    return Results({**environment, **where}, MACHINE, list(figures))


def test_a_run_and_its_files(tmp_path: Path) -> None:
    file, page = tmp_path / "r.json", tmp_path / "r.html"
    result = bench(*QUICK, "--json", str(file), "--html", str(page))
    assert result.exit_code == 0, result.output
    assert "muls_add" in result.output and "demo/prefill/t45" in result.output and "4 ok" in result.output
    content = json.loads(file.read_text())
    assert content["kind"] == "measured" and content["device"] == "cpu" and content["chip"] and content["commit"]
    assert content["versions"]["torch"] == torch.__version__ and content["threads"] >= 1
    for one in content["figures"]:
        times = one["times"][OURS]
        assert 0 < times["p20"] <= times["median"] <= times["p80"] and times["runs"] >= 3
        assert one["ratios"]["eager"] == pytest.approx(one["times"]["eager"]["median"] / times["median"])
        assert one["bytes"] > 0 and one["share"] > 0
    text = page.read_text()
    assert "muls_add" in text and "http" not in text, "one file, nothing fetched"


def test_a_failing_check_prints_no_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong(monkeypatch, "muls_add")
    file = tmp_path / "r.json"
    result = bench(*QUICK, "--json", str(file))
    assert result.exit_code == 1
    assert "2 ok, 2 failed" in result.output and "values differ" in result.output
    for one in json.loads(file.read_text())["figures"]:
        assert (one["times"] == {}) == (one["op"] == "muls_add"), one
        assert (one["share"] == 0.0) == (one["op"] == "muls_add"), one


def test_a_baseline_that_is_wrong_gets_no_time(monkeypatch: pytest.MonkeyPatch, host_driver: None) -> None:
    def swapped(case: Case, name: str, arguments: dict[str, Any]) -> Any:
        honest = implementation(case, name, arguments)
        return honest if honest is case.reference else lambda **a: honest(**a) + 1

    monkeypatch.setattr("dsv4_triton.bench.baselines.implementation", swapped)
    (case,) = select(kernel="indexer_topk", case="demo/decode/b5")
    found = Bench(CPU, MACHINE, 0.0).measure(case)
    assert found.status == "ok" and set(found.times) == {OURS, "eager"}
    assert "differs from the reference" in found.missing["torch.topk"]


def test_a_case_that_breaks_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Case.build

    def build(case: Case, *args: Any, **options: Any) -> Any:
        if case.op == "muls_add" and options.get("fill", True):
            raise TypeError("no such argument")
        return broken(case, *args, **options)

    monkeypatch.setattr(Case, "build", build)
    result = bench(*QUICK)
    assert result.exit_code == 1 and "TypeError: no such argument" in result.output and "2 ok" in result.output


def test_what_does_not_fit_is_skipped_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4_triton.bench.run.free_bytes", lambda device: 3 << 30)
    (case,) = select(kernel="moe_experts", case="flash/decode/b16")
    found = Bench(CPU, MACHINE, 0.0).measure(case)
    assert found.status == "skipped" and "needs about" in found.message and "2.0 GiB can be taken" in found.message
    assert run_of(found).ok


def test_memory_that_runs_out_is_a_skip(monkeypatch: pytest.MonkeyPatch, host_driver: None) -> None:
    monkeypatch.setattr(Case, "check", lambda *_: torch.empty(1 << 45, dtype=torch.uint8))
    (case,) = select(kernel="muls_add", case="demo/decode/b5")
    found = Bench(CPU, MACHINE, 0.0).measure(case)
    assert (found.status, found.message) == ("skipped", "ran out of memory")


def test_implementations_take_turns() -> None:
    order: list[str] = []
    found = alternate({name: (lambda name=name: order.append(name)) for name in "abc"}, 0.0)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab", "one run of each does not count"
    assert {times.runs for times in found.values()} == {3}


def test_times_and_roofline() -> None:
    assert Times.of([5.0, 1.0, 2.0, 3.0, 4.0, 6.0]) == Times(3.5, 2.0, 5.0, 6)
    assert MACHINE.seconds(Minimum(10**9)) == pytest.approx(0.1)
    assert MACHINE.seconds(Minimum(1, 10**11, torch.float32)) == pytest.approx(1.0)
    # bf16 products are slower here than fp32 ones: the job can be done at the faster rate.
    assert MACHINE.seconds(Minimum(1, 10**11, torch.bfloat16)) == pytest.approx(1.0)


def test_counts() -> None:
    assert [results.count(n) for n in (0, 7, 999, 1000, 65536, 10**6, 41_943_040, 10**12)] == [
        "", "7", "999", "1 k", "65.5 k", "1 M", "41.9 M", "1e+03 G"
    ]  # fmt: skip


def test_slow_products_do_not_hold_up_a_run() -> None:
    """bf16 on a CPU without instructions for it takes seconds a product."""
    for taken, calls, best in (([4.0, 1.0], 1, 4.0), ([0.7, 0.4, 0.1], 2, 0.4), ([0.01] * 9, 6, 0.01)):
        left = list(taken)
        assert measure._best(lambda _, left=left: left.pop(0), lambda: None) == best
        assert len(taken) - len(left) == calls


def test_comparison_with_an_earlier_run(tmp_path: Path) -> None:
    earlier, now = run_of(figure(1.0), figure(1.0, "hc_pre")), run_of(figure(1.1), figure(1.3, "hc_pre"))
    compared = results.changes(earlier, now, 0.15)
    assert [(c.op, c.worse) for c in compared] == [("rope", False), ("hc_pre", True)]
    assert [c.op for c in results.regressions(compared)] == ["hc_pre"]
    assert "1.30 times as long" in str(compared[1])
    # Where eager PyTorch takes as much longer, the machine is slower and not the kernel.
    slower = run_of(*(replace(f, times={**f.times, "eager": Times(2.6, 2.6, 2.6, 3)}) for f in now.figures))
    assert [c.worse for c in results.changes(earlier, slower, 0.15)] == [False, False]
    # Where it takes less, the kernel's own time counts.
    quicker = run_of(*(replace(f, times={**f.times, "eager": Times(1.0, 1.0, 1.0, 3)}) for f in now.figures))
    assert [c.worse for c in results.changes(earlier, quicker, 0.15)] == [False, True]
    assert results.unlike(earlier, run_of(chip="another")) == ["chip: a CPU then, another now"]
    file = tmp_path / "r.json"
    file.write_text(earlier.as_json())
    again = Results.read(file)
    assert again.figures == earlier.figures and again.machine == MACHINE


@pytest.mark.parametrize(("factor", "status"), [(1e-6, 1), (1e6, 0)])
def test_baseline_sets_the_status(tmp_path: Path, factor: float, status: int) -> None:
    """Against a run that was a million times as fast, or as slow."""
    file = tmp_path / "r.json"
    assert bench(*QUICK, "--json", str(file)).exit_code == 0
    content = json.loads(file.read_text())
    for one in content["figures"]:
        one["times"][OURS]["median"] *= factor
        del one["times"]["eager"]
    file.write_text(json.dumps(content))
    result = bench(*QUICK, "--baseline", str(file))
    assert result.exit_code == status, result.output
    assert "4 pairs compared" in result.output and ("worse:" in result.output) == bool(status)
    file.write_text(json.dumps(content | {"figures": []}))
    result = bench(*QUICK, "--baseline", str(file))
    assert result.exit_code == 1 and "no case that was measured is in" in result.output


def test_an_interrupted_run_keeps_what_is_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    interrupted_after(monkeypatch, raising(KeyboardInterrupt()))
    file = tmp_path / "r.json"
    result = bench(*QUICK, "--json", str(file))
    assert result.exit_code == 130 and "2 of 4 cases are done" in result.output
    content = json.loads(file.read_text())
    assert content["ended"] == "interrupted" and len(content["figures"]) == 2


def test_a_polite_end_from_outside_keeps_what_is_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usual = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("SIGTERM was not watched for"))
    try:
        interrupted_after(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGTERM))
        file = tmp_path / "r.json"
        result = bench(*QUICK, "--json", str(file))
    finally:
        signal.signal(signal.SIGTERM, usual)
    assert result.exit_code == 130 and "2 of 4 cases are done" in result.output
    assert len(json.loads(file.read_text())["figures"]) == 2


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM], ids=lambda end: end.name)
def test_interrupted_estimates_keep_what_is_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: signal.Signals
) -> None:
    def estimated(cases: list[Case], family: Family, **_: Any) -> list[CaseEstimate]:
        if cases[0].op == "step_layout":
            os.kill(os.getpid(), end)
        launches = (LaunchEstimate("kernel", 1, resource="vector"),)
        return [CaseEstimate(family.name, case.op, case.name, 1, 0, 1e-6, 3e-6, launches) for case in cases]

    monkeypatch.setattr("dsv4_triton.offline.estimates.estimates", estimated)
    monkeypatch.setattr("dsv4_triton.cli_bench._TOGETHER", 2)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    handlers = {
        signal.SIGTERM: lambda *_: pytest.fail("SIGTERM was not watched for"),
        signal.SIGINT: signal.default_int_handler,  # a shell's jobs in the background ignore it
    }
    usual = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    file = tmp_path / "e.json"
    arguments = ["--kernel", "muls_add", "--kernel", "step_layout", "--model", "demo", "--json", str(file)]
    try:
        result = bench("--estimate", "--family", "a2", *arguments)
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
    assert result.exit_code == 130, result.output
    assert "ended early: interrupted; 2 of 4 cases are done" in result.output
    assert "muls_add" in result.output and "step_layout" not in result.output
    content = json.loads(file.read_text())
    assert content["ended"] == "interrupted" and [one["op"] for one in content["cases"]] == ["muls_add"] * 2


def test_files_that_cannot_be_written_cost_nothing_else(tmp_path: Path) -> None:
    """Everything is printed first, and one full device does not keep the other file from being written."""
    page = tmp_path / "r.html"
    result = bench(*QUICK, "--json", "/dev/full", "--html", str(page))
    assert result.exit_code == 2, result.output
    assert "4 ok" in result.output and "muls_add" in page.read_text()
    assert result.output.endswith("error: /dev/full could not be written: No space left on device\n")


@pytest.mark.parametrize("broken", ["free_bytes", "needed_bytes"])
def test_a_case_that_cannot_be_sized_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """Such as one whose builder raises, or whose device is gone when it is asked for its memory."""
    honest, calls = getattr(run, broken), []

    def once(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) == 2:
            raise RuntimeError("mem_get_info: error")
        return int(honest(*arguments))

    monkeypatch.setattr(run, broken, once)
    monkeypatch.setattr(run, "bounded_memory", lambda device: nullcontext())
    result = bench(*QUICK)
    assert result.exit_code == 1 and "failed: RuntimeError: mem_get_info: error" in result.output
    assert "3 ok, 1 failed" in result.output


def test_a_device_that_is_gone_between_two_cases_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any, **__: Any) -> Any:
        raise RuntimeError("device 0 is gone")

    (case,) = select(kernel="muls_add", case="demo/decode/b5")
    monkeypatch.setattr(run, "free_bytes", gone)
    monkeypatch.setattr(run, "family_of", lambda kind: HOST)
    with pytest.raises(DeviceLostError, match=r"no longer answers: RuntimeError: device 0 is gone"):
        Bench(torch.device("cuda"), MACHINE, 0.0).measure(case)


def test_a_device_that_disappears_loses_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    interrupted_after(monkeypatch, raising(DeviceLostError("npu no longer answers")))
    file = tmp_path / "r.json"
    result = bench(*QUICK, "--json", str(file))
    assert result.exit_code == 2 and "npu no longer answers; 2 of 4 cases are done" in result.output
    assert len(json.loads(file.read_text())["figures"]) == 2


def raising(error: BaseException) -> Callable[[], None]:
    def event() -> None:
        raise error

    return event


def interrupted_after(monkeypatch: pytest.MonkeyPatch, event: Callable[[], None]) -> None:
    """The third case ends with `event`."""
    done: list[Case] = []

    def measured(bench: Bench, case: Case) -> Figure:
        done.append(case)
        if len(done) == 3:
            event()
        return figure(1.0, case.op)

    monkeypatch.setattr(Bench, "measure", measured)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kernel", "hc_pots"], "did you mean 'hc_post'? There are: compressor_fold"),
        (["--case", "flash/decode/b3"], "unknown case 'flash/decode/b3'"),
        (["--model", "large"], "There are: flash, pro, demo"),
        (["--device", "gpu"], "There are: host, npu, cuda"),
        (["--device", "npu"], "needs torch_npu"),
        (["--estimate", "--family", "a4"], "There are: a2, a3, a5"),
        (["--estimate"], "needs --family"),
        (["--family", "a2"], "needs --estimate"),
        (["--estimate", "--family", "a2", "--html", "x.html"], "not for --estimate"),
        (["--seconds", "-1"], "--seconds"),
        (["--baseline", "/nowhere/r.json"], "No such file"),
        (["--json", "/nowhere/r.json"], "/nowhere/r.json cannot be written"),
        (["--html", "/"], "/ cannot be written"),
        (["--json", "one", "--html", "./one"], "one is given for two outputs"),
        (["--threshold", "0.1"], "needs --baseline"),
        (["--estimate", "--family", "a2", "--threshold", "0.1"], "not for --estimate"),
        (["--estimate", "--family", "a2", "--seconds", "0.5"], "not for --estimate"),
        (["--estimate", "--family", "a2", "--interpreter", "2"], "not for --estimate"),
        (["--device", "cuda", "--interpreter", "2"], "needs --device host"),
        (["--estimate", "--family", "a2", "--case", "*/mxfp8"], "no case of this runs on a2"),
        (["--kernel", "muls_add", "launches"], "stands before 'launches', which does not read it"),
        (["step", "--estimate", "--family", "a2", "--seconds", "1"], "not for --estimate"),
        (["nonesuch"], "No such command 'nonesuch'. There are: step, launches, metadata, host-figures, serve, load"),
        (["serve", "--dtype", "float16"], "There are: float32, bfloat16"),
        (["launches", "--family", "a4"], "There are: a2, a3, a5, host"),
    ],
    ids=str,
)
def test_bad_requests_are_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("work has begun")

    monkeypatch.setattr(measure, "measure_machine", never)
    result = bench(*arguments)
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda one: one["times"].pop(OURS), "times has no 'this project'"),
        (lambda one: one["times"][OURS].update(median="fast"), "median is 'fast' and no positive number of seconds"),
        (lambda one: one["times"][OURS].update(median=0), "times['this project'].median is 0 and no positive"),
        (lambda one: one["times"]["eager"].update(median=float("nan")), "times['eager'].median is nan"),
        (lambda one: one.pop("times"), "figures[1]: KeyError: 'times'"),
        (lambda one: one["times"]["eager"].pop("p20"), "missing 1 required positional argument: 'p20'"),
        (lambda one: one.update(op=["rope"]), "op is ['rope'] and no name"),
    ],
)
def test_a_baseline_with_wrong_contents_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: Callable[[Any], Any], says: str
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("work has begun")

    monkeypatch.setattr(measure, "measure_machine", never)
    content = json.loads(run_of(figure(1.0, "hc_pre"), figure(1.0)).as_json())
    change(content["figures"][1])
    file = tmp_path / "r.json"
    file.write_text(json.dumps(content))
    result = bench(*QUICK, "--baseline", str(file))
    assert result.exit_code == 2, result.output
    assert f"error: {file} is not a file of `bench --json`: " in result.output and says in result.output
    assert "`bench --json`: figures[1]" in result.output


def test_cases_of_a_baseline_that_are_not_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those that are gone and those without a time now are named; those that nobody asked for are not."""
    monkeypatch.setattr(
        Bench, "measure", lambda bench, case: replace(figure(1.0, case.op, "skipped"), case=case.name, message="no fp8")
    )
    file = tmp_path / "r.json"
    earlier = [replace(figure(1.0, "muls_add"), case=name) for name in ("demo/decode/b5", "demo/decode/b1024")]
    file.write_text(run_of(*earlier, figure(1.0, "hc_pre")).as_json())
    result = bench(*QUICK, "--baseline", str(file))
    assert "not compared: muls_add demo/decode/b5: skipped now: no fp8\n" in result.output
    assert "not compared: muls_add demo/decode/b1024: there is no such case any more\n" in result.output
    assert result.output.count("not compared:") == 2, "hc_pre was not asked for"


def test_a_baseline_file_of_something_else(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    for text in ("[]", "{}", "no json", '{"schema": 1, "kind": "estimate"}', "[" * 100_000):
        file.write_text(text)
        with pytest.raises(ResultsError, match="is not a file of `bench --json`"):
            Results.read(file)


def test_metadata_is_timed(tmp_path: Path) -> None:
    file, threads = tmp_path / "m.json", torch.get_num_threads()
    result = bench("metadata", "--repeat", "2", "--json", str(file))
    assert result.exit_code == 0 and "planning a decode step" in result.output, result.output
    content = json.loads(file.read_text())
    assert [one["sequences"] for one in content["steps"]] == [1, 64, 256]
    assert all(one["planner_s"] > 0 and one["reference_s"] > 0 for one in content["steps"])
    assert 0 < content["lookup_s"] < content["first_lookup_s"]
    assert "the first of a size" in result.output
    assert torch.get_num_threads() == threads, "it is timed with one thread, and leaves as many as it found"
    where = content["environment"]
    assert where["chip"] and where["commit"] and where["versions"]["torch"] == torch.__version__


def test_a_look_up_of_launch_parameters_takes_less_than_2_us() -> None:
    """Others use this machine, too: the best of several tries counts."""
    assert any(lookup_seconds() < 2e-6 for _ in range(5))


def test_figures_of_the_host_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    found = [host_figures.Row("matmul", 1.0, 2.0, 300.0, 0.5)], 10.0
    monkeypatch.setattr(host_figures, "measure", lambda: found)
    result = bench("host-figures", "--json", str(file))
    assert result.exit_code == 0 and "MISSED" not in result.output and "0.50        300" in result.output
    content = json.loads(file.read_text())
    assert content["launch_us"] == 10.0 and content["environment"]["commit"]

    def wrong() -> Any:
        raise host_figures.FigureError("matmul: differs from PyTorch by 1")

    monkeypatch.setattr(host_figures, "measure", wrong)
    result = bench("host-figures")
    assert (result.exit_code, result.output) == (2, "error: matmul: differs from PyTorch by 1\n")


def test_launches_say_where_they_were_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("dsv4_triton.bench.launches.layer_launches", lambda **_: [])
    file = tmp_path / "l.json"
    assert bench("launches", "--json", str(file)).exit_code == 0
    content = json.loads(file.read_text())
    assert (content["family"], content["environment"]["family"]) == ("a2", "host") and content["environment"]["commit"]


def test_the_interpreter_has_a_limit() -> None:
    slow, quick = (select(kernel=op, case="demo/decode/b5")[0] for op in ("indexer_topk", "muls_add"))
    with Interpreter(60.0) as interpreter:
        assert interpreter.measure(quick) > 0
        interpreter.seconds = 0.01
        with pytest.raises(UnavailableError, match=r"not done after 0\.01 s"):
            interpreter.measure(slow)
        assert interpreter._process is None, "the process is gone"


def test_vllms_ops_agree_with_the_references(host_driver: None) -> None:
    for case in select(kernel=["hc_pre", "hc_post", "hc_post_pre", "moe_router"], case="demo/*"):
        inputs = case.build(HOST)
        case.check(inputs, HOST, implementation(case, "vllm", inputs.arguments))
