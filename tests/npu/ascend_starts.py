"""What configurations inside vllm-ascend come to, one after the other: `python -m tests.npu.ascend_starts JSON`.

Argument and output are those of `tests.npu.starts`. No engine is started.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tests.npu.starts import BEYOND_A2, Results, environments, message_of, ours, settled, show, start, starts

CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "blocks of 32": {"block_size": 32},
    "blocks of 256": {"block_size": 256},
    "fine": ours(geometry="fine"),
    "context parallel": {"additional_config": {"enable_dsa_cp": True}},
    "head apart": {"additional_config": {"finegrained_tp_config": {"lmhead_tensor_parallel_size": 2}}},
    "not set": {"additional_config": {"finegrained_tp_config": {}, "xlite_graph_config": {"full_mode": True}}},
    "no c128 layer": {"hf_overrides": {"compress_ratios": [0, 0, 4, 4, 0]}},
    "pieces": {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}},
    **BEYOND_A2,
}


def modes(checkpoint: str) -> Results:
    """Of graphs."""
    for name, options in {"graphs": {}, "eager": {"enforce_eager": True}}.items():
        yield name, settled(checkpoint, **options).compilation_config.cudagraph_mode.name


@contextmanager
def without(owner: Any, name: str) -> Iterator[None]:
    """There is no `owner.name` meanwhile."""
    with patch.object(owner, name):
        delattr(owner, name)
        yield


def contract(checkpoint: str) -> Results:
    import vllm_ascend.core.kv_cache_interface as interface
    import vllm_ascend.utils
    from vllm.v1.core import kv_cache_utils as planning
    from vllm.v1.kv_cache_interface import MLAAttentionSpec
    from vllm_ascend.attention import dsa_v1
    from vllm_ascend.attention import utils as attention
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    from dsv4_triton.backend.ascend_contract import check, check_runner

    @dataclass(frozen=True, kw_only=True)
    class WithoutScales(MLAAttentionSpec):
        """A spec of another vllm-ascend."""

    class OtherRows(interface.AscendMLAAttentionSpec):
        @property
        def storage_block_size(self) -> int:
            return self.block_size

    class FewerArguments:
        """Whose builders are called in another way."""

        def build(self, common_attn_metadata: Any) -> Any: ...

    class OtherShape:
        @staticmethod
        def get_kv_cache_shape(blocks: int, rows: int, heads: int, width: int) -> tuple[int, ...]:
            return 2, blocks, rows, heads, width

    def of_vllm() -> None: ...

    of_vllm.__module__ = "vllm.v1.core.kv_cache_utils"
    runner: Any = NPUModelRunner.__new__(NPUModelRunner)
    for name, owner, what, value in (
        ("no scale_dim", interface, "AscendMLAAttentionSpec", WithoutScales),
        ("other rows", interface, "AscendMLAAttentionSpec", OtherRows),
        ("not replaced", planning, "group_and_unify_kv_cache_specs", of_vllm),
        ("other signature", vllm_ascend.utils, "enable_dsa_cp", lambda config: False),
    ):
        with patch.object(owner, what, value):
            yield name, message_of(check)
    for name, owner, what in (
        ("nothing to replace", planning, "group_and_unify_kv_cache_specs"),
        ("no function", vllm_ascend.utils, "enable_dsa_cp"),
    ):
        with without(owner, what):
            yield name, message_of(check)
    with patch.dict(sys.modules, {interface.__name__: None}):
        yield "no specs", message_of(check)
    with patch.object(planning, "group_and_unify_kv_cache_specs", of_vllm):
        yield "start", message_of(start, checkpoint)
    yield "another config", message_of(check, SimpleNamespace(model_type="deepseek_v5"))
    runner.use_compress = False
    yield "not compressed", message_of(check_runner, runner)
    runner.use_compress, runner.attn_backend = True, dsa_v1.AscendDSABackend
    yield "kept", message_of(lambda: check_runner(runner) or check())
    with without(attention, "AscendCommonAttentionMetadata"), without(dsa_v1, "AscendDSAMetadataBuilder"):
        yield "no attention", message_of(check_runner, runner)
    with patch.object(dsa_v1, "AscendDSAMetadataBuilder", FewerArguments):
        yield "other calls", message_of(check_runner, runner)
    with patch.object(runner, "attn_backend", OtherShape):
        yield "other shape", message_of(check_runner, runner)
    runner.drafter = object()
    yield "other drafter", message_of(check_runner, runner)


def idle() -> Results:
    """Whether a step of no request is known to be one while the worker runs it, and afterwards."""
    from dsv4_triton.backend import metadata
    from dsv4_triton.backend.worker_ascend import AscendWorker, NPUWorker

    known: list[bool] = []
    with patch.object(NPUWorker, "execute_dummy_batch", lambda worker: known.append(metadata._idle)):
        AscendWorker.execute_dummy_batch(AscendWorker.__new__(AscendWorker))
    yield "idle", [*known, metadata._idle]


if __name__ == "__main__":
    checkpoint = json.loads(sys.argv[1])["checkpoint"]
    show(starts(checkpoint, CASES), environments(checkpoint), modes(checkpoint), contract(checkpoint), idle())
