"""Runtime functions as LLVM IR: transcendental functions that LLVM can inline and vectorise, and fp8 casts.

exp, exp2, log, log2 and tanh are branch-free polynomials, so a loop over them becomes vector code. Their error is at
most 2 ulp in fp32 over the whole range, with NaN, infinities and denormals as in C. The polynomials of exp and log
are those of Cephes (S. Moshier, expf.c and logf.c); range reduction uses fused multiply-add. Other functions call the
C library.
"""

from __future__ import annotations

import re
import struct

_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_EXP = [1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1]
_LOG = [
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
    2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
]  # fmt: skip


def _f32(value: float) -> str:
    """A float constant in LLVM's notation (the bits of the double it equals)."""
    rounded = struct.unpack("<f", struct.pack("<f", value))[0]
    return f"0x{struct.unpack('<Q', struct.pack('<d', rounded))[0]:016X}"


class _Function:
    """Text of one scalar function of %x."""

    def __init__(self, name: str, result: str, argument: str):
        self.lines = [f"define internal {result} @{name}({argument} %x) alwaysinline nounwind {{"]
        self.count = 0

    def __call__(self, text: str) -> str:
        self.count += 1
        self.lines.append(f"  %v{self.count} = {text}")
        return f"%v{self.count}"

    def op(self, name: str, a: str, b: str | int) -> str:
        """A binary operation or comparison, named with its type: `op("fmul float", a, b)`."""
        return self(f"{name} {a}, {b}")

    def cast(self, name: str, value: str, source: str, target: str) -> str:
        return self(f"{name} {source} {value} to {target}")

    def select(self, condition: str, a: str, b: str, kind: str = "float") -> str:
        return self(f"select i1 {condition}, {kind} {a}, {kind} {b}")

    def fma(self, a: str, b: str, c: str) -> str:
        return self(f"call float @llvm.fma.f32(float {a}, float {b}, float {c})")

    def polynomial(self, x: str, coefficients: list[float]) -> str:
        value = _f32(coefficients[0])
        for c in coefficients[1:]:
            value = self.fma(value, x, _f32(c))
        return value

    def end(self, kind: str, value: str) -> str:
        return "\n".join([*self.lines, f"  ret {kind} {value}", "}", ""])


_MAGIC = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer, which then sits in the low bits
_INF, _NAN = _f32(float("inf")), _f32(float("nan"))


def _bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _exp_tail(f: _Function, r: str, rounded: str) -> str:
    """exp(r) * 2^n for |r| <= ln2/2, where `rounded` is n + the magic number."""
    square = f.op("fmul float", r, r)
    p = f.fma(f.polynomial(r, _EXP), square, r)
    y = f.op("fadd float", p, _f32(1.0))
    n = f.op("sub i32", f.cast("bitcast", rounded, "float", "i32"), _bits(_MAGIC))
    # Two factors, so that results below 2^-126 come out as denormals and those above 2^127 as they should.
    half = f.op("ashr i32", n, 1)
    for part in (half, f.op("sub i32", n, half)):
        bits = f.op("shl i32", f.op("add i32", part, 127), 23)
        y = f.op("fmul float", y, f.cast("bitcast", bits, "i32", "float"))
    return y


def _clamped(f: _Function, low: float, high: float) -> str:
    x = f.select(f.op("fcmp ogt float", "%x", _f32(high)), _f32(high), "%x")
    return f.select(f.op("fcmp olt float", x, _f32(low)), _f32(low), x)


def _exp() -> str:
    f = _Function("dsv4.exp.f32", "float", "float")
    x = _clamped(f, -104.0, 89.0)
    rounded = f.fma(x, _f32(1.4426950408889634), _f32(_MAGIC))
    n = f.op("fsub float", rounded, _f32(_MAGIC))
    r = f.fma(n, _f32(-_LN2_HIGH), x)
    r = f.fma(n, _f32(-_LN2_LOW), r)
    return f.end("float", _exp_tail(f, r, rounded))


def _exp2() -> str:
    f = _Function("dsv4.exp2.f32", "float", "float")
    x = _clamped(f, -151.0, 129.0)
    rounded = f.op("fadd float", x, _f32(_MAGIC))
    fraction = f.op("fsub float", x, f.op("fsub float", rounded, _f32(_MAGIC)))
    return f.end("float", _exp_tail(f, f.op("fmul float", fraction, _f32(0.6931471805599453)), rounded))


