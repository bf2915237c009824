"""sparse_attention: both routes against the reference, the traps of the attention, and independence of the batch."""

from __future__ import annotations

import math

import pytest
import torch

from dsv4_triton.device import A2, A5, HOST, Family, acting_as
from dsv4_triton.kernels.sparse_attention import sparse_attention, sparse_attention_workspace
from dsv4_triton.reference.sparse_attention import sparse_attention as reference
from tests.kernels.attention_cases import DIM, EDGES, MIXED, SCALE, Case, build, paged
from tests.numeric import assert_close, assert_equal, poisoned

BF16 = torch.bfloat16
TOLERANCE = {
    # Sums of a few hundred fp32 terms in another order.
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    # One unit in the last place of the result, and the rounding of P (2^-9 of a convex combination of rows of size 4).
    BF16: {"rtol": 2**-7, "atol": 2**-9 * 4},
}
CASES = [
    Case((EDGES,)),
    Case((EDGES,), page=128, dtype=BF16),
    Case((EDGES,), compressed="selected"),
    Case((EDGES,), compressed="selected", dtype=BF16, gap=96),
    Case((EDGES,), compressed="holes"),
    Case((EDGES,), compressed="dense", gap=64),
    Case((EDGES,), compressed="dense", ratio=128, cmp_page=2),
    Case(MIXED, compressed="holes", heads=6, page=128),
    Case(MIXED, compressed="dense", ratio=128, cmp_page=2, dtype=BF16, heads=10),
    Case(MIXED, heads=6),
    Case(((200,),), heads=64, compressed="selected", dtype=BF16),
    Case(((200, 201),), heads=128, compressed="selected", dtype=BF16),
    Case(MIXED, compressed="selected", sink=-1e4),
    Case(MIXED, compressed="selected", sink=20.0),
    Case(MIXED, compressed="selected", sink=-math.inf),
    Case(((2300, 100),), compressed="holes", topk=512, dtype=BF16),
    Case(((150, 9),), compressed="holes", topk=40),
    Case((EDGES,), window=17, compressed="selected", page=16),
    Case(((2, 1),), compressed="selected"),
    Case(((-1, -1, -1),), compressed="selected"),
    Case(((-1, -1),), compressed="dense", ratio=128, cmp_page=2),
    Case(((-1,),)),
    Case(MIXED, compressed="holes", record=True),
    Case(MIXED, compressed="dense", record=True, dtype=BF16),
]


def check(case: Case, **more) -> None:
    inputs = build(case)
    expected = reference(*inputs.args(), scale=SCALE, window=case.window, **inputs.compressed)
    guarded = poisoned((len(inputs.q) + 1, case.heads, DIM), case.dtype)
    got = sparse_attention(
        *inputs.args(), scale=SCALE, window=case.window, **inputs.compressed, **more, out=guarded[:-1]
    )
    assert_close(got, expected, **TOLERANCE[case.dtype])
    assert not got[inputs.positions < 0].any(), "a padding token must give a zero row"
    assert_equal(guarded[-1:], poisoned((1, case.heads, DIM), case.dtype), "the row after the output")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_reference(case):
    check(case)


def test_no_tokens():
    inputs = build(Case(((5,),), compressed="selected")).tokens(slice(0, 0))
    assert sparse_attention(*inputs.args(), scale=SCALE, **inputs.compressed).shape == (0, 8, DIM)


@pytest.mark.parametrize("case", [
    Case(((2700, 30, 2559),), compressed="dense", ratio=4),
    Case(((8400, 700),), compressed="dense", ratio=1, cmp_page=8, dtype=BF16),
], ids=str)  # fmt: skip
def test_dense_rows_beyond_one_chunk(case):
    check(case)


def test_bound_of_visible_rows_changes_nothing():
    inputs = build(Case((EDGES,), compressed="dense", ratio=128, cmp_page=2))
    wide = torch.nn.functional.pad(inputs.compressed["cmp_table"], (0, 400), value=-1)
    compressed = {**inputs.compressed, "cmp_table": wide}
    expected = sparse_attention(*inputs.args(), scale=SCALE, **inputs.compressed)
    assert_close(sparse_attention(*inputs.args(), scale=SCALE, **compressed), expected, rtol=1e-6, atol=2e-6)
    bounded = sparse_attention(*inputs.args(), scale=SCALE, **compressed, max_n_vis=2)
    assert_close(bounded, expected, rtol=1e-6, atol=2e-6)
    cut = sparse_attention(*inputs.args(), scale=SCALE, **compressed, max_n_vis=1)
    assert_close(cut, reference(*inputs.args(), scale=SCALE, **compressed, max_n_vis=1), rtol=1e-5, atol=1e-5)


