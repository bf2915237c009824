"""`tl.device_print` and `tl.device_assert` in compiled code: what a kernel reports while it runs.

The adapter turns a print into a call of a device function that carries its text, but neither the source line nor
whether an integer is signed. So each message gets a number in place of its text before the adapter (`extract`); after
it, the calls become calls of `dsv4.message` with a table of 64-bit words, `number, program x, y, z, address of each
value` (`rewrite`). That function calls back into Python (host/report.py) through the launch's record, and ends the
program where it is told to. In between, prints and assertions are prints of exactly one value: the adapter of
triton-ascend 3.2.0 crashes on a print without values, and loses a mask that is asserted or not a print's first value.

A program with messages gets a context as the first argument that its kernel does not use: `record, jump buffer`. A
record is `callback, token of the launch`.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from dsv4_triton.compiler.frontend import KernelCompileError, locations
from dsv4_triton.compiler.mlir import Block, Builder, Module, Op, Shaped, split_top

_TEXT = r'(?P<text>"(?:[^"\\]|\\.)*")'
_PLACE = r"(?: loc\((?P<place>#loc\d*|unknown)\))?$"
_PRINT = re.compile(
    rf"tt\.print {_TEXT} \{{hex = (?P<hex>true|false), isSigned = array<i32(?:: (?P<signed>[\d, ]*))?>\}}"
    rf"(?: : (?P<values>%[^:]*) : (?P<kinds>.*?))?{_PLACE}"
)
_ASSERT = re.compile(rf"tt\.assert (?P<values>%[\w#]+), {_TEXT} : (?P<kinds>.*?){_PLACE}")
_ELEMENTS = frozenset(("i1", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64", "f8E4M3FN", "f8E5M2"))
_JUMP_BYTES = 512
_JUMP_OFFSET = 16
_RUNTIME = {
    "dsv4.message": f"""
declare void @longjmp(ptr, i32) noreturn
define internal void @dsv4.message(ptr %b, ptr %context, i64 %o, i64 %n, i64 %s, i64 %address) noinline {{
  %record = load ptr, ptr %context
  %callback = load ptr, ptr %record
  %second = getelementptr i64, ptr %record, i64 1
  %token = load i64, ptr %second
  %table = inttoptr i64 %address to ptr
  %verdict = call i32 %callback(i64 %token, ptr %table)
  %stop = icmp ne i32 %verdict, 0
  br i1 %stop, label %leave, label %end
leave:
  %jump = getelementptr i8, ptr %context, i64 {_JUMP_OFFSET}
  call void @longjmp(ptr %jump, i32 1)
  unreachable
end:
  ret void
}}
""",
    "dsv4.all": """