def _log(name: str) -> str:
    f = _Function(f"dsv4.{name}.f32", "float", "float")
    tiny = f.op("fcmp olt float", "%x", _f32(2.0**-126))
    x = f.select(tiny, f.op("fmul float", "%x", _f32(2.0**23)), "%x")
    bits = f.cast("bitcast", x, "float", "i32")
    # Exponent and mantissa so that the mantissa lies in [sqrt(1/2), sqrt(2)).
    exponent = f.op("ashr i32", f.op("sub i32", bits, _bits(0.7071067811865476)), 23)
    mantissa = f.cast("bitcast", f.op("sub i32", bits, f.op("shl i32", exponent, 23)), "i32", "float")
    exponent = f.op("add i32", exponent, f.select(tiny, "-23", "0", "i32"))
    e = f.cast("sitofp", exponent, "i32", "float")
    m = f.op("fsub float", mantissa, _f32(1.0))
    square = f.op("fmul float", m, m)
    y = f.op("fmul float", f.op("fmul float", m, square), f.polynomial(m, _LOG))
    if name == "log":
        y = f.fma(e, _f32(_LN2_LOW), y)
        y = f.fma(square, _f32(-0.5), y)
        y = f.fma(e, _f32(_LN2_HIGH), f.op("fadd float", m, y))
    else:
        extra = _f32(0.44269504088896340736)  # log2(e) - 1
        y = f.fma(square, _f32(-0.5), y)
        z = f.fma(m, extra, f.op("fmul float", y, extra))
        y = f.op("fadd float", f.op("fadd float", f.op("fadd float", z, y), m), e)
    y = f.select(f.op("fcmp oeq float", "%x", _INF), "%x", y)
    y = f.select(f.op("fcmp oeq float", "%x", _f32(0.0)), _f32(float("-inf")), y)
    return f.end("float", f.select(f.op("fcmp ult float", "%x", _f32(0.0)), _NAN, y))


def _tanh() -> str:
    """(1 - u) / (1 + u) with u = exp(-2|x|); an odd polynomial (Cephes tanhf.c) below 0.625, where that cancels."""
    f = _Function("dsv4.tanh.f32", "float", "float")
    a = f("call float @llvm.fabs.f32(float %x)")
    u = f(f"call float @dsv4.exp.f32(float {f.op('fmul float', a, _f32(-2.0))})")
    large = f.op("fdiv float", f.op("fsub float", _f32(1.0), u), f.op("fadd float", _f32(1.0), u))
    large = f(f"call float @llvm.copysign.f32(float {large}, float %x)")
    s = f.op("fmul float", "%x", "%x")
    coefficients = [-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1]
    small = f.fma(f.op("fmul float", f.polynomial(s, coefficients), s), "%x", "%x")
    return f.end("float", f.select(f.op("fcmp olt float", a, _f32(0.625)), small, large))


def _fp8_to_f32(name: str, mantissa: int, bias: int) -> str:
    """The code's exponent and fraction moved into an fp32 word and scaled: exact, subnormals included."""
    f = _Function(f"dsv4.{name}.to.f32", "float", "i8")
    wide = f("zext i8 %x to i32")
    magnitude = f.op("and i32", wide, 127)
    scaled = f.cast("bitcast", f.op("shl i32", magnitude, 23 - mantissa), "i32", "float")
    value = f.op("fmul float", scaled, _f32(2.0 ** (127 - bias)))
    if name == "e4m3":
        value = f.select(f.op("icmp eq i32", magnitude, 127), _NAN, value)
    else:
        special = f.select(f.op("icmp eq i32", magnitude, 124), _INF, _NAN)
        value = f.select(f.op("icmp uge i32", magnitude, 124), special, value)
    sign = f.op("shl i32", f.op("and i32", wide, 128), 24)
    word = f.op("or i32", f.cast("bitcast", value, "float", "i32"), sign)
    return f.end("float", f.cast("bitcast", word, "i32", "float"))


def _f32_to_fp8(name: str, mantissa: int, bias: int) -> str:
    """Round to nearest even, saturate to the largest finite code (infinities too), keep NaN."""
    f = _Function(f"dsv4.f32.to.{name}", "i8", "float")
    largest = _f32(448.0 if name == "e4m3" else 57344.0)
    a = f("call float @llvm.fabs.f32(float %x)")
    a = f.select(f.op("fcmp ogt float", a, largest), largest, a)
    bits = f.cast("bitcast", a, "float", "i32")
    shift = 23 - mantissa
    odd = f.op("and i32", f.op("lshr i32", bits, shift), 1)
    rounded = f.op("add i32", f.op("add i32", bits, (1 << (shift - 1)) - 1), odd)
    normal = f.op("sub i32", f.op("lshr i32", rounded, shift), (127 - bias) << mantissa)
    # Below the smallest normal number the format has a fixed step: adding 2^23 steps rounds to it.
    anchor = 2.0 ** (1 - bias - mantissa) * 2.0**23
    step = f.cast("bitcast", f.op("fadd float", a, _f32(anchor)), "float", "i32")
    subnormal = f.op("sub i32", step, _bits(anchor))
    small = f.op("fcmp olt float", a, _f32(2.0 ** (1 - bias)))
    code = f.select(small, subnormal, normal, "i32")
    code = f.select(f.op("fcmp uno float", "%x", "%x"), "127", code, "i32")
    sign = f.op("and i32", f.op("lshr i32", f("bitcast float %x to i32"), 24), 128)
    return f.end("i8", f.cast("trunc", f.op("or i32", code, sign), "i32", "i8"))


