"""What configurations inside vllm-ascend come to, one after the other: `python -m tests.npu.ascend_starts CHECKPOINT`.

Prints JSON with the block size, or the message, of every case. No engine is started.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch


@contextmanager
def instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` meanwhile."""
    usual = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, usual)


def message_of(action: Callable[[], Any]) -> Any:
    """What the action returns, or the message it ends with."""
    try:
        return action()
    except Exception as error:
        return str(error)


def settled(checkpoint: str, **options: Any) -> Any:
    """vLLM's config of a server with these options."""
    from vllm.engine.arg_utils import EngineArgs

    options = {"dtype": "float32", "max_model_len": 512, **options}
    return EngineArgs(checkpoint, **options).create_engine_config()


def start(checkpoint: str, **options: Any) -> tuple[int, str]:
    """Its block size and worker."""
    config = settled(checkpoint, **options)
    return config.cache_config.block_size, config.parallel_config.worker_cls


def graphs(checkpoint: str, **options: Any) -> str:
    """Its mode of graphs."""
    return settled(checkpoint, **options).compilation_config.cudagraph_mode.name


def starts(checkpoint: str) -> Iterator[tuple[str, Any]]:
    def ours(**options: Any) -> dict[str, Any]:
        return {"additional_config": {"dsv4_triton": options}}

    cases: dict[str, dict[str, Any]] = {
        "default": {},
        "blocks of 32": {"block_size": 32},
        "blocks of 256": {"block_size": 256},
        "fine": ours(geometry="fine"),
        "context parallel": {"additional_config": {"enable_dsa_cp": True}},
        "head apart": {"additional_config": {"finegrained_tp_config": {"lmhead_tensor_parallel_size": 2}}},
        "not set": {"additional_config": {"finegrained_tp_config": {}, "xlite_graph_config": {"full_mode": True}}},
        "pieces": {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}},
    }
    for name, options in cases.items():
        yield name, message_of(lambda options=options: start(checkpoint, **options))
    yield "graphs", message_of(lambda: graphs(checkpoint))
    yield "eager", message_of(lambda: graphs(checkpoint, enforce_eager=True))


def contract(checkpoint: str) -> Iterator[tuple[str, Any]]:
    import vllm_ascend.core.kv_cache_interface as interface
    import vllm_ascend.utils
    from vllm.v1.core import kv_cache_utils as planning
    from vllm.v1.kv_cache_interface import MLAAttentionSpec
    from vllm_ascend.attention import dsa_v1
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
        with instead(owner, what, value):
            yield name, message_of(check)
    with instead(planning, "group_and_unify_kv_cache_specs", of_vllm):
        yield "start", message_of(lambda: start(checkpoint))
    yield "another config", message_of(lambda: check(SimpleNamespace(model_type="deepseek_v5")))
    runner.use_compress = False
    yield "not compressed", message_of(lambda: check_runner(runner))
    runner.use_compress, runner.attn_backend = True, dsa_v1.AscendDSABackend
    yield "kept", message_of(lambda: check_runner(runner) or check())
    with instead(dsa_v1, "AscendDSAMetadataBuilder", FewerArguments):
        yield "other calls", message_of(lambda: check_runner(runner))
    with instead(runner, "attn_backend", OtherShape):
        yield "other shape", message_of(lambda: check_runner(runner))
    runner.drafter = object()
    yield "other drafter", message_of(lambda: check_runner(runner))


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {**dict(starts(sys.argv[1])), **dict(contract(sys.argv[1]))}
    print(json.dumps(found), flush=True)