define internal i1 @dsv4.all(i64 %address, i64 %count) noinline {
  %base = inttoptr i64 %address to ptr
  br label %head
head:
  %i = phi i64 [ 0, %0 ], [ %next, %head ]
  %so.far = phi i8 [ 1, %0 ], [ %both, %head ]
  %cell = getelementptr i8, ptr %base, i64 %i
  %value = load i8, ptr %cell
  %both = and i8 %so.far, %value
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %count
  br i1 %more, label %head, label %end
end:
  %result = trunc i8 %both to i1
  ret i1 %result
}
""",
}


@dataclass(frozen=True)
class Value:
    """One value that a message shows: MLIR element type, shape (empty for a scalar), and whether it has a sign."""

    element: str
    shape: tuple[int, ...]
    signed: bool


@dataclass(frozen=True)
class Message:
    """One `tl.device_print` (text: its prefix) or `tl.device_assert` (text: its message) of a kernel.

    place: `file:line` of the statement, of the statement that called its function, and so on; empty when unknown.
    """

    asserts: bool
    text: str
    place: tuple[str, ...]
    hex: bool
    values: tuple[Value, ...]

    def plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Message:
        """The message that `plain` came from."""
        values = tuple(Value(v["element"], tuple(v["shape"]), v["signed"]) for v in plain["values"])
        return cls(plain["asserts"], plain["text"], tuple(plain["place"]), plain["hex"], values)


def extract(kernel_name: str, ttir: str) -> tuple[str, tuple[Message, ...]]:
    """TTIR that prints one value at a time, under the number of its message, and the messages by number.

    Raises `KernelCompileError`, with kernel and line, for a value that cannot be shown.
    """
    if "tt.print " not in ttir and "tt.assert " not in ttir:
        return ttir, ()
    places = locations(ttir)
    messages: list[Message] = []
    lines = []
    for line in ttir.split("\n"):
        body = line.strip()
        if not body.startswith(("tt.print ", "tt.assert ")):
            lines.append(line)
            continue
        number = len(messages)
        if found := _PRINT.match(body):
            place = places.get(found["place"], ())
            operands, kinds = split_top(found["values"] or ""), split_top(found["kinds"] or "")
            signed = [int(v) != 0 for v in (found["signed"] or "").split(",") if v.strip()]
            values = _values("device_print", kernel_name, place, kinds, signed)
            messages.append(Message(False, _unescape(found["text"]), place, found["hex"] == "true", values))
        elif found := _ASSERT.match(body):
            place = places.get(found["place"], ())
            operands, kinds = [found["values"]], [found["kinds"]]
            values = _values("device_assert", kernel_name, place, kinds, [True])
            messages.append(Message(True, _unescape(found["text"]), place, False, values))
        else:
            raise KernelCompileError(f"kernel {kernel_name}: not understood: {body[:160]}", body.partition(" ")[0])
        if not operands:
            operands, kinds = [f"%dsv4_message_{number}"], ["i1"]
            lines.append(f"    {operands[0]} = arith.constant true")
        location = f" loc({found['place']})" if found["place"] else ""
        for operand, kind in zip(operands, kinds, strict=True):
            attributes = "{hex = false, isSigned = array<i32: 0>}"
            lines.append(f'    tt.print "{number}" {attributes} : {operand} : {kind}{location}')
    return "\n".join(lines), tuple(messages)


def _values(
    operation: str, kernel_name: str, place: tuple[str, ...], kinds: list[str], signed: list[bool]
) -> tuple[Value, ...]:
    values = []
    for kind, sign in zip(kinds, signed, strict=True):
        shaped = Shaped.parse(kind)
        element = shaped.element if shaped else kind
        if element not in _ELEMENTS:
            where = f" ({place[0]})" if place else ""
            what = "a pointer" if "!tt.ptr" in kind else kind
            raise KernelCompileError(
                f"kernel {kernel_name}{where}: tl.{operation} of {what} is not supported on the host", f"tt.{operation}"
            )
        values.append(Value(element, shaped.shape if shaped else (), sign))
    return tuple(values)


def _unescape(literal: str) -> str:
    """The text of an MLIR string literal."""
    text = re.sub(
        rb"\\([0-9A-Fa-f]{2}|.)",
        lambda m: bytes([int(m[1], 16)]) if len(m[1]) == 2 else m[1],
        literal[1:-1].encode(),
    )
    return text.decode(errors="replace")


def rewrite(module: Module, kernel_name: str, messages: tuple[Message, ...]) -> None:
    """Replace the adapter's calls for messages, in place."""
    numbers = {}
    for function in module.functions if messages else ():
        if prefix := function.attrs.get("prefix"):
            numbers["@" + (function.props["sym_name"] or "").strip('"')] = int(prefix.strip('"'))
    for function in module.functions if numbers else ():
        arguments = function.body.args if function.props["sym_name"] == f'"{kernel_name}"' else []
        for region in function.regions:
            for block in region:
                _rewrite_block(block, module, numbers, messages, arguments)


