"""The order in which configurations are tried, what counts as a gain, and a run with its journal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from dsv4_triton.autotune import report, store
from dsv4_triton.autotune import run as runs
from dsv4_triton.autotune.run import BusyError, Settings
from dsv4_triton.autotune.search import OutOfTimeError, asked, launched, named, search, targets
from dsv4_triton.autotune.space import DECLARED, UNCOUNTED, Space
from dsv4_triton.autotune.trials import Target, Verdict
from dsv4_triton.bench.measure import Machine
from dsv4_triton.bench.registry import RegistryError, ops, select
from dsv4_triton.bench.run import DeviceLostError
from dsv4_triton.device import A2, HOST, Family

CASE = select(kernel="muls_add", model="demo")[0]


def timed(cost: Callable[[Mapping[str, Any]], float], log: list[dict[str, Any]]) -> Callable[..., list[Verdict]]:
    def evaluate(configs: list[dict[str, Any]]) -> list[Verdict]:
        log.extend(configs)
        return [Verdict(c, "ok", "", cost(c), cost(c)) if cost(c) else Verdict(c, "memory", "UB") for c in configs]

    return evaluate


def target(space: Space, width: int = 96) -> Target:
    return Target(space, A2, {"tokens": 1, "width": width}, CASE)


def test_small_spaces_are_tried_whole_and_the_default_first(made: Space) -> None:
    log: list[dict[str, Any]] = []
    found = search(target(made), [], timed(lambda c: 100.0 / c["BLOCK"], log))
    assert log[0] == {"BLOCK": 8, "multibuffer": None} == found.default.config
    assert len(log) == 8 and found.space == 8 and found.dropped == 0
    assert found.ranked()[0].config["BLOCK"] == 32


def test_what_cannot_fit_is_never_tried(made: Space) -> None:
    log: list[dict[str, Any]] = []
    found = search(target(made, width=64), [], timed(lambda c: 1.0, log))
    assert {c["BLOCK"] for c in log} == {8, 16, 32} and found.dropped == 2
    assert found.ranked() == []


def test_large_spaces_vary_one_parameter_at_a_time(made: Space) -> None:
    made.default, made._fits = lambda f, k: {"A": 1, "B": 1, "C": 1}, None
    made.candidates = lambda f, k: dict.fromkeys("ABC", (1, 2, 3, 4))
    log: list[dict[str, Any]] = []
    found = search(target(made), [], timed(lambda c: 100.0 - 10 * c["A"] - 3 * c["B"] + c["C"], log))
    assert found.ranked()[0].config == {"A": 4, "B": 4, "C": 1}
    assert len(log) < 24 and len({str(c) for c in log}) == len(log), "nothing twice"


@pytest.fixture
def waits() -> Iterator[Space]:
    """A kernel with tile sizes and three options; the cost model counts nothing of two of them."""
    yield Space(
        "waits", buckets=(),
        default=lambda f, k: {"A": 2, "B": 2, **dict.fromkeys(("multibuffer", *sorted(UNCOUNTED)))},
        candidates=lambda f, k: {
            "A": (1, 2, 4), "B": (1, 2), "multibuffer": (None, False), "unit_flag": (None, True),
            "set_workspace_multibuffer": (None, 2, 8),
        },
    )  # fmt: skip
    del DECLARED["waits"]


def test_an_estimate_is_not_asked_about_what_it_does_not_count(waits: Space) -> None:
    """Without those options the space is small enough to be tried whole."""
    log: list[dict[str, Any]] = []
    found = search(target(waits), [], timed(lambda c: 10.0, log), fixed=UNCOUNTED)
    assert found.space == len(log) == 12 and found.dropped == 0
    assert all(c["unit_flag"] is None and c["set_workspace_multibuffer"] is None for c in log)
    timed_found = search(target(waits), [], timed(lambda c: 10.0 - bool(c["unit_flag"]), log))
    assert timed_found.space == 72 and timed_found.ranked()[0].config["unit_flag"] is True


@pytest.mark.parametrize("widths", [(1, 2), tuple(range(1, 17))], ids=["small", "large"])
def test_what_a_seed_has_of_a_fixed_option_stays(widths: tuple[int, ...], waits: Space) -> None:
    """Also where one parameter is varied at a time, from the seed: nothing like it is tried with the default's."""
    small = waits.candidates
    waits.candidates = lambda f, k: {**small(f, k), "B": widths}
    seed = {"A": 4, "B": 1, "multibuffer": False, "unit_flag": True, "set_workspace_multibuffer": 8}
    log: list[dict[str, Any]] = []
    found = search(target(waits), [seed], timed(lambda c: 10.0 / c["A"], log), fixed=UNCOUNTED)
    assert log[1] == found.ranked()[0].config == seed
    changed = [c for c in log[1:] if c["unit_flag"]]
    assert len(changed) == (1 if len(widths) == 2 else len(log) - 1) and len(log) > 10


