"""A second stream of a device, for work beside the current one's. Each order between the two is an event."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SideStream:
    """One more stream of `device`. Events are new every time, as a captured graph needs them."""

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Work within goes to this stream, behind all that the current one has been given."""
        self._stream.wait_event(self._module.current_stream().record_event())
        with self._module.stream(self._stream):
            yield

    def mark(self) -> Any:
        """The event after all that this stream has been given."""
        return self._stream.record_event()

    def wait_for(self, event: Any) -> None:
        """Let what the current stream is given from now on begin after an event."""
        self._module.current_stream().wait_event(event)
