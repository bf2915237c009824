"""vLLM's own Triton kernels, run natively, and what this project does in their place: the same numbers."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import multiprocessing
import random
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4_triton.backend import compat, upstream_kernels
from dsv4_triton.backend.compat import UpstreamChangedError
from dsv4_triton.backend.upstream_npu import KERNELS, METHODS, check_methods, replace

pytestmark = pytest.mark.usefixtures("host_driver")
VOCAB = 300
Launch = Callable[..., None]
ORIGINALS = {
    **{name: module for module, names in KERNELS.items() for name in names},
    "eagle_prepare_inputs_padded_kernel": "vllm.v1.spec_decode.utils",
    "eagle_prepare_next_token_padded_kernel": "vllm.v1.spec_decode.utils",
    "expand_kernel": "vllm.v1.sample.rejection_sampler",
    "_zero_kv_blocks_kernel": "vllm.v1.worker.utils",
}
NEWER = {
    "tl.sum(is_valid_mask)": "tl.sum(is_valid_mask.to(tl.int32))",
    "dtype=tl.uint32": "dtype=tl.int32",
    "tl.zeros([BLOCK_SIZE], dtype=tl.int32)": "tl.full([BLOCK_SIZE], 0, tl.int32)",
}
"""triton-ascend 3.2 sums booleans as booleans, newer Triton as integers: vLLM's kernel does not compile with it. And
its interpreter does not call a function of Triton that is itself jitted, as zeros is."""


def jitted(name: str, folder: Path) -> Any:
    """vLLM's kernel of a name. On a CPU vLLM makes plain functions of its kernels, and an engine that has run in this
    process has put others in their place: what is jitted here is the source in the module's file."""
    text = inspect.getsource(import_module(ORIGINALS[name]))
    found = next(part for part in ast.parse(text).body if isinstance(part, ast.FunctionDef) and part.name == name)
    source = "\n".join(text.splitlines()[found.decorator_list[0].lineno - 1 : found.end_lineno])
    for new, old in NEWER.items():
        source = source.replace(new, old)
    path = folder / f"upstream{name}.py"
    path.write_text(f"import triton\nimport triton.language as tl\n\n{source}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    return partial(jitted, folder=tmp_path_factory.mktemp("kernels"))


def ours(name: str) -> Launch:
    return getattr(upstream_kernels, name.lstrip("_"))


@pytest.mark.parametrize("name", [name for names in KERNELS.values() for name in names])
def test_arguments_are_those_of_the_kernel(name: str, original: Callable[[str], Any]) -> None:
    theirs = [parameter.removesuffix("_ptr") for parameter in original(name).arg_names]
    assert list(inspect.signature(ours(name)).parameters) == ["grid", *theirs]


def check(name: str, original: Callable[[str], Any], grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
    """Both write the same into all tensors; they begin with the same contents."""
    copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in arguments]
    original(name)[grid](*arguments, **named)
    ours(name)(grid, *copies, **named)
    for index, (theirs, found) in enumerate(zip(arguments, copies, strict=True)):
        if isinstance(theirs, torch.Tensor):
            assert torch.equal(theirs, found), f"argument {index}: {theirs} is not {found}"


def cumulative(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts, dtype=torch.int32).cumsum(0).to(torch.int32)


COUNTS = [[1], [3], [0, 0], [2, 0, 3, 1], [3, 3, 3], [0, 2]]
"""Drafts of each request."""


@pytest.mark.parametrize("lengths", [[1], [5, 1, 9], [1, 1, 1, 1]])
def test_compute_slot_mapping(lengths: list[int], original: Callable[[str], Any]) -> None:
    """Of the last two of the step's tokens, which are padding, the slots stay as they are."""
    tokens, block = sum(lengths) + 2, 16
    starts = torch.tensor([0, *cumulative(lengths)], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) + 7 * n for n in lengths] + [torch.zeros(2, dtype=torch.int64)])
    table = torch.randint(0, 1000, (8, 12), dtype=torch.int32)
    slots = torch.full((64,), 12345)
    check(
        "_compute_slot_mapping_kernel", original, (len(lengths) + 1,),
        tokens, 64, starts, positions, table, table.stride(0), block, slots,
        KV_CACHE_BLOCK_SIZE=2 * block, BLOCKS_PER_KV_BLOCK=2, TOTAL_CP_WORLD_SIZE=1, TOTAL_CP_RANK=0,
        CP_KV_CACHE_INTERLEAVE_SIZE=1, PAD_ID=-1, BLOCK_SIZE=1024,
    )  # fmt: skip