@pytest.mark.parametrize(("mode", "fixed"), [("offline", UNCOUNTED), ("device", frozenset())])
def test_a_device_tries_what_an_estimate_cannot_rank(
    mode: Any, fixed: frozenset[str], settings: Settings, waits: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = fake(monkeypatch, lambda config: Verdict(config, "ok", "", 1.0, 1.0))
    npu(monkeypatch, "")
    runs.run([target(waits)], Settings(A2, mode, settings.folder, jobs=1), lambda *_: None)
    assert {name for c in log for name in UNCOUNTED if c[name] is not None} == UNCOUNTED - fixed


def test_a_short_search_varies_tile_sizes_before_options(waits: Space) -> None:
    log: list[dict[str, Any]] = []
    search(target(waits), [], timed(lambda c: 10.0, log), 6, fixed=UNCOUNTED)
    assert [(c["A"], c["B"]) for c in log] == [(2, 2), (1, 2), (2, 1), (4, 2), (1, 1), (4, 1)]
    assert all(c["multibuffer"] is None for c in log)


def test_a_gain_below_a_percent_is_none(made: Space) -> None:
    found = search(target(made), [], timed(lambda c: 100.0 if c["BLOCK"] == 8 else 99.5, []))
    assert found.ranked() == []


def test_more_launches_are_no_gain(made: Space) -> None:
    def evaluate(configs: list[dict[str, Any]]) -> list[Verdict]:
        return [Verdict(c, "ok", "", 100.0 / c["BLOCK"], 1.0, launches=1 + (c["BLOCK"] == 32)) for c in configs]

    assert search(target(made), [], evaluate).ranked()[0].config["BLOCK"] == 24


def test_seeds_are_tried_right_after_the_default(made: Space) -> None:
    log: list[dict[str, Any]] = []
    seeds = [{"BLOCK": 24, "multibuffer": False}, {"TILE": 1}, {"BLOCK": 7, "multibuffer": None}]
    search(target(made), seeds, timed(lambda c: 1.0, log))
    assert log[1] == seeds[0] and {"TILE": 1} not in log


def test_out_of_time_keeps_what_is_known(made: Space) -> None:
    calls = 0

    def evaluate(configs: list[dict[str, Any]]) -> list[Verdict]:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OutOfTimeError
        return [Verdict(c, "ok", "", 1.0, 1.0) for c in configs]

    assert len(search(target(made), [], evaluate).verdicts) == 1
    with pytest.raises(OutOfTimeError):
        search(target(made), [], evaluate)


def test_what_is_on_file_is_tried_with_the_default_whatever_the_limit(made: Space) -> None:
    rounds: list[list[dict[str, Any]]] = []

    def evaluate(configs: list[dict[str, Any]]) -> list[Verdict]:
        rounds.append(configs)
        return [Verdict(c, "ok", "", 100.0 / c["BLOCK"], 1.0) for c in configs]

    own = {"BLOCK": 32, "multibuffer": False}
    others = [{"BLOCK": 7, "multibuffer": None}, {"TILE": 1}]
    found = search(target(made), [], evaluate, 1, own=[own, *others])
    assert rounds == [[found.default.config, own]] and found.ranked()[0].config == own


def test_tries_are_limited_with_the_default_first(made: Space) -> None:
    log: list[dict[str, Any]] = []
    seed = {"BLOCK": 24, "multibuffer": False}
    found = search(target(made), [seed], timed(lambda c: 100.0 / c["BLOCK"], log), 3)
    assert len(log) == len(found.verdicts) == 3 and log[:2] == [found.default.config, seed]


def test_targets_are_the_kernels_of_the_cases_once_for_each_bucket() -> None:
    found = targets(select(kernel="muls_add", model="demo"), HOST, lambda *_: None)
    assert [one.space.name for one in found] == ["muls_add"] * len(found)
    assert len({one.name for one in found}) == len(found)


def test_a_kernel_that_is_an_op_is_tuned_in_its_own_case() -> None:
    """As if the op had been asked for: `o_proj` rotates, and a faster rotation would be lost in its time."""
    through, itself = (
        {one.name: one.case for one in targets(select(kernel=op, case="flash/decode/b1*"), A2, lambda *_: None)}
        for op in ("o_proj", "rope")
    )
    rotations = {name: case for name, case in through.items() if name.startswith("rope ")}
    assert rotations and all(itself[name] == case for name, case in rotations.items())


def test_targets_are_named_by_op_or_by_kernel() -> None:
    """hc_mix is a kernel of three ops and none itself, muls_add is both."""

    def kernels(*names: str, case: str = "demo/*") -> list[str]:
        return [one.space.name for one in named(names, ["demo"], [case], HOST, lambda *_: None)]

    assert set(kernels("hc_mix")) == {"hc_mix"} and set(kernels("muls_add")) == {"muls_add"}
    both = kernels("hc_pre", "hc_mix")
    assert set(both) == {"hc_pre", "hc_mix"} and set(kernels("hc_pre")) <= set(both)
    assert set(kernels()) > {"hc_mix", "muls_add", "rope"}
    with pytest.raises(RegistryError, match=r"unknown kernel 'hc_mic'; did you mean 'hc_mix'\? .* hc_mix, .* muls_add"):
        kernels("hc_mix", "hc_mic")


@pytest.mark.parametrize("family", [A2, HOST], ids=lambda family: family.name)
def test_a_kernel_is_looked_for_in_the_ops_that_can_launch_it_alone(family: Family) -> None:
    for case in select(model="demo"):
        if case.runs_on(family):
            assert {one.space.name for one in asked(case, family)} <= launched(case.op), case
    assert [op for op in ops() if "o_proj_quantise" in launched(op)] == ["o_proj"]
    said: list[str] = []
    named(["o_proj_quantise"], ["demo"], [], family, lambda done, total, what: said.append(what))
    assert said and all(what.startswith("asking o_proj ") for what in said)


def test_a_pattern_may_be_of_one_of_the_kernels_alone() -> None:
    """Steps of q_norm_rope have variants, those of the op that launches moe_copy have none."""
    found = named(["q_norm_rope", "moe_copy"], [], ["flash/decode/b64/*", "flash/decode/b64"], HOST, lambda *_: None)
    assert {one.space.name for one in found} == {"q_norm_rope", "moe_copy"}
    found = named(["q_norm_rope", "moe_copy"], [], ["flash/decode/b64/*"], HOST, lambda *_: None)
    assert {one.space.name for one in found} == {"q_norm_rope"}


def test_a_case_that_is_named_needs_no_model() -> None:
    """Not even one of the demo checkpoint, which is left out where nothing is named."""
    assert [one.case.model for one in named(["muls_add"], [], ["demo/decode/b5"], HOST, lambda *_: None)] == ["demo"]
    assert {one.case.model for one in named(["muls_add"], [], [], HOST, lambda *_: None)} == {"flash", "pro"}


@pytest.fixture
def settings(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("DSV4_TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(report, "machine", lambda: Machine(1e10, {"float32": 1e11}))
    return Settings(HOST, "offline", folder, jobs=1)


def fake(monkeypatch: pytest.MonkeyPatch, verdict: Callable[[dict[str, Any]], Verdict]) -> list[dict[str, Any]]:
    """Tries that are only thought of; the list of them."""
    log: list[dict[str, Any]] = []

    def try_all(tries: Any, mode: str, *, done: Any, **_: Any) -> None:
        for index, (_, config) in enumerate(tries):
            log.append(dict(config))
            done(index, verdict(dict(config)))

    monkeypatch.setattr(runs, "try_all", try_all)
    monkeypatch.setattr(
        runs, "time_in_turn",
        lambda target, config, _: replace(verdict(dict(config)), against=verdict(target.default).microseconds),
    )  # fmt: skip
    return log


def good(config: dict[str, Any]) -> Verdict:
    return Verdict(config, "ok", "", 100.0 / config["BLOCK"], 1.0)


def here(space: Space, tokens: int = 1) -> Target:
    return Target(space, HOST, {"tokens": tokens, "width": 96}, CASE)


def on_file(block: int, kind: str = "estimate") -> store.Entry:
    """An entry of `here` and `target`."""
    found = store.Found(kind, 3.0, 12.0, str(CASE), "some chip", "2026-01-31")
    names = {"tokens": 1, "width": 96}
    return store.Entry(names, {"BLOCK": block, "multibuffer": None}, {"BLOCK": 8, "multibuffer": None}, found)


@pytest.mark.parametrize("place", ["shipped", "user", "out"])
def test_a_short_search_keeps_what_is_on_file(
    place: str, settings: Settings, made: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result takes its place or hides it."""
    log = fake(monkeypatch, good)
    store.write(tmp_path / place, "host", "made", [on_file(24)])
    short = replace(settings, tries=1, folder=tmp_path / "out" if place == "out" else settings.folder)
    runs.run([here(made)], short, lambda *_: None)
    assert [config["BLOCK"] for config in log] == [8, 24]
    (entry,) = store.read(store.path(short.folder, "host", "made"), "host", "made")
    assert entry.config == {"BLOCK": 24, "multibuffer": None}


def test_what_the_nearest_sizes_have_is_tried_before_the_space(
    settings: Settings, made: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this family alone; what other families have for the very sizes goes before it."""
    log = fake(monkeypatch, good)
    near, other, neither = ({"BLOCK": block, "multibuffer": False} for block in (24, 32, 16))
    for family, tokens, config in (("host", 4, near), ("a3", 1, other), ("a2", 2, neither)):
        entry = replace(on_file(8), key={"tokens": tokens, "width": 96}, config=config)
        store.write(settings.folder, family, "made", [entry])
    runs.run([here(made)], replace(settings, tries=4), lambda *_: None)
    assert log == [here(made).default, other, near, {"BLOCK": 16, "multibuffer": None}]


def test_time_that_ends_before_what_is_on_file_was_tried_changes_nothing(
    settings: Settings, made: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = fake(monkeypatch, good)
    store.write(settings.folder, "host", "made", [on_file(24)])
    monkeypatch.setattr(runs._Evaluate, "late", property(lambda self: bool(log)))
    assert runs.run([here(made)], replace(settings, minutes=60.0), lambda *_: None) == [] and len(log) == 1
    assert store.read(store.path(settings.folder, "host", "made"), "host", "made") == [on_file(24)]


@pytest.mark.parametrize("place", ["shipped", "user"])
def test_an_estimate_does_not_take_the_place_of_what_was_measured(
    place: str, settings: Settings, made: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, good)
    monkeypatch.setattr(runs, "check_on_host", lambda target, config, *_: Verdict(dict(config), "ok"))
    file = store.write(tmp_path / place, "a2", "made", [on_file(24, "measured")])
    (found,) = runs.run([target(made)], Settings(A2, "offline", settings.folder, jobs=1), lambda *_: None)
    assert found.note == f"made {CASE.name}: the estimate was not written, {file} has it measured"
    assert store.read(file, "a2", "made") == [on_file(24, "measured")]
    assert list(tmp_path.rglob("made.json")) == [file]


def test_a_run_writes_what_won_and_can_be_resumed(
    settings: Settings, made: Space, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Target(made, HOST, {"tokens": 1, "width": 96}, CASE)
    log = fake(monkeypatch, good)
    assert runs.run([one], settings, lambda *_: None)[0].gain == 4.0
    entries = store.read(store.path(folder, "host", "made"), "host", "made")
    assert entries[0].config == {"BLOCK": 32, "multibuffer": None} and entries[0].found.kind == "measured"
    assert entries[0].found.default_microseconds == 12.5 and entries[0].found.microseconds == 3.125
    tries = len(log)
    resumed = Settings(HOST, "offline", folder, jobs=1, resume=True)
    assert runs.run([one], resumed, lambda *_: None)[0].gain == 4.0 and len(log) == tries, "nothing is tried again"
    runs.run([one], settings, lambda *_: None)
    assert len(log) == 2 * tries, "without --resume everything is"


def test_ctrl_c_keeps_what_is_done(
    settings: Settings, made: Space, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verdict(config: dict[str, Any]) -> Verdict:
        if len(log) > 10:
            raise KeyboardInterrupt
        return good(config)

    log = fake(monkeypatch, verdict)
    both = [Target(made, HOST, {"tokens": tokens, "width": 96}, CASE) for tokens in (1, 2)]
    with pytest.raises(KeyboardInterrupt):
        runs.run(both, settings, lambda *_: None)
    assert len(store.read(store.path(folder, "host", "made"), "host", "made")) == 1
    log.clear()
    resumed = Settings(HOST, "offline", folder, jobs=1, resume=True)
    assert len(runs.run(both, resumed, lambda *_: None)) == 2 and len(log) == 6, "two of the second were kept"


def test_what_ends_before_its_default_is_reported(
    settings: Settings, made: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on file is tried with the default and may end before it."""

    def try_all(tries: Any, mode: str, *, done: Any, **_: Any) -> None:
        done(1, good(dict(tries[1][1])))

    monkeypatch.setattr(runs, "try_all", try_all)
    ended: list[bool] = []
    monkeypatch.setattr(runs._Evaluate, "late", property(lambda self: bool(ended)))
    monkeypatch.setattr(runs._Evaluate, "note", lambda self, verdict: ended.append(True))
    store.write(settings.folder, "host", "made", [on_file(24)])
    said: list[runs.Found] = []
    assert runs.run([here(made)], settings, lambda done, what, found: said.extend([found] if found else [])) == []
    (partial,) = said
    assert [one.config["BLOCK"] for one in partial.verdicts] == [24] and not partial.finished and not partial.file
    assert partial.default.config["BLOCK"] == 8 and partial.default.fate == "unfinished" and partial.gain == 1.0
    assert "not finished" in report.summary(said, settings) and report.table(said, settings).row_count == 1


def test_the_end_of_the_time_ends_a_round(settings: Settings, made: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    log = fake(monkeypatch, good)
    one = Target(made, HOST, {"tokens": 1, "width": 96}, CASE)
    monkeypatch.setattr(runs._Evaluate, "late", property(lambda self: len(log) > 3))
    (found,) = runs.run([one], replace(settings, minutes=60.0), lambda *_: None)
    assert len(log) == 4 and len(found.verdicts) == 1, "the default's round was over"
    (kept,) = runs.Journal(replace(settings, resume=True)).known.values()
    assert len(kept) == 4


def test_what_is_tried_is_told(settings: Settings, made: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, good)
    said: list[str] = []
    runs.run([here(made)], replace(settings, tries=3), lambda done, what, found: said.append(what))
    assert said[0] == f"made {CASE.name}: default, 1 of this round left"
    assert f"made {CASE.name}: BLOCK=16, 2 of this round left, best 12.5 us" in said
    assert f"made {CASE.name}: BLOCK=24, 1 of this round left, best 6.25 us" in said


def test_a_run_leaves_the_tries_of_other_targets(
    settings: Settings, made: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = fake(monkeypatch, good)
    resumed = replace(settings, resume=True)
    runs.run([here(made, 1), here(made, 2)], settings, lambda *_: None)
    log.clear()
    runs.run([here(made, 1)], settings, lambda *_: None)
    assert len(log) == 8, "its own count no more"
    log.clear()
    runs.run([here(made, 1), here(made, 2)], resumed, lambda *_: None)
    assert not log, "those of the second were there all the time"


def test_a_dropped_try_does_not_come_back(settings: Settings, made: Space) -> None:
    first = runs.Journal(settings)
    config = {"BLOCK": 8, "multibuffer": None}
    first.add(here(made, 1), good(config))
    first.add(here(made, 2), good(config))
    first.drop(here(made, 1))
    first.close()
    again = runs.Journal(settings)
    again.close()
    assert again.get(here(made, 1), config) is None and again.get(here(made, 2), config) == good(config)


def test_tries_are_those_of_a_case(settings: Settings, made: Space) -> None:
    """Their time is that of its op: another case of the same key takes another."""
    journal = runs.Journal(settings)
    config = {"BLOCK": 8, "multibuffer": None}
    other = select(kernel="rope", model="demo")[0]
    journal.add(here(made), good(config))
    assert journal.get(here(made), config) and journal.get(replace(here(made), case=other), config) is None
    journal.close()


def test_tries_hold_for_one_chip_and_for_sources_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = runs._stamp("Ascend910B2"), runs._stamp("Ascend910B3")
    assert first != other and first == runs._stamp("Ascend910B2")
    source = tmp_path / "offline" / "counting.py"
    source.parent.mkdir()
    monkeypatch.setattr(runs.dsv4_triton, "__file__", str(tmp_path / "__init__.py"))
    stamps = []
    for text in ("a = 1", "a = 2"):
        source.write_text(text)
        stamps.append(runs._stamp("Ascend910B2"))
    assert stamps[0] != stamps[1]


def test_two_runs_do_not_share_a_journal(settings: Settings, made: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, good)
    first = runs.Journal(settings)
    with pytest.raises(BusyError, match="another process tunes host"):
        runs.run([target(made)], settings, lambda *_: None)
    first.close()
    assert runs.run([Target(made, HOST, {"tokens": 1, "width": 96}, CASE)], settings, lambda *_: None)


def test_a_winner_that_differs_from_the_reference_does_not_win(
    folder: Path, made: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSV4_TRITON_CACHE_DIR", str(tmp_path / "cache"))
    fake(monkeypatch, good)
    monkeypatch.setattr(runs, "check_cases", lambda target: [CASE])
    monkeypatch.setattr(
        runs, "check_on_host",
        lambda target, config, *_: Verdict(dict(config), "ok" if config["BLOCK"] < 32 else "wrong", "differs"),
    )  # fmt: skip
    found = runs.run([target(made)], Settings(A2, "offline", folder, jobs=1), lambda *_: None)[0]
    assert found.winner is not None and found.winner.config["BLOCK"] == 24
    assert sum(one.fate == "wrong" for one in found.verdicts) == 2


def test_what_is_no_faster_in_turn_with_the_default_does_not_win(
    settings: Settings, made: Space, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tries run one after the other, so a change of the machine's load can make one of them look fast."""
    fake(monkeypatch, good)
    monkeypatch.setattr(
        runs, "time_in_turn",
        lambda target, config, _: Verdict(dict(config), "ok", "", 7.0, 9.0)
        if config["BLOCK"] < 32 else Verdict(dict(config), "no gain", "0.9 times as fast"),
    )  # fmt: skip
    found = runs.run([Target(made, HOST, {"tokens": 1, "width": 96}, CASE)], settings, lambda *_: None)[0]
    assert found.winner is not None and found.winner.config["BLOCK"] == 24 and found.gain == 9 / 7
    assert sum(one.fate == "no gain" for one in found.verdicts) == 2
    entry = store.read(store.path(folder, "host", "made"), "host", "made")[0]
    assert (entry.found.microseconds, entry.found.default_microseconds) == (7.0, 9.0)


def test_a_default_that_fails_leaves_no_entry(
    settings: Settings, made: Space, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, lambda config: Verdict(config, "wrong", "differs"))
    found = runs.run([Target(made, HOST, {"tokens": 1, "width": 96}, CASE)], settings, lambda *_: None)[0]
    assert found.winner is None and not store.path(folder, "host", "made").exists()


def npu(monkeypatch: pytest.MonkeyPatch, problem: str) -> None:
    """An NPU which answers, or has a problem."""
    monkeypatch.setattr(runs, "npu_name", lambda: "Ascend910B2")
    monkeypatch.setattr(runs, "device_named", lambda name: name)
    monkeypatch.setattr(runs, "problem_of", lambda device: problem)


def test_a_lost_device_ends_the_run_and_the_next_one_tries_again(
    settings: Settings, made: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, on_npu = target(made), Settings(A2, "device", settings.folder, jobs=1)
    npu(monkeypatch, "the driver is gone")
    fake(monkeypatch, lambda config: Verdict(config, "crash", "no device"))
    says = r"NPU no longer answers: the driver is gone; made demo/.* was tried with default: no device"
    with pytest.raises(DeviceLostError, match=says):
        runs.run([one], on_npu, lambda *_: None)
    fake(monkeypatch, good)
    (found,) = runs.run([one], replace(on_npu, resume=True), lambda *_: None)
    assert found.gain == 4.0, "what crashed without a device is no finding about the candidate"


@pytest.mark.parametrize("fate", ["crash", "time"])
def test_a_device_that_is_lost_after_the_default_leaves_what_is_on_file(
    fate: str, settings: Settings, made: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    npu(monkeypatch, "the driver is gone")
    file = store.write(settings.folder, "a2", "made", [on_file(24, "measured")])
    fake(monkeypatch, lambda config: good(config) if config["BLOCK"] == 8 else Verdict(config, fate, "no device"))
    with pytest.raises(DeviceLostError, match="was tried with BLOCK=24: no device"):
        runs.run([target(made)], Settings(A2, "device", settings.folder, jobs=1), lambda *_: None)
    assert store.read(file, "a2", "made") == [on_file(24, "measured")]


def test_a_device_that_is_lost_while_a_winner_is_timed_again(
    settings: Settings, made: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    npu(monkeypatch, "the driver is gone")
    fake(monkeypatch, good)
    monkeypatch.setattr(runs, "time_in_turn", lambda target, config, _: Verdict(dict(config), "crash", "no device"))
    with pytest.raises(DeviceLostError, match="was tried with BLOCK=32: no device"):
        runs.run([target(made)], Settings(A2, "device", settings.folder, jobs=1), lambda *_: None)
    assert not store.path(settings.folder, "a2", "made").exists()


def test_a_default_that_crashes_on_a_device_that_answers_costs_its_kernel_alone(
    settings: Settings, made: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    npu(monkeypatch, "")
    log = fake(monkeypatch, lambda config: Verdict(config, "crash", "vector core exception"))
    on_npu = Settings(A2, "device", settings.folder, jobs=1)
    both = [target(made), replace(target(made), key={"tokens": 2, "width": 96})]
    assert [found.winner for found in runs.run(both, on_npu, lambda *_: None)] == [None, None]
    log.clear()
    assert len(runs.run(both, replace(on_npu, resume=True), lambda *_: None)) == 2 and not log


def test_a_default_that_crashes_on_the_host_costs_its_kernel_alone(
    settings: Settings, made: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verdict(config: dict[str, Any]) -> Verdict:
        return Verdict(config, "crash", "[/some/a.mlir]") if failing else good(config)

    fake(monkeypatch, verdict)
    both = [Target(made, HOST, {"tokens": tokens, "width": 96}, CASE) for tokens in (1, 2)]
    failing = True
    (first, *_) = runs.run(both[:1], settings, lambda *_: None)
    failing = False
    (second, *_) = runs.run(both[1:], settings, lambda *_: None)
    assert first.winner is None and second.winner is not None
    console = Console(width=200)
    with console.capture() as printed:
        console.print(report.table([first, second], settings))
    assert "crash: [/some/a.mlir]" in printed.get(), "what a compiler says is no markup"


def test_an_npu_is_asked_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has used the device cannot fork tries that use it."""
    fork = ModuleType("torch_npu")
    fork.npu = SimpleNamespace(get_device_name=lambda _: f"by {os.getpid()}")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", fork)
    runs.npu_name.cache_clear()
    name = runs.npu_name()
    runs.npu_name.cache_clear()
    assert name.startswith("by ") and name != f"by {os.getpid()}"
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(RuntimeError, match="does not say which NPU"):
        runs.npu_name()
