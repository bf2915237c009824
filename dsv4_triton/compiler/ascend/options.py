"""Compile options of a launch -> switches of the adapter and flags of AscendNPU IR's compiler.

Names and mapping are those of triton-ascend 3.2 (`NPUOptions` and its `linalg_to_bin` functions), defaults included:
what is compiled offline is what a launch on the device would compile. Nothing is read from the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dsv4_triton.compiler.frontend import FrontendOptions
from dsv4_triton.device import FAMILIES, Family

_WITHOUT_EFFECT = {
    "debug", "sanitize_overflow", "llvm_version", "kernel_name", "cluster_dims", "num_warps", "num_ctas", "num_stages",
    "warp_size", "num_buffers_warp_spec", "num_consumer_groups", "reg_dec_producer", "reg_inc_consumer",
    "enable_warp_specialization", "enable_persistent", "optimize_epilogue", "enable_fp_fusion", "allow_fp8e4nv",
    "allowed_dot_input_precisions", "max_num_imprecise_acc_default", "stream", "maxnreg",
}  # fmt: skip
"""Launch keywords that triton-ascend accepts and that change nothing in the code for the cores here."""


@dataclass(frozen=True)
class Options:
    """Compile options; None is the family's default.

    multibuffer: double-buffer local memory. A2 and A3: on; A5: off.
    enable_auto_bind_sub_block: split the vector work of mixed kernels over both vector cores. A2 and A3: on; A5: off.
    tile_mix_vector_loop, tile_mix_cube_loop: trips of the tiled vector and cube loops of mixed kernels.
    set_workspace_multibuffer: buffers of the workspace between cube and vector cores.
    enable_hivm_auto_cv_balance, unit_flag, sync_solver, inject_barrier_all, inject_block_all,
    disable_auto_inject_block_sync: the compiler's switches of these names; the last three and `sync_solver` A2 and A3.
    limit_auto_multi_buffer_only_for_local_buffer, limit_auto_multi_buffer_of_local_buffer: where not to double-buffer.
    enable_select_analysis, enable_nd2nz_on_vector, enable_linearize, force_simt_template: the adapter's switches.
    compile_mode: "simd", or "unstructured_in_simt" (A5) for scattered accesses as SIMT code.
    disable_tight_coupled_buffer: A5's compiler has it, but triton-ascend 3.2.0 cannot pass it: for studies only.
    """

    multibuffer: bool | None = None
    enable_auto_bind_sub_block: bool | None = None
    enable_hivm_auto_cv_balance: bool | None = None
    sync_solver: bool | None = None
    unit_flag: bool | None = None
    inject_barrier_all: bool | None = None
    inject_block_all: bool | None = None
    limit_auto_multi_buffer_only_for_local_buffer: bool | None = None
    set_workspace_multibuffer: int | None = None
    tile_mix_vector_loop: int | None = None
    tile_mix_cube_loop: int | None = None
    limit_auto_multi_buffer_of_local_buffer: str | None = None
    disable_auto_inject_block_sync: bool | None = None
    enable_select_analysis: bool | None = None
    enable_nd2nz_on_vector: bool = False
    enable_linearize: bool = False
    force_simt_template: bool = False
    compile_mode: str = "simd"
    disable_tight_coupled_buffer: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Options from the keywords of a launch. `ValueError` for one that does not exist or that the offline compile
        does not follow.
        """
        known = {field.name for field in fields(cls)}
        wrong = sorted(given.keys() - known - _WITHOUT_EFFECT)
        if wrong:
            raise ValueError(f"unknown compile options {wrong}; there are: {', '.join(sorted(known))}")
        options = cls(**{name: value for name, value in given.items() if name in known})
        if options.compile_mode not in ("simd", "unstructured_in_simt"):
            modes = "'simd' or 'unstructured_in_simt'"
            raise ValueError(f"compile_mode is {options.compile_mode!r}, it must be {modes} for an offline compile")
        return options

    def frontend(self, family: Family) -> FrontendOptions:
        """What the front end and the adapter are told."""
        a5 = _a5(family)
        select = self.enable_select_analysis
        return FrontendOptions(
            fp8=family.fp8, adapter_910_95=a5, named_ops=True, select_analysis=a5 if select is None else select,
            nd2nz_on_vector=self.enable_nd2nz_on_vector, linearize=self.enable_linearize,
            force_simt_template=self.force_simt_template or self.compile_mode == "unstructured_in_simt",
        )  # fmt: skip

    def flags(self, family: Family) -> list[str]:
        """Flags of `bishengir-compile` or `bishengir-compile-a5`, in triton-ascend's order."""
        a5 = _a5(family)
        both_cores = self.enable_auto_bind_sub_block
        values = {
            "target": family.target,
            "enable-auto-multi-buffer": not a5 if self.multibuffer is None else self.multibuffer,
            "enable-auto-bind-sub-block": not a5 if both_cores is None else both_cores,
            "enable-hivm-auto-cv-balance": self.enable_hivm_auto_cv_balance,
            "enable-hivm-graph-sync-solver": None if a5 else self.sync_solver,
            "enable-hivm-unit-flag-sync": self.unit_flag,
            "enable-hivm-inject-barrier-all-sync": self.inject_barrier_all,
            "enable-hivm-inject-block-all-sync": None if a5 else self.inject_block_all,
            "limit-auto-multi-buffer-only-for-local-buffer": self.limit_auto_multi_buffer_only_for_local_buffer,
            "set-workspace-multibuffer": self.set_workspace_multibuffer,
            "tile-mix-vector-loop": self.tile_mix_vector_loop,
            "tile-mix-cube-loop": self.tile_mix_cube_loop,
            "limit-auto-multi-buffer-of-local-buffer": self.limit_auto_multi_buffer_of_local_buffer,
            "disable-auto-inject-block-sync": None if a5 else self.disable_auto_inject_block_sync,
            "enable-hfusion-compile": "true",
            "enable-hivm-compile": None if a5 else "true",
            "enable-triton-kernel-compile": "true",
        }
        if self.disable_tight_coupled_buffer:
            if not a5:
                raise ValueError(f"disable_tight_coupled_buffer is an option of A5's compiler, not of {family.name}'s")
            values["disable-tight-coupled-buffer"] = "true"
        return [f"--{name}={value}" for name, value in values.items() if value is not None]


def _a5(family: Family) -> bool:
    """Whether triton-ascend takes its path for A5 (its "910_95" switch)."""
    if not family.arch:
        names = ", ".join(f.name for f in FAMILIES.values() if f.arch)
        raise ValueError(f"there is no offline compile for family {family.name!r}; there is for {names}")
    return family.arch == "c310"
