"""Launch parameters of the kernels in `_attend_split.py`, and how their work is divided."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from dsv4_triton.autotune.space import Choices, Key, Space, buffering
from dsv4_triton.device import Family
from dsv4_triton.kernels._attend_plan import HEAD_DIM
from dsv4_triton.kernels._tiling import next_power_of_2

_SCORE_ROWS = 320
_MERGE_HEADS = 16


def _heads(key: Key) -> int:
    return max(16, next_power_of_2(key["heads"]))


def _operands(family: Family) -> int:
    """Elements of 16 bits that both operands of a product may have: they are in L1, twice where the compiler loads one
    while the other is used."""
    return family.l1_bytes // 2 // (2 if family.mixed_kernels else 1)


def _power_of_2_below(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def _tile_of(chunk: int, most: int) -> int:
    """The most rows, a multiple of 16, that divide a chunk."""
    return max(rows for rows in range(16, max(16, min(chunk, most)) + 1, 16) if chunk % rows == 0)


def _tiles_of(chunk: int, least: int) -> list[int]:
    """Rows that divide a chunk and are multiples of 16."""
    return [rows for rows in range(least, min(chunk, 1024) + 1, 16) if chunk % rows == 0]


def _together(key: Key) -> int:
    """Rows that are one run: of the chunk, or of that and the window's rows, which are copied apart from the others."""
    return gcd(key["chunk"], key["first"]) if key["first"] else key["chunk"]


def parts(tiles: int, items: int, cores: int) -> int:
    """In how many parts the `tiles` of an item are divided so that the busiest core has the fewest."""
    return min(range(1, tiles + 1), key=lambda n: -(-items * n // cores) * -(-tiles // n))


def _scores(family: Family, key: Key) -> dict[str, Any]:
    """HEADS of an item, and ROWS of a tile: few enough that every core has something to do."""
    heads = min(128, _heads(key))
    rows = _tile_of(_together(key), min(_SCORE_ROWS, _operands(family) // HEAD_DIM - heads))
    items = key["tokens"] * -(-key["heads"] // heads)
    while rows > 64 and rows % 32 == 0 and items * (key["columns"] // rows) < family.cube_cores:
        rows //= 2
    return {"HEADS": heads, "ROWS": rows, "multibuffer": None, "unit_flag": None}


def _score_candidates(family: Family, key: Key) -> Choices:
    if not family.arch:
        return {}
    heads = min(128, _heads(key))
    return {
        "HEADS": [h for h in (heads, heads // 2) if h >= 16], "ROWS": _tiles_of(_together(key), 32)[-8:],
        **buffering(family), "unit_flag": (None, True),
    }  # fmt: skip


def _scores_fit(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    heads, rows = config["HEADS"], config["ROWS"]
    if _together(key) % rows:
        return f"ROWS {rows} does not divide {_together(key)} rows"
    if not family.arch:
        return ""
    operands, sums = (heads + rows) * HEAD_DIM * key["bytes"], heads * rows * 4
    if operands > family.l1_bytes:
        return f"HEADS {heads}, ROWS {rows}: operands take {operands} bytes, L1 has {family.l1_bytes}"
    return f"HEADS {heads}, ROWS {rows}: L0C has {family.l0c_bytes} bytes" if sums > family.l0c_bytes else ""


SCORES = Space(
    "attend_scores", default=_scores, candidates=_score_candidates, fits=_scores_fit, buckets=("tokens", "columns")
)


def _softmax(family: Family, key: Key) -> dict[str, Any]:
    """HEADS of an item: their scores are in UB with all that is made of them, and every core has something to do."""
    block = min(_heads(key), _power_of_2_below(family.ub_bytes // (16 * key["chunk"])))
    while block > 8 and key["chunks"] * -(-key["heads"] // block) < family.vector_cores:
        block //= 2
    return {"HEADS": block, "multibuffer": None}


def _softmax_candidates(family: Family, key: Key) -> Choices:
    if not family.arch:
        return {}
    return {"HEADS": [h for h in (4, 8, 16, 32, 64) if h <= _heads(key)], **buffering(family)}


def _softmax_fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    scores = config["HEADS"] * key["chunk"] * 4
    fit = not family.arch or 2 * scores <= family.ub_bytes
    return "" if fit else f"HEADS {config['HEADS']}: scores take {2 * scores} bytes, UB has {family.ub_bytes}"


SOFTMAX = Space(
    "attend_softmax", default=_softmax, candidates=_softmax_candidates, fits=_softmax_fits, buckets=("chunks",)
)


def _values(family: Family, key: Key) -> dict[str, Any]:
    """HEADS of an item, ROWS of a product after the first `first` ones, and DV features of a slice: few enough that
    every core has something to do.

    The sums fill the accumulators, or where they leave through vector memory a part of that; there each further
    addition takes the vector cores, too.
    """
    heads = min(128, _heads(key))
    sums = family.l0c_bytes // 4 if family.mixed_kernels else min(family.l0c_bytes // 4, family.ub_bytes // 12)
    width = min(HEAD_DIM, _power_of_2_below(sums // heads))
    rows = _tile_of(key["chunk"] - key["first"], _operands(family) // (heads + width))
    items = key["tokens"] * -(-key["heads"] // heads)
    while width > 64 and items * (HEAD_DIM // width) < family.cube_cores:
        width //= 2
    return {"HEADS": heads, "ROWS": rows, "DV": width, "multibuffer": None, "unit_flag": None}


def _value_candidates(family: Family, key: Key) -> Choices:
    if not family.arch:
        return {}
    heads = min(128, _heads(key))
    return {
        "HEADS": [h for h in (heads, heads // 2) if h >= 16], "ROWS": _tiles_of(key["chunk"] - key["first"], 64)[-8:],
        "DV": (64, 128, 256, 512), **buffering(family), "unit_flag": (None, True),
    }  # fmt: skip


def _values_fit(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    heads, rows, width = config["HEADS"], config["ROWS"], config["DV"]
    rest = key["chunk"] - key["first"]
    if rest % rows or HEAD_DIM % width:
        return f"ROWS {rows} or DV {width} does not divide {rest} or {HEAD_DIM}"
    if not family.arch:
        return ""
    operands = (heads + width) * rows * key["bytes"]
    if operands > family.l1_bytes:
        return f"HEADS {heads}, ROWS {rows}, DV {width}: operands take {operands} bytes, L1 has {family.l1_bytes}"
    return f"HEADS {heads}, DV {width}: L0C has {family.l0c_bytes}" if heads * width * 4 > family.l0c_bytes else ""


VALUES = Space("attend_values", default=_values, candidates=_value_candidates, fits=_values_fit)


def _merge(family: Family, key: Key) -> dict[str, Any]:
    """HEADS of an item."""
    return {"HEADS": min(_MERGE_HEADS, next_power_of_2(key["heads"])), "multibuffer": None}


def _merge_candidates(family: Family, key: Key) -> Choices:
    most = next_power_of_2(key["heads"])
    return {"HEADS": [h for h in (1, 2, 4, 8, 16, 32) if h <= most], **buffering(family)}


def _merge_fits(family: Family, key: Key, config: Mapping[str, Any]) -> str:
    values = 2 * config["HEADS"] * HEAD_DIM * 4
    fit = not family.arch or values <= family.ub_bytes
    return "" if fit else f"HEADS {config['HEADS']}: values take {values} bytes, UB has {family.ub_bytes}"


MERGE = Space("attend_merge", default=_merge, candidates=_merge_candidates, fits=_merge_fits)