def test_all_visible_rows_selected_equals_dense():
    inputs = build(Case((EDGES,), compressed="dense", ratio=16))
    dense = sparse_attention(*inputs.args(), scale=SCALE, **inputs.compressed)
    indices = torch.arange(32, dtype=torch.int32).expand(len(inputs.q), -1)
    n_vis = inputs.compressed.pop("n_vis")
    indices = torch.where(indices < n_vis[:, None], indices, -1)
    selected = sparse_attention(*inputs.args(), scale=SCALE, **inputs.compressed, indices=indices)
    assert_close(selected, dense, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [
    Case((tuple(range(250, 270)), (3,), (128, 129)), compressed="selected"),
    Case((tuple(range(250, 270)), (3,), (128, 129)), compressed="dense", ratio=128, cmp_page=2),
    Case((tuple(range(250, 270)), (3,), (128, 129))),
], ids=str)  # fmt: skip
def test_a_token_does_not_depend_on_the_batch(case):
    inputs = build(case)
    together = sparse_attention(*inputs.args(), scale=SCALE, **inputs.compressed)
    for chosen in ([7], list(range(3, 9)), torch.randperm(len(inputs.q)).tolist()):
        part = inputs.tokens(chosen)
        assert_equal(sparse_attention(*part.args(), scale=SCALE, **part.compressed), together[chosen], f"{chosen}")


@pytest.mark.parametrize("compressed, page", [("selected", 64), ("dense", 2)])
def test_runs_of_tokens_change_nothing(monkeypatch, compressed, page):
    """Scratch for 16 tokens at a time, against all at once."""
    inputs = build(Case((tuple(range(250, 270)), (3,), (-1, 128)), compressed=compressed, ratio=16, cmp_page=page))
    with acting_as(A2):
        expected = sparse_attention(*inputs.args(), scale=SCALE, **inputs.compressed)
        with monkeypatch.context() as patch:
            patch.setitem(vars(A2), "scratch_bytes", 1)
            result = sparse_attention(*inputs.args(), scale=SCALE, **inputs.compressed)
    assert_equal(result, expected)


