"""Modules that vLLM's server code could be."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dsv4_triton.backend import compat


def fake_server(monkeypatch: pytest.MonkeyPatch, key: str, **contents: Any) -> ModuleType:
    """A module that vLLM's server code could be, under `key` in sys.modules."""
    module = ModuleType(compat.API_SERVER)
    module.__spec__ = SimpleNamespace(name=compat.API_SERVER)  # type: ignore[assignment]
    module.__dict__.update(contents)
    monkeypatch.setitem(sys.modules, key, module)
    return module
