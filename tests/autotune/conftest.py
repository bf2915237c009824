"""A user's folder of config files and a space of their own for each test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4_triton.autotune import store
from dsv4_triton.autotune.space import DECLARED, Space


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's folder, empty; and no shipped files."""
    monkeypatch.setenv("DSV4_TRITON_CONFIG_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "shipped")
    store.forget()
    yield tmp_path / "user"
    store.forget()


def without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no entry in passwd."""
    for name in (store.FOLDER, "XDG_CONFIG_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 1 << 30)
    store.forget()


@pytest.fixture
def made() -> Iterator[Space]:
    """A space whose default block is 8 for each token, and which takes divisors of the width."""
    yield Space(
        "made",
        default=lambda family, key: {"BLOCK": 8 * key["tokens"], "multibuffer": None},
        candidates=lambda family, key: {"BLOCK": (8, 16, 24, 32), "multibuffer": (None, False)},
        fits=lambda family, key, config: f"BLOCK {config['BLOCK']}" if key["width"] % config["BLOCK"] else "",
    )
    del DECLARED["made"]
