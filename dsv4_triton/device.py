"""Device families. Everything that differs between A2, A3, A5 and the host is a field of one record here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

KiB = 1024


class RowFormat(Enum):
    """How one row of the window and compressed caches is stored."""

    PLAIN = "plain"
    """512 values in the cache's dtype."""
    RECORD = "record"
    """640 bytes: 64 bf16 RoPE values, 448 e4m3 values, 7 e8m0 scales (one per 64 values), padding."""


IndexFormat = Literal["plain", "int8", "e4m3"]
"""How indexer keys are stored: in the cache's dtype, int8 with an fp16 scale, or e4m3 with an fp32 scale."""


@dataclass(frozen=True, eq=False)
class Speed:
    """Rates that the cost model counts with; docs/cost_model.md says what they leave out. "per cycle" is per core.

    Sources: [config] `platform_config/<chip>.ini` of Huawei's public repository hicann/runtime, entries in brackets;
    [guide] Ascend C best practices, "L2 Cache Tiling"; [assumed] nobody's measurement.
    """

    clock_hz: float
    """[config: cube_freq]"""
    macs_per_cycle: dict[str, int]
    """By MLIR element type of the operands. 16 x 16 x 16 for 16-bit types, twice that for 8-bit ones [config:
    cube_m_size, cube_n_size, cube_k_size, DtypeMKN]; a quarter for f32 [assumed, from the chips' published peaks]."""
    hbm_bytes_per_second: float
    """[guide] for A2; A3 the same [assumed]; A5 [config: ddr_rate times cores, which is also what Huawei announced]."""
    l2_bytes_per_second: float
    """All cores at l2_read_rate [config]; the guide says about 7 TB/s for reads and writes together on A2."""
    l2_bytes: int
    """[config: l2_size]"""
    gm_l1: int
    """Bytes per cycle from global memory into L1 [config: l2_read_rate]."""
    gm_ub: int
    """... into vector memory: A2 and A3 [assumed: as out of it], A5 [config: l2_read_rate of the vector core]."""
    ub_gm: int
    """... out of vector memory [config: ub_to_l2_rate]."""
    l0c_gm: int
    """... out of the accumulators [config: l2_write_rate]."""
    l0c_ub: int
    """... from the accumulators into vector memory [config: l0_c_to_ub_rate]."""
    ub_l1: int
    """... from vector memory into L1 [config: ub_to_l1_rate]."""
    l1_l0a: int
    """... into the cube's left operand [config: l1_to_l0_a_rate]."""
    l1_l0b: int
    """... into the cube's right operand [config: l1_to_l0_b_rate]."""
    vector_issue: int = 20
    """Cycles per vector operation besides its 256-byte steps; on A5 per call of a vector function [assumed]."""
    transfer_issue: int = 60
    """Cycles between two transfers that a core starts [assumed]."""
    run_issue: int = 1
    """Cycles per contiguous run of a transfer besides its bytes [assumed]."""
    scalar_cycles: dict[str, int] = field(
        default_factory=lambda: {"alu": 1, "div": 16, "gm": 32, "ub": 8, "stack": 1, "store": 2}
    )
    """Cycles of scalar arithmetic (divisions by a power of two are shifts), of a load by memory, and of a store
    [assumed]."""
    launch_seconds: float = 3e-6
    """Start and end of a kernel on the device [assumed]."""


_INT8_FP16 = {"bf16": 4096, "f16": 4096, "f32": 1024, "i8": 8192}

