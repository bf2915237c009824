"""vLLM's CPU worker with native execution of Triton kernels."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from dsv4_triton.compiler import host


class HostWorker(CPUWorker):
    """Installs the host Triton driver, so that kernels run on CPU tensors in this process."""

    def init_device(self) -> None:
        host.install()
        super().init_device()
