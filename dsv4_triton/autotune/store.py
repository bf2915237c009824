"""Config files: what tuning found for a kernel on a device family.

`<folder>/<family>/<kernel>.json`, shipped beside this module; files of the user's folder go before them, entry by
entry. The user's folder is `DSV4_TRITON_CONFIG_DIR`, else `~/.config/dsv4_triton/configs`. A file that cannot be used
costs one warning that names it and the field, and its kernel runs with what lies below: the shipped file, or defaults.

    {
      "schema": 1, "kernel": "muls_add", "family": "a2",
      "entries": [
        {"key": {"tokens": 64, "dtype": "bfloat16"},
         "config": {"BLOCK": 4096, "multibuffer": null},
         "default": {"BLOCK": 8192, "multibuffer": null},
         "found": {"kind": "estimate", "microseconds": 2.1, "default_microseconds": 2.4, "case": "muls_add flash/...",
                   "chip": "Ascend910B2", "date": "2026-01-31", "versions": {"triton-ascend": "3.2.0"}}}
      ]
    }

`config` is null where the computed default was the best. Entries are sorted by their keys.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from math import log2
from pathlib import Path
from typing import Any

SCHEMA = 1
SHIPPED = Path(__file__).parent / "configs"
FOLDER = "DSV4_TRITON_CONFIG_DIR"
KINDS = ("estimate", "measured")
_LEAST, _MOST = 1e-9, 1e15
"""Microseconds that can be a time: sums and quotients of them are finite."""


class ConfigWarning(UserWarning):
    """A config file that is not used."""


class ConfigFileError(ValueError):
    """What is wrong with a config file: the message names the file and the field."""


class NoFolderError(ValueError):
    """There is no folder for the user's config files."""


@dataclass(frozen=True)
class Found:
    """How an entry was found: `kind` is estimate or measured, times are of the whole op, `chip` that it is for."""

    kind: str
    microseconds: float
    default_microseconds: float
    case: str
    chip: str
    date: str
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        """How many times faster than the default it is."""
        return self.default_microseconds / self.microseconds


@dataclass(frozen=True)
class Entry:
    """The parameters for one key. `config` is None where the computed default was the best."""

    key: dict[str, Any]
    config: dict[str, Any] | None
    default: dict[str, Any]
    found: Found

    @property
    def at(self) -> tuple[tuple[str, Any], ...]:
        """What equal keys have in common."""
        return _at(self.key)


def _at(key: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(key.items()))


def _order(at: Iterable[tuple[str, Any]]) -> list[tuple[str, int, str]]:
    """Sizes by their value."""
    return [(name, v if isinstance(v, int) else -1, str(v)) for name, v in at]


def user_folder() -> Path:
    """Where `tune` writes and what serving reads before the shipped files; `NoFolderError` for a user without one."""
    chosen = os.environ.get(FOLDER)
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CONFIG_HOME")
    try:
        return (Path(base) if base else Path.home() / ".config") / "dsv4_triton" / "configs"
    except RuntimeError:
        raise NoFolderError(f"this user has no home: name a folder for config files with {FOLDER}") from None


def hidden_by(family: str) -> str:
    """ "" or a sentence that names the user's folder, where its config files hide shipped entries of a family."""
    folder = folders()[0]
    with suppress(ConfigFileError):
        if folder != SHIPPED and files(folder, family):
            return f"{folder / family} hides shipped launch parameters"
    return ""


@contextmanager
def shipped_only() -> Iterator[None]:
    """Inside, look-ups, those of child processes too, find what everybody has and nothing of the user's."""
    usual = os.environ.get(FOLDER)
    os.environ[FOLDER] = str(SHIPPED)
    forget()
    try:
        yield
    finally:
        if usual is None:
            del os.environ[FOLDER]
        else:
            os.environ[FOLDER] = usual
        forget()


def folders() -> tuple[Path, ...]:
    """The folders of config files, the first one first, each once: the user's may be the shipped one or none."""
    with suppress(NoFolderError):
        user = user_folder()
        if os.path.realpath(user) != os.path.realpath(SHIPPED):
            return user, SHIPPED
    return (SHIPPED,)


