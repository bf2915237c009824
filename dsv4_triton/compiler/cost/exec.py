"""Evaluating what decides a kernel's counts: scalars, tensors of integers, and buffers on the chip.

A condition or loop bound that is unknown (`cost.scalar`) is decided, true or one iteration, and noted.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from dsv4_triton.compiler.cost.facts import Counts
from dsv4_triton.compiler.cost.ops import runs
from dsv4_triton.compiler.cost.program import Program, identifier
from dsv4_triton.compiler.cost.scalar import SCALARS, UNKNOWN
from dsv4_triton.compiler.cost.vector import Lanes, run_operation
from dsv4_triton.compiler.cost.vf import VectorFunction
from dsv4_triton.compiler.hivm import CostError, Memref, bits_of

BUFFER_BYTES = 1 << 18
_READABLE = {torch.int32, torch.int64, torch.int16, torch.bool}
_MAX_TRIPS = 20_000_000

Extents = tuple[int, ...]

_bits = lru_cache(maxsize=64)(bits_of)


class Machine:
    """Runs the generated functions of one kernel for one launch's arguments.

    arguments: the entry's arguments in order, tensors for pointers. unwritten: positions of tensors whose contents
    are not to be read.
    """

    def __init__(self, program: Program, scope: dict[str, Any], arguments: list[Any], unwritten: set[int]):
        self.program = program
        self.arguments = arguments
        self.assumed: dict[str, int] = {}
        self.memory = np.zeros(BUFFER_BYTES, np.uint8)
        self.unknown = np.ones(BUFFER_BYTES, bool)
        self.stack: dict[tuple[str, int], Any] = {}
        self._tensors: dict[int, np.ndarray | None] = {}
        self._unwritten = unwritten
        self._vector: dict[str, VectorFunction] = {}
        self.work = 0
        """Operations executed for control flow, weighted by their size."""
        self.scope = scope
        scope.update(
            SCALARS,
            stack=self.stack, sure_range=self._range, taken=self._taken, sure_turn=self._turn,
            from_argument=self.from_argument, from_buffer=self.from_buffer, to_buffer=self.to_buffer,
            execute=self._execute,
        )  # fmt: skip

    def run(self, entry: str, block: int, sub_block: int) -> tuple[Counts, int]:
        """Counts of an entry for one program, and the work that it took, in loop iterations."""
        scope = self.scope
        scope["C"][:] = [0] * len(scope["C"])
        scope["K"][:] = [0] * len(scope["K"])
        tallies = [scope[f"T{i}"] for i in range(len(self.program.tallies))]
        for tally in tallies:
            tally.clear()
        self.stack.clear()
        if self.program.calls:
            self.unknown[:] = True
        self.work = 0
        ticks: int = scope[identifier(entry)](self.arguments, block, sub_block)
        for name, cell in self.program.deferred.items():
            if scope["K"][cell]:
                scope[identifier(name)](scope["K"][cell])
        return self.program.expand(scope["C"], tallies, self._known), ticks + self.work

    # Decisions

    def _note(self, what: str) -> None:
        self.assumed[what] = self.assumed.get(what, 0) + 1

    def _range(self, lower: Any, upper: Any, step: Any) -> range:
        if lower is UNKNOWN or upper is UNKNOWN or step is UNKNOWN:
            self._note("loop bound unknown: one iteration")
            return range(1)
        if len(trips := range(lower, upper, step)) > _MAX_TRIPS:
            raise CostError(f"a loop runs from {lower} to {upper}: was its bound read from a tensor nobody wrote?")
        return trips

    def _taken(self) -> bool:
        self._note("condition unknown: taken")
        return True

    def _turn(self, condition: Any, done: int) -> Any:
        if condition is UNKNOWN:
            self._note("condition of a while loop unknown: one iteration")
            return done < 1
        if done > _MAX_TRIPS:
            raise CostError("a while loop does not end")
        return condition

    def _known(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments of a counting function, with one in place of what is unknown."""
        known = []
        for argument in arguments:
            if isinstance(argument, tuple) and any(entry is UNKNOWN for entry in argument):
                self._note("extent unknown: one")
                argument = tuple(1 if entry is UNKNOWN else entry for entry in argument)
            known.append(argument)
        return tuple(known)

    # Memory

    def tensor(self, position: int) -> np.ndarray | None:
        """The elements of an argument from its first on; None where they cannot be known."""
        if position not in self._tensors:
            value = self.arguments[position] if 0 <= position < len(self.arguments) else None
            data = None
            if isinstance(value, torch.Tensor) and value.dtype in _READABLE and position not in self._unwritten:
                storage = value.untyped_storage().size() // value.element_size() - value.storage_offset()
                data = torch.as_strided(value, (storage,), (1,)).numpy()
            self._tensors[position] = data
        return self._tensors[position]

    def from_argument(self, position: int, offset: Any) -> Any:
        data = self.tensor(position)
        if data is None or offset is UNKNOWN or not 0 <= offset < len(data):
            return UNKNOWN
        return int(data[offset])

    def from_buffer(self, element: str, base: Any, offset: Any) -> Any:
        if base is UNKNOWN or offset is UNKNOWN:
            return UNKNOWN
        lanes = self.read(Memref((1,), (1,), element, "ub"), base, offset, (1,), (1,))
        return UNKNOWN if lanes.unknown.any() else lanes.values.reshape(-1)[0].item()

    def to_buffer(self, element: str, base: Any, offset: Any, value: Any) -> None:
        if base is UNKNOWN or offset is UNKNOWN:
            self._note("store to an unknown place: ignored")
            return
        lanes = Lanes.of(None if value is UNKNOWN else value)
        self.write(Memref((1,), (1,), element, "ub"), base, offset, (1,), (1,), lanes)

    def _places(self, base: int, offset: int, sizes: Extents, strides: Extents, bits: int) -> np.ndarray:
        """Byte addresses (bit addresses for elements of one bit) of a memref's elements."""
        width = 1 if bits == 1 else bits // 8
        places = np.asarray(base * (8 if bits == 1 else 1) + offset * width)
        for size, stride in zip(sizes, strides):
            places = np.add.outer(places, np.arange(size) * (stride * width))
        return places

    def _window(self, base: int, offset: int, sizes: Extents, strides: Extents, bits: int) -> slice | None:
        """The bytes of a memref that is contiguous and not of single bits."""
        total, run, _ = runs(sizes, strides)
        if bits == 1 or total != run or total == 0:
            return None
        start = base + offset * bits // 8
        return slice(start, start + total * bits // 8)

    def known_part(self, base: int, offset: int, sizes: Extents, strides: Extents, bits: int) -> bool:
        """Whether any element of a memref is known."""
        window = self._window(base, offset, sizes, strides, bits)
        if window is not None:
            return not self.unknown[window].all()
        places = self._places(base, offset, sizes, strides, bits)
        return not self.unknown[places >> 3 if bits == 1 else places].all()

    def read(self, memref: Memref, base: int, offset: int, sizes: Extents, strides: Extents) -> Lanes:
        bits = _bits(memref.element)
        window = self._window(base, offset, sizes, strides, bits)
        if window is not None:
            values = decode(self.memory[window].reshape(-1, bits // 8), memref.element)
            return Lanes(values.reshape(sizes), self.unknown[window][:: bits // 8].reshape(sizes).copy())
        places = self._places(base, offset, sizes, strides, bits)
        if bits == 1:
            return Lanes((self.memory[places >> 3] >> (places & 7)) & 1, self.unknown[places >> 3])
        raw = self.memory[places[..., None] + np.arange(bits // 8)]
        return Lanes(decode(raw, memref.element), self.unknown[places])

    def write(self, memref: Memref, base: int, offset: int, sizes: Extents, strides: Extents, lanes: Lanes) -> None:
        bits = _bits(memref.element)
        window = self._window(base, offset, sizes, strides, bits)
        if window is not None:
            hidden = bool(lanes.unknown.any())
            if hidden and lanes.unknown.all():
                self.unknown[window] = True
                return
            values = lanes.values if lanes.values.shape == sizes else np.broadcast_to(lanes.values, sizes)
            self.memory[window] = encode(values, memref.element).reshape(-1)
            if hidden:
                self.unknown[window] = np.repeat(np.broadcast_to(lanes.unknown, sizes).reshape(-1), bits // 8)
            else:
                self.unknown[window] = False
            return
        places = self._places(base, offset, sizes, strides, bits)
        values = np.broadcast_to(lanes.values, places.shape)
        unknown = np.broadcast_to(lanes.unknown, places.shape)
        if bits == 1:
            flags = (values != 0).astype(np.uint8)
            np.bitwise_and.at(self.memory, places >> 3, (~(1 << (places & 7))).astype(np.uint8))
            np.bitwise_or.at(self.memory, places >> 3, (flags << (places & 7)).astype(np.uint8))
            self.unknown[places >> 3] = unknown
            return
        steps = places[..., None] + np.arange(bits // 8)
        self.memory[steps] = encode(values, memref.element)
        self.unknown[steps] = unknown[..., None]

    # Executed operations

    def _execute(self, number: int, operands: tuple[Any, ...]) -> None:
        call = self.program.calls[number]
        references: list[Any] = []
        for described, operand in zip(call.operands, operands):
            references.append(Reference(self, *described, operand) if described else operand)
        self.work += 20
        if call.callee is not None:
            if call.callee.name not in self._vector:
                self._vector[call.callee.name] = VectorFunction(call.callee)
            self.work += 10 * self._vector[call.callee.name].run(references)
        elif not run_operation(call.op, references):
            self._note(f"{call.op.name} is not evaluated")


class Reference:
    """A memref operand at run time."""

    def __init__(self, machine: Machine, memref: Memref, root: int, place: tuple[Any, ...]):
        self.machine = machine
        self.memref = memref
        self.root = root
        self.base, self.offset, self.sizes, self.strides = place
        self.known = not any(v is UNKNOWN for v in (self.base, self.offset, *self.sizes, *self.strides))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sizes if self.known else tuple(e or 1 for e in self.memref.shape)

    def known_part(self) -> bool:
        """Whether any element is known; tensors count as known."""
        if self.memref.space not in ("ub", "stack") or not self.known:
            return self.known
        return self.machine.known_part(self.base, self.offset, self.sizes, self.strides, _bits(self.memref.element))

    def read(self) -> Lanes:
        if not self.known:
            return Lanes.of(None, self.shape)
        if self.memref.space in ("ub", "stack"):
            return self.machine.read(self.memref, self.base, self.offset, self.sizes, self.strides)
        data = self.machine.tensor(self.root)
        if self.memref.space != "gm" or data is None:
            return Lanes.of(None, self.shape)
        places = np.asarray(self.offset)
        for size, stride in zip(self.sizes, self.strides):
            places = np.add.outer(places, np.arange(size) * stride)
        inside = (places >= 0) & (places < len(data))
        values = data[np.where(inside, places, 0)] if len(data) else np.zeros(places.shape, np.int64)
        return Lanes(values.astype(np.int64), ~inside)

    def write(self, lanes: Lanes) -> None:
        if self.known and self.memref.space in ("ub", "stack"):
            self.machine.write(self.memref, self.base, self.offset, self.sizes, self.strides, lanes)


_DTYPES = {"f32": np.float32, "f16": np.float16, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64}


def decode(raw: np.ndarray, element: str) -> np.ndarray:
    """Values of elements given as bytes on the last axis."""
    raw = np.ascontiguousarray(raw)
    if element == "bf16":
        return (raw.view(np.uint16)[..., 0].astype(np.uint32) << 16).view(np.float32)
    dtype = _DTYPES.get(element)
    if dtype is None:
        return np.zeros(raw.shape[:-1], np.int64)
    values = raw.view(dtype)[..., 0]
    return values if values.dtype == np.float32 else values.astype(np.float32 if element == "f16" else np.int64)


def encode(values: np.ndarray, element: str) -> np.ndarray:
    """The bytes of values as elements, on a new last axis."""
    if element == "bf16":
        words = np.ascontiguousarray(values, np.float32).view(np.uint32)
        rounded = ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)
        return np.ascontiguousarray(rounded)[..., None].view(np.uint8)
    dtype = _DTYPES.get(element, np.uint8)
    size = _bits(element) // 8
    with np.errstate(invalid="ignore", over="ignore"):
        cast = np.ascontiguousarray(values.astype(dtype))[..., None].view(np.uint8)
    return np.broadcast_to(cast[..., :1], (*cast.shape[:-1], size)) if cast.shape[-1] != size else cast
