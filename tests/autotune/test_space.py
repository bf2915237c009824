"""Look-up of launch parameters: buckets, files of the user before shipped ones, and the computed default."""

from __future__ import annotations

import json
import multiprocessing
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4_triton.autotune import space as spaces_module
from dsv4_triton.autotune import store
from dsv4_triton.autotune.run import versions
from dsv4_triton.autotune.search import spaces
from dsv4_triton.autotune.shipped import changed_default, key_of, lines
from dsv4_triton.autotune.space import Space, bucket, trial
from dsv4_triton.autotune.store import ConfigWarning, Entry, Found
from dsv4_triton.device import A2, A3, FAMILIES, HOST, Family
from tests.autotune.conftest import without_home

FOUND = Found(
    "estimate", 1.0, 2.0, "muls_add flash/decode/b16", "Ascend910B2", "2026-01-31", {"triton-ascend": "3.2.0"}
)


def entry(block: int | None, tokens: int, width: int = 64, dtype: str = "bfloat16") -> Entry:
    config = None if block is None else {"BLOCK": block, "multibuffer": None}
    key = {"tokens": tokens, "width": width, "dtype": dtype}
    return Entry(key, config, {"BLOCK": 8, "multibuffer": None}, FOUND)


def ask(space: Space, tokens: int, width: int = 64, dtype: torch.dtype = torch.bfloat16, family: Any = A2) -> Any:
    space.forget()
    return space(family, tokens=tokens, width=width, dtype=dtype)


def test_buckets_are_powers_of_two() -> None:
    assert [bucket(n) for n in (0, 1, 2, 3, 4, 5, 64, 65, 4096)] == [1, 1, 2, 4, 4, 8, 64, 128, 4096]


def test_default_without_a_file(folder: Path, made: Space) -> None:
    config = ask(made, 2)
    assert config == {"BLOCK": 16, "multibuffer": None} and config.options == {}


def test_exact_bucket_next_smaller_bucket_default(folder: Path, made: Space) -> None:
    store.write(folder, "a2", "made", [entry(32, 16)])
    assert ask(made, 16)["BLOCK"] == ask(made, 9)["BLOCK"] == 32
    assert ask(made, 17)["BLOCK"] == ask(made, 32)["BLOCK"] == 32, "the next smaller bucket of 32 is 16"
    assert ask(made, 33)["BLOCK"] == 8 * 33, "the next smaller bucket of 64 is 32, and it has no entry"
    assert ask(made, 8)["BLOCK"] == 64, "a larger bucket never counts"
    store.write(folder, "a2", "made", [entry(16, 32)])
    assert ask(made, 17)["BLOCK"] == 16


def test_other_keys_and_families_do_not_count(folder: Path, made: Space) -> None:
    store.write(folder, "a2", "made", [entry(32, 2)])
    assert ask(made, 2)["BLOCK"] == 32
    assert ask(made, 2, width=128)["BLOCK"] == 16
    assert ask(made, 2, dtype=torch.float32)["BLOCK"] == 16
    assert ask(made, 2, family=A3)["BLOCK"] == 16


def test_an_entry_without_parameters_is_the_computed_default(folder: Path, made: Space) -> None:
    """It ends the search: the next smaller bucket does not count any more."""
    store.write(folder, "a2", "made", [entry(32, 2), entry(None, 4)])
    store.write(folder, "a2", "made", [entry(None, 8)])
    assert ask(made, 4)["BLOCK"] == 32 and ask(made, 8)["BLOCK"] == 64 and ask(made, 2)["BLOCK"] == 32


def test_the_default_is_that_of_the_bucket(folder: Path, made: Space) -> None:
    """Sizes of one bucket share their parameters, so that a few compiles serve all of them."""
    assert [ask(made, tokens)["BLOCK"] for tokens in (3, 4, 5, 8)] == [32, 32, 64, 64]
    assert ask(made, 3, width=24)["BLOCK"] == 24, "32 does not divide 24, so that the size itself decides"


