"""`tests.npu.serve` inside the real vllm-ascend, from a checkout on PYTHONPATH: `python -m tests.npu.real_ascend JSON`.

What its import and its worker ask of CANN and of torch_npu, and neither this project nor the simulated device has, is
put in their place here, before anything of it is imported.
"""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch
import torch_npu
from triton.backends import backends

from dsv4_triton.backend.upstream_npu import Launches
from dsv4_triton.device import A2, A5, family_of
from tests.npu.serve import run

CHIPS = {A2: ("A2", 220), A5: ("A5", 260)}
"""What it is built for, and what its chip says at run time."""


def module(name: str, **contents: Any) -> ModuleType:
    """An imported module `name` with these contents."""
    made = sys.modules[name] = ModuleType(name)
    vars(made).update(contents)
    made.__path__, made.__spec__ = [], ModuleSpec(name, None, is_package=True)
    absent_from(made)
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, made)
    return made


class Absent:
    """Stands for what vllm-ascend takes from torch_npu when it is imported; calling it is an error that names it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{self._name} was called; tests/npu/real_ascend.py has no such thing")


def absent_from(parent: ModuleType) -> None:
    """Let anything be taken from `parent`."""

    def get(name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{parent.__name__}.{name}")

    parent.__getattr__ = get  # type: ignore[method-assign]


def nothing(*_: Any, **__: Any) -> None: ...


class Nothing:
    """Stands for classes that are only named."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, None]:
    scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype), None


def install() -> None:
    backends["ascend"].driver.is_active = classmethod(lambda cls: False)  # it needs triton-ascend 3.2.2
    absent_from(torch_npu)
    absent_from(torch.npu)
    chip, number = CHIPS[family_of("npu")]
    torch.npu.get_soc_version = lambda: number
    torch_npu._npu_matmul_add_fp32 = nothing
    torch_npu.npu_format_cast = lambda tensor, layout: tensor
    torch_npu.npu_rms_norm = rms_norm

    module("acl")
    module("acl.rt", memcpy=nothing)
    module("scipy", __version__="1.15.0")
    module("scipy.linalg", hadamard=nothing)
    module("scipy.stats", norm=SimpleNamespace(ppf=nothing))
    module("scipy.optimize", linear_sum_assignment=nothing)
    for name in ("qwen3_5", "qwen3_dflash", "qwen3vl", "kimi_k25"):  # models that need torchvision
        module(f"vllm_ascend.patch.worker.patch_{name}")
    module("vllm_ascend._build_info", __device_type__=chip)
    module("torch_npu.op_plugin")
    module("torch_npu.op_plugin.atb")
    module("torch_npu.op_plugin.atb._atb_ops", _register_atb_extensions=nothing)
    module("torch_npu.profiler", dynamic_profile=Nothing())
    module("torch_npu._C", **vars(torch_npu._C))
    module("torch_npu._C._distributed_c10d", ProcessGroupHCCL=type("ProcessGroupHCCL", (), {"Options": Nothing}))
    module("torch_npu.multiprocessing")
    module("torch_npu.multiprocessing.reductions", rebuild_npu_tensor=nothing)


def without_triton() -> None:
    """Its own kernels that it launches whether there is a Triton driver or not. They compute slots that no cache of
    this project is written by, and zero pages of which only valid rows are read."""
    from vllm.platforms import current_platform

    current_platform.pre_register_and_update()
    from vllm_ascend.worker import block_table, utils

    block_table._compute_slot_mapping_kernel = Launches(nothing)
    utils._zero_kv_blocks_kernel = Launches(nothing)


if __name__ == "__main__":
    install()
    without_triton()
    print(json.dumps(run(**json.loads(sys.argv[1]))), flush=True)
