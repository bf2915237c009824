from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata


@dataclass
class AscendCommonAttentionMetadata(CommonAttentionMetadata):
    seq_lens_cpu: Any = None
    num_computed_tokens_cpu: Any = None
    actual_seq_lengths_q: list[int] = field(default_factory=list)
    positions: torch.Tensor | None = None
    positions_cpu: torch.Tensor | None = None
    attn_state: Any = None
    num_input_tokens: int = 0
