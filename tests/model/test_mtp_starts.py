"""Engine starts with speculation that cannot work, and the smallest cache that can."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4_triton.model.loader import CheckpointError
from tests.model import engine
from tests.model.speculation import check_same, speculation

BLOCKS = {0: 58, 3: 62}
"""By the number of drafts: what a request of 254 tokens, 64 of them in a step, may take at once, and the null block."""
LIMITS = {"max_model_len": 254, "max_num_batched_tokens": 64}


def test_a_checkpoint_whose_block_has_no_tensors(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Its config.json promises one."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("float32"), folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    gone = {file for name, file in index["weight_map"].items() if name.startswith("mtp.")}
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file not in gone}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for file in gone:
        (folder / file).unlink()
    with (
        pytest.raises(CheckpointError, match=r"the checkpoint lacks \d+ tensors: mtp\.0\.enorm\.weight, "),
        engine.engine(folder, **LIMITS, **speculation(1)),
    ):
        pass


@pytest.mark.parametrize("drafts", BLOCKS)
def test_a_cache_too_small_for_one_request_is_refused(checkpoint: Callable[[str], Path], drafts: int) -> None:
    """vLLM itself refuses what is smaller still."""
    blocks = BLOCKS[drafts]
    ours = f"has {blocks - 1} blocks, of which requests get {blocks - 2}, and one .* tokens takes {blocks - 1}: make"
    says = [ours, "To serve at least one request"]
    for missing, message in enumerate(says, start=1):
        options = {"num_gpu_blocks_override": blocks - missing, **LIMITS, **speculation(drafts)}
        with pytest.raises(ValueError, match=message), engine.engine(checkpoint("float32"), **options):
            pass


def test_the_smallest_cache_serves_requests_up_to_the_limit(checkpoint: Callable[[str], Path]) -> None:
    """Drafts and all, one after the other as there is room. A request that could not fit is an error by itself."""
    from vllm.exceptions import VLLMValidationError

    prompts = [engine.prompt(length) for length in (230, 240)]
    options = {"num_gpu_blocks_override": BLOCKS[3], **LIMITS, **speculation(3)}
    with engine.engine(checkpoint("float32"), **options) as llm:
        alone = [engine.generate(llm, [tokens], 254 - len(tokens))[0] for tokens in prompts]
        assert [len(tokens) for tokens, *_ in alone] == [24, 14]
        engine.forget(llm)
        with pytest.raises(VLLMValidationError, match="maximum context length is 254 tokens"):
            engine.generate(llm, [engine.prompt(255)], 1)
        check_same(engine.generate(llm, prompts, 24), alone)
