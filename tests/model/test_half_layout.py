"""Half layout is invisible outside: with permuted weights and half-layout rotation every score and output is the same
number as with the checkpoint's interleaved pairs.

Weights and inputs are small integers and rotations are quarter turns, so that no sum or product is rounded and the
order of additions cannot matter: equality is exact.
"""

from __future__ import annotations

import pytest
import torch

from dsv4_triton.hadamard import sylvester
from dsv4_triton.kernels.o_proj import o_proj
from dsv4_triton.kernels.rope import rope
from dsv4_triton.model.rope import half_layout
from tests.numeric import assert_equal

TOKENS, HIDDEN, HEADS, GROUPS, RANK = 12, 24, 4, 2, 16


pytestmark = pytest.mark.usefixtures("host_driver")


@pytest.fixture(params=[True, False], ids=["permuted", "control"])
def permuted(request: pytest.FixtureRequest) -> bool:
    """The control leaves the weights as they are, which half-layout rotation must not bear."""
    return bool(request.param)


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape, dtype=torch.float32)


def quarter_turns() -> tuple[torch.Tensor, torch.Tensor]:
    """Positions [T] and a table of angles that are multiples of a quarter turn, another one for each frequency."""
    turns = torch.randint(0, 4, (TOKENS, 32))
    cos, sin = torch.tensor([1.0, 0.0, -1.0, 0.0]), torch.tensor([0.0, 1.0, 0.0, -1.0])
    return torch.arange(TOKENS, dtype=torch.int32), torch.cat((cos[turns], sin[turns]), dim=1)


def project(x: torch.Tensor, weight: torch.Tensor, width: int) -> torch.Tensor:
    return (x @ weight.T).view(len(x), -1, width)


def test_attention(permuted: bool) -> None:
    """Queries, keys, scores, and the value that each head's best key gives, through the output projection."""
    positions, cos_sin = quarter_turns()
    x, wq, wkv = integers(TOKENS, HIDDEN), integers(HEADS * 512, HIDDEN), integers(512, HIDDEN)
    wo_a = integers(GROUPS * RANK, HEADS // GROUPS * 512)
    layouts = []
    for half in (False, True):
        q_rows, kv_rows = (half_layout(w, 512, 0) if half and permuted else w for w in (wq, wkv))
        columns = half_layout(wo_a, 512, 1) if half and permuted else wo_a
        q = rope(project(x, q_rows, 512), positions, cos_sin, interleaved=not half)
        kv = rope(project(x, kv_rows, 512), positions, cos_sin, interleaved=not half)
        scores = torch.einsum("thd,sd->ths", q, kv[:, 0])
        o = kv[scores.argmax(-1), 0].contiguous()
        groups = columns.view(GROUPS, RANK, -1).contiguous()
        if half:
            z = o_proj(o, groups, positions, cos_sin)
        else:
            back = rope(o, positions, cos_sin, inverse=True, interleaved=True)
            z = torch.einsum("tgk,grk->tgr", back.view(TOKENS, GROUPS, -1), groups).reshape(TOKENS, -1)
        layouts.append((scores, z))
    (scores, z), (half_scores, half_z) = layouts
    if permuted:
        assert_equal(half_scores + 0.0, scores + 0.0, "scores")
        assert_equal(half_z + 0.0, z + 0.0, "outputs")  # + 0.0: without the sign of zero
    else:
        assert not torch.equal(half_scores, scores) and not torch.equal(half_z, z)


def test_indexer(permuted: bool) -> None:
    """Queries and keys of 128 features, rotated and then mixed by the Hadamard matrix, which is the same in both."""
    positions, cos_sin = quarter_turns()
    x, wq, wk = integers(TOKENS, HIDDEN), integers(HEADS * 128, HIDDEN), integers(128, HIDDEN)
    hadamard = sylvester(128, dtype=torch.float32)
    layouts = []
    for half in (False, True):
        q_rows, k_rows = (half_layout(w, 128, 0) if half and permuted else w for w in (wq, wk))
        q = rope(project(x, q_rows, 128), positions, cos_sin, interleaved=not half) @ hadamard
        k = rope(project(x, k_rows, 128), positions, cos_sin, interleaved=not half) @ hadamard
        layouts.append(torch.einsum("thd,sd->ths", q, k[:, 0]))
    if permuted:
        assert_equal(layouts[1] + 0.0, layouts[0] + 0.0, "scores")
    else:
        assert not torch.equal(*layouts)
