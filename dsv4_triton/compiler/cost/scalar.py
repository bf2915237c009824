"""Scalars while a kernel is counted: numbers, or `UNKNOWN`.

An unknown value is one that is not evaluated: it comes from a floating-point tensor, from a tensor that nobody wrote,
or from an operation without a rule.
"""

from __future__ import annotations

from typing import Any

from dsv4_triton.compiler.hivm import CostError


class _Unknown:
    """Absorbs arithmetic; its truth is an error, so that no decision on it goes unnoticed."""

    def _same(self, *_: Any) -> _Unknown:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __rfloordiv__ = _same
    __mod__ = __rmod__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __neg__ = _same
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __lt__ = __le__ = __gt__ = __ge__ = _same
    __eq__ = __ne__ = _same  # type: ignore[assignment]
    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise CostError("a decision on an unknown value")

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _Unknown()


def _larger(*values: Any) -> Any:
    try:
        return max(values)
    except CostError:
        return UNKNOWN


def _smaller(*values: Any) -> Any:
    try:
        return min(values)
    except CostError:
        return UNKNOWN


def _quotient(a: Any, b: Any) -> Any:
    """Division that rounds towards zero."""
    if a is UNKNOWN or b is UNKNOWN or b == 0:
        return UNKNOWN
    return a // b if (a >= 0) == (b > 0) else -(-a // b)


def _remainder(a: Any, b: Any) -> Any:
    if a is UNKNOWN or b is UNKNOWN or b == 0:
        return UNKNOWN
    return a % b if a >= 0 and b > 0 else a - b * _quotient(a, b)


def _divided(a: Any, b: Any) -> Any:
    return UNKNOWN if a is UNKNOWN or b is UNKNOWN or b == 0 else a / b


def _pick(condition: Any, a: Any, b: Any) -> Any:
    if condition is UNKNOWN:
        return a if a is b else UNKNOWN
    return a if condition else b


def _real(value: Any) -> Any:
    return value if value is UNKNOWN else float(value)


def _whole(value: Any) -> Any:
    return value if value is UNKNOWN else int(value)


SCALARS: dict[str, Any] = {
    "UNKNOWN": UNKNOWN, "larger": _larger, "smaller": _smaller, "quotient": _quotient, "remainder": _remainder,
    "pick": _pick, "divided": _divided, "real": _real, "whole": _whole, "inf": float("inf"), "nan": float("nan"),
}  # fmt: skip
"""What the expressions of `cost.rules` call."""
