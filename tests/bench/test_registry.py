"""The registry of cases: complete, buildable without memory, recordable for every family, and right on the host."""

from __future__ import annotations

import resource
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

import dsv4_triton.kernels
from dsv4_triton.bench.registry import MODELS, Case, MismatchError, RegistryError, caches, cases, ops, select
from dsv4_triton.bench.registry.case import EAGER
from dsv4_triton.bench.registry.compare import EXACT, Tolerance, compare
from dsv4_triton.bench.registry.make import Maker, reserve
from dsv4_triton.bench.registry.steps import decode, prefill
from dsv4_triton.compiler.launches import recording
from dsv4_triton.device import A2, A3, A5, HOST, Family, acting_as

KERNELS = Path(dsv4_triton.kernels.__path__[0])
PUBLIC = sorted(path.stem for path in KERNELS.glob("*.py") if not path.stem.startswith("_"))
DEMO = select(model="demo")


def resident() -> int:
    """Bytes of memory that this process has in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("op", PUBLIC)
def test_every_public_op_has_cases(op: str) -> None:
    assert op in ops(), f"no entry for {op} in dsv4_triton/bench/registry"
    of_op = select(kernel=op)
    assert {case.model for case in of_op} == set(MODELS)
    for model in ("flash", "pro"):
        sizes = {(case.phase, case.step.tokens) for case in of_op if case.model == model}
        assert {("decode", 1), ("decode", 16), ("decode", 64)} <= sizes, f"{op}: {model} lacks a decode step"


def test_nothing_else_has_cases() -> None:
    assert set(ops()) == set(PUBLIC)


def test_names_are_unique_within_an_op() -> None:
    twice = [key for key, count in Counter((case.op, case.name) for case in cases()).items() if count > 1]
    assert not twice


@pytest.mark.parametrize(
    ("case", "family"),
    [
        pytest.param(case, family, id=f"{case}-{family.name}")
        for case in DEMO
        for family in (HOST, A2, A5)
        if case.runs_on(family)
    ],
)
def test_demo_cases_equal_their_reference(case: Case, family: Family, host_driver) -> None:
    """With the formats, the launch configuration and the kernel variants of every family (A3 has those of A2)."""
    with acting_as(family):
        case.check(case.build(family), family)


@pytest.mark.parametrize("op", PUBLIC)
def test_cases_build_without_memory_and_can_be_recorded(op: str) -> None:
    for case in select(kernel=op):
        for family in filter(case.runs_on, (A2, A3, A5)):
            before, began = resident(), time.process_time()
            inputs = case.build(family, fill=False)
            seconds, grown = time.process_time() - began, resident() - before
            assert seconds < 5, f"{case}: {seconds:.1f} s to build"
            assert grown < 256 << 20, f"{case}: {grown >> 20} MiB written while building"
            with acting_as(family), recording() as launches:
                case.launcher(**inputs.arguments)
            assert launches, f"{case}: nothing launched for {family.name}"
            assert all(1 <= programs <= 65535 for launch in launches for programs in launch.grid)


@pytest.mark.parametrize("family", (A2, A5), ids=lambda family: family.name)
def test_minimum_counts_real_traffic(family: Family) -> None:
    """No job can need more bytes than its arguments have, results not counted twice."""
    for case in filter(lambda case: case.runs_on(family), cases()):
        least = case.minimum(family)
        assert least.bytes > 0 and least.macs >= 0, str(case)
        assert (least.macs > 0) == (least.operands is not None), str(case)
        assert case.baselines[0] == EAGER


@pytest.mark.parametrize(
    ("op", "name", "size", "macs"),
    [
        ("sparse_attention", "flash/decode/b1/ctx32k/c4", 768 * 1024 + 512 * 4, 41_943_040),
        ("hc_post", "flash/decode/b16", 16 * (18 * 4096 + 80), 0),
        ("moe_router", "flash/prefill/t4096/top-k", 4096 * (256 * 4 + 6 * 8), 0),
        ("o_proj", "flash/decode/b16", 16 * (64 * 1024 + 8192 * 2 + 256) + 8 * 1024 * 4096 * 2, 16 * 8 * 1024 * 4096),
        (
            "o_proj",
            "flash/decode/b16/mxfp8",
            16 * (64 * 1024 + 8192 * 2 + 256) + 8 * 1024 * (4096 + 4),
            16 * 8 * 1024 * 4096,
        ),
        ("compressor_fold", "pro/decode/b1/ctx32k/c128", 128 * 4096 + 1024 + 256 + 1024 + 4, 0),
        ("indexer_score", "flash/decode/b1/ctx1m", 64 * 134 + 262144 * (130 + 4), 262144 * 64 * 128),
        # 5 of 7 tokens live, 8 heads: of padding the zeros that are written, or the slot that says so.
        ("rope", "demo/decode/b5/inverse", 5 * (8 * 64 * 4 + 256) + 2 * 8 * 1024, 0),
        ("rope", "demo/decode/b5/interleaved", (5 + 7) * 8 * 1024 + 5 * 256, 0),
        ("q_norm_rope", "demo/decode/b5", (5 + 7) * 8 * 1024 + 5 * 256, 0),
        ("compressor_state_insert", "demo/decode/b5/c128", 5 * (2 * 4096 + 8) + 2 * 4 + 5 * 2048, 0),
        ("token_slots", "demo/decode/b5/window", 7 * 8 + 5 * 4 + 5 * 4, 0),
        # 75 + 32 + 15 + 0 + 32 entries: the fourth request's query meets none, and no other score is written.
        ("indexer_score", "demo/decode/b5", 4 * 8 * 134 + 154 * (130 + 4), 154 * 8 * 128),
        # 11 windows close; the first of the request that begins has four tokens to fold, not eight.
        ("compressor_fold", "demo/prefill/t45/c4", (11 * 8 - 4) * 1024 * 4 + 11 * (1024 + 256) + 1024 + 48 * 4, 0),
    ],
)
def test_minimum_by_hand(op: str, name: str, size: int, macs: int) -> None:
    (case,) = select(kernel=op, case=name)
    assert (case.minimum(A2).bytes, case.minimum(A2).macs) == (size, macs)


def test_tables_name_blocks_of_their_own_and_slots_differ() -> None:
    (case,) = select(kernel="kv_norm_rope_insert", case="flash/decode/b64/ctx32k")
    job = case.job(A2)
    for pages in (job.layout.window, job.layout.compressed[4], job.layout.state[128]):
        where = caches.table(Maker("cpu", False, 0), job.step, pages)
        live = where.table[where.table > 0]
        assert len(live.unique()) == len(live) and int(where.table.max()) < where.blocks
        written = where.slots[where.slots >= 0]
        assert len(written.unique()) == len(written) > 0
        order = live.argsort()
        assert not torch.equal(order, torch.arange(len(live))), "blocks are in order"


def test_large_pools_are_shared_but_not_what_is_written() -> None:
    (case,) = select(kernel="indexer_score", case="pro/decode/b64/ctx1m")
    job = case.job(A2)
    where = caches.table(Maker("cpu", False, 0), job.step, job.layout.compressed[4])
    assert where.blocks * job.layout.compressed[4].page_bytes <= 1 << 30
    assert int((where.table > 0).sum()) > where.blocks
    written = where.slots[where.slots >= 0]
    assert len(written.unique()) == len(written) > 0


def test_selected_entries_are_visible_and_differ() -> None:
    for case in select(kernel="sparse_attention", case=["*/ctx32k/c4", "demo/*/c4"]):
        inputs = case.build(HOST, fill=False).arguments
        indices, visible = inputs["indices"].long(), case.step.visible(4)
        k = indices.shape[1]
        chosen = indices >= 0
        assert torch.equal(chosen.sum(1), visible.clamp(max=k).long())
        assert bool((indices < visible[:, None]).all())
        assert bool((indices[:, 1:] > indices[:, :-1])[chosen[:, 1:]].all())


def test_steps() -> None:
    step = decode(64, 32768)
    lengths = step.seq_lens()
    assert step.longest == 32768 and int(lengths.min()) > 16000 and len(lengths.unique()) == 64
    assert step.closing(4) == 16 and step.closing(128) == 1
    assert prefill().tokens == prefill(32768).tokens == 4096
    assert prefill(32768).closing(128) == 32
    assert decode(1, 1 << 20).name == "decode/b1/ctx1m"


def test_equal_seeds_build_equal_inputs(host_driver) -> None:
    (case,) = select(kernel="indexer_score", case="demo/decode/b5")
    first, second, other = (case.build(A5, seed=seed).tensors for seed in (1, 1, 2))
    for name, tensor in first.items():
        same = tensor.float() == second[name].float()
        assert bool(same.all()), name
    assert not torch.equal(first["q"].float(), other["q"].float())
    assert torch.equal(first["block_table"], other["block_table"])


def test_a_wrong_result_is_reported() -> None:
    good = torch.tensor([1.0, float("nan"), 3.0])
    compare("op", good.clone(), good, EXACT)
    with pytest.raises(MismatchError, match=r"op: 1 of 3 values differ, first at \(2,\): got 3.1, expected 3"):
        compare("op", torch.tensor([1.0, float("nan"), 3.1]), good, Tolerance(0.01, 0.0, ""))
    with pytest.raises(MismatchError, match="1 of 3"):
        compare("op", torch.tensor([1.0, 2.0, 3.0]), good, EXACT)
    with pytest.raises(MismatchError, match=r"expected torch\.float32"):
        compare("op", good.double(), good, EXACT)


def test_reserved_memory_takes_no_memory() -> None:
    before = resident()
    tensor = reserve((1 << 36,), torch.uint8)
    tensor[1 << 35] = 7
    assert int(tensor[1 << 35]) == 7 and resident() - before < 8 << 20


def test_steps_between_those_that_are_reported_are_asked_for() -> None:
    usual = {case.step.tokens for case in select(kernel="rope", model="flash")}
    assert usual == {1, 16, 64, 4096}
    assert {case.step.tokens for case in select(kernel="rope", model="flash", between=True)} == usual | {
        2,
        4,
        8,
        32,
        128,
        256,
    }
    assert {case.step.tokens for case in select(kernel="muls_add", case="flash/decode/*")} == {1, 16, 64}
    (named,) = select(kernel="muls_add", case="flash/decode/b8")
    assert named.step.between and named.step.tokens == 8
    assert {case.step.tokens for case in select(kernel="rope", model="flash", case="*/b8/*")} == {8}
    assert {case.step.tokens for case in select(kernel="rope", case=["flash/*/b8/*", "flash/*/inverse"])} == usual | {8}


def test_select() -> None:
    assert {case.op for case in select(kernel=["rope", "hc_post"])} == {"rope", "hc_post"}
    assert {case.model for case in select(model="pro")} == {"pro"}
    long = select(kernel="indexer_topk", case="*/decode/*/ctx1m")
    assert [case.name for case in long] == [f"{m}/decode/b{b}/ctx1m" for m in ("flash", "pro") for b in (1, 16, 64)]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"kernel": "hc_pots"}, r"unknown kernel 'hc_pots'; did you mean 'hc_post'\? There are: compressor_fold, "),
        ({"model": "flahs"}, r"unknown model 'flahs'; did you mean 'flash'\? There are: flash, pro, demo"),
        ({"kernel": "muls_add", "case": "flash/decode/b3"}, r"unknown case 'flash/decode/b3'.*flash/decode/b16"),
        ({"model": "pro", "case": "demo/*"}, r"^there is no case 'demo/\*' of model pro, only of demo$"),
        ({"kernel": "muls_add", "case": "*/c4"}, r"^there is no case '\*/c4' of kernel muls_add, only of comp"),
        ({"kernel": "muls_add", "model": "pro", "case": "flash/*/c4"}, r"'flash/\*/c4' of model pro, only of flash$"),
    ],
)
def test_unknown_names_list_what_exists(wanted: dict, message: str) -> None:
    with pytest.raises(RegistryError, match=message):
        select(**wanted)