def test_parameters_that_do_not_fit_other_sizes_of_the_bucket(folder: Path, made: Space) -> None:
    made.buckets = ("tokens", "width")
    store.write(folder, "a2", "made", [entry(32, 2)])
    assert ask(made, 2, width=64)["BLOCK"] == 32
    assert ask(made, 2, width=48)["BLOCK"] == 16, "48 is in the bucket of 64, but 32 does not divide it"


def test_parameters_of_a_smaller_bucket_are_for_a_whole_bucket(folder: Path, made: Space) -> None:
    """The warm-up asks for its largest size alone, so that no other size may get something else."""
    made._fits = lambda family, key, config: "too many" if key["tokens"] * config["BLOCK"] > 64 * 24 else ""
    store.write(folder, "a2", "made", [entry(32, 32)])
    assert ask(made, 32)["BLOCK"] == 32
    assert 32 not in [ask(made, tokens)["BLOCK"] for tokens in (33, 48, 64)], "33 and 48 it would fit, 64 not"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"TILE": 32}, "lacks BLOCK and has unknown TILE;"),
        ({"multibuffer": None}, "lacks BLOCK;"),
        ({"BLOCK": 8, "multibuffer": None, "TILE": 32, "unit_flag": True}, "has unknown TILE, unit_flag;"),
        ({"BLOCK": "32", "multibuffer": None}, "has BLOCK '32', expected the kind of 16"),
        ({"BLOCK": None, "multibuffer": None}, "has BLOCK None, expected the kind of 16"),
        ({"BLOCK": True, "multibuffer": None}, "has BLOCK True, expected the kind of 16"),
        ({"BLOCK": 0, "multibuffer": None}, "has BLOCK 0, expected one of 16, 8, 24, 32"),
        ({"BLOCK": -1, "multibuffer": None}, "has BLOCK -1, expected one of"),
        ({"BLOCK": 64, "multibuffer": None}, "has BLOCK 64, expected one of"),
        ({"BLOCK": 8, "multibuffer": 2}, "has multibuffer 2, expected one of None, False"),
    ],
)
def test_outdated_parameters_cost_one_warning(folder: Path, made: Space, config: dict[str, Any], says: str) -> None:
    """Parameters of other names or types than the kernel has now, or values that it does not choose from: `fits` of
    many kernels divides by them."""
    keys = [{"tokens": tokens, "width": 64, "dtype": "bfloat16"} for tokens in (2, 4)]
    file = store.write(folder, "a2", "made", [Entry(key, config, dict.fromkeys(config, 8), FOUND) for key in keys])
    with pytest.warns(ConfigWarning, match=f"{file}: config of .* {says}") as caught:
        assert ask(made, 2) == {"BLOCK": 16, "multibuffer": None}
        assert ask(made, 4) == {"BLOCK": 32, "multibuffer": None}
    assert len(caught) == 1


