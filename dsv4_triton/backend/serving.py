"""What is served and how: the checkpoint's config and the user's options, read from a vLLM config and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dsv4_triton.backend import ascend
from dsv4_triton.backend.geometry import Layout, layout
from dsv4_triton.config import ConfigError, ModelSettings
from dsv4_triton.device import Family, RowFormat, family_of
from dsv4_triton.options import Choices, Options, resolve

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Serving:
    """A checkpoint, the user's options and what they come to on this device."""

    model: ModelSettings
    options: Options
    choices: Choices
    layout: Layout

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Serving:
        """Read `vllm_config`, which `limits.check` has passed; ConfigError for choices that exclude each other."""
        model_config = vllm_config.model_config
        model = ModelSettings.of(model_config.hf_config)
        options = Options.of(vllm_config.additional_config)
        dtype = model_config.dtype
        device = family_of(vllm_config.device_config.device_type)
        exact = dtype == torch.float32
        cache = vllm_config.cache_config
        asked = cache.block_size if cache.user_specified_block_size else None
        choices = resolve(model, options, device, exact=exact, block_size=asked, inside_ascend=ascend.active())
        # fp32 is for exact comparisons, so its rows stay whole whatever the family stores.
        row_format = RowFormat.PLAIN if exact else choices.family.row_format
        pages = layout(choices, model.ratios, row_format, dtype)
        # vllm-ascend writes the model's dtype where the user has said "auto".
        settled = ascend.active() and cache.cache_dtype == str(dtype).removeprefix("torch.")
        if not settled:
            _check_cache_dtype(cache.cache_dtype, pages.window.dtype, choices.family)
        return cls(model, options, choices, pages)

    def summary(self) -> str:
        """What is served in which formats, for the log."""
        kinds = [self.model.ratios.count(ratio) for ratio in (0, 4, 128)]
        records = self.layout.window.dtype == torch.uint8
        rounding = "on" if self.choices.kv_fake_quant or records else "off"
        shared = sorted(self.choices.shared_indices)
        sharing = f"; layers {', '.join(map(str, shared))} share selections and load no indexer" if shared else ""
        streams = "; prologues on two streams" if self.choices.prologue_overlap else ""
        return (
            f"{kinds[0]} window-only, {kinds[1]} c4 and {kinds[2]} c128 layers{sharing}; "
            f"family {self.choices.family.name}; cache geometry {self.layout.geometry} with blocks of "
            f"{self.layout.block_size}: hits every {self.layout.hit_tokens} tokens, "
            f"{self.layout.token_bytes:.0f} bytes a token of context; {'record' if records else 'plain'} rows, "
            f"{self.choices.index_format} index keys, fp8 rounding of rows {rounding}; "
            f"{self.choices.o_proj_format} operands of the output projection{streams}"
        )


def _check_cache_dtype(asked: str, stored: torch.dtype, family: Family) -> None:
    """--kv-cache-dtype cannot choose: a family stores rows in one way."""
    if asked == "auto" or (asked == "bfloat16" and stored == torch.bfloat16):
        return
    rows = "fp8 records" if stored == torch.uint8 else f"values of {stored}"
    fp8 = "" if family.fp8 else " and has no fp8"
    raise ConfigError(
        f"--kv-cache-dtype is {asked!r}, but family {family.name!r} keeps rows as {rows}{fp8}; use 'auto'"
    )