def lookup(family: str, kernel: str, key: Mapping[str, Any]) -> dict[str, Any] | None:
    """The parameters of exactly this key, {} where those are the computed default, None where there is no entry.

    Files are read at the first question about a kernel.
    """
    return _table(family, kernel).get(_at(key))


def nearby(family: str, kernel: str, key: Mapping[str, Any], sizes: Collection[str]) -> list[dict[str, Any]]:
    """The parameters, but for defaults, of entries that differ from `key` in `sizes` alone, each once and the nearest
    first; a step is a factor of two."""

    def others(of: Mapping[str, Any]) -> dict[str, Any]:
        return {name: v for name, v in of.items() if name not in sizes}

    found = []
    for at, config in _table(family, kernel).items():
        there = dict(at)
        sized = [name for name in sizes if name in key]
        like = there.keys() == key.keys() and others(there) == others(key)
        if config and there != key and like and all(isinstance(there[name], int) for name in sized):
            steps = sum(abs(log2(max(1, there[name])) - log2(max(1, key[name]))) for name in sized)
            found.append((steps, config))
    ordered = [config for _, config in sorted(found, key=lambda one: one[0])]
    return [config for number, config in enumerate(ordered) if config not in ordered[:number]]


@cache
def _table(family: str, kernel: str) -> dict[tuple[tuple[str, Any], ...], dict[str, Any]]:
    found: dict[tuple[tuple[str, Any], ...], dict[str, Any]] = {}
    for folder in reversed(folders()):
        try:
            entries = read(path(folder, family, kernel), family, kernel)
        except ConfigFileError as error:
            warnings.warn(f"{error}; its entries are left out", ConfigWarning, stacklevel=2)
            continue
        found |= {entry.at: entry.config or {} for entry in entries}
    return found


def source(family: str, kernel: str, key: Mapping[str, Any]) -> Path:
    """The file that `lookup` has this key from: the user's where that has it, else the shipped one."""
    holding = (folder for folder in folders() if entry_in(folder, family, kernel, key))
    return path(next(holding, SHIPPED), family, kernel)


def entry_in(folder: Path, family: str, kernel: str, key: Mapping[str, Any]) -> Entry | None:
    """The entry of exactly this key in one folder; None where it has none, or a file that cannot be used."""
    with suppress(ConfigFileError):
        for entry in read(path(folder, family, kernel), family, kernel):
            if entry.at == _at(key):
                return entry
    return None


def forget() -> None:
    """Read the files again at the next question."""
    _table.cache_clear()


def path(folder: Path, family: str, kernel: str) -> Path:
    """The file of a kernel."""
    return folder / family / f"{kernel}.json"


def files(folder: Path, family: str) -> list[Path]:
    """The files of a family in a folder; `ConfigFileError` for a folder that cannot be read."""
    with _readable(folder / family):
        try:
            names = os.listdir(folder / family)
        except (FileNotFoundError, NotADirectoryError):
            return []
    return [folder / family / name for name in sorted(names) if name.endswith(".json")]


def read(file: Path, family: str, kernel: str) -> list[Entry]:
    """The entries of a file, none where there is no file; `ConfigFileError` for one that cannot be used."""
    with _readable(file):
        try:
            text = file.read_text()
        except (FileNotFoundError, NotADirectoryError):
            return []
        content = json.loads(text)
    return entries_of(content, str(file), {"schema": SCHEMA, "kernel": kernel, "family": family})


def content_of(file: Path) -> Any:
    """What a JSON file holds; `ConfigFileError` for one that is none."""
    with _readable(file):
        return json.loads(file.read_text())


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Whatever keeps a file from being read is a `ConfigFileError`."""
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigFileError(f"{file}: cannot be read: {error}") from None


def entries_of(content: Any, name: str, expected: Mapping[str, Any]) -> list[Entry]:
    """The entries of a file's content; `expected` are the fields that must have these values."""
    _need(isinstance(content, dict), name, "the file", "an object", content)
    for label, value in expected.items():
        got = field_of(content, label, name)
        _need(type(got) is type(value) and got == value, name, label, repr(value), got)
    entries = field_of(content, "entries", name)
    _need(isinstance(entries, list), name, "entries", "a list", entries)
    return [_entry(one, name, f"entries[{i}]") for i, one in enumerate(entries)]