def _rewrite_block(
    block: Block,
    module: Module,
    numbers: dict[str, int],
    messages: tuple[Message, ...],
    arguments: list[tuple[str, str]],
) -> None:
    ops: list[Op] = []
    values: list[tuple[str, str]] = []
    for op in block.ops:
        # The body of an operation on tensors is no place for a call that ends the program.
        inside = [] if op.name.startswith(("linalg.", "tt.", "hfusion.")) else arguments
        for region in op.regions:
            for nested in region:
                _rewrite_block(nested, module, numbers, messages, inside)
        number = numbers.get(op.props.get("callee") or "") if op.name == "func.call" else None
        if number is None:
            ops.append(op)
            continue
        values.append((op.operands[0], op.types[0]))
        if len(values) < len(messages[number].values):
            continue
        if not arguments:
            raise KernelCompileError(
                "tl.device_print and tl.device_assert are supported on the host neither in a function that is not "
                "inlined nor in the function of a reduction or scan",
                (op.props["callee"] or "").removeprefix("@"),
            )
        _lower(Builder(module, ops), number, messages[number], values, arguments)
        values = []
    if values:
        raise KernelCompileError("the values of a tl.device_print were torn apart", "triton_print")
    block.ops = ops


def _lower(
    builder: Builder,
    number: int,
    message: Message,
    values: list[tuple[str, str]],
    arguments: list[tuple[str, str]],
) -> None:
    context, programs = arguments[0], arguments[-3:]

    def report(inner: Builder, addresses: list[str]) -> None:
        words = [inner.constant(number, "i64")]
        words += [inner.op("arith.extsi", [program], "i64") for program in programs]
        words += addresses
        kind = f"memref<{len(words)}xi64>"
        table = inner.alloc(kind)
        for i, word in enumerate(words):
            inner.store(word, table, kind, [inner.index(i)])
        callee: dict[str, str | None] = {"callee": "@dsv4.message"}
        inner.op("func.call", [context, (_address(inner, table, kind), "i64")], None, callee)

    addresses = [_in_memory(builder, *value) for value in values] if message.values else []
    if not message.asserts:
        report(builder, addresses)
        return
    size = math.prod(message.values[0].shape)
    callee: dict[str, str | None] = {"callee": "@dsv4.all"}
    passed = builder.op("func.call", [(addresses[0], "i64"), (builder.constant(size, "i64"), "i64")], "i1", callee)
    failed = builder.binary("xori", passed, builder.constant(1, "i1"), "i1")
    builder.branch(failed, lambda inner: report(inner, addresses))


def _in_memory(builder: Builder, value: str, kind: str) -> str:
    """Address (i64) of a copy of a scalar or tensor, dense and in row-major order.

    Without the copy, bufferization would not see that the value is read here and could reuse its buffer before.
    """
    shaped = Shaped.parse(kind)
    if shaped is None:
        memref = f"memref<1x{kind}>"
        buffer = builder.alloc(memref)
        builder.store(value, buffer, memref, [builder.index(0)])
    else:
        memref = str(shaped.of(kind="memref"))
        buffer = builder.alloc(memref)
        extents = list(shaped.shape)
        builder.loops(extents, lambda inner, i: inner.store(inner.load(value, kind, i), buffer, memref, i))
    return _address(builder, buffer, memref)


def _address(builder: Builder, buffer: str, kind: str) -> str:
    index = builder.op("memref.extract_aligned_pointer_as_index", [(buffer, kind)], "index")
    return builder.op("arith.index_cast", [(index, "index")], "i64")


def emit(name: str) -> str | None:
    """LLVM IR of this module's runtime function of a name; None for another name."""
    return _RUNTIME.get(name)


def entry_parts(slot: int) -> tuple[str, str, str]:
    """Pieces of the entry point of a kernel with messages: setting up, before a program, and the context argument.

    `slot` is the argument slot that holds the address of the launch's record. A program that is ended continues at the
    label `advance`.
    """
    setup = f"""  %context = alloca [{_JUMP_BYTES} x i8], align 16
  %jump = getelementptr i8, ptr %context, i64 {_JUMP_OFFSET}
  %record.slot = getelementptr i64, ptr %args, i64 {slot}
  %record = load ptr, ptr %record.slot
  store ptr %record, ptr %context
"""
    before = """  %jumped = call i32 @_setjmp(ptr %jump) returns_twice
  %ended = icmp ne i32 %jumped, 0
  br i1 %ended, label %advance, label %work
work:
"""
    return setup, before, "ptr %context, ptr %context, i64 0, i64 0, i64 1"