def _half(name: str) -> str:
    f = _Function(f"dsv4.{name}.f16", "half", "half")
    wide = f("fpext half %x to float")
    value = f(f"call float @dsv4.{name}.f32(float {wide})")
    return f.end("half", f(f"fptrunc float {value} to half"))


def _definitions() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name -> (text, names it needs)."""
    table: dict[str, tuple[str, tuple[str, ...]]] = {
        "dsv4.exp.f32": (_exp(), ()),
        "dsv4.exp2.f32": (_exp2(), ()),
        "dsv4.log.f32": (_log("log"), ()),
        "dsv4.log2.f32": (_log("log2"), ()),
        "dsv4.tanh.f32": (_tanh(), ("dsv4.exp.f32",)),
    }
    for name in ("exp", "exp2", "log", "log2", "tanh"):
        table[f"dsv4.{name}.f16"] = _half(name), (f"dsv4.{name}.f32",)
    for name, mantissa, bias in (("e4m3", 3, 7), ("e5m2", 2, 15)):
        table[f"dsv4.{name}.to.f32"] = _fp8_to_f32(name, mantissa, bias), ()
        table[f"dsv4.f32.to.{name}"] = _f32_to_fp8(name, mantissa, bias), ()
    return table


# What MLIR's and the adapter's names stand for: a function above, or one of the C library.
_ALIASES = {
    **{f"llvm.{name}.{kind}": f"dsv4.{name}.{kind}" for name in ("exp", "exp2", "log", "log2") for kind in ("f32",
    "f16")}, "tanhf": "dsv4.tanh.f32", "__hmf_tanhf": "dsv4.tanh.f32",
    "__hmf_log1pf": "log1pf", "__hmf_tanf": "tanf", "__hmf_atanf": "atanf", "__hmf_powf": "powf", "__hmf_roundf":
    "roundf",
}  # fmt: skip
# Extrema in reductions: `maxnum` only ever sees numbers there (host/tensor.py), and only so does LLVM vectorise it.
_EXTREMA = {
    f"dsv4.{name}.{suffix}": (
        f"{flags}{kind} @llvm.{name}.{suffix}",
        f"declare {kind} @llvm.{name}.{suffix}({kind}, {kind})",
    )
    for name, flags in (("maxnum", "nnan nsz "), ("minnum", "nnan nsz "), ("maximum", ""), ("minimum", ""))
    for suffix, kind in (("f32", "float"), ("f16", "half"))
}
_INTRINSICS = """
declare float @llvm.fma.f32(float, float, float)
declare float @llvm.fabs.f32(float)
declare float @llvm.copysign.f32(float, float)
"""


def link(text: str) -> str:
    """Resolve this package's runtime functions in a module's text."""
    used = set(re.findall(r'^declare [^@\n]*@"?([\w.]+)"?\(', text, re.MULTILINE))
    for name, target in _ALIASES.items():
        if name in used:
            text = re.sub(rf"@{re.escape(name)}\(", f"@{target}(", text)
    for name, (call, declaration) in _EXTREMA.items():
        if name in used:
            text = re.sub(rf"call \w+ @{re.escape(name)}\(", f"call {call}(", text)
            text += declaration + "\n"
    definitions = _definitions()
    needed: list[str] = []

    def need(name: str) -> None:
        if name not in needed:
            for other in definitions[name][1]:
                need(other)
            needed.append(name)

    for name in definitions:
        if f"@{name}(" in text:
            need(name)
    text = re.sub(r"^declare [^@\n]*@dsv4\.[\w.]+\(.*\).*\n", "", text, flags=re.MULTILINE)
    if needed:
        for line in _INTRINSICS.strip().splitlines():
            if line not in text:
                text += line + "\n"
        text += "\n".join(definitions[name][0] for name in needed)
    return text