def field_of(one: Mapping[str, Any], label: str, name: str, where: str = "") -> Any:
    """A field of a file's object; `ConfigFileError` where it is missing."""
    if label not in one:
        raise ConfigFileError(f"{name}: {where}{label} is missing")
    return one[label]


def _entry(one: Any, name: str, where: str) -> Entry:
    _need(isinstance(one, dict), name, where, "an object", one)
    labels = ("key", "config", "default", "found")
    key, config, default, found = (field_of(one, label, name, f"{where}.") for label in labels)
    _need(isinstance(key, dict) and all(isinstance(v, (int, str)) for v in key.values()), name, f"{where}.key",
          "an object of numbers and strings", key)  # fmt: skip
    _need(config is None or (config != {} and _is_config(config)), name, f"{where}.config",
          "null or an object with parameters", config)  # fmt: skip
    _need(_is_config(default), name, f"{where}.default", "an object of parameters", default)
    _need(isinstance(found, dict), name, f"{where}.found", "an object", found)
    for label in fields(Found):
        value = field_of(found, label.name, name, f"{where}.found.")
        if label.type == "float":
            good, expected = type(value) in (int, float) and _LEAST <= value <= _MOST, f"from {_LEAST:g} to {_MOST:g}"
        else:
            good, expected = isinstance(value, str if label.type == "str" else dict), f"of type {label.type}"
        _need(good, name, f"{where}.found.{label.name}", expected, value)
    _need(found["kind"] in KINDS, name, f"{where}.found.kind", " or ".join(KINDS), found["kind"])
    _need(config is None or config.keys() == default.keys(), name, f"{where}.config",
          f"the parameters {', '.join(default)}", config)  # fmt: skip
    return Entry(key, config, default, Found(**{label.name: found[label.name] for label in fields(Found)}))


def _is_config(value: Any) -> bool:
    return isinstance(value, dict) and all(v is None or isinstance(v, (int, str)) for v in value.values())


def _need(good: bool, name: str, what: str, expected: str, got: Any) -> None:
    if not good:
        raise ConfigFileError(f"{name}: {what} is {got!r:.80}, expected {expected}")


def write(folder: Path, family: str, kernel: str, entries: Iterable[Entry]) -> Path:
    """Merge entries into a kernel's file, those of equal keys in place of what is there; the file is replaced whole.

    `ConfigFileError` where the present file cannot be read, OSError where it cannot be written: it then stays as it is.
    """
    file = path(folder, family, kernel)
    file.parent.mkdir(parents=True, exist_ok=True)
    with _locked(file.parent):
        _merge(file, family, kernel, entries)
    forget()
    return file


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Inside, no other process merges into a file of `folder`."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _merge(file: Path, family: str, kernel: str, entries: Iterable[Entry]) -> None:
    merged = {entry.at: entry for entry in read(file, family, kernel)} | {entry.at: entry for entry in entries}
    content = {"schema": SCHEMA, "kernel": kernel, "family": family}
    replace_file(file, _text(content, [merged[at] for at in sorted(merged, key=_order)]))


def _text(content: Mapping[str, Any], entries: Iterable[Entry]) -> str:
    """One line a field of an entry, so that diffs are small and readable."""
    head = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in content.items())
    parts = []
    for entry in entries:
        rows = [f"   {json.dumps(name)}: {json.dumps(value)}" for name, value in asdict(entry).items()]
        parts.append("  {\n" + ",\n".join(rows) + "\n  }")
    return "{\n" + head + ' "entries": [\n' + ",\n".join(parts) + "\n ]\n}\n"


def replace_file(file: Path, text: str) -> None:
    """Write a file whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "w") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise
