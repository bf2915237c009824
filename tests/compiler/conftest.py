"""Fixtures of the compiler's tests."""

from __future__ import annotations

import pytest

from dsv4_triton.compiler.host import runtime


@pytest.fixture
def four_threads(monkeypatch):
    """Four threads share every grid, however small."""
    monkeypatch.setattr(runtime, "_PARALLEL_NS", 0.0)
    runtime.set_threads(4)
    yield
    runtime.set_threads(None)
