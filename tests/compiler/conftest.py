"""Fixtures of the compiler's tests."""

from __future__ import annotations

import pytest

from dsv4_triton.compiler import host_runtime


@pytest.fixture
def four_threads(monkeypatch):
    """Four threads share every grid, however small."""
    monkeypatch.setattr(host_runtime, "_PARALLEL_NS", 0.0)
    host_runtime.set_threads(4)
    yield
    host_runtime.set_threads(None)
