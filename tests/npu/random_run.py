"""Random schedules on the simulated NPU, in a process of its own: `python -m tests.npu.random_run JSON` prints JSON.

The argument has `checkpoint`, a tiny one, how many `drafts` there are a step and how many `steps` are to be made. The
result says whether steps were scheduled ahead of the one that is computed, and what came to pass.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.model import engine
from tests.model.random_schedules import Driver
from tests.model.speculation import speculation
from tests.model.test_random_schedules import OPTIONS
from tests.model.truths import Truths


def run(checkpoint: str, drafts: int, steps: int) -> dict[str, Any]:
    with engine.engine(checkpoint, **OPTIONS, async_scheduling=False) as plain:
        truths = Truths(plain)
    with engine.engine(checkpoint, **OPTIONS, **speculation(drafts)) as llm:
        driver = Driver(llm, truths, drafts)
        driver.explore(steps)
        ahead = llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    return {"ahead": ahead, "steps": driver.steps, **driver.seen}


if __name__ == "__main__":
    print(json.dumps(run(**json.loads(sys.argv[1]))), flush=True)
