"""Asynchronous scheduling, which vLLM switches on for an NPU, and for drafts of the MTP block, too, by itself.

A step is scheduled before the tokens of the last one are known, and how many drafts were accepted is read on the device
only. Steps are not computed at the same time: the simulated device does everything when it is told to.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.truths import TINY
from tests.npu.conftest import machine, serve


@pytest.mark.long
@pytest.mark.parametrize("drafts", [0, 3])
def test_answers_do_not_depend_on_the_schedule(simulated_npu: Path, tmp_path: Path, drafts: int) -> None:
    """As `test_random_schedules`: another number of drafts is accepted in every step and for every request."""
    from dsv4_triton.demo.checkpoint import write_checkpoint

    write_checkpoint(tmp_path / "model", TINY)
    folder = str(tmp_path / "model")
    found = serve(machine(simulated_npu), "tests.npu.random_run", checkpoint=folder, drafts=drafts, steps=300)
    print(found)
    assert found["ahead"]
    assert all(found.get(what) for what in ("finished", "aborted", "hit", "preempted")), found
