"""What config files hold, as tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from dsv4_triton.autotune import store
from dsv4_triton.autotune.shipped import ALL, Gain, Line
from dsv4_triton.autotune.trials import difference


def entries_table(lines: Iterable[Line]) -> Table:
    """One line an entry. What files say is no markup."""
    headings = "family", "kernel", "sizes", "what changed", "us", "of case", "gain", "kind", "from", "outdated"
    table = _plain_table(headings)
    for line in lines:
        entry, what = line.entry, line.entry.found
        changed = difference(entry.config, entry.default) if entry.config else "default"
        sizes = " ".join(f"{n}={v}" if isinstance(v, int) else str(v) for n, v in entry.key.items())
        source = "shipped" if line.folder == store.SHIPPED else "user"
        cells = (
            line.family, line.kernel, sizes, changed, f"{what.microseconds:.4g}", what.case, f"{what.gain:.2f}",
            what.kind, f"{source} {what.date}" + (" (hidden)" if line.hidden else ""), line.old,
        )  # fmt: skip
        table.add_row(*map(Text, cells))
    return table


def gains_table(gains: Iterable[Gain]) -> Table:
    """One line a kernel; times are those of its op, summed over the sizes."""
    headings = "family", "kernel", "kind", "sizes", "winners", "op us, default", "op us, best", "mean gain"
    table = _plain_table(headings)
    for one in gains:
        cells = one.family, one.kernel, one.kind, f"{one.entries}", f"{one.winners}"
        times = ("" if time is None else f"{time:.5g}" for time in (one.default_microseconds, one.microseconds))
        table.add_row(*map(Text, (*cells, *times, f"{one.gain:.3f}")), end_section=one.kernel == ALL)
    return table


def _plain_table(headings: Iterable[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