@pytest.mark.parametrize("case", [
    Case((EDGES,)),
    Case((EDGES,), page=128, dtype=BF16),
    Case((EDGES,), compressed="dense", gap=64),
    Case((EDGES,), compressed="dense", ratio=128, cmp_page=2),
    Case(MIXED, compressed="dense", ratio=128, cmp_page=16, page=128, dtype=BF16, heads=10),
    Case(MIXED, compressed="holes", heads=6, page=128),
    Case(MIXED, compressed="selected", sink=-math.inf),
    Case(((2300, 100),), compressed="holes", topk=512, dtype=BF16),
    Case(((150, 9),), compressed="holes", topk=40),
    Case((EDGES,), window=17, compressed="selected", page=16),
    Case(((200, 9),), heads=64, compressed="holes", dtype=BF16),
    Case(((700, 5),), heads=16, compressed="dense", ratio=1, cmp_page=2, dtype=BF16),
    Case(((700, 5),), compressed="dense", ratio=1, cmp_page=32, page=32),
    Case(((2700, 30),), compressed="dense"),
    Case(MIXED, compressed="holes", record=True),
    Case(((200, 9),), heads=64, compressed="selected", record=True, dtype=BF16),
    Case(((2700, 30),), compressed="dense", record=True, dtype=BF16),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("family", [A2, A5], ids=lambda family: family.name)
def test_variants_of_the_accelerators(family: Family, case):
    """Pages as tiles, gathered rows, products in slices and partial results run here too."""
    with acting_as(family):
        check(case)


RUN_OF_TOKENS = tuple(range(500, 520))


@pytest.mark.parametrize("case", [
    Case((RUN_OF_TOKENS, (3,), (-1,)), compressed="dense", ratio=16, cmp_page=2),
    Case((RUN_OF_TOKENS, (255, 256, 257)), compressed="dense", ratio=4, cmp_page=2, gap=64, heads=6, dtype=BF16),
    Case((RUN_OF_TOKENS, (2699, 2700)), compressed="dense", cmp_page=8),
    Case((RUN_OF_TOKENS, (1,)), compressed="dense", ratio=1, record=True, dtype=BF16),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("family", [A2, A5], ids=lambda family: family.name)
def test_tokens_of_a_request_share_dense_rows(monkeypatch, family: Family, case):
    """Against the reference, and against a copy for every token, which a small bound of the scratch enforces."""
    inputs = build(case)
    with acting_as(family):
        check(case)
        shared = sparse_attention(*inputs.args(), scale=SCALE, **inputs.compressed)
        with monkeypatch.context() as patch:
            patch.setitem(vars(family), "scratch_bytes", 1)
            alone = sparse_attention(*inputs.args(), scale=SCALE, **inputs.compressed)
        tolerance = {"rtol": 1e-5, "atol": 2e-6} if case.dtype == torch.float32 else TOLERANCE[BF16]
        assert_close(shared, alone, **tolerance)


@pytest.mark.parametrize("case", [
    Case((EDGES,), compressed="selected"),
    Case((EDGES,), compressed="dense", ratio=128, cmp_page=2),
    Case(((2700, 30),), compressed="dense"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("family", [HOST, A2, A5], ids=lambda family: family.name)
def test_scratch_comes_from_the_workspace(family: Family, case):
    inputs = build(case)
    dense = 0 if case.compressed == "selected" else case.visible(max(p for request in case.requests for p in request))
    needed = sparse_attention_workspace(
        len(inputs.q), case.heads, case.dtype, family, window_page=case.page, cmp_page=case.cmp_page,
        topk=0 if dense else case.topk, max_n_vis=dense,
    )  # fmt: skip
    bound = {"max_n_vis": dense} if dense else {}
    with acting_as(family):
        want = sparse_attention(*inputs.args(), scale=SCALE, **inputs.compressed, **bound)
        workspace = poisoned((needed,), torch.uint8)
        assert_equal(
            sparse_attention(*inputs.args(), scale=SCALE, **inputs.compressed, **bound, workspace=workspace), want
        )
        if needed:
            with pytest.raises(ValueError, match=r"sparse_attention: workspace has 64 bytes, this call needs \d+"):
                sparse_attention(*inputs.args(), scale=SCALE, **inputs.compressed, **bound, workspace=workspace[:64])


@pytest.mark.parametrize("family", [HOST, A2, A5], ids=lambda family: family.name)
@pytest.mark.parametrize("page", [64, 128])
def test_the_workspace_suffices_for_smaller_calls(family: Family, page):
    """Whatever fewer tokens and visible rows make of runs and partial results."""
    most = sparse_attention_workspace(3000, 64, BF16, family, window_page=page, cmp_page=page, topk=512, max_n_vis=9000)
    for tokens in (1, 15, 100, 2999):
        for topk, dense in ((512, 0), (0, 0), (0, 1), (0, 200), (0, 513), (0, 5000), (0, 9000)):
            less = sparse_attention_workspace(
                tokens, 64, BF16, family, window_page=page, cmp_page=page, topk=topk, max_n_vis=dense
            )
            assert less <= most


def one_key(cmp_rows: int, sink: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A request of one token whose only window row also is every compressed row; output, logits and row."""
    row = torch.randn(1, DIM)
    cache, table = paged([row], 64, torch.float32)
    entries, entry_table = paged([row.expand(cmp_rows, -1)], 64, torch.float32)
    q = torch.randn(1, 8, DIM)
    got = sparse_attention(
        q, cache, table, torch.full((8,), sink), torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32),
        scale=SCALE, cmp_cache=entries, cmp_table=entry_table, indices=torch.arange(cmp_rows, dtype=torch.int32)[None],
    )  # fmt: skip
    return got[0], SCALE * q[0] @ row[0], row[0]


@pytest.mark.parametrize("cmp_rows", [1, 3])
@pytest.mark.parametrize("sink", [0.5, -3.0, 20.0])
def test_sink_is_unscaled_and_window_and_compressed_rows_both_count(cmp_rows, sink):
    """The row is key and value at once; it is attended once raw and `cmp_rows` times compressed."""
    got, logits, row = one_key(cmp_rows, sink)
    weight = (1 + cmp_rows) * logits.exp() / ((1 + cmp_rows) * logits.exp() + math.exp(sink))
    assert_close(got, weight[:, None] * row, rtol=1e-5, atol=1e-5)


def test_large_logits_do_not_overflow():
    inputs = build(Case((EDGES,), compressed="selected"))
    inputs.q.mul_(300)
    expected = reference(*inputs.args(), scale=SCALE, **inputs.compressed)
    got = sparse_attention(*inputs.args(), scale=SCALE, **inputs.compressed)
    assert_close(got, expected, rtol=1e-3, atol=1e-3)  # logits near 2,000: their fp32 rounding alone is 1e-4


@pytest.mark.parametrize("compressed", ["none", "selected"])
def test_offsets_beyond_two_to_the_31(compressed):
    """Two pages whose distance is more than 2^31 values; only what is touched of the storage takes memory."""
    inputs = build(Case(((40, 130),), compressed=compressed, dtype=BF16, page=128))

    def spread(cache: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The request's pages 0 and 1 at blocks 1 and 0 of a storage with a huge stride."""
        page = cache[0].numel()
        stride = 2**31 + page
        far = torch.empty(stride + page, dtype=BF16).as_strided((2, *cache.shape[1:]), (stride, DIM, 1))
        moved = table.clone()
        for i in range(int((table >= 0).sum())):
            far[1 - i] = cache[table[0, i]]
            moved[0, i] = 1 - i
        return far, moved

    if compressed == "none":
        inputs.window_cache, inputs.window_table = spread(inputs.window_cache, inputs.window_table)
    else:
        far = spread(inputs.compressed["cmp_cache"], inputs.compressed["cmp_table"])
        inputs.compressed["cmp_cache"], inputs.compressed["cmp_table"] = far
    expected = reference(*inputs.args(), scale=SCALE, **inputs.compressed)
    assert_close(sparse_attention(*inputs.args(), scale=SCALE, **inputs.compressed), expected, **TOLERANCE[BF16])


@pytest.mark.parametrize("change, message", [
    ({"scale": SCALE, "window": 129}, "window is 129"),
    ({"scale": SCALE, "n_vis": None}, "exactly one of n_vis and indices"),
    ({"scale": SCALE, "indices": torch.zeros(1, 4, dtype=torch.int32)}, "exactly one of n_vis and indices"),
    ({"scale": SCALE, "cmp_table": None}, "needs cmp_table"),
    ({"scale": SCALE, "cmp_cache": None}, "need cmp_cache"),
    ({"scale": SCALE, "n_vis": torch.zeros(2, dtype=torch.int32)}, "n_vis has shape"),
    ({"scale": SCALE, "out": torch.zeros(1, 8, 256)}, "out has shape"),
])  # fmt: skip
def test_arguments_that_do_not_fit(change, message):
    inputs = build(Case(((200,),), compressed="dense"))
    with pytest.raises(ValueError, match=message):
        sparse_attention(*inputs.args(), **{**inputs.compressed, **change})


def test_wrong_dtypes_and_head_counts():
    inputs = build(Case(((5,),)))
    with pytest.raises(TypeError, match="window_cache has dtype"):
        sparse_attention(inputs.q.bfloat16(), *inputs.args()[1:], scale=SCALE)
    with pytest.raises(TypeError, match="positions has dtype"):
        sparse_attention(*inputs.args()[:-1], inputs.positions.long(), scale=SCALE)
    with pytest.raises(TypeError, match="window_cache must be a"):
        sparse_attention(inputs.q, None, *inputs.args()[2:], scale=SCALE)
    with pytest.raises(ValueError, match=r"window_table has shape .* at least one row"):
        sparse_attention(inputs.q, inputs.window_cache, inputs.window_table[:, :0], *inputs.args()[3:], scale=SCALE)
    with pytest.raises(ValueError, match="129 heads"):
        sparse_attention(torch.zeros(1, 129, DIM), *inputs.args()[1:], scale=SCALE)
