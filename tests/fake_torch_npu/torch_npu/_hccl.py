"""The communication backend "hccl" of the simulated NPU: gloo on the devices' memory."""

from datetime import timedelta
from typing import Any

import torch
from torch import distributed


def _on_host(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_on_host(item) for item in value]
    return torch.ops.simnpu.host(value) if isinstance(value, torch.Tensor) else value


def _collective(name: str) -> Any:
    def call(self: "ProcessGroupHCCL", *arguments: Any) -> Any:
        from torch_npu import npu

        run, arguments = getattr(self.gloo, name), tuple(map(_on_host, arguments))
        if torch.ops.simnpu.capturing():
            npu.submit(lambda: run(*arguments).wait())
        else:
            npu.current_stream().synchronize()
        return run(*arguments)

    return call


class ProcessGroupHCCL(distributed.ProcessGroup):
    """Every collective that torch.distributed dispatches to a backend, by gloo on the same memory."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = distributed.ProcessGroupGloo(store, rank, size, timeout)
        # torch keeps a group's name in its backends.
        self._register_backend(torch.device("npu"), distributed.ProcessGroup.BackendType.CUSTOM, self.gloo)

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return "hccl"


SAME = ("allreduce", "broadcast", "allgather", "_allgather_base", "reduce_scatter", "_reduce_scatter_base", "barrier")
SAME += ("gather", "scatter", "alltoall", "send", "recv")
OTHER = {"all_gather_single": "_allgather_base", "reduce_scatter_single": "_reduce_scatter_base"}
"""What torch 2.13 calls on a group, and gloo's name for it."""
for _name, _gloo in {**{name: name for name in SAME}, **OTHER}.items():
    setattr(ProcessGroupHCCL, _name, _collective(_gloo))


def register() -> None:
    """Make the backend known to torch.distributed."""
    distributed.Backend.register_backend("hccl", ProcessGroupHCCL, devices=["npu"])
