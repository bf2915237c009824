"""fp8 types: upstream MLIR passes do not lower them, so tensors become i8 and casts become calls of host/math.py."""

from __future__ import annotations

import re
import struct

from dsv4_triton.compiler.host.fuse import PARALLEL, generic
from dsv4_triton.compiler.mlir import Block, Builder, Module, Op, Shaped, declare_called

_TYPES = {"f8E4M3FN": "e4m3", "f8E5M2": "e5m2"}
_PRODUCTS = ("linalg.matmul", "linalg.batch_matmul")
_PATTERN = re.compile("|".join(_TYPES))


def rewrite(module: Module) -> None:
    """Replace every fp8 type and cast of the module, in place."""
    for function in module.functions:
        for region in function.regions:
            for block in region:
                _block(block, module)
    declare_called(module)
    if any(_PATTERN.search(t) for op in module.root.walk() for t in [*op.types, *op.result_types]):
        _erase_types(module)


def _element(kind: str) -> str:
    parsed = Shaped.parse(kind)
    return parsed.element if parsed else kind


def _block(block: Block, module: Module) -> None:
    ops: list[Op] = []
    for op in block.ops:
        for region in op.regions if op.name not in _PRODUCTS else []:
            for nested in region:
                _block(nested, module)
        builder = Builder(module, ops)
        is_cast = op.name in ("tt.fp_to_fp", "hfusion.cast", "arith.extf", "arith.truncf")
        if is_cast and (_element(op.types[0]) in _TYPES or _element(op.result_types[0]) in _TYPES):
            _cast(builder, op)
        elif op.name == "hfusion.cast":
            _plain_cast(builder, op)
        elif op.name in _PRODUCTS and any(_element(t) in _TYPES for t in op.types):
            for i in range(2):
                if _element(op.types[i]) in _TYPES:
                    wide = str(Shaped.parse(op.types[i]).of(element="f32"))  # type: ignore[union-attr]
                    widened = Op("tt.fp_to_fp", [op.operands[i]], [op.types[i]], [module.fresh()], [wide])
                    _cast(builder, widened)
                    op.operands[i], op.types[i] = widened.result, wide
            _widen_body(op)
            ops.append(op)
        else:
            ops.append(op)
    block.ops = ops


def _widen_body(op: Op) -> None:
    """The scalar body of a product whose operands were widened to f32."""
    arguments = [(name, _element(kind)) for (name, _), kind in zip(op.body.args, op.types, strict=True)]
    op.body.args = arguments
    replaced: dict[str, str] = {}
    kept = []
    for inner in op.body.ops:
        inner.operands = [replaced.get(v, v) for v in inner.operands]
        if inner.name in ("arith.extf", "tt.fp_to_fp", "arith.truncf") and _element(inner.types[0]) in _TYPES:
            replaced[inner.result] = inner.operands[0]
        else:
            kept.append(inner)
    op.body.ops = kept


def _scalar_cast(builder: Builder, value: str, source: str, target: str) -> str:
    """Convert a scalar between fp8 and any float type, through f32."""
    if source in _TYPES:
        value = builder.op("func.call", [(value, "i8")], "f32", {"callee": f"@dsv4.{_TYPES[source]}.to.f32"})
        source = "f32"
    elif source in ("bf16", "f16"):
        value = builder.op("arith.extf", [(value, source)], "f32")
        source = "f32"
    if target in _TYPES:
        return builder.op("func.call", [(value, "f32")], "i8", {"callee": f"@dsv4.f32.to.{_TYPES[target]}"})
    if target in ("bf16", "f16"):
        return builder.op("arith.truncf", [(value, "f32")], target)
    return value


def _cast(builder: Builder, op: Op) -> None:
    source, target = _element(op.types[0]), _element(op.result_types[0])
    module = builder.module
    kind = Shaped.parse(op.types[0])
    if kind is None:
        value = _scalar_cast(builder, op.operands[0], source, target)
        builder.op(
            "arith.bitcast", [(value, "i8" if target in _TYPES else target)], "i8" if target in _TYPES else target
        )
        builder.ops[-1].results = op.results
        return
    x, old = module.fresh(), module.fresh()
    inner = Builder(module)
    value = _scalar_cast(inner, x, source, target)
    inner.op("linalg.yield", [(value, "i8" if target in _TYPES else target)])
    rank = tuple(range(len(kind.shape)))
    empty = builder.op("tensor.empty", [], op.result_types[0])
    block = Block([(x, source), (old, target)], inner.ops)
    builder.ops.append(
        generic(
            [(op.operands[0], op.types[0])], [(empty, op.result_types[0])], [rank, rank], [PARALLEL] * len(rank), block,
            op.results,
        )
    )  # fmt: skip