A2_SPEED = Speed(
    clock_hz=1.80e9, macs_per_cycle=_INT8_FP16, hbm_bytes_per_second=1.6e12, l2_bytes_per_second=24 * 110 * 1.80e9,
    l2_bytes=192 * KiB * KiB,
    gm_l1=110, gm_ub=64, ub_gm=64, l0c_gm=86, l0c_ub=256, ub_l1=128, l1_l0a=512, l1_l0b=256,
)  # fmt: skip
A3_SPEED = Speed(
    clock_hz=1.85e9, macs_per_cycle=_INT8_FP16, hbm_bytes_per_second=1.6e12, l2_bytes_per_second=24 * 110 * 1.85e9,
    l2_bytes=192 * KiB * KiB,
    gm_l1=110, gm_ub=64, ub_gm=64, l0c_gm=86, l0c_ub=256, ub_l1=128, l1_l0a=512, l1_l0b=256,
)  # fmt: skip
A5_SPEED = Speed(
    clock_hz=1.65e9, macs_per_cycle={**_INT8_FP16, "f8E4M3FN": 8192, "f8E5M2": 8192},
    hbm_bytes_per_second=32 * 31 * 1.65e9, l2_bytes_per_second=32 * 100 * 1.65e9,
    l2_bytes=128 * KiB * KiB,
    gm_l1=100, gm_ub=100, ub_gm=42, l0c_gm=100, l0c_ub=128, ub_l1=128, l1_l0a=256, l1_l0b=256,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Family:
    """What kernels and caches need to know of a device family.

    Sizes are bytes per core. Sources: the module limits that `bishengir-compile` prints (910B2, 910_9391, 950PR_9589).
    Records are equal only to themselves: launches look things up by family, and hashing all fields would take longer
    than the look-up.
    """

    name: str
    title: str
    cube_cores: int
    vector_cores: int
    ub_bytes: int
    l1_bytes: int
    l0c_bytes: int
    dot_rows: int
    """Rows of a left matmul operand that are processed at once; fewer cost as much."""
    dot_copies: int
    """Tiles of each operand that the compiler keeps in L1 for a loop of products: one of a peeled product before it,
    and those of the loop, which it doubles by default on A2 and A3."""
    fp8: bool
    row_operands: bool
    """A product's operand may be loaded row by row from computed addresses; elsewhere the vector cores gather it."""
    mixed_kernels: bool
    """Both vector cores share the vector work of a kernel that also uses the cube; elsewhere only one of them does it,
    and cube and vector steps are better kernels of their own."""
    vector_registers: bool
    """Vector code keeps values in registers through a chain of operations on small vectors; elsewhere each operation
    goes through vector memory, and few large tiles are faster."""
    vector_sort: bool
    """Sorting a tile is one vector instruction, while prefix sums and scattered stores are scalar code."""
    row_format: RowFormat
    index_format: IndexFormat
    scratch_bytes: int = 72 << 20
    """Rows that one launch gathers for the next should stay in the last cache: most bytes of them."""
    any_tile: bool = False
    """Local memory is a cache, so that a tile may be larger: the sizes above guide, they do not bind."""
    arch: str = ""
    """Instruction set of the cores, which decides compiler and device library; "" where there is no offline compile."""
    target: str = ""
    """The chip that an offline compile is for."""
    speed: Speed | None = None
    """What the cost model counts with; None where there is no offline compile."""
    soc_prefixes: tuple[str, ...] = field(default=())


A2 = Family(
    name="a2", title="Atlas A2 (910B)", cube_cores=24, vector_cores=48,
    ub_bytes=192 * KiB, l1_bytes=512 * KiB, l0c_bytes=128 * KiB, dot_rows=16, dot_copies=3,
    fp8=False, row_operands=False, mixed_kernels=True, vector_registers=False, vector_sort=True,
    row_format=RowFormat.PLAIN, index_format="int8",
    arch="c220", target="Ascend910B2", speed=A2_SPEED, soc_prefixes=("Ascend910B",),
)  # fmt: skip
A3 = Family(
    name="a3", title="Atlas A3 (910C)", cube_cores=24, vector_cores=48,
    ub_bytes=192 * KiB, l1_bytes=512 * KiB, l0c_bytes=128 * KiB, dot_rows=16, dot_copies=3,
    fp8=False, row_operands=False, mixed_kernels=True, vector_registers=False, vector_sort=True,
    row_format=RowFormat.PLAIN, index_format="int8",
    arch="c220", target="Ascend910_9391", speed=A3_SPEED, soc_prefixes=("Ascend910_93",),
)  # fmt: skip
A5 = Family(
    name="a5", title="Atlas A5 (950)", cube_cores=32, vector_cores=64,
    ub_bytes=248 * KiB, l1_bytes=512 * KiB, l0c_bytes=256 * KiB, dot_rows=16, dot_copies=2,
    fp8=True, row_operands=False, mixed_kernels=False, vector_registers=True, vector_sort=True,
    row_format=RowFormat.RECORD, index_format="e4m3",
    arch="c310", target="Ascend950PR_9589", speed=A5_SPEED, soc_prefixes=("Ascend950", "Ascend910_95"),
)  # fmt: skip
HOST = Family(
    name="host", title="development host (CPU)", cube_cores=os.cpu_count() or 1, vector_cores=os.cpu_count() or 1,
    ub_bytes=1024 * KiB, l1_bytes=1024 * KiB, l0c_bytes=1024 * KiB, dot_rows=4, dot_copies=1,
    fp8=True, row_operands=True, mixed_kernels=True, vector_registers=False, vector_sort=False,
    row_format=RowFormat.PLAIN, index_format="int8", scratch_bytes=8 << 20, any_tile=True,
)  # fmt: skip

FAMILIES = {family.name: family for family in (A2, A3, A5, HOST)}

CUDA = Family(
    name="cuda", title="NVIDIA GPU (checks of kernels only)", cube_cores=256, vector_cores=256,
    ub_bytes=32 * KiB, l1_bytes=48 * KiB, l0c_bytes=32 * KiB, dot_rows=16, dot_copies=3,
    fp8=False, row_operands=True, mixed_kernels=True, vector_registers=False, vector_sort=False,
    row_format=RowFormat.PLAIN, index_format="int8",
)  # fmt: skip
"""No family of the model: `scripts/gpu_check.sh` runs kernels there, where programs really run at once. As many
programs as several generations have cores for; memories such that tiles fit registers and shared memory."""

DEVICE_TYPES = ("cpu", "npu")
"""Torch device types with kernels."""


def device_types() -> tuple[str, ...]:
    """Torch device types with kernels now: `cuda` only while acting as `CUDA`, so that nothing is served there."""
    return (*DEVICE_TYPES, "cuda") if _acting is CUDA else DEVICE_TYPES


class UnsupportedDeviceError(RuntimeError):
    """The device is not one of the supported families."""


def family_of_soc(soc: str) -> Family:
    """The family of a SoC name such as `Ascend910B2`; `UnsupportedDeviceError` for any other chip."""
    matches = [
        (len(prefix), family)
        for family in FAMILIES.values()
        for prefix in family.soc_prefixes
        if soc.lower().startswith(prefix.lower())
    ]
    if not matches:
        supported = ", ".join(f"{p}* ({f.name})" for f in FAMILIES.values() for p in f.soc_prefixes)
        raise UnsupportedDeviceError(f"chip {soc!r} is not supported; supported are {supported}")
    return max(matches, key=lambda match: match[0])[1]


_acting: Family | None = None


@contextmanager
def acting_as(family: Family) -> Iterator[None]:
    """While active, CPU tensors belong to `family` instead of HOST: launchers take its configuration and its variants.

    Kernels still run on the host, or are recorded for an offline compile. Nests; holds for all threads of the process.
    """
    global _acting
    saved, _acting = _acting, family
    try:
        yield
    finally:
        _acting = saved


@cache
def _npu_family() -> Family:
    """Asking the driver takes longer than a launch, and the devices of a machine are of one kind."""
    import torch_npu

    return family_of_soc(torch_npu.npu.get_device_name(0))


def family_of(device_type: str) -> Family:
    """The family that serves tensors of a torch device type.

    `"cpu"` is HOST, or the family of `acting_as`; `"npu"` is asked for its SoC name.
    """
    if device_type == "cpu":
        return _acting or HOST
    if device_type == "cuda" and _acting is CUDA:
        return CUDA
    if device_type == "npu":
        return _npu_family()
    raise UnsupportedDeviceError(
        f"tensors on device type {device_type!r} are not supported; use {' or '.join(map(repr, DEVICE_TYPES))}"
    )


class CaptureError(RuntimeError):
    """A graph is captured, and what was asked for cannot be part of it."""


def capturing(device: torch.device) -> bool:
    """Whether what is given to the device's current stream is captured into a graph."""
    if device.type != "npu":
        return False
    import torch

    return bool(torch.get_device_module(device).is_current_stream_capturing())


def refuse_in_capture(device: torch.device, what: str) -> None:
    """CaptureError where a graph is captured; `what` says what cannot be done then."""
    if capturing(device):
        raise CaptureError(f"{what} while a graph is captured, which cannot hold that")
