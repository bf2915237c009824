"""After the warm-up no request and no capture compiles a kernel, whatever its length and company."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4_triton.autotune.space import bucket
from dsv4_triton.compiler.host.launch import Launcher
from dsv4_triton.device import FAMILIES
from dsv4_triton.model.warmup import layouts, shapes, warm_up
from tests.model import capture
from tests.model.engine import engine, prompt, runner

PRODUCTS = {"aten::linear", "aten::matmul", "aten::mm", "aten::addmm", "aten::bmm", "_C::onednn_mm"}
LIMITS = {"max_model_len": 640, "max_num_batched_tokens": 48, "max_num_seqs": 4}


class Seen(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.names.add(op.name())
        return op(*args, **kwargs or {})


def test_shapes_are_the_powers_of_two_up_to_the_limits() -> None:
    found = list(shapes(100, 8, 300))
    assert {s.tokens for s in found} == {1, 2, 4, 8, 16, 32, 64, 100}
    assert {s.context for s in found} == {1, 2, 4, 8, 16, 32, 64, 128, 256, 300}
    assert {s.requests for s in found if s.tokens == 64} == {1, 8}
    assert {s.requests for s in found if s.tokens == 4} == {1, 4}
    assert max(s.context for s in shapes(1, 1, 1 << 20)) == 1 << 20
    # 33 to 64 tokens of one request are a sequence of at least 33; of 8 requests one has at least 5.
    assert min(s.context for s in found if s.tokens == 64 and s.requests == 1) == 64
    assert min(s.context for s in found if s.tokens == 64 and s.requests == 8) == 8


def test_layouts_reach_every_bucket_of_tokens_and_requests() -> None:
    reached = {(bucket(s.tokens), bucket(s.requests)) for s in layouts(100, 6)}
    assert reached == {(bucket(t), bucket(r)) for t in range(1, 101) for r in range(1, min(t, 6) + 1)}


@pytest.mark.parametrize(("family", "geometry"), [("host", "fine"), ("a2", "vllm-ascend")])
def test_mixed_traffic_and_captures_compile_nothing(
    family: str, geometry: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams

    compiled: list[str] = []
    compile_one = Launcher._compile

    def counted(self: Launcher, *arguments: Any) -> Any:
        compiled.append(self.name)
        return compile_one(self, *arguments)

    options = {"dsv4_triton": {"warm_up": "on", "device_family": family, "geometry": geometry}}
    dtype = "float32" if family == "host" else "bfloat16"
    with engine(checkpoint(dtype), dtype=dtype, **LIMITS, additional_config=options) as llm:
        with Seen() as seen:
            assert warm_up(runner(llm)) > 20
        assert "aten::slice.Tensor" in seen.names and not PRODUCTS & {name.split(".")[0] for name in seen.names}
        monkeypatch.setattr(Launcher, "_compile", counted)
        rng = random.Random(7)
        for turn in range(4):
            lengths = [rng.randrange(1, 600 if i == 0 else 90) for i in range(rng.randrange(1, 7))]
            inputs = [{"prompt_token_ids": prompt(length, turn)} for length in lengths]
            sampling = [SamplingParams(max_tokens=rng.randrange(1, 9), ignore_eos=True) for _ in lengths]
            llm.generate(inputs, sampling, use_tqdm=False)
        with capture.graphs(runner(llm), list(range(1, LIMITS["max_num_seqs"] + 1)), FAMILIES[family]) as graphs:
            assert len(graphs.tapes) == LIMITS["max_num_seqs"]
    assert compiled == []
