"""Decode steps as graphs: the same launches whatever the data, right when replayed, and padding that touches nothing.

vLLM's runner pads, dispatches and makes the metadata as it does on a device with graphs; `tests/model/capture.py`
stands in for the device's graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from dsv4_triton.backend.caches import CacheLayer
from dsv4_triton.backend.metadata import DsaMetadataBuilder
from dsv4_triton.device import FAMILIES, Family, acting_as
from dsv4_triton.model.attention import Attention
from tests.model import capture, engine
from tests.model.speculation import speculation

TOLERANCE = 1e-5
"""As in `test_schedules`."""
LENGTHS = (3, 129, 255, 300, 517)
ANSWER = 10


class Served(NamedTuple):
    """An engine, what it answers to `prompts` without graphs, and the sizes of its graphs."""

    llm: Any
    family: Family
    prompts: list[list[int]]
    answers: list[Any]
    sizes: list[int]

    @property
    def runner(self) -> Any:
        return engine.runner(self.llm)

    def graphs(self, **options: Any) -> contextlib.AbstractContextManager[capture.Graphs]:
        return capture.graphs(self.runner, self.sizes, self.family, **options)

    def idle(self) -> None:
        """A step without requests, as a rank makes it whose neighbours have some."""
        self.llm.llm_engine.model_executor.driver_worker.worker.execute_dummy_batch()

    def answer(self, first: int, last: int, tokens: int = ANSWER) -> list[Any]:
        """`tokens` tokens after prompts `first` to `last`, in one batch on shuffled blocks."""
        engine.forget(self.llm)
        engine.shuffle_free_blocks(self.llm, last)
        return engine.generate(self.llm, self.prompts[first : last + 1], tokens)

    def check(self, first: int, last: int, tokens: int = ANSWER) -> None:
        """The first `tokens` tokens of the answers to prompts `first` to `last`."""
        found = self.answer(first, last, tokens)
        expected = self.answers[first : last + 1]
        assert [f[0] for f in found] == [e[0][:tokens] for e in expected]
        assert engine.worst([f[1] for f in found], [e[1][:tokens] for e in expected]) <= TOLERANCE


@contextlib.contextmanager
def serving(checkpoint: Callable[[str], Path], name: str, drafts: int, dtype: str) -> Iterator[Served]:
    """An engine of the family `name` with so many drafts a step."""
    options: dict[str, Any] = {"device_family": name}
    if name != "host":
        options |= {"index_format": "int8", "index_cache": {"freq": 2}}
    with engine.engine(
        checkpoint(dtype),
        dtype=dtype,
        max_model_len=768,
        kv_cache_memory_bytes=112 << 20,
        max_num_seqs=8,
        additional_config={"dsv4_triton": options},
        **speculation(drafts),
    ) as llm:
        prompts = [engine.prompt(length) for length in LENGTHS]
        answers = engine.generate(llm, prompts, ANSWER)
        sizes = [(1 + drafts) * requests for requests in (1, 2, 4, 8)]
        yield Served(llm, FAMILIES[name], prompts, answers, sizes)


@pytest.fixture(scope="module", params=[("host", 0), ("host", 2), ("a2", 1)], ids=str)
def served(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Iterator[Served]:
    with serving(checkpoint, *request.param, "float32") as served:
        yield served


@contextlib.contextmanager
def before_each_step(served: Served, call: Callable[[], None]) -> Iterator[None]:
    worker = served.llm.llm_engine.model_executor.driver_worker.worker
    usual = worker.execute_model

    def execute_model(*args: Any, **named: Any) -> Any:
        call()
        return usual(*args, **named)

    worker.execute_model = execute_model
    try:
        yield
    finally:
        del worker.execute_model


def test_replays_with_idle_steps_between_give_the_answers(served: Served) -> None:
    """Idle steps come while vLLM's tensors still hold the requests of the last step. Pages, the null block's too, are
    full of NaN at first."""
    with served.graphs() as graphs, before_each_step(served, served.idle), engine.poisoned_pages(served.llm):
        for first, last in ((0, 0), (1, 2), (1, 4), (0, 4)):
            served.check(first, last)
    assert {shape.num_tokens for shape in graphs.steps} == set(served.sizes)
    assert {shape.num_reqs for shape in graphs.steps} == {1, 2, 4, 8}


BF16_TOLERANCE = 0.05
"""Of log-probabilities that a step of other requests gives. Products in fp32 (router, mixing, compressors) of one to
three rows round in another way than those of more, by 1e-6; what is rounded to bf16 behind them can move by an ulp of
4e-3. Answers to a prompt of three tokens alone differ by 6e-3 from those beside others, with graphs and without, and
part where two tokens are 1e-2 apart."""


@pytest.mark.long
def test_replays_in_bf16_are_the_padded_steps_bit_for_bit(checkpoint: Callable[[str], Path]) -> None:
    """And the answers of all requests in one batch, as far as rounding allows."""
    batches = ((0, 0), (2, 4))
    with serving(checkpoint, "a2", 1, "bfloat16") as whole:
        served = whole._replace(sizes=[2, 8])
        with served.graphs() as graphs:
            replayed = [answer for first, last in batches for answer in served.answer(first, last)]
        assert {shape.num_tokens for shape in graphs.steps} == set(served.sizes)
        with served.graphs(again=True):
            computed = [answer for first, last in batches for answer in served.answer(first, last)]
        for (tokens, scores, _), (others, again, _) in zip(replayed, computed, strict=True):
            assert tokens == others and torch.equal(scores, again)
        for index, (found, scores, _) in zip((0, 2, 3, 4), replayed, strict=True):
            tokens, expected, _ = served.answers[index]
            same = next((at for at, (a, b) in enumerate(zip(found, tokens, strict=True)) if a != b), ANSWER)
            assert engine.worst([scores[:same]], [expected[:same]]) <= BF16_TOLERANCE
            if same < ANSWER:
                before = served.prompts[index] + tokens[:same]
                both = engine.score(served.llm, [[*before, answer[same]] for answer in (found, tokens)])
                assert abs(both[0][-1] - both[1][-1]) <= BF16_TOLERANCE


def test_launches_do_not_depend_on_data(served: Served) -> None:
    """Every step is recorded anew, which fails on whatever a capture cannot hold, and compared with the capture."""
    with served.graphs(again=True) as graphs, before_each_step(served, served.idle):
        served.check(1, 3, 4)
        served.check(0, 4, 5)
    assert {shape.num_reqs for shape in graphs.steps} >= {1, 4, 8}


def test_metadata_is_built_without_the_host_and_without_memory(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, tapes = DsaMetadataBuilder.build, []

    def build(*args: Any, **named: Any) -> Any:
        with capture.recording() as tape:
            result = usual(*args, **named)
        tapes.append(tape)
        return result

    engine.generate(served.llm, served.prompts[:2], 2)
    with served.graphs():
        monkeypatch.setattr(DsaMetadataBuilder, "build", build)
        engine.generate(served.llm, served.prompts[:3], 4)
    assert any(tape.entries for tape in tapes)
    assert not [tensor for tape in tapes for tensor in tape.made]


def caches_of(served: Served) -> Iterator[tuple[int, CacheLayer]]:
    """All caches, with the number of their group."""
    runner = served.runner
    for group, described in enumerate(runner.kv_cache_config.kv_cache_groups):
        for name in described.layer_names:
            yield group, runner.compilation_config.static_forward_context[name]


class Watched:
    """Compares all cache bytes before and after graph steps: only rows of tokens that are there may have changed."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._pages = engine.pages(served.llm)
        self.steps = 0
        self.without_entries = 0

    @contextlib.contextmanager
    def step(self, metadata: dict[str, Any]) -> Iterator[None]:
        before = self._pages.clone()
        yield
        assert not torch.equal(self._pages, before)
        self.without_entries += not self._take_written(before)
        assert torch.equal(self._pages, before)
        self.steps += 1

    def _take_written(self, before: torch.Tensor) -> int:
        """Bring the rows that the step's tokens may write into `before`; how many compressed rows they close."""
        runner, entries = self._served.runner, 0
        starts, lengths = runner.query_start_loc.np, runner.seq_lens.tolist()
        for group, cache in caches_of(self._served):
            if cache.prefix.startswith("mtp"):
                continue  # drafts are computed after the step
            table = runner.input_batch.block_table[group].get_numpy_array()
            tensors = [getattr(cache, "keys", cache.rows), getattr(cache, "scales", None)]
            views = [(self._bytes(before, t), self._bytes(self._pages, t)) for t in tensors if t is not None]
            for request in range(runner.input_batch.num_reqs):
                length = lengths[request]
                for position in range(length - int(starts[request + 1] - starts[request]), length):
                    if (position + 1) % cache.ratio:
                        continue
                    entries += cache.ratio > 1
                    block, row = divmod(position // cache.ratio, cache.rows_per_block)
                    for old, new in views:
                        old[table[request, block], row] = new[table[request, block], row]
        return entries

    def _bytes(self, memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """The bytes of `memory` where `tensor` has its rows: [blocks, rows, bytes]."""
        if tensor.dim() == 2:
            tensor = tensor[..., None]
        size = tensor.element_size()
        offset = tensor.data_ptr() - self._pages.data_ptr()
        blocks, rows, width = tensor.shape
        strides = (tensor.stride(0) * size, tensor.stride(1) * size, 1)
        return memory.as_strided((blocks, rows, width * size), strides, offset)


@contextlib.contextmanager
def poisoned_padding(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Garbage in what requests that are not there have: lengths and block tables when the metadata is built, and NaN
    in their tokens' hidden rows."""
    usual = DsaMetadataBuilder.build

    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        requests = served.runner.input_batch.num_reqs
        common_attn_metadata.seq_lens[requests:] = 400
        common_attn_metadata.block_table_tensor[requests:] = common_attn_metadata.block_table_tensor[0]
        return usual(self, common_prefix_len, common_attn_metadata, fast_build)

    def embedded(_module: Any, _inputs: Any, hidden: torch.Tensor) -> None:
        from vllm.forward_context import get_forward_context

        metadata = get_forward_context().attn_metadata
        if metadata:
            positions = next(iter(metadata.values())).step.positions
            hidden.masked_fill_((positions < 0)[:, None], float("nan"))

    hook = engine.model(served.llm).model.embed_tokens.register_forward_hook(embedded)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(DsaMetadataBuilder, "build", build)
            yield
    finally:
        hook.remove()


def test_padding_touches_no_cache(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(served)
    with (
        engine.poisoned_pages(served.llm),  # blocks of an earlier test may hold the very rows that are written
        poisoned_padding(served, monkeypatch),
        served.graphs(around=watched.step) as graphs,
    ):
        served.check(0, 0, 8)
        served.check(0, 4, 3)
    assert watched.steps == len(graphs.steps)
    assert watched.without_entries > 0, "some steps close no window"


def test_idle_and_profiling_steps_touch_no_cache(served: Served) -> None:
    """In a graph, without one, and before there are caches."""
    runner = served.runner
    with acting_as(served.family), served.graphs() as graphs:
        engine.generate(served.llm, served.prompts, 3)
        replayed = len(graphs.steps)
        before = engine.pages(served.llm).clone()
        served.idle()
        assert len(graphs.steps) == replayed + 1
        runner._dummy_run(served.sizes[1], is_profile=True)
        assert len(graphs.steps) == replayed + 1
    served.idle()
    assert torch.equal(engine.pages(served.llm), before)


def warmed_up(served: Served, tokens: int, longest: int | None) -> capture.Tape:
    """What vLLM's step ahead of a capture does."""
    from vllm.config import CUDAGraphMode

    runner, tapes = served.runner, []
    usual = runner.model

    def recorded(*args: Any, **named: Any) -> Any:
        with capture.recording() as tape:
            output = usual(*args, **named)
        tapes.append(tape)
        return output

    runner.model = recorded
    try:
        with acting_as(served.family):
            runner._dummy_run(
                tokens, cudagraph_runtime_mode=CUDAGraphMode.NONE, force_attention=True, uniform_decode=True,
                profile_seq_lens=longest,
            )  # fmt: skip
    finally:
        runner.model = usual
    return tapes[0]


def test_steps_before_a_capture_launch_what_it_captures(served: Served) -> None:
    """Given `profile_seq_lens`, so that no kernel is loaded while a graph is recorded; else they launch less."""
    with served.graphs() as graphs:
        captured = {shape.num_tokens: tape for shape, (tape, _) in graphs.tapes.items()}
    served.runner.input_batch.block_table.clear()  # as it is when vLLM starts
    before = engine.pages(served.llm).clone()
    for tokens, tape in captured.items():
        capture.compare(tape, warmed_up(served, tokens, served.runner.max_model_len))
    assert torch.equal(engine.pages(served.llm), before)
    with pytest.raises(capture.CaptureError, match="another one"):
        capture.compare(captured[served.sizes[0]], warmed_up(served, served.sizes[0], None))


def test_the_guard_sees_inside_the_attention(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Attention.queries
    monkeypatch.setattr(Attention, "queries", lambda self, latent: usual(self, latent * float(latent.any())))
    with pytest.raises(capture.CaptureError, match="__float__"), served.graphs():
        pass


HOST_READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "array": lambda x: np.asarray(x),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "bool": lambda x: bool(x[0]),
    "index": lambda x: range(8)[x[0].int()],
    "max": lambda x: max(x),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "mask write": lambda x: x.index_put_((x > 0,), torch.ones(())),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x + 1),
    "allclose": lambda x: torch.allclose(x, x + 1),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.arange(4)),
    "tensor": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "from_numpy": lambda x: x + torch.from_numpy(np.ones(4)),
}


@pytest.mark.parametrize("name", HOST_READS)
def test_the_guard_refuses(name: str) -> None:
    x = torch.arange(4.0)
    with torch.inference_mode(), pytest.raises(capture.CaptureError), capture.recording():
        HOST_READS[name](x)


def test_a_tape_tells_steps_apart() -> None:
    """By the order, sizes and number of what they allocate, and by the addresses and numbers that they use."""

    def tape(step: Callable[[], Any]) -> capture.Tape:
        with torch.inference_mode(), capture.recording() as found:
            step()
        return found

    x, other = torch.ones(4), torch.ones(4)
    first = tape(lambda: torch.empty(4).copy_(x).mul_(2))
    capture.compare(first, tape(lambda: torch.empty(4).copy_(x).mul_(2)))
    for step in (
        lambda: torch.empty(4).copy_(other).mul_(2),
        lambda: torch.empty(4).copy_(x).mul_(3),
        lambda: torch.empty(1, 4).copy_(x).mul_(2),
        lambda: (torch.empty(4).copy_(x).mul_(2), torch.empty(4)),
    ):
        with pytest.raises(capture.CaptureError):
            capture.compare(first, tape(step))


@contextlib.contextmanager
def in_a_step(served: Served) -> Iterator[int]:
    """The context of a decode step with two requests; the number of its tokens."""
    from vllm.forward_context import get_forward_context, override_forward_context

    contexts: list[Any] = []
    layer = engine.model(served.llm).model.layers[0]
    hook = layer.register_forward_pre_hook(lambda *_: contexts.append(get_forward_context()))
    engine.generate(served.llm, served.prompts[:2], 3)
    hook.remove()
    with override_forward_context(contexts[-1]), acting_as(served.family):
        yield next(iter(contexts[-1].attn_metadata.values())).step.num_tokens


@pytest.mark.parametrize("index", range(3))
def test_the_op_is_a_proper_operator(served: Served, index: int) -> None:
    attention = engine.model(served.llm).model.layers[index].attn
    groups, rank, _ = attention.wo_a.shape
    with in_a_step(served) as tokens, torch.no_grad():
        hidden = torch.randn(tokens, attention.settings.hidden)
        output = torch.empty(tokens, groups * rank)
        torch.library.opcheck(
            torch.ops.vllm.triton_dsa_forward.default, (hidden, hidden.clone(), output, attention.prefix)
        )


def test_a_function_around_the_op_compiles(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one graph, in which the op is a node, and traced with fake tensors; both give what the function gives."""
    attention = engine.model(served.llm).model.layers[1].attn
    graphs = []

    def function(hidden: torch.Tensor) -> torch.Tensor:
        doubled = hidden * 2
        return attention(doubled, doubled) + 1

    def keep(module: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        graphs.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
        return module.forward

    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    with in_a_step(served) as tokens, torch.no_grad(), torch._dynamo.config.patch(disable=False):
        hidden = torch.randn(tokens, attention.settings.hidden)
        expected = function(hidden)
        for backend in (keep, "aot_eager"):
            torch._dynamo.reset()
            assert torch.equal(torch.compile(function, fullgraph=True, backend=backend)(hidden), expected)
        torch._dynamo.reset()
    (nodes,) = graphs
    assert nodes.count("vllm.triton_dsa_forward") == 1
