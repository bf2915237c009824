"""Entry points of vLLM's plugin groups."""

from __future__ import annotations


def register() -> None:
    """Register the model, the attention backend and the custom ops; called in every vLLM process."""


def platform() -> str | None:
    """The platform class to use, or None to stand aside."""
    return None
