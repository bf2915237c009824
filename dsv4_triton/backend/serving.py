"""What is served and how: the checkpoint's config and the user's options, read from a vLLM config and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dsv4_triton.config import Choices, ConfigError, ModelSettings, Options, resolve
from dsv4_triton.device import RowFormat, family_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DTYPES = (torch.bfloat16, torch.float32)
CACHE_DTYPES = {"auto": DTYPES, "bfloat16": (torch.bfloat16,)}
"""Accepted --kv-cache-dtype and the model dtypes it may stand for: rows are kept in the model's dtype."""


@dataclass(frozen=True)
class Serving:
    """A checkpoint, the user's options and what they come to on this device."""

    model: ModelSettings
    options: Options
    choices: Choices
    row_format: RowFormat

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Serving:
        """Read `vllm_config`; ConfigError for whatever cannot be served, naming what it got and what is right."""
        model_config = vllm_config.model_config
        model = ModelSettings.of(model_config.hf_config)
        options = Options.of(vllm_config.additional_config)
        dtype = model_config.dtype
        if dtype not in DTYPES:
            raise ConfigError(f"--dtype is {dtype}, DeepSeek-V4 runs in {' or '.join(map(str, DTYPES))}")
        cache_dtype = vllm_config.cache_config.cache_dtype
        if dtype not in CACHE_DTYPES.get(cache_dtype, ()):
            raise ConfigError(
                f"--kv-cache-dtype is {cache_dtype!r}: cache rows are kept in the model's dtype {dtype}, use 'auto'"
            )
        backend = vllm_config.attention_config.backend
        if backend is not None and backend.name != "CUSTOM":
            raise ConfigError(f"--attention-backend is {backend.name}, DeepSeek-V4 is served by CUSTOM only")
        if model_config.quantization is not None:
            raise ConfigError(
                f"the checkpoint is quantised ({model_config.quantization}), only unquantised ones can be loaded"
            )
        if vllm_config.speculative_config is not None:
            raise ConfigError("--speculative-config is set; speculative decoding is not supported")
        device = family_of(vllm_config.device_config.device_type)
        choices = resolve(model, options, device, exact=dtype == torch.float32)
        # fp32 is for exact comparisons, so its rows stay whole whatever the family stores.
        row_format = RowFormat.PLAIN if dtype == torch.float32 else choices.family.row_format
        return cls(model, options, choices, row_format)

    def summary(self) -> str:
        """What is served in which formats, for the log."""
        kinds = [self.model.ratios.count(ratio) for ratio in (0, 4, 128)]
        rounding = "on" if self.choices.kv_fake_quant or self.row_format is RowFormat.RECORD else "off"
        return (
            f"{kinds[0]} window-only, {kinds[1]} c4 and {kinds[2]} c128 layers; family {self.choices.family.name}; "
            f"cache geometry {self.options.kv_geometry}, {self.row_format.value} rows, "
            f"{self.choices.index_format} index keys, fp8 rounding of rows {rounding}"
        )