@pytest.mark.parametrize("padding", [0, 3])
def test_eagle_step_slot_mapping_metadata(padding: int, original: Callable[[str], Any]) -> None:
    positions = torch.tensor([0, 15, 62, 63, 16])
    table = torch.randint(0, 1000, (5, 4), dtype=torch.int32)
    lengths = torch.tensor([1, 16, 63, 64, 17], dtype=torch.int32)
    check(
        "eagle_step_slot_mapping_metadata_kernel", original, (5 + padding,),
        positions, table, table.stride(0), lengths, torch.full((9,), -7), torch.full((9,), -7),
        block_size=16, max_model_len=64, n_blocks_per_req=4, PAD_ID=-1, batch_size=5,
    )  # fmt: skip


@pytest.mark.parametrize("counts", COUNTS)
def test_eagle_prepare_inputs_padded(counts: list[int], original: Callable[[str], Any]) -> None:
    rng, batch = random.Random(len(counts)), len(counts)
    starts = torch.tensor([0, *cumulative([n + 1 for n in counts])], dtype=torch.int32)
    valid = torch.tensor([rng.randint(1, n + 1) for n in counts], dtype=torch.int32)
    outputs = [torch.full((batch,), -7, dtype=torch.int32) for _ in range(2)]
    check("eagle_prepare_inputs_padded_kernel", original, (batch,), cumulative(counts), valid, starts, *outputs, batch)


@pytest.mark.parametrize("width", [1, 4])
def test_eagle_prepare_next_token_padded(width: int, original: Callable[[str], Any]) -> None:
    """Rejected drafts are -1; ids beyond the vocabulary do not count; two of the requests are discarded."""
    batch = 7
    sampled = torch.randint(0, VOCAB, (batch, width), dtype=torch.int32)
    for row in range(batch):
        sampled[row, row % (width + 1) :] = -1
    sampled[5, 0] = VOCAB + 1
    discarded = torch.tensor([False, True, False, False, False, False, True])
    backup = torch.randint(0, VOCAB, (batch,), dtype=torch.int32)
    outputs = [torch.full((batch,), -7, dtype=torch.int32) for _ in range(2)]
    check(
        "eagle_prepare_next_token_padded_kernel", original, (batch,),
        sampled, discarded, backup, *outputs, VOCAB, width, batch, sampled.stride(0),
        BLOCK_SIZE_TOKENS=4,
    )  # fmt: skip


def step(counts: list[int]) -> SimpleNamespace:
    """A step that verifies drafts: about every second draft is the target's choice."""
    batch, tokens, width = len(counts), sum(counts), max(counts)
    target = torch.randint(0, VOCAB, (tokens,))
    draft = torch.where(torch.rand(tokens) < 0.5, target, torch.randint(0, VOCAB, (tokens,))).to(torch.int32)
    probabilities = torch.rand(tokens, VOCAB).softmax(1)
    if tokens:
        probabilities[torch.arange(tokens), draft.long()] *= 100
        draft[0] = -1
    return SimpleNamespace(
        batch=batch, width=width, cumulative=cumulative(counts), draft=draft, argmax=target,
        output=torch.full((batch, width + 1), -1, dtype=torch.int32),
        bonus=torch.randint(0, VOCAB, (batch, 1), dtype=torch.int32), probabilities=probabilities,
        recovered=torch.randint(0, VOCAB, (tokens,), dtype=torch.int32),
        greedy=torch.arange(batch) % 2 == 0, uniform=torch.rand(tokens, dtype=torch.float64),
    )  # fmt: skip


@pytest.mark.parametrize("all_greedy", [True, False])
@pytest.mark.parametrize("counts", COUNTS)
def test_rejection_greedy_sample(counts: list[int], all_greedy: bool, original: Callable[[str], Any]) -> None:
    s = step(counts)
    check(
        "rejection_greedy_sample_kernel", original, (s.batch,),
        s.output, s.cumulative, s.draft, s.argmax, s.bonus, None if all_greedy else s.greedy, s.width, None, None,
        SYNTHETIC_MODE=False,
    )  # fmt: skip


@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize("counts", COUNTS)
def test_rejection_random_sample(counts: list[int], drafted: bool, original: Callable[[str], Any]) -> None:
    s = step(counts)
    drafts = torch.rand(len(s.draft), VOCAB).softmax(1) if drafted else None
    if drafts is not None and len(drafts) > 1:
        drafts[1, s.draft[1].long()] = 0
    check(
        "rejection_random_sample_kernel", original, (s.batch,),
        s.output, s.cumulative, s.draft, drafts, s.probabilities, s.bonus, s.recovered, s.uniform, s.greedy,
        s.width, VOCAB, None,
        NO_DRAFT_PROBS=not drafted, SYNTHETIC_MODE=False,
    )  # fmt: skip


@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize("counts", [counts for counts in COUNTS if sum(counts)])
def test_sample_recovered_tokens(counts: list[int], drafted: bool, original: Callable[[str], Any]) -> None:
    s = step(counts)
    drafts = torch.rand(len(s.draft), VOCAB).softmax(1) if drafted else None
    inverse = 1 / torch.empty(s.batch, VOCAB).exponential_()
    check(
        "sample_recovered_tokens_kernel", original, (s.batch, s.width),
        torch.full_like(s.draft, -7), s.cumulative, s.draft, drafts, s.probabilities, inverse, VOCAB,
        128, NO_DRAFT_PROBS=not drafted, USE_FP64_GUMBEL=False,
    )  # fmt: skip


