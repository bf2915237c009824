"""The steps of the cases: ragged batches as a server sees them, as numbers and as the tensors that describe them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dsv4_triton.bench.registry.models import Model

KI = 1024


@dataclass(frozen=True)
class Step:
    """`requests` are (tokens before this step, tokens in this step); `padding` rows follow the last request. A step
    `between` those that are reported is there for launch parameters, whose files have an entry for each size."""

    name: str
    requests: tuple[tuple[int, int], ...]
    padding: int = 0
    between: bool = False

    @property
    def tokens(self) -> int:
        """Rows of the step, padding included."""
        return sum(new for _, new in self.requests) + self.padding

    @property
    def longest(self) -> int:
        """Tokens of the longest request after the step."""
        return max(before + new for before, new in self.requests)

    def live(self) -> Iterator[tuple[int, int]]:
        """(request, position) of every token that is not padding."""
        for request, (before, new) in enumerate(self.requests):
            for position in range(before, before + new):
                yield request, position

    def positions(self) -> torch.Tensor:
        """[T] int32, -1 for padding."""
        return torch.tensor([p for _, p in self.live()] + [-1] * self.padding, dtype=torch.int32)

    def token_req(self) -> torch.Tensor:
        """[T] int32, -1 for padding."""
        return torch.tensor([r for r, _ in self.live()] + [-1] * self.padding, dtype=torch.int32)

    def visible(self, ratio: int) -> torch.Tensor:
        """[T] int32: compressed entries of `ratio` tokens that each token sees."""
        return ((self.positions() + 1) // ratio).to(torch.int32)

    def closing(self, ratio: int) -> int:
        """Tokens that close a window of `ratio` tokens."""
        return sum((before + new) // ratio - before // ratio for before, new in self.requests)

    def entries(self, ratio: int) -> int:
        """Compressed entries of all requests after the step."""
        return sum((before + new) // ratio for before, new in self.requests)

    def query_start_loc(self) -> torch.Tensor:
        """[B + 1] int32."""
        counts = torch.tensor([0, *(new for _, new in self.requests)])
        return counts.cumsum(0).to(torch.int32)

    def seq_lens(self) -> torch.Tensor:
        """[B] int32."""
        return torch.tensor([before + new for before, new in self.requests], dtype=torch.int32)


def _size(tokens: int) -> str:
    return f"{tokens // KI // KI}m" if tokens % (KI * KI) == 0 else f"{tokens // KI}k"


def decode(batch: int, context: int, *, named: bool = True) -> Step:
    """One token for each of `batch` requests. Their lengths lie between half of `context` and all of it, in mixed
    order and with every remainder of 128; the longest closes a window of every ratio."""
    lengths = [context - i * context // (2 * batch) - i * 37 % 128 for i in range(batch)]
    order = [(5 * i + 3) % batch for i in range(batch)]
    name = f"decode/b{batch}" + (f"/ctx{_size(context)}" if named else "")
    return Step(name, tuple((lengths[i] - 1, 1) for i in order), between=batch in _BETWEEN)


def prefill(context: int | None = None) -> Step:
    """4,096 tokens: four prompts, two of which continue a cached prefix, or the last chunk of one long prompt."""
    if context is None:
        return Step("prefill/t4096", ((0, 1311), (512, 1021), (256, 701), (0, 1063)))
    return Step(f"prefill/t4096/ctx{_size(context)}", ((context - 4096, 4096),))


_DEMO_DECODE = Step("decode/b5", ((299, 1), (130, 1), (62, 1), (0, 1), (127, 1)), padding=2)
_DEMO_PREFILL = Step("prefill/t45", ((0, 17), (120, 20), (255, 8)), padding=3)
_DEMO = (_DEMO_DECODE, _DEMO_PREFILL)
_BETWEEN = (2, 4, 8, 32, 128, 256)
BATCHES = tuple(sorted((1, 16, 64, *_BETWEEN)))
"""Requests of the decode steps."""


def by_tokens(model: Model) -> tuple[Step, ...]:
    """For ops whose work follows from the number of tokens alone."""
    if model.demo:
        return _DEMO
    return (*(decode(b, 32 * KI, named=False) for b in BATCHES), prefill())


def by_context(model: Model, *contexts: int, chunk: bool = False) -> tuple[Step, ...]:
    """For ops that touch caches: decode at each context, and prefill of short prompts or, with `chunk`, of a chunk
    at the first of the contexts."""
    if model.demo:
        return _DEMO
    steps = [decode(b, context) for context in contexts for b in BATCHES]
    return (*steps, prefill(contexts[0] if chunk else None))


def by_slots(model: Model) -> tuple[Step, ...]:
    """For ops that write a row of a cache for each token: a decode step of 4,096 requests, too, whose slots and
    positions do not follow one another."""
    steps = by_context(model, 32 * KI)
    return steps if model.demo else (*steps, decode(4096, 32 * KI))
