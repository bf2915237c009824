"""Stand-in for torch_npu on the simulated NPU of `tests/simnpu`.

It has what this project uses of torch_npu and nothing else, so that each new dependency on it is a decision that shows:
an attribute that is missing here raises with its name.
"""

import os
from types import SimpleNamespace

import torch

from torch_npu import _triton

__version__ = "2.13.0"

torch.ops.load_library(os.environ["SIMNPU_LIBRARY"])
_triton.install()  # before the device can be seen: the host's Triton driver makes way for a real one
torch.utils.rename_privateuse1_backend("npu")

from torch_npu import npu  # noqa: E402  (names the device)

torch._register_device_module("npu", npu)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

_C = SimpleNamespace(_weak_ref_tensor=lambda tensor: tensor)
"""What torch_npu keeps in its extension module. A weak reference keeps its tensor here, since graphs have no pool."""


def _autoload() -> None:
    """Entry point of torch: importing this module has done everything."""


def __getattr__(name: str) -> None:
    raise AttributeError(f"torch_npu.{name}: the stand-in of the tests (tests/fake_torch_npu) has no such attribute")
