"""LLVM dialect -> LLVM IR -> object code for this machine.

The kernel's function gets one `noalias` pointer parameter per temporary buffer, so that LLVM knows that buffers are
distinct; a generated entry point places them in the thread's arena and runs a range of program instances:

    void run(i64 *args, i8 *arena, i64 begin, i64 end, i32 grid_x, i32 grid_y, i32 grid_z)

Every kernel argument takes one 8-byte slot of `args`. Programs are numbered x fastest.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any

import llvmlite.binding as llvm

from dsv4_triton.compiler.frontend import KernelCompileError
from dsv4_triton.compiler.host import atomic, math
from dsv4_triton.compiler.host import gemm as gemms
from dsv4_triton.compiler.host import messages as device_messages

ENTRY = "dsv4_run"
ALIGNMENT = 64
_lock = threading.Lock()

# Memory of i1 values as bytes: LLVM does not vectorise loads and stores of types narrower than their storage.
_I1_LOAD = re.compile(r"^  (%(\w+)) = load i1, ptr ([^,\n]+).*$", re.MULTILINE)
_I1_STORE = re.compile(r"^  store i1 ([^,\n]+), ptr ([^,\n]+).*$", re.MULTILINE)

_SIZES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "half": 2, "bfloat": 2, "float": 4, "double": 8, "ptr": 8}
_MALLOC = re.compile(
    r"(%\w+) = call ptr @malloc\(i64 ptrtoint \(ptr getelementptr \((\w+), ptr null, i(?:32|64) (\d+)\) to i64\)\)"
)


@dataclass(frozen=True)
class HostObject:
    """Native code of one kernel specialisation: an object file, its entry symbol, the arena bytes it needs, and the
    messages that it may send while it runs.
    """

    code: bytes
    symbol: str
    arena_bytes: int
    messages: tuple[device_messages.Message, ...] = ()


def to_llvm_ir(dialect_text: str, kernel_name: str) -> str:
    """LLVM IR of a module in the LLVM dialect, translated by triton's own library."""
    from triton._C.libtriton import ir
    from triton._C.libtriton import llvm as triton_llvm

    with tempfile.NamedTemporaryFile("w", suffix=".mlir") as file:
        file.write(dialect_text)
        file.flush()
        with _lock:
            context = ir.context()
            ir.load_dialects(context)
            try:
                module = ir.parse_mlir_module(file.name, context)
                text = str(triton_llvm.to_module(module, triton_llvm.context()))
            except RuntimeError as error:
                raise KernelCompileError(f"kernel {kernel_name}: no LLVM IR: {error}") from error
            context.disable_multithreading()
    text = _I1_LOAD.sub(r"  %byte\2 = load i8, ptr \3\n  \1 = trunc nuw i8 %byte\2 to i1", text)
    counter = count()

    def store(match: re.Match[str]) -> str:
        name = f"%bit{next(counter)}"
        return f"  {name} = zext i1 {match[1]} to i8\n  store i8 {name}, ptr {match[2]}"

    return _I1_STORE.sub(store, text)


def _slot_type(kind: str) -> str:
    """LLVM type of a Triton scalar type in a slot."""
    return {"fp16": "half", "bf16": "bfloat", "fp32": "float", "fp64": "double", "f32": "float"}.get(
        kind, kind.replace("u", "i")
    )


