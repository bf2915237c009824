"""The process of `baselines.Interpreter`: a line [op, case] in, a line with seconds or an error out.

Runs with TRITON_INTERPRET=1, which has to be set before a kernel is decorated.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from dsv4_triton.bench.measure import host_clock
from dsv4_triton.bench.registry import select
from dsv4_triton.bench.run import bounded_memory
from dsv4_triton.device import HOST


def answer(op: str, name: str) -> dict[str, float | str]:
    """Seconds of a run, after the check against the reference."""
    (case,) = select(kernel=op, case=name)
    try:
        with bounded_memory(torch.device("cpu")):
            inputs = case.build(HOST)
            case.check(inputs, HOST)
            return {"seconds": host_clock(lambda: case.launcher(**inputs.arguments))}
    except Exception as error:
        # Whatever the interpreter cannot do is a finding about it and goes to the caller.
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def main() -> None:
    torch.set_grad_enabled(False)
    channel = os.dup(1)
    os.dup2(2, 1)  # kernels and libraries print elsewhere
    with open(channel, "w") as out:
        print("ready", file=out, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(*json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
