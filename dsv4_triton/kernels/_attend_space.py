"""Launch parameters of `sparse_attention`: the limits that its plan follows, and options of the attend launches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import product
from operator import itemgetter
from typing import Any

from dsv4_triton.autotune.space import MIXED, Choices, Config, Key, Space, mixing
from dsv4_triton.device import Family
from dsv4_triton.kernels._attend_plan import HEAD_DIM, PATHS, Call, Limits, Plan, default_limits, plan

_CHUNK_ROWS = (384, 512, 640, 768)
_SLOT_ROWS = (384, 512, 640)


def limits_of(config: Config) -> Limits:
    """The limits that a configuration holds."""
    return Limits._make(_VALUES(config))


_VALUES = itemgetter(*Limits._fields)


def _call(key: Key) -> Call:
    return Call(**{name: key[name] for name in Call.__dataclass_fields__})


def _default(family: Family, key: Key) -> dict[str, Any]:
    return {**default_limits(family)._asdict(), **MIXED}


def _paths(family: Family, call: Call) -> tuple[str | None, ...]:
    """None for the first possible path, and the names of others: where the window can stay in its place it does, since
    scratch would grow by its rows."""
    limit = default_limits(family)
    first = plan(family, call, limit)
    names = ["copies", "steps"] if first.base else ["pages", "beside", "parts"]
    others = {name: PATHS[name](family, call, limit._replace(PATH=name)) for name in names}
    return None, *(name for name, other in others.items() if other not in (None, first))


def _candidates(family: Family, key: Key) -> Choices:
    """Those that make a difference to the launches of this call."""
    if not family.arch:
        return {}
    call, limit = _call(key), default_limits(family)
    paths, chosen = _paths(family, call), plan(family, call, limit)
    found: dict[str, Any] = {"PATH": paths} if len(paths) > 1 else {}
    if call.dense:
        found |= {"SLOT_ROWS": _SLOT_ROWS} if chosen.slots and family.mixed_kernels else {"CHUNK_ROWS": _CHUNK_ROWS}
    if not chosen.launches:
        return found
    if call.heads > 64:
        found["HEADS"] = (64, 128)
    if any(tiling.DK == HEAD_DIM for tiling in chosen.launches):
        found |= {"ONCE": (None, False, True), "WHOLE_COLUMNS": (0, limit.WHOLE_COLUMNS)}
    if chosen.gathered > limit.TILE_ROWS:
        found["TILE_ROWS"] = (128, 192, limit.TILE_ROWS)
    if chosen.slots:
        found["CORE_ITEMS"] = (1, 2, 4, 8)
    return found | {"VALUE_WIDTH": (128, limit.VALUE_WIDTH, 512), **mixing(family)}


@lru_cache(maxsize=1024)
def _variants(family: Family, call: Call) -> tuple[Plan, ...]:
    """Plans that need the most scratch among those that may be chosen."""
    limit = default_limits(family)
    if not family.arch:
        return (plan(family, call, limit),)
    choices = product(_paths(family, call), _CHUNK_ROWS, _SLOT_ROWS)
    return tuple({plan(family, call, limit._replace(PATH=p, CHUNK_ROWS=c, SLOT_ROWS=s)) for p, c, s in choices})


def most_scratch(family: Family, call: Call, itemsize: int) -> tuple[int, int]:
    """Bytes of scratch that a token takes at most, and of rows that a request shares, whatever is chosen."""
    plans = _variants(family, call)
    a_token = max(one.scratch(call.heads, itemsize) for one in plans)
    shared = max((one.gathered - one.base) * HEAD_DIM * itemsize if one.shared else 0 for one in plans)
    return a_token, shared


def _fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    """The path is possible, a launch's tiles fit on the chip, and scratch stays within what the workspace has."""
    call, limit = _call(key), Limits._make(_VALUES(config))
    path = PATHS.get(limit.PATH or "")
    if limit.PATH is not None and (path is None or path(family, call, limit) is None):
        return f"PATH {limit.PATH!r} is not possible"
    chosen = plan(family, call, limit)
    a_token, shared = most_scratch(family, call, key["bytes"])
    if chosen.scratch(call.heads, key["bytes"]) > a_token:
        return f"scratch of more than {a_token} bytes a token"
    if chosen.shared and (chosen.gathered - chosen.base) * HEAD_DIM * key["bytes"] > shared:
        return f"scratch of more than {shared} bytes a request"
    for tiling in chosen.launches if family.arch else ():
        scores = tiling.HEADS * tiling.columns * 4 // (2 if family.mixed_kernels else 1)
        most = max(tiling.ROWS if tiling.TILES else 16, tiling.WINDOW_ROWS if tiling.WINDOWS else 16)
        width = HEAD_DIM if limit.ONCE and tiling.DK == HEAD_DIM else tiling.DV
        sums = tiling.HEADS * max(most, width) * 4
        operands = (tiling.HEADS * tiling.DK + most * min(tiling.DK, HEAD_DIM)) * key["bytes"]
        for memory, need, size in (
            ("UB", scores, family.ub_bytes), ("L0C", sums, family.l0c_bytes), ("L1", operands, family.l1_bytes)
        ):  # fmt: skip
            if need > size:
                return f"{memory} has {size} bytes, tiles of {most} rows and {tiling.HEADS} heads take {need}"
    return ""


SPACE = Space("sparse_attention", default=_default, candidates=_candidates, fits=_fits, buckets=("tokens", "dense"))
