"""How each number of a HIVM function follows from others: the rules that counting evaluates."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dsv4_triton.compiler.cost.memref import Facet, element_address, mixed
from dsv4_triton.compiler.hivm import CostError, Function, affine_results
from dsv4_triton.compiler.mlir import Op

_BINARY = {
    "addi": "({0} + {1})", "subi": "({0} - {1})", "muli": "({0} * {1})", "andi": "({0} & {1})", "ori": "({0} | {1})",
    "xori": "({0} ^ {1})", "shli": "({0} << {1})", "shrsi": "({0} >> {1})", "shrui": "({0} >> {1})",
    "maxsi": "larger({0}, {1})", "minsi": "smaller({0}, {1})", "maxui": "larger({0}, {1})",
    "minui": "smaller({0}, {1})", "divsi": "quotient({0}, {1})", "divui": "quotient({0}, {1})",
    "remsi": "remainder({0}, {1})", "remui": "remainder({0}, {1})", "floordivsi": "({0} // {1})",
    "ceildivsi": "(-(-{0} // {1}))", "ceildivui": "(-(-{0} // {1}))", "addf": "({0} + {1})", "subf": "({0} - {1})",
    "mulf": "({0} * {1})", "divf": "divided({0}, {1})", "maximumf": "larger({0}, {1})", "maxnumf": "larger({0}, {1})",
    "minimumf": "smaller({0}, {1})", "minnumf": "smaller({0}, {1})",
}  # fmt: skip
_CASTS = {"index_cast", "index_castui", "extsi", "extui", "trunci", "extf", "truncf"}
_CMPI = ["==", "!=", "<", "<=", ">", ">=", "<", "<=", ">", ">="]
_CMPF = {
    1: "==", 2: ">", 3: ">=", 4: "<", 5: "<=", 6: "!=", 8: "==", 9: ">", 10: ">=", 11: "<", 12: "<=", 13: "!=",
}  # fmt: skip

UNKNOWN = "UNKNOWN"


@dataclass(frozen=True)
class Rule:
    """`template` with `{0}` ... for the facets `needs`. `merge` names a value that control flow assigns (a function's
    argument, an induction variable, a loop-carried value, a branch's result); `opaque` one that is not evaluated.
    """

    needs: tuple[Facet, ...] = ()
    template: str = "{0}"
    merge: str = ""
    opaque: bool = False

    @property
    def alias(self) -> bool:
        return self.template == "{0}" and not self.merge


class Rules:
    """The rules of one function."""

    def __init__(self, function: Function):
        self.function = function
        self._rules: dict[Facet, Rule] = {}

    def literal(self, facet: Facet) -> int | None:
        """The facet where the type alone says it."""
        value, kind = facet
        if kind[0] not in "sd":
            return None
        memref = self.function.memref(value)
        assert memref is not None
        return (memref.shape if kind[0] == "s" else memref.strides)[int(kind[1:])]

    def rule(self, facet: Facet) -> Rule:
        if facet not in self._rules:
            self._rules[facet] = self._make(facet)
        return self._rules[facet]

    def _make(self, facet: Facet) -> Rule:
        value, kind = facet
        known = self.literal(facet)
        if known is not None:
            return Rule(template=str(known))
        if value in self.function.block_args:
            return self._block_arg(facet)
        op, position = self.function.defined[value]
        control = self._control(op, position, kind)
        if control:
            return control
        if op.name == "arith.select":
            return Rule(((op.operands[0], "v"), (op.operands[1], kind), (op.operands[2], kind)), "pick({0}, {1}, {2})")
        return self._scalar(op, position) if kind == "v" else self._memref(op, position, kind)

    def _block_arg(self, facet: Facet) -> Rule:
        value, kind = facet
        op, region, position = self.function.block_args[value]
        if op is self.function.op:
            if kind in ("a", "b") and not self.function.vector:
                return Rule(template="0")
            return Rule(merge="argument")
        if op.name == "scf.for":
            if position == 0:
                return Rule(merge="induction")
            return Rule(
                ((op.operands[2 + position], kind), (op.body.terminator.operands[position - 1], kind)), merge="carried"
            )
        if op.name == "scf.while":
            if region == 1:
                return Rule(((op.body.terminator.operands[1 + position], kind),))
            after = op.regions[1][0].terminator
            return Rule(((op.operands[position], kind), (after.operands[position], kind)), merge="carried")
        raise CostError(f"unknown region of {op.name}")

    def _control(self, op: Op, position: int, kind: str) -> Rule | None:
        if op.name == "scf.for":
            return Rule(((op.body.args[1 + position][0], kind),))
        if op.name == "scf.while":
            return Rule(((op.body.terminator.operands[1 + position], kind),))
        if op.name == "scf.if":
            branches = tuple((region[0].terminator.operands[position], kind) for region in op.regions)
            return Rule(branches, merge="branch")
        return None

    def _scalar(self, op: Op, position: int) -> Rule:
        dialect, _, name = op.name.partition(".")
        operands: tuple[Facet, ...] = tuple((v, "v") for v in op.operands)
        if op.name == "arith.constant":
            return _constant(op.props["value"] or "")
        if dialect == "arith":
            if name in _BINARY:
                return Rule(operands, _BINARY[name])
            if name in _CASTS:
                source, target = op.types[0], op.result_types[0]
                if target == "i1":
                    return Rule(operands, "({0} & 1)")
                return Rule(operands, "(-{0})" if name == "extsi" and source == "i1" else "{0}")
            if name in ("sitofp", "uitofp"):
                return Rule(operands, "real({0})")
            if name in ("fptosi", "fptoui"):
                return Rule(operands, "whole({0})")
            if name in ("cmpi", "cmpf"):
                number = int((op.props["predicate"] or "0").split()[0])
                sign = _CMPI[number] if name == "cmpi" else _CMPF.get(number)
                return Rule(operands, f"({{0}} {sign} {{1}})") if sign else Rule(template=UNKNOWN, opaque=True)
        if dialect == "affine" and name in ("apply", "min", "max"):
            _, results = affine_results(op.props["map"] or "")
            if len(results) == 1:
                return Rule(operands, results[0])
            return Rule(operands, f"{'smaller' if name == 'min' else 'larger'}({', '.join(results)})")
        if op.name == "hivm.hir.get_block_idx":
            return Rule(template="block")
        if op.name == "hivm.hir.get_sub_block_idx":
            return Rule(template="sub_block")
        if op.name == "memref.load":
            address = element_address(self.function, op.operands[0], op.operands[1:])
            return Rule(tuple(address), merge="load")
        if op.name == "memref.extract_strided_metadata":
            rank = (len(op.results) - 2) // 2
            part = ["", "a", *(f"s{i}" for i in range(rank)), *(f"d{i}" for i in range(rank))][position]
            return Rule(((op.operands[0], part),))
        return Rule(template=UNKNOWN, opaque=True)

    def _memref(self, op: Op, position: int, kind: str) -> Rule:
        source = op.operands[0] if op.operands else ""
        axis = int(kind[1:] or 0)
        if op.name == "hivm.hir.pointer_cast":
            if kind == "s0" or kind[0] == "s":
                memref = self.function.memref(op.results[0])
                assert memref is not None
                dynamic = [i for i, extent in enumerate(memref.shape) if extent is None]
                return Rule(((op.operands[1 + dynamic.index(axis)], "v"),))
            return Rule(((source, "v"),)) if kind == "b" else Rule(template="0")
        if op.name in ("memref.alloca", "memref.alloc"):
            return Rule(template="0")
        if op.name == "memref.cast":
            return Rule(((source, kind),))
        if op.name == "memref.view":
            return Rule(((source, "b"), (op.operands[1], "v")), "({0} + {1})") if kind == "b" else Rule(template="0")
        if kind == "b":
            return Rule(((source, "b"),))
        if op.name == "memref.extract_strided_metadata":
            return Rule(template="0")
        if op.name == "memref.reinterpret_cast":
            offsets, sizes, strides = (mixed(op, n) for n in ("offsets", "sizes", "strides"))
            return _entry(offsets[0] if kind == "a" else (sizes if kind[0] == "s" else strides)[axis])
        if op.name == "memref.subview":
            return self._subview(op, kind, axis)
        if op.name in ("memref.collapse_shape", "memref.expand_shape"):
            return self._reshape(op, kind, axis)
        return Rule(template=UNKNOWN, opaque=True)

    def _subview(self, op: Op, kind: str, axis: int) -> Rule:
        source = op.operands[0]
        offsets, sizes, strides = (mixed(op, n) for n in ("offsets", "sizes", "strides"))
        if kind == "a":
            needs: list[Facet] = [(source, "a")]
            terms = ["{0}"]
            for i, offset in enumerate(offsets):
                if offset != 0:
                    needs += [(source, f"d{i}")]
                    text = f"{{{len(needs) - 1}}}"
                    if isinstance(offset, str):
                        needs.append((offset, "v"))
                        offset = f"{{{len(needs) - 1}}}"
                    terms.append(f"{offset} * {text}")
            return Rule(tuple(needs), terms[0] if len(terms) == 1 else f"({' + '.join(terms)})")
        axis = self.kept_axes(op)[axis]
        if kind[0] == "s":
            return _entry(sizes[axis])
        step = strides[axis]
        if step == 1:
            return Rule(((source, f"d{axis}"),))
        if isinstance(step, str):
            return Rule(((source, f"d{axis}"), (step, "v")), "({0} * {1})")
        return Rule(((source, f"d{axis}"),), f"({{0}} * {step})")

    def kept_axes(self, op: Op) -> list[int]:
        """The source's axes that a subview keeps; axes of one may be dropped."""
        sizes = mixed(op, "sizes")
        result = self.function.memref(op.results[0])
        assert result is not None
        kept: list[int] = []
        drop = len(sizes) - len(result.shape)
        for axis, size in enumerate(sizes):
            wanted = result.shape[len(kept)] if len(kept) < len(result.shape) else 0
            matches = wanted == (None if isinstance(size, str) else size)
            if drop and size == 1 and not matches:
                drop -= 1
            elif len(kept) < len(result.shape):
                kept.append(axis)
        return kept

    def _reshape(self, op: Op, kind: str, axis: int) -> Rule:
        source = op.operands[0]
        if kind == "a":
            return Rule(((source, "a"),))
        groups = [[int(n) for n in re.findall(r"\d+", g)] for g in re.findall(r"\[([\d, ]*)\]", _groups(op))]
        if op.name == "memref.collapse_shape":
            group = groups[axis]
            if kind[0] == "d":
                memref = self.function.memref(source)
                assert memref is not None
                inner = [i for i in group if memref.shape[i] != 1] or group
                return Rule(((source, f"d{inner[-1]}"),))
            needs = tuple((source, f"s{i}") for i in group)
            return Rule(needs, "(" + " * ".join(f"{{{i}}}" for i in range(len(needs))) + ")")
        if kind[0] == "s":
            return _entry(mixed(op, "output_shape", 1)[axis])
        number = next(i for i, group in enumerate(groups) if axis in group)
        inner = [i for i in groups[number] if i > axis]
        needs = ((source, f"d{number}"), *((op.results[0], f"s{i}") for i in inner))
        return Rule(needs, "(" + " * ".join(f"{{{i}}}" for i in range(len(needs))) + ")")


def _groups(op: Op) -> str:
    return (op.props.get("reassociation") or "")[1:-1]


def _entry(entry: int | str) -> Rule:
    return Rule(((entry, "v"),)) if isinstance(entry, str) else Rule(template=str(entry))


def _constant(text: str) -> Rule:
    value = text.partition(" :")[0]
    if value in ("true", "false"):
        return Rule(template="1" if value == "true" else "0")
    if re.fullmatch(r"-?\d+", value):
        return Rule(template=value if value[0] != "-" else f"({value})")
    try:
        return Rule(template=f"real({float(value)!r})")
    except ValueError:
        return Rule(template=UNKNOWN, opaque=True)
