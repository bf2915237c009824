"""What one execution of a HIVM operation counts as.

Keys are (kind, name):
    mac, mac_padded, mmad / operand dtype      multiply-accumulates asked for, with M, K, N filled up to whole
                                               fractals, and matrix instructions
    l0a, l0b / "bytes"                         operand bytes from L1 to the cube's input buffers
    dma, bursts, bytes, moved / path           transfers, contiguous runs, bytes, and bytes with each run filled up to
                                               32; paths: gm_ub ub_gm gm_l1 l0c_gm l0c_ub ub_l1, `ws` in place of gm
                                               for the workspace, fill_l1
    small_dma / path                           transfers of at most 32 bytes inside loops
    read, write / argument                     bytes of a kernel's tensor argument
    vinst, velem, vrep / op                    vector operations, elements, and 256-byte steps (A2, A3)
    ave / op, vf / "calls"                     vector instructions and calls of vector functions (A5)
    load, store, loop_load, loop_store / space scalar accesses: gm, ub, stack; all, and those inside loops
    scalar / "alu" | "div", sync / op, unsupported / op
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from dsv4_triton.compiler.cost.memref import Facet, root_of
from dsv4_triton.compiler.cost.rules import Rules
from dsv4_triton.compiler.hivm import Function, Memref, bits_of
from dsv4_triton.compiler.mlir import Op

Key = tuple[str, str]

DMA_BLOCK = 32
"""Bytes that a transfer moves at least per contiguous run."""
VECTOR_BYTES = 256
"""Bytes that a vector unit handles in one step."""

_TRANSFERS = {"load": 0, "store": 1, "nd2nz": 0, "fixpipe": 1, "copy": 1}
"""Operations that move data, and the operand whose extents say how much."""
_SPACES = {"gm": "gm", "ub": "ub", "cbuf": "l1", "cc": "l0c", "stack": "ub"}
_VECTOR = {
    "vadd", "vsub", "vmul", "vdiv", "vmod", "vmax", "vmin", "vabs", "vneg", "vand", "vor", "vxor", "vnot", "vshl",
    "vshr", "vcmp", "vsel", "vcast", "vbrc", "vreduce", "varange", "vexp", "vln", "vsqrt", "vrsqrt", "vrec", "vrelu",
    "vpow",
    "vtanh", "vsin", "vcos", "verf", "vcumsum", "vcumprod", "vtranspose", "vsort", "vgather", "vinterleave",
    "vdeinterleave", "vflip", "vpad", "vconcat", "vmulext",
}  # fmt: skip
_PLAIN_OUTPUT = {"vbrc", "vtranspose", "vcumsum", "vcumprod", "varange", "copy", "vflip"}
_SYNC = {
    "set_flag", "wait_flag", "pipe_barrier", "sync_block_set", "sync_block_wait", "sync_block",
    "create_sync_block_lock", "sync_block_lock", "sync_block_unlock",
}  # fmt: skip
_FREE = {
    "pointer_cast", "get_block_idx", "get_sub_block_idx", "set_ffts_base_addr", "set_mask_norm", "set_ctrl",
    "get_block_num", "bitcast",
}  # fmt: skip
_FREE_DIALECTS = ("memref.", "builtin.", "vector.bitcast", "annotation.")
SCALAR_DIALECTS = ("arith.", "affine.", "math.", "hivm.hir.get_block_idx", "hivm.hir.get_sub_block_idx")
_FREE_ARITH = {"constant", "index_cast", "index_castui", "extsi", "extui", "trunci", "bitcast"}
_DIVISIONS = {"divsi", "divui", "remsi", "remui", "floordivsi", "ceildivsi", "divf"}
_FRACTAL_K_BYTES = 32


@dataclass
class Count:
    """Counts of one execution: `fixed`, and functions of facets whose results go to `keys` in order."""

    fixed: dict[Key, int] = field(default_factory=dict)
    varying: list[Varying] = field(default_factory=list)


@dataclass(frozen=True)
class Varying:
    """`function(*arguments)` of this module; arguments are numbers, or tuples of numbers and facets."""

    function: str
    arguments: tuple[int | tuple[int | Facet, ...], ...]
    keys: tuple[tuple[Key, ...], ...]

    @property
    def facets(self) -> list[Facet]:
        groups = [a for a in self.arguments if isinstance(a, tuple)]
        return [entry for group in groups for entry in group if isinstance(entry, tuple)]


@lru_cache(maxsize=65536)
def runs(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int, int]:
    """Elements, length of a contiguous run, and axes that remain outside the runs."""
    total = 1
    for size in sizes:
        total *= size
    run, outer, contiguous = 1, 0, True
    last_stride = 0
    for size, stride in zip(reversed(sizes), reversed(strides)):
        if size == 1:
            continue
        if contiguous and stride == run:
            run *= size
            continue
        contiguous = False
        if outer and stride == last_stride:
            last_stride *= size
            continue
        outer += 1
        last_stride = stride * size
    return total, run, outer


@lru_cache(maxsize=65536)
def transfer(sizes: tuple[int, ...], strides: tuple[int, ...], bits: int) -> tuple[int, int, int, int, int]:
    """Transfers, contiguous runs, bytes, bytes with runs filled up, and transfers of at most 32 bytes.

    One transfer moves runs at one distance; each further axis costs one transfer per position.
    """
    total, run, outer = runs(sizes, strides)
    if total <= 0:
        return 0, 0, 0, 0, 0
    count = total // run
    run_bytes = -(-run * bits // 8)
    transfers = 1
    if outer > 1:
        # The innermost remaining axis is one transfer's; the others repeat it.
        positions = [size for size, stride in zip(sizes, strides) if size > 1 and stride >= run]
        transfers = max(1, count // positions[-1]) if positions else 1
    total_bytes = count * run_bytes
    small = transfers if total_bytes // transfers <= DMA_BLOCK else 0
    return transfers, count, total_bytes, count * -(-run_bytes // DMA_BLOCK) * DMA_BLOCK, small


@lru_cache(maxsize=65536)
def steps(sizes: tuple[int, ...], strides: tuple[int, ...], bits: int) -> tuple[int, int]:
    """Elements and 256-byte steps of a vector operation; a step does not cross from one row to the next."""
    total, run, _ = runs(sizes, strides)
    if total <= 0:
        return 0, 0
    return total, total // run * -(-run * bits // (8 * VECTOR_BYTES))


def product(sizes: tuple[int, int, int], bits: int) -> tuple[int, int, int, int]:
    """Multiply-accumulates of [m, k] x [k, n], the same over whole fractals, and operand bytes of left and right."""
    m, k, n = sizes
    if m <= 0 or k <= 0 or n <= 0:
        return 0, 0, 0, 0
    depth = _FRACTAL_K_BYTES * 8 // bits
    m16, kk, n16 = -(-m // 16) * 16, -(-k // depth) * depth, -(-n // 16) * 16
    return m * k * n, m16 * kk * n16, m16 * kk * bits // 8, kk * n16 * bits // 8


FUNCTIONS: dict[str, Callable[..., tuple[int, ...]]] = {"transfer": transfer, "steps": steps, "product": product}


class Counter:
    """Counts the operations of one function; `names` are the kernel's arguments, `hidden` how many come before them."""

    def __init__(self, function: Function, rules: Rules, names: list[str], workspace: int):
        self.function = function
        self.rules = rules
        self.names = names
        self.workspace = workspace

    def count(self, op: Op, in_loop: bool) -> Count:
        dialect, _, name = op.name.partition(".")
        if op.name.startswith("hivm.hir."):
            return self._hivm(op, op.name.removeprefix("hivm.hir."), in_loop)
        if op.name.startswith("ave.hir."):
            return Count({("ave", op.name.removeprefix("ave.hir.")): 1})
        if op.name in ("memref.load", "memref.store"):
            memref = self.function.memref(op.operands[0 if name == "load" else 1])
            assert memref is not None
            keys = [(name, memref.space)] + ([(f"loop_{name}", memref.space)] if in_loop else [])
            return Count(dict.fromkeys(keys, 1))
        if dialect in ("arith", "math"):
            if name in _FREE_ARITH:
                return Count()
            divides = name in _DIVISIONS and not self._power_of_two(op.operands[1])
            return Count({("scalar", "div" if divides or dialect == "math" else "alu"): 1})
        if dialect == "affine":
            text = op.props.get("map") or ""
            divisors = re.findall(r"(?:floordiv|ceildiv|mod) (\w+)", text)
            divisions = sum(not d.isdigit() or bool(int(d) & (int(d) - 1)) for d in divisors)
            alu = len(re.findall(r"[+*]", text)) + len(divisors) - divisions + 1
            return Count({("scalar", "alu"): alu, **({("scalar", "div"): divisions} if divisions else {})})
        if op.name == "scf.for":
            return Count()
        if op.name == "func.call" and "hivm.vector_function" in op.attrs:
            return Count({("vf", "calls"): 1})
        if dialect in ("scf",) or op.name in ("func.return",) or op.name.startswith(_FREE_DIALECTS):
            return Count()
        return Count({("unsupported", op.name): 1})

    def _power_of_two(self, value: str) -> bool:
        number = self._entry((value, "v"))
        return isinstance(number, int) and number > 0 and not number & (number - 1)

    def _hivm(self, op: Op, name: str, in_loop: bool) -> Count:
        if name in _TRANSFERS:
            return self._transfer(op, name, in_loop)
        if name == "mmadL1":
            return self._product(op)
        if name in _VECTOR:
            return self._vector(op, name)
        if name in _SYNC:
            return Count({("sync", name): 1})
        if name in _FREE:
            return Count()
        return Count({("unsupported", op.name): 1})

    def _shape(self, value: str) -> tuple[Memref, tuple[int | Facet, ...], tuple[int | Facet, ...]]:
        memref = self.function.memref(value)
        assert memref is not None
        axes = range(len(memref.shape))
        return (
            memref,
            tuple(self._entry((value, f"s{i}")) for i in axes),
            tuple(self._entry((value, f"d{i}")) for i in axes),
        )

    def _entry(self, facet: Facet) -> int | Facet:
        """A facet, or its number where that is fixed."""
        rule = self.rules.rule(facet)
        while rule.alias and not rule.opaque:
            facet = rule.needs[0]
            rule = self.rules.rule(facet)
        return int(rule.template.strip("()")) if re.fullmatch(r"\(?-?\d+\)?", rule.template) else facet

    def _add(self, count: Count, function: str, arguments: tuple, keys: tuple[tuple[Key, ...], ...]) -> Count:
        varying = Varying(function, arguments, keys)
        if varying.facets:
            count.varying.append(varying)
        else:
            for number, names in zip(FUNCTIONS[function](*arguments), keys):
                for key in names:
                    count.fixed[key] = count.fixed.get(key, 0) + number
        return count

    def _place(self, value: str) -> tuple[str, str]:
        """Space of a memref for a path, and the kernel's argument that it is a part of."""
        memref = self.function.memref(value)
        assert memref is not None
        if memref.space != "gm":
            return _SPACES[memref.space], ""
        maker, position = root_of(self.function, value)
        if maker is None and position == self.workspace:
            return "ws", ""
        return "gm", self.names[position] if maker is None and 0 <= position < len(self.names) else "?"

    def _transfer(self, op: Op, name: str, in_loop: bool) -> Count:
        source, target = op.operands[:2]
        (origin, read), (goal, written) = self._place(source), self._place(target)
        if origin == goal == "ub":
            return self._vector(op, "copy")
        path = f"{origin}_{goal}"
        memref, sizes, strides = self._shape(op.operands[_TRANSFERS[name]])
        total: tuple[Key, ...] = (("bytes", path),)
        total += ((("read", read),) if read else ()) + ((("write", written),) if written else ())
        small: tuple[Key, ...] = (("small_dma", path),) if in_loop else ()
        keys = ((("dma", path),), (("bursts", path),), total, (("moved", path),), small)
        count = self._add(Count(), "transfer", (sizes, strides, memref.bits), keys)
        if op.props.get("init_out_buffer") == "true":
            memref, sizes, strides = self._shape(target)
            count.fixed[("vinst", "fill")] = 1
            self._add(count, "steps", (sizes, strides, memref.bits), ((("velem", "fill"),), (("vrep", "fill"),)))
        return count

    def _product(self, op: Op) -> Count:
        operands = [group[0] for group in op.segments()[:7]]
        memref = self.function.memref(operands[0])
        assert memref is not None
        dtype = memref.element
        sizes = tuple(self._entry((value, "v")) for value in operands[3:6])
        keys = ((("mac", dtype),), (("mac_padded", dtype),), (("l0a", "bytes"),), (("l0b", "bytes"),))
        return self._add(Count({("mmad", dtype): 1}), "product", (sizes, bits_of(dtype)), keys)

    def _vector(self, op: Op, name: str) -> Count:
        if name in _PLAIN_OUTPUT or not op.ints("operandSegmentSizes"):
            outputs = [op.operands[0 if name == "varange" else 1]]
            inputs = [op.operands[0]]
        else:
            inputs, outputs = op.segments()[:2]
        shaped = [m for m in (self.function.memref(v) for v in [*inputs, *outputs]) if m is not None]
        main = inputs[0] if name == "vreduce" else outputs[0]
        memref, sizes, strides = self._shape(main)
        if memref.space == "cbuf":
            fill: tuple[tuple[Key, ...], ...] = ((("dma", "fill_l1"),), (), (("bytes", "fill_l1"),))
            return self._add(Count(), "transfer", (sizes, strides, memref.bits), fill)
        bits = max(m.bits for m in shaped)
        count = Count({("vinst", name): 1})
        return self._add(count, "steps", (sizes, strides, bits), ((("velem", name),), (("vrep", name),)))