@pytest.mark.parametrize("replaced", [(0, 0), (0, 1), (6, 2)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
@pytest.mark.parametrize("counts", [counts for counts in COUNTS if sum(counts)])
def test_expand_batch_to_tokens(
    counts: list[int], dtype: torch.dtype, replaced: tuple[int, int], original: Callable[[str], Any]
) -> None:
    """What requests ask for (temperature, top-k, top-p), for each of their tokens."""
    asked, ends = torch.arange(len(counts)).to(dtype) * 3, cumulative(counts)
    theirs = torch.full((sum(counts),), -7, dtype=dtype)
    original("expand_kernel")[(len(counts),)](theirs, asked, ends, *replaced, MAX_NUM_TOKENS=128)
    found = compat._expanded(asked, ends, sum(counts), *replaced)
    assert found.dtype == dtype and torch.equal(found, theirs)


def zeroed(zeroer: type[Any], caches: dict[str, torch.Tensor], device: torch.device) -> None:
    """What `zeroer` does to blocks 7, 0 and 3 of `caches` [10 blocks, 16, features]; "window" is not of full
    attention."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    fields = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    specs = {"full": FullAttentionSpec(**fields), "window": SlidingWindowSpec(sliding_window=64, **fields)}
    backend = SimpleNamespace(get_kv_cache_block_dim=lambda *_, **__: 0)
    groups = [
        SimpleNamespace(
            kv_cache_spec=spec,
            layer_names=[name for name in caches if (name == "window") == (kind == "window")],
            kv_cache_group_id=index,
            backend=backend,
        )
        for index, (kind, spec) in enumerate(specs.items())
    ]
    layers = {name: SimpleNamespace(kv_cache=cache) for name, cache in caches.items()}
    made = zeroer(device, groups, [16, 16], "auto", layers)
    made.zero_block_ids([])
    made.zero_block_ids([7, 0, 3])


def check_page_zeroer(device: torch.device) -> None:
    """All of the pages in caches of full attention, whose widths may differ, and nothing of others in their pages."""
    memory = torch.ones(10, 16 * 48, device=device)
    caches = {"one": memory[:, :128].view(10, 16, 8), "two": memory[:, 128:640].view(10, 16, 32)}
    caches["window"] = memory[:, 640:].view(10, 16, 8)
    zeroed(upstream_kernels.PageZeroer, caches, device)
    expected = torch.ones(memory.shape)
    expected[[7, 0, 3], :640] = 0
    assert torch.equal(memory.cpu(), expected)


def test_page_zeroer() -> None:
    check_page_zeroer(torch.device("cpu"))


def own_memory() -> dict[str, torch.Tensor]:
    """Caches that share no pages, as vLLM's zeroer takes them."""
    return {name: torch.ones(10, 16, width) for name, width in (("one", 8), ("two", 24), ("window", 8))}


def vllms_zeroer(folder: Path, results: Any) -> None:
    """Put what vLLM's zeroer leaves of `own_memory`. Its kernel addresses caches by numbers, of which the host driver
    makes no pointers: Triton's interpreter runs it, after which nothing can be compiled in the process."""
    from triton.runtime.interpreter import InterpretedFunction
    from vllm.v1.worker import utils

    utils._zero_kv_blocks_kernel = InterpretedFunction(jitted("_zero_kv_blocks_kernel", folder).fn)
    caches = own_memory()
    zeroed(utils.KVBlockZeroer, caches, torch.device("cpu"))
    results.put({name: cache.numpy() for name, cache in caches.items()})


def test_page_zeroer_zeroes_what_vllms_does(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(target=vllms_zeroer, args=(tmp_path, results))
    child.start()
    try:
        theirs = results.get(timeout=120)
    finally:
        child.join(timeout=30)
    caches = own_memory()
    zeroed(upstream_kernels.PageZeroer, caches, torch.device("cpu"))
    for name, cache in caches.items():
        assert (cache.numpy() == theirs[name]).all() and bool((cache == 0).any()) == (name != "window"), name


def test_a_name_that_vllm_no_longer_has_ends_the_start() -> None:
    with pytest.raises(UpstreamChangedError, match="block_table has no kernel: this version of vLLM"):
        replace("vllm.v1.worker.block_table", "kernel", None)


@pytest.mark.parametrize("owner", METHODS)
def test_a_method_that_vllm_no_longer_has_ends_the_start(owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for it would be called by nobody."""
    check_methods()
    name = METHODS[owner][-1]
    monkeypatch.delattr(resolve_name(owner), name)
    with pytest.raises(UpstreamChangedError, match=f"{owner} has no {name}: this version of vLLM"):
        check_methods()
