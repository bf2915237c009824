"""Matrix products as LLVM IR: `C[M,N] += A[M,K] @ B[K,N]` for the static shapes of one `tl.dot`.

Operands are widened exactly to fp32 (int8 too: its sums stay below 2^24 for K <= 1024, where fp32 is exact) and
multiplied by a register-blocked kernel with fused multiply-add. Wide products pack B into panels of columns; products
with few rows (decode) read B as it lies in memory, whether stored [K,N] or transposed [N,K]. Any extents work; those
that are not multiples of the vector length get narrower blocks for the rest.

The name of a function holds its parameters, so that the IR can be made from the name alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

_LLVM = {"f32": "float", "bf16": "i16", "f16": "half", "i8": "i8", "i32": "i32"}
_FEW_ROWS = 8
_INT8_EXACT_K = 1024


@dataclass(frozen=True)
class Gemm:
    """One product: element types of A, B and C, extents, and whether B is stored [N,K]."""

    a: str
    b: str
    c: str
    m: int
    n: int
    k: int
    transposed: bool

    @property
    def name(self) -> str:
        layout = "t" if self.transposed else "n"
        return f"dsv4.gemm.{self.a}.{self.b}.{self.c}.{self.m}.{self.n}.{self.k}.{layout}"

    @classmethod
    def of(cls, name: str) -> Gemm | None:
        match = re.fullmatch(r"dsv4\.gemm\.(\w+)\.(\w+)\.(\w+)\.(\d+)\.(\d+)\.(\d+)\.([nt])", name)
        if match is None:
            return None
        return cls(match[1], match[2], match[3], int(match[4]), int(match[5]), int(match[6]), match[7] == "t")

    @property
    def supported(self) -> bool:
        """Whether this module covers the product; others are plain loops."""
        inputs = self.a in ("f32", "bf16", "f16") and self.b in ("f32", "bf16", "f16") and self.c == "f32"
        int8 = self.a == self.b == "i8" and self.c == "i32" and self.k <= _INT8_EXACT_K
        return inputs or int8

    @property
    def packs(self) -> bool:
        """Whether B is rewritten as fp32 panels first."""
        if self.m <= _FEW_ROWS:
            return False
        return self.transposed or self.b != "f32" or self.k * self.n * 4 > 24 * 1024

    @property
    def scratch(self) -> tuple[int, int]:
        """fp32 elements of scratch for A and for B (at least 1 each)."""
        return (1 if self.a == "f32" else self.m * self.k), (self.k * self.n if self.packs else 1)


def _power(x: int, limit: int) -> int:
    """The largest power of two that divides `x`, at most `limit`."""
    return min(x & -x, limit)


def _segments(extent: int, block: int) -> list[tuple[int, int, int]]:
    """`extent` as (start, end, block) runs: blocks of `block`, then ever smaller powers of two."""
    result, start = [], 0
    while start < extent:
        while block > extent - start:
            block = 1 << ((extent - start).bit_length() - 1)
        end = start + (extent - start) // block * block
        result.append((start, end, block))
        start = end
    return result


class _Writer:
    """LLVM IR text with structured loops."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0
        self.block = "entry"

    def value(self, text: str) -> str:
        self.count += 1
        self.lines.append(f"  %t{self.count} = {text}")
        return f"%t{self.count}"

    def do(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def loop(
        self, extent: int, step: int, body: Callable[[str, list[str]], Sequence[str]],
        carried: Sequence[str] = (), kind: str = "", start: int = 0,
    ) -> list[str]:  # fmt: skip
        """A loop over start, start + step, ... below `extent` with carried values of one type; returns the last
        ones.
        """
        if extent <= start + step:
            return list(body(str(start), list(carried)))
        self.count += 1
        n = self.count
        before = self.block
        self.do(f"br label %l{n}")
        self.lines.append(f"l{n}:")
        self.block = f"l{n}"
        place = len(self.lines)
        names = [f"%c{n}.{i}" for i in range(len(carried))]
        results = list(body(f"%i{n}", names))
        self.do(f"%n{n} = add nuw nsw i64 %i{n}, {step}")
        self.do(f"%m{n} = icmp ult i64 %n{n}, {extent}")
        self.do(f"br i1 %m{n}, label %l{n}, label %x{n}")
        heads = [f"  %i{n} = phi i64 [ {start}, %{before} ], [ %n{n}, %{self.block} ]"]
        for name, first, result in zip(names, carried, results, strict=True):
            heads.append(f"  {name} = phi {kind} [ {first}, %{before} ], [ {result}, %{self.block} ]")
        self.lines[place:place] = heads
        self.lines.append(f"x{n}:")
        self.block = f"x{n}"
        return results

    def address(self, base: str, element: str, *terms: str | tuple[str, str | int]) -> str:
        """Pointer to `base[sum of terms]`; a term is an index or an (index, stride) pair."""
        for term in terms:
            if isinstance(term, tuple):
                if term[0] == "0":
                    continue
                term = self.value(f"mul nsw i64 {term[0]}, {term[1]}")
            if term != "0":
                base = self.value(f"getelementptr {element}, ptr {base}, i64 {term}")
        return base

    def widened(self, pointer: str, element: str, width: int) -> str:
        """`width` consecutive elements at `pointer` as a vector of floats."""
        raw = self.value(
            f"load <{width} x {_LLVM[element]}>, ptr {pointer}, align {2 if element in ('bf16', 'f16') else 1}"
        )
        if element == "f32":
            self.lines[-1] = self.lines[-1].replace("align 1", "align 4")
            return raw
        if element == "f16":
            return self.value(f"fpext <{width} x half> {raw} to <{width} x float>")
        if element == "i8":
            return self.value(f"sitofp <{width} x i8> {raw} to <{width} x float>")
        wide = self.value(f"zext <{width} x i16> {raw} to <{width} x i32>")
        shifted = self.value(f"shl <{width} x i32> {wide}, {_splat('i32', '16', width)}")
        return self.value(f"bitcast <{width} x i32> {shifted} to <{width} x float>")

    def splat_load(self, pointer: str, width: int) -> str:
        """The float at `pointer` in every lane."""
        scalar = self.value(f"load float, ptr {pointer}, align 4")
        one = self.value(f"insertelement <{width} x float> poison, float {scalar}, i64 0")
        return self.value(
            f"shufflevector <{width} x float> {one}, <{width} x float> poison, <{width} x i32> zeroinitializer"
        )

    def fma(self, a: str, b: str, c: str, width: int) -> str:
        kind = f"<{width} x float>"
        return self.value(f"call {kind} @llvm.fma.v{width}f32({kind} {a}, {kind} {b}, {kind} {c})")


def _splat(kind: str, value: str, width: int) -> str:
    return "<" + ", ".join([f"{kind} {value}"] * width) + ">"


def emit(gemm: Gemm, lanes: int) -> str:
    """LLVM IR of `gemm` for vectors of `lanes` floats.

    Arguments are four expanded memrefs: A, B, C (pointer, aligned pointer, offset, two sizes, two strides), then
    scratch for A and for B (pointer, aligned pointer, offset, size, stride). The inner stride of A, B and C is 1.
    """
    w = _Writer()
    matrices = "".join(
        f"ptr %{x}0, ptr %{x}1, i64 %{x}o, i64 %{x}m, i64 %{x}n, i64 %{x}s, i64 %{x}u, " for x in ("a", "b", "c")
    )
    scratch = ", ".join(f"ptr %{x}0, ptr %{x}1, i64 %{x}o, i64 %{x}m, i64 %{x}s" for x in ("p", "q"))
    w.lines = [f"define internal void @{gemm.name}({matrices}{scratch}) noinline nounwind {{", "entry:"]
    for x, element in (("a", gemm.a), ("b", gemm.b), ("c", gemm.c)):
        w.do(f"%{x} = getelementptr {_LLVM[element]}, ptr %{x}1, i64 %{x}o")
    w.do("%p = getelementptr float, ptr %p1, i64 %po")
    w.do("%q = getelementptr float, ptr %q1, i64 %qo")
    a, a_stride = "%a", "%as"
    if gemm.a != "f32":
        width = _power(gemm.k, lanes)

        def convert(i: str, _: list[str]) -> Sequence[str]:
            def columns(k: str, _: list[str]) -> Sequence[str]:
                value = w.widened(w.address("%a", _LLVM[gemm.a], (i, "%as"), k), gemm.a, width)
                w.do(f"store <{width} x float> {value}, ptr {w.address('%p', 'float', (i, gemm.k), k)}, align 4")
                return ()

            w.loop(gemm.k, width, columns)
            return ()

        w.loop(gemm.m, 1, convert)
        a, a_stride = "%p", str(gemm.k)
    if gemm.transposed and gemm.m <= _FEW_ROWS:
        _rows_by_dot_products(w, gemm, lanes, a, a_stride)
    else:
        _blocked(w, gemm, lanes, a, a_stride)
    w.do("ret void")
    w.lines.append("}")
    return "\n".join(w.lines) + "\n"


def _blocked(w: _Writer, gemm: Gemm, lanes: int, a: str, a_stride: str) -> None:
    """Blocks of some rows times some vectors of columns, held in registers over the whole K."""
    sums = 12 if lanes < 16 else 24
    rows = gemm.m if gemm.m <= _FEW_ROWS else 4 if lanes < 16 else 8
    vectors = 1 << ((sums // rows).bit_length() - 1)
    for start, end, columns in _segments(gemm.n, lanes * vectors):
        width = min(lanes, columns)
        if gemm.packs:
            _pack(w, gemm, width, columns, start, end)
        _panels(w, gemm, a, a_stride, rows, width, columns, start, end)


def _panels(
    w: _Writer, gemm: Gemm, a: str, a_stride: str, rows: int, width: int, columns: int, first: int, last: int
) -> None:  # fmt: skip
    """Columns `first` to `last` of C, `columns` at a time."""
    vectors = columns // width
    kind = f"<{width} x float>"
    unroll = _power(gemm.k, 4)

    def panel(j: str, _: list[str]) -> Sequence[str]:
        for begin, end, count in _segments(gemm.m, rows):

            def block(i: str, _: list[str], count: int = count) -> Sequence[str]:
                a_rows = [w.address(a, "float", (i, a_stride), (str(r), a_stride)) for r in range(count)]
                start = ["zeroinitializer"] * (count * vectors)
                targets = []
                for r in range(count):
                    row = w.address("%c", _LLVM[gemm.c], (i, "%cs"), (str(r), "%cs"), j)
                    targets += [w.address(row, _LLVM[gemm.c], str(v * width)) for v in range(vectors)]
                if gemm.c == "f32":
                    start = [w.value(f"load {kind}, ptr {t}, align 4") for t in targets]

                def depth(k: str, sums: list[str]) -> Sequence[str]:
                    for u in range(unroll):
                        b = []
                        for v in range(vectors):
                            if gemm.packs:
                                base = w.address("%q", "float", (j, gemm.k), (k, columns), str(u * columns + v * width))
                                b.append(w.widened(base, "f32", width))
                            else:
                                base = w.address("%b", _LLVM[gemm.b], (k, "%bs"), (str(u), "%bs"), j, str(v * width))
                                b.append(w.widened(base, gemm.b, width))
                        out = []
                        for r in range(count):
                            x = w.splat_load(w.address(a_rows[r], "float", k, str(u)), width)
                            out += [w.fma(x, b[v], sums[r * vectors + v], width) for v in range(vectors)]
                        sums = out
                    return sums

                _store(w, gemm, width, targets, w.loop(gemm.k, unroll, depth, start, kind))
                return ()

            w.loop(end, count, block, start=begin)
        return ()

    w.loop(last, columns, panel, start=first)


def _store(w: _Writer, gemm: Gemm, width: int, targets: list[str], sums: list[str]) -> None:
    for target, total in zip(targets, sums, strict=True):
        if gemm.c == "i32":
            whole = w.value(f"fptosi <{width} x float> {total} to <{width} x i32>")
            old = w.value(f"load <{width} x i32>, ptr {target}, align 4")
            total = w.value(f"add <{width} x i32> {old}, {whole}")
            w.do(f"store <{width} x i32> {total}, ptr {target}, align 4")
        else:
            w.do(f"store <{width} x float> {total}, ptr {target}, align 4")


def _pack(w: _Writer, gemm: Gemm, width: int, columns: int, first: int, last: int) -> None:
    """Columns `first` to `last` of B as fp32 panels: a panel that begins at column j lies at q[j * K] as [K,
    columns].
    """
    side = min(_power(gemm.k, 8), width)

    def panel(j: str, _: list[str]) -> Sequence[str]:
        def straight(k: str, _: list[str]) -> Sequence[str]:
            for v in range(columns // width):
                source = w.address("%b", _LLVM[gemm.b], (k, "%bs"), j, str(v * width))
                value = w.widened(source, gemm.b, width)
                target = w.address("%q", "float", (j, gemm.k), (k, columns), str(v * width))
                w.do(f"store <{width} x float> {value}, ptr {target}, align 4")
            return ()

        def turned(k: str, _: list[str]) -> Sequence[str]:
            for c in range(0, columns, side):
                rows = []
                for r in range(side):
                    source = w.address("%b", _LLVM[gemm.b], (j, "%bs"), (str(c + r), "%bs"), k)
                    rows.append(w.widened(source, gemm.b, side))
                for r, row in enumerate(_transpose(w, rows, side)):
                    target = w.address("%q", "float", (j, gemm.k), (k, columns), str(r * columns + c))
                    w.do(f"store <{side} x float> {row}, ptr {target}, align 4")
            return ()

        w.loop(gemm.k, side if gemm.transposed else 1, turned if gemm.transposed else straight)
        return ()

    w.loop(last, columns, panel, start=first)


def _transpose(w: _Writer, rows: list[str], side: int) -> list[str]:
    """A square of vectors transposed by log2(side) rounds of exchanging halves."""
    distance = side // 2
    while distance:
        low = [i if not i & distance else i - distance + side for i in range(side)]
        high = [i + distance if not i & distance else i + side for i in range(side)]
        new = list(rows)
        for r in range(side):
            if not r & distance:
                pair = f"<{side} x float> {rows[r]}, <{side} x float> {rows[r + distance]}"
                for target, lanes in ((r, low), (r + distance, high)):
                    mask = "<" + ", ".join(f"i32 {lane}" for lane in lanes) + ">"
                    new[target] = w.value(f"shufflevector {pair}, <{side} x i32> {mask}")
        rows = new
        distance //= 2
    return rows


def _rows_by_dot_products(w: _Writer, gemm: Gemm, lanes: int, a: str, a_stride: str) -> None:
    """Few rows times a transposed B: both operands run along K, so each element of C is a vector dot product."""
    width = _power(gemm.k, lanes)
    kind = f"<{width} x float>"
    element = _LLVM[gemm.c]
    for first, last, rows in _segments(gemm.m, 4):
        for begin, end, columns in _segments(gemm.n, 8 // rows):

            def block(j: str, _: list[str], top: int, rows: int, columns: int) -> Sequence[str]:
                a_rows = [w.address(a, "float", (str(top + r), a_stride)) for r in range(rows)]
                b_rows = [w.address("%b", _LLVM[gemm.b], (j, "%bs"), (str(c), "%bs")) for c in range(columns)]

                def depth(k: str, sums: list[str]) -> Sequence[str]:
                    x = [w.widened(w.address(p, "float", k), "f32", width) for p in a_rows]
                    y = [w.widened(w.address(p, _LLVM[gemm.b], k), gemm.b, width) for p in b_rows]
                    return [
                        w.fma(x[r], y[c], sums[r * columns + c], width) for r in range(rows) for c in range(columns)
                    ]

                sums = w.loop(gemm.k, width, depth, ["zeroinitializer"] * (rows * columns), kind)
                for r in range(rows):
                    for c in range(columns):
                        total = w.value(
                            f"call reassoc float @llvm.vector.reduce.fadd.v{width}f32"
                            f"(float -0.0, {kind} {sums[r * columns + c]})"
                        )
                        target = w.address("%c", element, (str(top + r), "%cs"), j, str(c))
                        if gemm.c == "i32":
                            total = w.value(f"fptosi float {total} to i32")
                        old = w.value(f"load {element}, ptr {target}, align 4")
                        new = w.value(f"{'fadd float' if gemm.c == 'f32' else 'add i32'} {old}, {total}")
                        w.do(f"store {element} {new}, ptr {target}, align 4")
                return ()

            for top in range(first, last, rows):
                w.loop(end, columns, partial(block, top=top, rows=rows, columns=columns), start=begin)