def _plain_cast(builder: Builder, op: Op) -> None:
    """`hfusion.cast` between ordinary types, with its rounding mode."""
    source, target = _element(op.types[0]), _element(op.result_types[0])
    module = builder.module
    kind = Shaped.parse(op.types[0])
    assert kind is not None
    mode = re.search(r"round_mode<(\w+)>", op.props.get("round_mode") or op.props.get("mode") or "")
    unsigned = "unsigned" in (op.props.get("cast") or "")
    x, old = module.fresh(), module.fresh()
    inner = Builder(module)
    value = x
    floats = (source[0] in "fb", target[0] in "fb")
    bits = [int(re.sub(r"\D", "", t)) for t in (source, target)]
    if floats == (True, True):
        if bits[0] != bits[1]:
            value = inner.op("arith.extf" if bits[1] > bits[0] else "arith.truncf", [(value, source)], target)
        elif source != target:
            value = inner.op("arith.truncf", [(inner.op("arith.extf", [(value, source)], "f32"), "f32")], target)
    elif floats == (True, False):
        rounding = {"rint": "math.roundeven", "round": "math.round", "floor": "math.floor", "ceil": "math.ceil"}
        if mode and mode[1] in rounding:
            value = inner.op(rounding[mode[1]], [(value, source)], source)
        value = inner.op("arith.fptoui" if unsigned else "arith.fptosi", [(value, source)], target)
    elif floats == (False, True):
        value = inner.op("arith.uitofp" if unsigned or source == "i1" else "arith.sitofp", [(value, source)], target)
    elif bits[0] != bits[1]:
        widen = "arith.extui" if unsigned or source == "i1" else "arith.extsi"
        value = inner.op(widen if bits[1] > bits[0] else "arith.trunci", [(value, source)], target)
    inner.op("linalg.yield", [(value, target)])
    rank = tuple(range(len(kind.shape)))
    empty = builder.op("tensor.empty", [], op.result_types[0])
    block = Block([(x, source), (old, target)], inner.ops)
    builder.ops.append(
        generic(
            [(op.operands[0], op.types[0])], [(empty, op.result_types[0])], [rank, rank], [PARALLEL] * len(rank), block,
            op.results,
        )
    )  # fmt: skip


def _erase_types(module: Module) -> None:
    for op in module.root.walk():
        if op.name == "arith.constant":
            _constant(op)
        op.types = [_PATTERN.sub("i8", t) for t in op.types]
        op.result_types = [_PATTERN.sub("i8", t) for t in op.result_types]
        if op.name == "func.func":
            op.props["function_type"] = _PATTERN.sub("i8", op.props["function_type"] or "")
        for region in op.regions:
            for block in region:
                block.args = [(name, _PATTERN.sub("i8", kind)) for name, kind in block.args]


def _constant(op: Op) -> None:
    match = _PATTERN.search(op.result_types[0])
    if match is None:
        return
    text = op.props["value"] or ""
    bits = re.match(r"(?:dense<)?(0x[0-9A-Fa-f]+|-?[\d.e+-]+)>? : (.*)", text)
    if bits is None:
        raise ValueError(f"unexpected fp8 constant {text}")
    code = int(bits[1], 16) if bits[1].startswith("0x") else encode(float(bits[1]), _TYPES[match[0]])
    code = code - 256 if code > 127 else code
    value = f"dense<{code}>" if text.startswith("dense") else str(code)
    op.props["value"] = f"{value} : {_PATTERN.sub('i8', bits[2])}"


def encode(value: float, name: str) -> int:
    """The fp8 code of a number that the format can represent exactly."""
    mantissa, bias = (3, 7) if name == "e4m3" else (2, 15)
    if value == 0:
        return 0x80 if struct.pack("<d", value)[7] else 0
    sign = 0x80 if value < 0 else 0
    codes = range(0x7F if name == "e4m3" else 0x7C)

    def decode(code: int) -> float:
        exponent, fraction = code >> mantissa, code & ((1 << mantissa) - 1)
        if exponent == 0:
            return fraction * 2.0 ** (1 - bias - mantissa)
        return (1 + fraction / 2**mantissa) * 2.0 ** (exponent - bias)

    return sign | min(codes, key=lambda code: abs(decode(code) - abs(value)))
