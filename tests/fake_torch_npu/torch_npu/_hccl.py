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
        return getattr(self.gloo, name)(*map(_on_host, arguments))

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


for _name in ("allreduce", "broadcast", "allgather", "_allgather_base", "gather", "scatter", "barrier", "send", "recv"):
    setattr(ProcessGroupHCCL, _name, _collective(_name))


def register() -> None:
    """Make the backend known to torch.distributed."""
    distributed.Backend.register_backend("hccl", ProcessGroupHCCL, devices=["npu"])
