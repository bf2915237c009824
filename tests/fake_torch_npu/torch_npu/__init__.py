"""Stand-in for torch_npu on the simulated NPU of `tests/simnpu`.

It has what this project uses of torch_npu and nothing else, so that each new dependency on it is a decision that shows:
an operator that is missing here raises with its name when it is called, anything else when it is asked for.
"""

import os
from collections.abc import Callable
from typing import NoReturn

import torch

from torch_npu import _hccl, _triton

__version__ = "2.13.0"

torch.ops.load_library(os.environ["SIMNPU_LIBRARY"])
_triton.install()  # before the device can be seen: the host's Triton driver makes way for a real one
torch.utils.rename_privateuse1_backend("npu")

from torch_npu import _C, npu  # noqa: E402, F401  (name the device)

torch._register_device_module("npu", npu)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
_hccl.register()


def _autoload() -> None:
    """Entry point of torch: importing this module has done everything."""


def __getattr__(name: str) -> Callable[..., NoReturn]:
    message = f"torch_npu.{name}: the stand-in of the tests (tests/fake_torch_npu) has no such thing"
    if not name.startswith("npu_"):
        raise AttributeError(message)

    def operator(*_: object, **__: object) -> NoReturn:  # libraries import operators that they may never call
        raise NotImplementedError(message)

    return operator