def test_values_are_those_of_the_entrys_own_sizes(folder: Path, made: Space) -> None:
    """A larger bucket has other candidates, and is served by what was found for the next smaller one all the same."""
    made.candidates = lambda family, key: {"BLOCK": (8 * key["tokens"],), "multibuffer": (None,)}
    made.default = lambda family, key: {"BLOCK": 64, "multibuffer": None}
    store.write(folder, "a2", "made", [entry(16, 2)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ask(made, 2)["BLOCK"] == ask(made, 4)["BLOCK"] == 16 and ask(made, 8)["BLOCK"] == 64


def test_parameters_of_the_nearest_sizes(folder: Path) -> None:
    """Of entries that differ in sizes alone, by factors of two and each once; a search begins with them."""
    others = [entry(24, 64, width=32), entry(24, 64, dtype="float32"), entry(None, 32), entry(8, 16)]
    store.write(folder, "a2", "made", [entry(32, 256), entry(16, 8), *others, entry(16, 4), entry(12, 64)])
    key = {"tokens": 16, "width": 64, "dtype": "bfloat16"}
    found = store.nearby("a2", "made", key, ("tokens",))
    assert [config["BLOCK"] for config in found] == [16, 12, 32], "its own, the default and other widths do not count"
    assert [config["BLOCK"] for config in store.nearby("a2", "made", key, ("tokens", "width"))] == [16, 12, 24, 32]
    assert store.nearby("a3", "made", key, ("tokens",)) == []
    odd = replace(entry(48, 8), key=key | {"tokens": "8"})
    store.write(folder, "a2", "made", [odd])
    assert [config["BLOCK"] for config in store.nearby("a2", "made", key, ("tokens",))] == [16, 12, 32], "8 is a number"


def test_a_file_may_be_older_than_an_option(folder: Path, made: Space) -> None:
    """What was found without an option of the compiler holds without it, whatever its default is now."""
    made.default = lambda family, key: {"BLOCK": 16, "multibuffer": None, "tile_mix_vector_loop": 1}
    store.write(folder, "a2", "made", [entry(32, 2)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ask(made, 2) == {"BLOCK": 32, "multibuffer": None, "tile_mix_vector_loop": None}
        assert ask(made, 2).options == {}


def test_an_option_may_be_off_by_its_name(folder: Path, made: Space) -> None:
    """None leaves it out, and what the compiler then does may be either: both truths can be told."""
    config = {"BLOCK": 8, "multibuffer": True}
    store.write(folder, "a2", "made", [replace(entry(8, 2), config=config)])
    assert ask(made, 2) == config, "the candidates are None and False"


def test_answers_that_are_kept_are_bounded(folder: Path, made: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest context of a server is part of some keys and grows with every step."""
    monkeypatch.setattr(spaces_module, "_MOST_KNOWN", 8)
    for tokens in range(1, 50):
        assert made(A2, tokens=tokens, width=1 << 20, dtype=torch.float32)["BLOCK"] == 8 * bucket(tokens)
        assert len(made._known) <= 8


def test_the_users_file_goes_before_the_shipped_one(folder: Path, made: Space) -> None:
    store.write(store.SHIPPED, "a2", "made", [entry(32, 2), entry(16, 4)])
    store.write(folder, "a2", "made", [entry(8, 2)])
    assert ask(made, 2)["BLOCK"] == 8 and ask(made, 4)["BLOCK"] == 16


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c.update(schema=2), "schema"),
        (lambda c: c.update(family="a3"), "family"),
        (lambda c: c.update(kernel="other"), "kernel"),
        (lambda c: c.update(schema=True), "schema"),
        (lambda c: c.pop("entries"), "entries"),
        (lambda c: c["entries"].append(3), r"entries\[1\]"),
        (lambda c: c["entries"][0].update(key={"tokens": [1]}), r"entries\[0\].key"),
        (lambda c: c["entries"][0].update(config={"BLOCK": 1.5}), r"entries\[0\].config"),
        (lambda c: c["entries"][0].update(config={"TILE": 1}), r"entries\[0\].config"),
        (lambda c: c["entries"][0].update(config={}, default={}), r"entries\[0\].config"),
        (lambda c: c["entries"][0].pop("config"), r"entries\[0\].config"),
        (lambda c: c["entries"][0].pop("key"), r"entries\[0\].key"),
        (lambda c: c["entries"][0]["found"].update(kind="guessed"), r"entries\[0\].found.kind"),
        (lambda c: c["entries"][0]["found"].pop("chip"), r"entries\[0\].found.chip"),
        *(
            (
                lambda c, time=time: c["entries"][0]["found"].update(microseconds=time),
                r"entries\[0\].found.microseconds",
            )
            for time in (0, -1, True, "1", float("inf"), float("nan"), 10**400, 1e300)
        ),
        (
            lambda c: c["entries"][0]["found"].update(default_microseconds=0.0),
            r"entries\[0\].found.default_microseconds",
        ),
    ],
)
def test_a_broken_file_costs_one_warning(folder: Path, made: Space, change: Any, named: str) -> None:
    file = store.write(folder, "a2", "made", [entry(32, 2)])
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    store.forget()
    with pytest.warns(ConfigWarning, match=f"made.json: {named} is") as caught:
        assert ask(made, 2)["BLOCK"] == 16
        assert ask(made, 4)["BLOCK"] == 32
    assert len(caught) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema": 1}'])
def test_a_file_that_is_none(folder: Path, made: Space, text: str) -> None:
    file = store.path(folder, "a2", "made")
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.warns(ConfigWarning, match=str(file)):
        assert ask(made, 2)["BLOCK"] == 16


def test_a_folder_that_cannot_be_read(folder: Path, made: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels run with what is shipped. This one's name is too long for any file system."""
    store.write(store.SHIPPED, "a2", "made", [entry(32, 2)])
    unreadable = f"/{'x' * 300}"
    monkeypatch.setenv(store.FOLDER, unreadable)
    with pytest.warns(ConfigWarning, match=f"{store.path(Path(unreadable), 'a2', 'made')}: cannot be read") as caught:
        assert ask(made, 2)["BLOCK"] == ask(made, 4)["BLOCK"] == 32
    assert len(caught) == 1
    found, problems = lines(["a2"])
    assert len(found) == 1 and "cannot be read" in problems[0] and store.hidden_by("a2") == ""


def test_a_user_without_a_home(folder: Path, made: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write(store.SHIPPED, "a2", "made", [entry(32, 2)])
    without_home(monkeypatch)
    assert store.folders() == (store.SHIPPED,) and store.hidden_by("a2") == ""
    assert ask(made, 2)["BLOCK"] == 32
    with pytest.raises(store.NoFolderError, match="DSV4_TRITON_CONFIG_DIR"):
        store.user_folder()


def test_the_users_folder_may_be_the_shipped_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write(store.SHIPPED, "a2", "muls_add", [entry(32, 2)])
    (link := folder.parent / "link").symlink_to(store.SHIPPED)
    for same in (store.SHIPPED, store.SHIPPED / "a2" / "..", link):
        monkeypatch.setenv(store.FOLDER, str(same))
        found, problems = lines(["a2"])
        assert [line.folder for line in found] == [store.SHIPPED] and not problems and not store.hidden_by("a2")


def test_a_broken_file_is_never_overwritten(folder: Path) -> None:
    file = store.path(folder, "a2", "made")
    file.parent.mkdir(parents=True)
    file.write_text("{")
    with pytest.raises(store.ConfigFileError):
        store.write(folder, "a2", "made", [entry(32, 2)])
    assert file.read_text() == "{"


def test_what_is_nested_too_deeply_is_a_broken_file(folder: Path) -> None:
    file = store.path(folder, "a2", "made")
    file.parent.mkdir(parents=True)
    file.write_text("[" * 100_000)
    with pytest.warns(ConfigWarning, match=f"{file}: cannot be read"):
        assert store.lookup("a2", "made", {}) is None


def _write_some(folder: Path, first: int) -> None:
    for tokens in range(first, first + 30):
        store.write(folder, "a2", "made", [entry(32, tokens)])


def test_two_processes_lose_nothing_of_each_other(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=_write_some, args=(folder, first)) for first in (0, 100)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    found = store.read(store.path(folder, "a2", "made"), "a2", "made")
    assert [one.key["tokens"] for one in found] == [*range(30), *range(100, 130)]


def test_files_are_sorted_and_merged(folder: Path) -> None:
    store.write(folder, "a2", "made", [entry(32, 4096), entry(32, 64)])
    file = store.write(folder, "a2", "made", [entry(8, 64), entry(16, 128)])
    found = store.read(file, "a2", "made")
    assert [(e.key["tokens"], (e.config or {})["BLOCK"]) for e in found] == [(64, 8), (128, 16), (4096, 32)]
    assert not list(file.parent.glob(".*")), "nothing half-written is left"


def test_a_trial(folder: Path, made: Space) -> None:
    store.write(folder, "a2", "made", [entry(32, 2)])
    with trial({"made": {"BLOCK": 8}}) as tried:
        assert ask(made, 2) == {"BLOCK": 8, "multibuffer": None}
    assert tried.used == {"made"} and tried.asked[0].key["tokens"] == 2
    with trial({"made": {"BLOCK": 24}}) as tried:
        assert ask(made, 2)["BLOCK"] == 16, "it does not fit"
    assert not tried.used
    with trial({"made": {"BLOCK": 8}}, only={"tokens": 4, "width": 64, "dtype": "bfloat16"}):
        assert ask(made, 2)["BLOCK"] == 16 and ask(made, 3)["BLOCK"] == 8
    with trial() as tried:
        assert ask(made, 2)["BLOCK"] == 16, "no file counts"
        assert made(A2, tokens=2, width=64, dtype=torch.bfloat16) is made(A2, tokens=2, width=64, dtype=torch.bfloat16)
    assert len(tried.asked) == 1, "an answer is kept: launches that are timed do not wait longer for it than others"
    assert ask(made, 2)["BLOCK"] == 32


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_shipped_files_can_be_used(family: Family) -> None:
    """Every file is that of a kernel, every entry is what a launch of its sizes gets, without a warning there and at
    the next larger sizes, and no default was better than what won."""
    files = list((store.SHIPPED / family.name).glob("*.json"))
    assert files, "configs are shipped for every family"
    with store.shipped_only(), warnings.catch_warnings():
        warnings.simplefilter("error", ConfigWarning)
        for file in files:
            assert file.stem in spaces(), file
            space = spaces()[file.stem]
            space.forget()
            for one in store.read(file, family.name, file.stem):
                assert one.found.kind == ("measured" if family is HOST else "estimate"), file
                assert one.found.microseconds <= one.found.default_microseconds, (file, one.key)
                key = key_of(one)
                if one.config is not None:
                    assert space(family, **key) == one.config, (file, one.key)
                for name in space.buckets:
                    space(family, **key | {name: 2 * key[name]})
            space.forget()


def test_an_entry_is_old_when_its_default_has_changed(folder: Path, made: Space) -> None:
    """An option that an older file does not name was left out; a key that no launcher asks with has no default."""
    current = replace(entry(32, 2), default={"BLOCK": 16}, found=replace(FOUND, versions=versions()))
    moved, odd = replace(current, key=current.key | {"tokens": 4}), replace(current, key={"tokens": "4"})
    more = replace(current, key=current.key | {"tokens": 8}, default={"BLOCK": 64, "multibuffer": None, "SPLIT": 2})
    for one in (moved, odd, more, current):
        config = one.config and dict.fromkeys(one.default, 8)
        store.write(folder, "a2", "made", [replace(one, config=config)])
    found, _ = lines(["a2"])
    assert {(line.entry.key["tokens"], line.old) for line in found} == {
        (2, ""), (4, "its default is now BLOCK=32"), (8, "its default is now SPLIT=None"),
        ("4", "no launch asks for its key"),
    }  # fmt: skip


def test_a_computed_default_is_asked_with_dtypes(folder: Path, made: Space) -> None:
    made.default = lambda family, key: {"BLOCK": 8 * key["dtype"].itemsize, "multibuffer": None}
    store.write(folder, "a2", "made", [replace(entry(None, 2), found=replace(FOUND, versions=versions()))])
    (line,), _ = lines(["a2"])
    assert line.old == "its default is now BLOCK=16"


@pytest.mark.parametrize("family", FAMILIES)
def test_shipped_defaults_are_the_computed_ones(family: str) -> None:
    """Whoever changes a default measures its entries again: those without parameters would mean what nobody tried."""
    with store.shipped_only():
        found, problems = lines([family])
    stale = []
    for line in found:
        now = spaces()[line.kernel].computed(FAMILIES[family], key_of(line.entry))
        if why := changed_default(line.entry, now):
            stale.append(f"{line.kernel} {line.entry.key}: {why}")
    assert found and not problems and not stale
