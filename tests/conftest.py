"""Shared fixtures. Kernel tests run natively on the CPU through the project's own Triton driver."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded; spinning threads slow the kernels down
# What was tuned on this machine is not what is tested: there is no such folder.
os.environ["DSV4_TRITON_CONFIG_DIR"] = str(Path(__file__).parent / "no-configs")

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """A seed derived from the test id, so that the order of tests does not matter."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


_SET_NUM_THREADS = torch.set_num_threads


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU worker replaces torch.set_num_threads by a function that does nothing, for the whole process. Work in
    a fork needs the real one: OpenMP's threads have stayed behind in the parent, and waiting for them never ends."""
    monkeypatch.setattr(torch, "set_num_threads", _SET_NUM_THREADS)


@pytest.fixture(scope="session")
def host_driver():
    """Install the host driver for Triton kernels on CPU tensors for the session; with DSV4_TRITON_TEST_DEVICE=cuda
    kernels run on a GPU instead, on copies of the same tensors (`scripts/gpu_check.sh`)."""
    if os.environ.get("DSV4_TRITON_TEST_DEVICE") == "cuda":
        from dsv4_triton.bench import cuda

        with cuda.installed(mirror=True):
            yield
        return
    from dsv4_triton.compiler import host

    with host.installed():
        yield


@pytest.fixture(scope="session")
def simulated_npu() -> Path:
    """The library of the simulated NPU, for `simnpu.environment`; a skip where there is no C++ compiler."""
    from tests import simnpu

    if simnpu.compiler() is None:
        pytest.skip("the simulated NPU needs a C++20 compiler (g++ or clang++)")
    return simnpu.build()


if os.environ.get("DSV4_TRITON_TEST_DEVICE") == "cuda":
    from dsv4_triton.bench.run import NotHereError

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(pyfuncitem: pytest.Function):
        """What cannot be launched on a GPU is a skip that says so."""
        try:
            return (yield)
        except NotHereError as error:
            pytest.skip(str(error))
