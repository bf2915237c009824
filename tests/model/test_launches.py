"""Launches of a decode step in a layer of each kind, and that one workspace serves all of them."""

from __future__ import annotations

import pytest
import torch

from dsv4_triton.bench.launches import KINDS, ROUTERS, LayerLaunches, Log, Operations, layer_launches

LIMITS = {"c4": 38, "c128": 28, "window": 26}
ATTENTION_LIMIT = 16
"""Bounds of every family: launches of a layer, and of them those between the dense products of a c4 layer."""
FLASH = {
    ("a2", 16): {"c4": 26, "c128": 21, "window": 18},
    ("a2", 64): {"c4": 28, "c128": 23, "window": 20},
    ("a5", 16): {"c4": 30, "c128": 25, "window": 23},
    ("host", 16): {"c4": 24, "c128": 20, "window": 18},
}
"""Launches of DeepSeek-V4-Flash at 32,768 tokens of context, by family and tokens. A change is a change of this table;
fewer are better."""


def by_kind(layers: list[LayerLaunches]) -> dict[str, int]:
    """Launches of each kind of layer, whichever way it routes."""
    assert [(layer.router, layer.kind) for layer in layers] == [(r, k) for r in ROUTERS for k in KINDS]
    totals = {layer.kind: layer.total for layer in layers}
    assert all(layer.total == totals[layer.kind] for layer in layers), "both routers take the same launches"
    return totals


@pytest.mark.parametrize(("family", "tokens"), FLASH)
def test_launches_of_flash(family: str, tokens: int) -> None:
    layers = layer_launches(family=family, tokens=tokens)
    totals = by_kind(layers)
    assert totals == FLASH[family, tokens]
    assert all(totals[kind] <= limit for kind, limit in LIMITS.items())
    assert all(layer.of("attention") <= ATTENTION_LIMIT for layer in layers)


@pytest.mark.parametrize("context", [300, 100_000])
def test_launches_of_the_demo_in_fp32(context: int) -> None:
    """While all entries are attended, and with three levels of top-k."""
    totals = by_kind(layer_launches(model="demo", family="host", tokens=8, context=context, dtype="float32"))
    assert all(totals[kind] <= limit for kind, limit in LIMITS.items())


@pytest.mark.parametrize(("family", "tokens"), [("host", 37), ("a2", 1000), ("a5", 1000)])
def test_the_workspace_suffices_for_every_op_of_a_step(family: str, tokens: int) -> None:
    """A step as large as the model was built for, and small ones: every op finds room, or it would raise."""
    layer_launches(model="demo", family=family, tokens=tokens, max_tokens=1000, context=16384)


def test_operations_are_counted_and_views_are_not() -> None:
    log = Log([])
    x = torch.randn(4, 6)
    with torch.no_grad(), Operations(log):
        y = torch.nn.functional.linear(x, torch.empty(3, 6).fill_(1.0)).view(2, 6)[:, 1:4]
        y.to(torch.bfloat16).float()
        y.float()
        y.contiguous()
        torch.empty_like(y).copy_(y)
    names = [launched.name for launched in log.take()]
    assert names == ["fill_", "mm", "_to_copy", "_to_copy", "clone", "copy_"]
    assert log.take() == ()
