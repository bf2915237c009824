"""Strict loading and refused configurations."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4_triton.model.loader import CheckpointError, Slot, load_strict, prefixed
from dsv4_triton.model.rope import half_layout
from tests.model import engine


def collecting_slots() -> tuple[dict[str, Slot], dict[str, torch.Tensor]]:
    stored: dict[str, torch.Tensor] = {}
    slots = {
        "a.weight": Slot((2, 3), lambda t: stored.__setitem__("a", t)),
        "table": Slot((4,), lambda t: stored.__setitem__("table", t), integer=True),
    }
    return slots, stored


GOOD = {"a.weight": torch.ones(2, 3), "table": torch.arange(4)}


def test_every_tensor_is_stored_and_mtp_is_skipped() -> None:
    slots, stored = collecting_slots()
    load_strict([*GOOD.items(), ("mtp.0.anything", torch.ones(1))], slots, skipped="mtp.")
    assert stored.keys() == {"a", "table"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b.weight": torch.ones(1)}, r"'b\.weight' is not part of the model"),
        ({"a.scale": torch.ones(1)}, r"'a\.scale' is not part of the model \(quantised"),
        ({"a.weight": torch.ones(3, 2)}, r"'a\.weight' has shape \(3, 2\), the model expects \(2, 3\)"),
        ({"a.weight": torch.ones(2, 3, dtype=torch.int8)}, r"'a\.weight' has dtype torch\.int8"),
        ({"a.weight": torch.ones(2, 3).to(torch.float8_e4m3fn)}, r"'a\.weight' has dtype torch\.float8"),
        ({"table": torch.ones(4)}, r"'table' has dtype torch\.float32, the model expects int"),
        ({"table": None}, r"lacks 1 tensors: table"),
        ({"a.weight": None, "table": None}, r"lacks 2 tensors: a\.weight, table"),
    ],
)
def test_a_checkpoint_that_does_not_fit(changes: dict[str, torch.Tensor | None], message: str) -> None:
    weights = {name: tensor for name, tensor in (GOOD | changes).items() if tensor is not None}
    with pytest.raises(CheckpointError, match=message):
        load_strict(weights.items(), collecting_slots()[0])


def test_a_tensor_given_twice() -> None:
    with pytest.raises(CheckpointError, match="'table' is given twice"):
        load_strict([*GOOD.items(), ("table", GOOD["table"])], collecting_slots()[0])


def test_prefixed_names() -> None:
    assert list(prefixed("layers.3", collecting_slots()[0])) == ["layers.3.a.weight", "layers.3.table"]


def test_half_layout_permutes_the_last_64_features_of_every_head() -> None:
    rows = torch.arange(2 * 128)
    expected = [base + feature for base in (0, 128) for feature in [*range(64), *range(64, 128, 2), *range(65, 128, 2)]]
    assert half_layout(rows, 128, 0).tolist() == expected
    assert half_layout(rows.repeat(3, 1), 128, 1).tolist() == [expected] * 3


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[[str], Path]) -> Iterator[Any]:
    with engine.engine(checkpoint("float32"), max_model_len=256, max_num_batched_tokens=256) as llm:
        yield llm


def test_the_model_names_exactly_the_official_tensors(llm: Any, checkpoint: Callable[[str], Path]) -> None:
    index = json.loads((checkpoint("float32") / "model.safetensors.index.json").read_text())
    official = {name for name in index["weight_map"] if not name.startswith("mtp.")}
    assert set(engine.model(llm).slots()) == official


def test_missing_unknown_and_misshapen_tensors_are_named(llm: Any) -> None:
    load = engine.model(llm).load_weights
    with pytest.raises(CheckpointError, match=r"lacks \d+ tensors: embed\.weight, hc_head_fn.* and \d+ more"):
        load([])
    with pytest.raises(CheckpointError, match=r"'layers\.9\.attn_norm\.weight' is not part of the model"):
        load([("layers.9.attn_norm.weight", torch.ones(256))])
    with pytest.raises(CheckpointError, match=r"'layers\.1\.attn\.wkv\.weight' has shape \(512, 255\)"):
        load([("layers.1.attn.wkv.weight", torch.ones(512, 255))])


def test_a_table_with_an_expert_that_does_not_exist(llm: Any) -> None:
    with pytest.raises(CheckpointError, match="tid2eid holds experts 0 to 16"):
        load = engine.model(llm).load_weights
        load([("layers.0.ffn.gate.tid2eid", torch.full((512, 6), 16).index_fill_(0, torch.tensor([0]), 0))])


def test_an_engine_start_names_the_missing_tensor(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint("float32"), broken)
    index = json.loads((broken / "model.safetensors.index.json").read_text())
    name = "layers.3.attn.indexer.compressor.ape"
    shard = broken / index["weight_map"].pop(name)
    tensors = load_file(shard)
    del tensors[name]
    save_file(tensors, shard)
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    with (
        pytest.raises(CheckpointError, match="lacks 1 tensors: " + name.replace(".", r"\.")),
        engine.engine(broken, max_model_len=256, max_num_batched_tokens=256),
    ):
        pass


def ours(**options: str) -> dict[str, Any]:
    return {"additional_config": {"dsv4_triton": options}}


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ({"compress_ratios": [0, 4, 8, 4, 128, 0, 0]}, {}, r"compress_ratios\[2\] is 8"),
        ({"hc_mult": 2}, {}, "hc_mult is 2"),
        ({"index_topk": 4096}, {}, "index_topk is 4096"),
        ({}, {"additional_config": {"dsv4_triton": {"kv_fakequant": "on"}}}, "unknown option 'kv_fakequant'"),
        ({}, {"additional_config": {"dsv4_triton": {"index_format": 8}}}, "index_format got 8"),
        ({}, {"dtype": "float16"}, "--dtype is float16"),
        ({}, {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype is 'fp8'"),
        ({}, {"attention_backend": "CPU_ATTN"}, "--attention-backend is CPU_ATTN"),
        ({}, {"block_size": 32}, "--block-size is 32, .*geometry 'fine' .*\"fine\" takes 256"),
        ({}, {"block_size": 256, **ours(geometry="vllm-ascend")}, '"vllm-ascend" takes 128, 64, 32'),
        ({}, {"dtype": "bfloat16", **ours(device_family="a2", index_format="e4m3")}, "'e4m3', which family 'a2'"),
        ({}, {"dtype": "bfloat16", **ours(device_family="a5", kv_fake_quant="off")}, "stores rows in fp8"),
        ({}, {"dtype": "bfloat16", "kv_cache_dtype": "fp8", **ours(device_family="a2")}, "'a2' keeps .* has no fp8"),
        ({}, {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16", **ours(device_family="a5")}, "'a5' keeps .* records"),
        ({}, {"kv_offloading_size": 1.0}, "KV connectors are not supported"),
        ({}, {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}, "KV connectors"),
        ({}, {"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid-kv-cache-manager is True"),
    ],
)
def test_configurations_that_cannot_be_served(
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    config: dict[str, Any],
    arguments: dict[str, Any],
    message: str,
) -> None:
    """Refused before an engine process starts, with the field or option named."""
    from vllm.engine.arg_utils import EngineArgs

    folder = tmp_path / "model"
    folder.mkdir()
    source = checkpoint("float32")
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | config))
    with pytest.raises(ValueError, match=message):
        EngineArgs(
            model=str(folder), **({"dtype": "float32", "enforce_eager": True} | arguments)
        ).create_engine_config()