def add_entry(
    text: str, function: str, types: list[tuple[int, str]], symbol: str, record_slot: int | None = None
) -> tuple[str, int]:
    """Place temporaries in an arena and append the entry point; returns the module and the arena's size in bytes.

    `types` are the argument slot and the Triton type of each of the kernel's run-time arguments, in order;
    `record_slot` is the slot of the launch's record where the kernel has messages (host/messages.py).
    """
    head = re.search(rf"^define void @{re.escape(function)}\((.*)\) *(.*)\{{$", text, re.MULTILINE)
    if head is None:
        raise KernelCompileError(f"kernel {function}: its function is missing from the LLVM IR")
    offsets: list[int] = []
    total = 0

    def place(match: re.Match[str]) -> str:
        nonlocal total
        size = _SIZES[match[2]] * int(match[3])
        offsets.append(total)
        total += -(-size // ALIGNMENT) * ALIGNMENT
        return f"{match[1]} = getelementptr i8, ptr %buffer{len(offsets) - 1}, i64 0"

    if re.search(r"\basm (?:sideeffect )?\"", text):
        raise KernelCompileError("inline assembly is not supported on the host", "inline_asm")
    text = _MALLOC.sub(place, text)
    if "@malloc(i64 %" in text:
        raise KernelCompileError(f"kernel {function}: needs a temporary whose size is only known at run time")
    buffers = [f"ptr noalias align {ALIGNMENT} %buffer{i}" for i in range(len(offsets))]
    old = head[0]
    new = f"define internal void @{function}({', '.join([head[1], *buffers])}) noinline {{"
    text = text.replace(old, new).replace("declare ptr @malloc(i64)\n", "")

    lines, arguments = [], []
    null_memref = "ptr null, ptr null, i64 0, i64 0, i64 1"
    for i, (place_of, kind) in enumerate(types):
        slot = f"%slot{i}"
        lines.append(f"  {slot} = getelementptr i64, ptr %args, i64 {place_of}")
        if kind.startswith("*"):
            lines.append(f"  %a{i} = load ptr, ptr {slot}")
            arguments.append(f"ptr %a{i}, ptr %a{i}, i64 0, i64 -1, i64 1")
        else:
            lines.append(f"  %a{i} = load {_slot_type(kind)}, ptr {slot}")
            arguments.append(f"{_slot_type(kind)} %a{i}")
    for i, offset in enumerate(offsets):
        lines.append(f"  %b{i} = getelementptr i8, ptr %arena, i64 {offset}")
    setup, before, context = "", "", null_memref
    if record_slot is not None:
        setup, before, context = device_messages.entry_parts(record_slot)
        text += "declare i32 @_setjmp(ptr) returns_twice\n"
    prologue = "\n".join(lines)
    operands = ", ".join(
        [context, null_memref, *arguments, "i32 %gx", "i32 %gy", "i32 %gz", "i32 %x", "i32 %y", "i32 %z"]
        + [f"ptr %b{i}" for i in range(len(offsets))]
    )
    entry = f"""
define void @{symbol}(ptr %args, ptr %arena, i64 %begin, i64 %end, i32 %gx, i32 %gy, i32 %gz) {{
{prologue}
{setup}  %wx = zext i32 %gx to i64
  %wy = zext i32 %gy to i64
  br label %head
head:
  %p = phi i64 [ %begin, %0 ], [ %next, %advance ]
  %more = icmp slt i64 %p, %end
  br i1 %more, label %body, label %done
body:
  %lx = urem i64 %p, %wx
  %row = udiv i64 %p, %wx
  %ly = urem i64 %row, %wy
  %lz = udiv i64 %row, %wy
  %x = trunc i64 %lx to i32
  %y = trunc i64 %ly to i32
  %z = trunc i64 %lz to i32
{before}  call void @{function}({operands})
  br label %advance
advance:
  %next = add nuw nsw i64 %p, 1
  br label %head
done:
  ret void
}}
"""
    return text + entry, total


@lru_cache(maxsize=1)
def _initialized() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


@lru_cache(maxsize=1)
def cpu() -> tuple[str, str]:
    """Name and feature string of this machine's CPU as LLVM knows them."""
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def target_machine() -> Any:
    """A fresh LLVM target machine for this CPU (they are not shared between threads)."""
    _initialized()
    name, features = cpu()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=name, features=features, opt=3, reloc="pic", codemodel="default")


def vector_lanes() -> int:
    """Floats per vector register of this CPU."""
    features = cpu()[1].split(",")
    return 16 if "+avx512f" in features else 8 if "+avx2" in features else 4


def _link_runtime(text: str) -> str:
    """Replace declarations of this package's runtime functions by their definitions."""
    definitions = []
    products = False

    def define(match: re.Match[str]) -> str:
        nonlocal products
        gemm = gemms.Gemm.of(match[1])
        definition: str | None
        if gemm is not None:
            definition = gemms.emit(gemm, vector_lanes())
        else:
            definition = atomic.emit(match[1]) or device_messages.emit(match[1])
        if definition is None:
            return match[0]
        products |= gemm is not None
        definitions.append(definition)
        return ""

    text = re.sub(r"^declare [^@\n]*@(dsv4\.[\w.]+)\(.*\).*$", define, text, flags=re.MULTILINE)
    if products:
        for width in (1, 2, 4, 8, 16):
            kind = f"<{width} x float>"
            definitions.append(f"declare {kind} @llvm.fma.v{width}f32({kind}, {kind}, {kind})\n")
            definitions.append(f"declare float @llvm.vector.reduce.fadd.v{width}f32(float, {kind})\n")
    return math.link(text + "\n" + "".join(definitions))


def compile_ir(text: str, kernel_name: str) -> bytes:
    """Optimise LLVM IR (O3) and emit an object file."""
    machine = target_machine()
    text = _link_runtime(text)
    if path := os.environ.get("DSV4_TRITON_DUMP_DIR"):
        with open(os.path.join(path, f"{kernel_name}.ll"), "w") as file:
            file.write(text)
    try:
        module = llvm.parse_assembly(text)
    except RuntimeError as error:
        raise KernelCompileError(f"kernel {kernel_name}: LLVM does not accept its IR: {error}") from error
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = True
    options.slp_vectorization = True
    options.loop_interleaving = True
    # Unrolling at every constant bound makes builds several times slower and little else faster.
    options.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    if path:
        with open(os.path.join(path, f"{kernel_name}.opt.ll"), "w") as file:
            file.write(str(module))
        with open(os.path.join(path, f"{kernel_name}.s"), "w") as file:
            file.write(machine.emit_assembly(module))
    return machine.emit_object(module)
