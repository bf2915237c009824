"""An engine whose prologues run on two streams, in a process of its own: `python -m tests.npu.streams JSON`.

The argument is that of `tests.npu.serve`, with the `orders` of work (`SIMNPU_LATE`) in which the cases are served. The
JSON that it prints has the answers in each of them, of `one stream` in the first, and of the first case `without` each
kind of event.
"""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch

from dsv4_triton.backend.streams import SideStream
from dsv4_triton.model.attention import Attention
from tests.model import engine
from tests.npu.serve import CASES

EVENTS = {"wait_for": "side", "beside": "default"}
"""Methods of `SideStream` that order work, each with an order in which a step without its events is wrong."""


def unordered(self: SideStream) -> AbstractContextManager[Any]:
    """`SideStream.beside` of the work before it."""
    return self._module.stream(self._stream)


WITHOUT = {"wait_for": lambda self, event: None, "beside": unordered}


def serve(llm: Any, order: str, cases: list[str]) -> dict[str, Any]:
    torch.ops.simnpu.set_order(order)
    engine.forget(llm)
    return {name: CASES[name](llm) for name in cases}


def run(checkpoint: str, options: dict[str, Any], cases: list[str], orders: list[str]) -> dict[str, Any]:
    with engine.engine(checkpoint, **options) as llm:
        result: dict[str, Any] = {order: serve(llm, order, cases) for order in orders}
        result |= {"captures": torch.npu.NPUGraph.captures, "replays": torch.npu.NPUGraph.replays, "without": {}}
        for name, order in EVENTS.items():
            with patch.object(SideStream, name, WITHOUT[name]):
                result["without"][name] = serve(llm, order, cases[:1])
        for layer in engine.model(llm).modules():
            if isinstance(layer, Attention):
                layer.side = None
        result["one stream"] = serve(llm, orders[0], cases)
    return result


if __name__ == "__main__":
    print(json.dumps(run(**json.loads(sys.argv[1]))), flush=True)
