"""Every device family's kernels, formats and page tables on the host, against transformers in fp32 (bf16 weights)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open

from dsv4_triton.backend import attention
from dsv4_triton.demo.checkpoint import DemoSettings
from dsv4_triton.model.rope import half_layout
from dsv4_triton.reference.mx import quantise_rows
from tests.model import engine
from tests.model.conftest import Oracle, teacher_forced

LONG = 800
PROMPTS = [engine.prompt(length) for length in (5, 129, 300)]
TOPK = DemoSettings().index_topk
FAR = 4 * TOPK
"""Visible entries from which on the choice of TOPK of them matters."""


class Run(NamedTuple):
    """Teacher-forced scores of the long prompt and of PROMPTS, and what each c4 layer chose of the long prompt's
    visible entries: pairs of [T, TOPK] and [T]."""

    long: torch.Tensor
    scores: list[torch.Tensor]
    selections: list[tuple[torch.Tensor, torch.Tensor]]


@contextlib.contextmanager
def recorded_selections() -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """The results of the indexer, one of each c4 layer a step."""
    chosen: list[tuple[torch.Tensor, torch.Tensor]] = []
    usual = attention.indexer_topk

    def topk(scores: torch.Tensor, visible: torch.Tensor, k: int, **named: Any) -> torch.Tensor:
        result = usual(scores, visible, k, **named)
        chosen.append((result.clone(), visible.clone()))
        return result

    attention.indexer_topk = topk
    try:
        yield chosen
    finally:
        attention.indexer_topk = usual


@pytest.fixture(scope="module")
def start(checkpoint: Callable[[str], Path]) -> Callable[..., Any]:
    """An engine in bf16 with options of ours and of vLLM."""

    def context(options: dict[str, str], **arguments: Any) -> Any:
        return engine.engine(
            checkpoint("bfloat16"), dtype="bfloat16", additional_config={"dsv4_triton": options}, **arguments
        )

    return context


def run(llm: Any) -> Run:
    with recorded_selections() as selections:
        long = engine.score(llm, [engine.prompt(LONG)])[0]
    return Run(long, engine.score(llm, PROMPTS), selections)


@pytest.fixture(scope="module")
def a5_fine(start: Callable[..., Any]) -> Run:
    with start({"device_family": "a5"}) as llm:
        return run(llm)


def check(found: Run, expected: Oracle, tolerance: float) -> None:
    logprobs, chosen = expected.with_selections(engine.prompt(LONG))
    wanted = [teacher_forced(p, expected(p)) for p in PROMPTS]
    assert (found.long - teacher_forced(engine.prompt(LONG), logprobs)).abs().mean() <= tolerance
    assert (torch.cat(found.scores) - torch.cat(wanted)).abs().mean() <= tolerance
    assert len(found.selections) == len(chosen) == 2
    shared = []
    for (selected, visible), oracle in zip(found.selections, chosen, strict=True):
        far = visible >= FAR
        shared.append((selected[far][:, :, None] == oracle[far][:, None, :]).any(-1).float())
    overlap = torch.cat(shared)
    assert len(overlap) > 500
    assert overlap.mean() >= 0.95


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({"device_family": "a2"}, {}),
        ({"device_family": "a3", "geometry": "vllm-ascend"}, {"block_size": 32}),
    ],
    ids=["a2-fine", "a3-vllm-ascend"],
)
def test_int8_families(
    start: Callable[..., Any],
    oracle: Callable[[str], Oracle],
    options: dict[str, str],
    arguments: dict[str, Any],
) -> None:
    with start(options, **arguments) as llm:
        check(run(llm), oracle("bfloat16"), tolerance=0.03)


def test_fp8_family(a5_fine: Run, oracle: Callable[[str], Oracle]) -> None:
    check(a5_fine, oracle("bfloat16"), tolerance=0.06)


def test_records_equal_simulated_fp8(start: Callable[..., Any], a5_fine: Run) -> None:
    """A5's formats against bf16 rows rounded through fp8: the same numbers in other bytes.

    What differs is the order in which attention adds rows up, hence bf16 roundings.
    """
    with start({"kv_fake_quant": "on", "index_format": "e4m3"}) as llm:
        scores = engine.score(llm, PROMPTS)
    assert (torch.cat(scores) - torch.cat(a5_fine.scores)).abs().mean() <= 0.005


def test_fp8_family_in_vllm_ascend_pages(start: Callable[..., Any], a5_fine: Run) -> None:
    """Records on other pages are the same records; then chunks, shuffled blocks and NaN in every block handed out.

    Between schedules bf16 products round differently, so that only the mean is compared; a NaN would show anywhere.
    """
    with start({"device_family": "a5", "geometry": "vllm-ascend"}, block_size=32) as llm:
        scores = engine.score(llm, PROMPTS)
        assert (torch.cat(scores) - torch.cat(a5_fine.scores)).abs().mean() <= 0.005
        engine.forget(llm)
        with engine.poisoned_pages(llm):
            engine.shuffle_free_blocks(llm, 0)
            with engine.chunks_of(llm, 77):
                chunked = torch.cat(engine.score(llm, PROMPTS))
    assert torch.isfinite(chunked).all()
    assert (chunked - torch.cat(scores)).abs().mean() <= 0.02


def stored(folder: Path, name: str) -> torch.Tensor:
    """A tensor of a checkpoint as it is on disk."""
    shard = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    with safe_open(folder / shard, "pt") as tensors:
        return tensors.get_tensor(name)


def test_output_projection_in_mxfp8(
    start: Callable[..., Any],
    a5_fine: Run,
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Quantised at loading, used in every layer and step, and near the bf16 projection in whole prompts and chunks.

    Two operands of three mantissa bits give an attention output an error of 4 %. It may move log-probabilities half as
    far as fp8 rows and index keys may, which have the same kind of error before the softmax.
    """
    folder, used = checkpoint("bfloat16"), []
    usual = attention.o_proj

    def o_proj(o: torch.Tensor, wo_a: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        used.append(wo_a.dtype)
        return usual(o, wo_a, *rest, **named)

    monkeypatch.setattr(attention, "o_proj", o_proj)
    with start({"device_family": "a5", "o_proj_format": "mxfp8"}) as llm:
        layers = [layer.attn for layer in engine.model(llm).model.layers]
        for number, layer in enumerate(layers):
            weights = half_layout(stored(folder, f"layers.{number}.attn.wo_a.weight"), 512, axis=1)
            elements, scale = quantise_rows(weights.view(layer.wo_a.shape))
            assert torch.equal(layer.wo_a.float(), elements.float()) and torch.equal(layer.wo_scale, scale)
        whole = torch.cat(engine.score(llm, PROMPTS))
        engine.forget(llm)
        with engine.chunks_of(llm, 77):
            chunked = torch.cat(engine.score(llm, PROMPTS))
    assert used and len(used) % len(layers) == 0 and set(used) == {torch.float8_e4m3fn}
    for scores in (whole, chunked):
        assert 0.001 < (scores - torch.cat(a5_fine.scores)).abs().mean() <= 0.03
