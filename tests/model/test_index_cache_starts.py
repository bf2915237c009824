"""Engine starts with index sharing: patterns, families, what a checkpoint has to hold, and the warm-up."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4_triton.compiler.host.launch import Launcher
from dsv4_triton.demo.checkpoint import DemoSettings, write_checkpoint
from dsv4_triton.model.loader import CheckpointError
from tests.model import engine
from tests.model.conftest import teacher_forced
from tests.model.index_sharing import FREQ, LETTERS, SETTINGS, SharingOracle, poisoned_selection, sharing
from tests.model.test_parity import FP32_TOLERANCE

PROMPTS = [engine.prompt(length) for length in (5, 140, 300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("c4") / "model"
    write_checkpoint(path, SETTINGS)
    return path


def test_frequency_one_is_off_bit_for_bit(folder: Path) -> None:
    found = []
    for options in ({}, sharing({"freq": 1})):
        with engine.engine(folder, max_model_len=512, **options) as llm:
            layers = [layer.attn for layer in engine.model(llm).model.layers]
            assert all(layer.selection is None for layer in layers)
            assert sum(layer.caches.index_keys is not None for layer in layers) == 5
            answers = engine.generate(llm, PROMPTS, 4)
            engine.forget(llm)
            found.append([*engine.score(llm, PROMPTS), *(logprobs for _, logprobs, _ in answers)])
    assert all(torch.equal(off, one) for off, one in zip(*found, strict=True))


def test_quantised_rows_and_keys(tmp_path: Path) -> None:
    """The formats of A5 in pages of vllm-ascend, in bf16: as near to transformers in fp32 as without sharing."""
    folder = tmp_path / "model"
    write_checkpoint(folder, DemoSettings(ratios=SETTINGS.ratios))
    expected = SharingOracle(folder, LETTERS)
    options = {"dsv4_triton": {"device_family": "a5", "geometry": "vllm-ascend", "index_cache": FREQ}}
    limits = {"max_model_len": 512, "block_size": 32}
    with (
        engine.engine(folder, dtype="bfloat16", additional_config=options, **limits) as llm,
        poisoned_selection(llm),
        engine.poisoned_pages(llm),
    ):
        scores = torch.cat(engine.score(llm, PROMPTS))
        engine.forget(llm)
        with engine.chunks_of(llm, 77):
            chunked = torch.cat(engine.score(llm, PROMPTS))
    wanted = torch.cat([teacher_forced(p, expected(p)) for p in PROMPTS])
    for found in (scores, chunked):
        assert (found - wanted).abs().mean() <= 0.06


def without(folder: Path, target: Path, prefixes: tuple[str, ...]) -> Path:
    """A copy of a checkpoint that lacks the tensors under `prefixes`."""
    shutil.copytree(folder, target)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    for file in {file for name, file in index["weight_map"].items() if name.startswith(prefixes)}:
        tensors = {k: v for k, v in load_file(target / file).items() if not k.startswith(prefixes)}
        save_file(tensors, target / file, {"format": "pt"})
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if not k.startswith(prefixes)}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    return target


def test_a_pattern_and_a_checkpoint_without_the_indexers_of_shared_layers(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two shared layers in a row, with other kinds of layers between the full one and them. The start says which."""
    letters, lacking = "FSSFS", tuple(f"layers.{index}.attn.indexer." for index in (2, 4, 6))
    oracle, logger = SharingOracle(folder, letters), logging.getLogger("vllm")
    caplog.set_level(logging.INFO, logger.name)
    logger.addHandler(caplog.handler)
    try:
        with engine.engine(
            without(folder, tmp_path / "part", lacking), max_model_len=512, **sharing({"pattern": letters})
        ) as llm:
            assert not [name for name in engine.model(llm).slots() if name.startswith(lacking)]
            with poisoned_selection(llm):
                scores = engine.score(llm, PROMPTS)
    finally:
        logger.removeHandler(caplog.handler)
    assert engine.worst(scores, [teacher_forced(p, oracle(p)) for p in PROMPTS]) <= FP32_TOLERANCE
    assert "5 c4 and 1 c128 layers; layers 2, 4, 6 share selections and load no indexer;" in caplog.text


def test_indexers_of_full_layers_need_their_weights(folder: Path, tmp_path: Path) -> None:
    broken = without(folder, tmp_path / "full", ("layers.5.attn.indexer.wq_b",))
    with (
        pytest.raises(CheckpointError, match=r"lacks 1 tensors: layers\.5\.attn\.indexer\.wq_b\.weight"),
        engine.engine(broken, max_model_len=256, **sharing(FREQ)),
    ):
        pass


def test_a_pattern_for_another_model_is_refused_at_the_start(folder: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    for option, says in (({"pattern": "FS"}, "'FS' with 2 letters, the checkpoint has 5"), ({"freq": 0}, "N at least")):
        with pytest.raises(ValueError, match=says):
            EngineArgs(model=str(folder), dtype="float32", enforce_eager=True, **sharing(option)).create_engine_config()


def test_nothing_is_compiled_after_the_warm_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared layers are a kind of their own."""
    compiled: list[str] = []
    usual = Launcher._compile

    def counted(self: Launcher, *arguments: Any) -> Any:
        compiled.append(self.name)
        return usual(self, *arguments)

    options = {"dsv4_triton": {"warm_up": "on", "index_cache": FREQ}}
    limits = {"max_model_len": 160, "max_num_batched_tokens": 16, "max_num_seqs": 2}
    with engine.engine(folder, **limits, additional_config=options) as llm:
        monkeypatch.setattr(Launcher, "_compile", counted)
        engine.generate(llm, [engine.prompt(length) for length in (1, 20, 150)], 6)
    assert compiled == []
