"""Which functions the device libraries of AscendNPU IR define, and which of a kernel's calls they lack.

The libraries are LLVM bitcode for a private target, some of it with attributes that no public LLVM reads, so only what
is needed is read here: the function records of the module block and the string table (LLVM's bitstream format,
https://llvm.org/docs/BitCodeFormat.html).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from dsv4_triton.compiler import cache

_MODULE_BLOCK, _STRTAB_BLOCK = 8, 23
_FUNCTION_RECORD, _BLOB_RECORD = 8, 1
_CHAR6 = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._"
_ENTER_SUBBLOCK, _DEFINE_ABBREV, _UNABBREVIATED = 1, 2, 3

_PREFIX = "_mlir_ciface_"


class _Reader:
    def __init__(self, data: bytes, position: int):
        self.data = data
        self.position = position

    def fixed(self, width: int) -> int:
        if width == 0:
            return 0
        start, shift = self.position >> 3, self.position & 7
        word = int.from_bytes(self.data[start : start + ((shift + width + 7) >> 3)], "little")
        self.position += width
        return word >> shift & ((1 << width) - 1)

    def vbr(self, width: int) -> int:
        more, value, shift = 1 << (width - 1), 0, 0
        while True:
            chunk = self.fixed(width)
            value |= (chunk & (more - 1)) << shift
            if not chunk & more:
                return value
            shift += width - 1

    def align(self) -> None:
        self.position = (self.position + 31) & ~31

    def abbreviation(self) -> list[tuple[str, int]]:
        """The operands of an abbreviation: kind, and literal value or width."""
        operands = []
        for _ in range(self.vbr(5)):
            if self.fixed(1):
                operands.append(("literal", self.vbr(8)))
            else:
                kind = ("", "fixed", "vbr", "array", "char6", "blob")[self.fixed(3)]
                operands.append((kind, self.vbr(5) if kind in ("fixed", "vbr") else 0))
        return operands

    def scalar(self, kind: str, width: int) -> int:
        if kind == "literal":
            return width
        if kind == "fixed":
            return self.fixed(width)
        if kind == "vbr":
            return self.vbr(width) if width else 0
        return ord(_CHAR6[self.fixed(6)])

    def record(self, operands: list[tuple[str, int]]) -> list[Any]:
        """Code and values of an abbreviated record; a blob is one value of bytes."""
        values: list[Any] = []
        for i, (kind, width) in enumerate(operands):
            if kind == "array":
                values += [self.scalar(*operands[i + 1]) for _ in range(self.vbr(6))]
                break
            if kind == "blob":
                size = self.vbr(6)
                self.align()
                start = self.position >> 3
                values.append(self.data[start : start + size])
                self.position += 8 * size
                self.align()
            else:
                values.append(self.scalar(kind, width))
        return values

    def block(self) -> tuple[int, int, int]:
        """After ENTER_SUBBLOCK: the block's number, its abbreviation width, and where it ends."""
        number, width = self.vbr(8), self.vbr(4)
        self.align()
        words = self.fixed(32)
        return number, width, self.position + 32 * words


def defined_functions(data: bytes) -> set[str]:
    """Names of the functions that a bitcode module defines; `ValueError` for anything but a module with a string
    table.
    """
    if data[:4] != b"BC\xc0\xde":
        raise ValueError("not LLVM bitcode")
    reader = _Reader(data, 32)
    functions: list[list[int]] = []
    names = b""
    while reader.position >> 3 < len(data) - 3:
        if reader.fixed(2) != _ENTER_SUBBLOCK:
            raise ValueError("not LLVM bitcode: no block at the top")
        number, width, end = reader.block()
        abbreviations: list[list[tuple[str, int]]] = []
        while number in (_MODULE_BLOCK, _STRTAB_BLOCK) and reader.position < end:
            kind = reader.fixed(width)
            if kind == _ENTER_SUBBLOCK:
                reader.position = reader.block()[2]
                continue
            if kind == _DEFINE_ABBREV:
                abbreviations.append(reader.abbreviation())
                continue
            if kind == _UNABBREVIATED:
                code, count = reader.vbr(6), reader.vbr(6)
                record: list[Any] = [code, *(reader.vbr(6) for _ in range(count))]
            elif kind > _UNABBREVIATED:
                record = reader.record(abbreviations[kind - 4])
            else:
                break
            if number == _MODULE_BLOCK and record[0] == _FUNCTION_RECORD:
                functions.append(record[1:])
            elif number == _STRTAB_BLOCK and record[0] == _BLOB_RECORD:
                names = record[1]
        reader.position = end
    if functions and not names:
        raise ValueError("bitcode without a string table")
    # A function record is [name offset, name size, type, calling convention, is only declared, ...].
    return {names[f[0] : f[0] + f[1]].decode() for f in functions if not f[4]}


@lru_cache(maxsize=16)
def _library(path: Path) -> frozenset[str]:
    """Functions of one library file that MLIR can call; kept on disk, as reading a large file takes seconds."""
    data = path.read_bytes()
    digest = hashlib.sha256(cache.toolchain("ascend/library.py").encode() + data).hexdigest()
    stored = cache.load("library", digest)
    if stored is None:
        found = (name[len(_PREFIX) :] for name in defined_functions(data) if name.startswith(_PREFIX))
        stored = "\n".join(sorted(found)).encode()
        cache.store("library", digest, stored)
    return frozenset(stored.decode().splitlines())


def called_functions(module: str) -> list[tuple[str, str]]:
    """(name, core) of the functions that a lowered kernel calls and does not define, in generic MLIR text."""
    declaration = r'sym_name = "([\w.$]+)", sym_visibility = "private"}> \({\s*}\)([^\n]*)'
    calls = []
    for name, attributes in re.findall(declaration, module):
        core = re.search(r"func_core_type<(\w+)>", attributes)
        calls.append((name, core[1] if core else ""))
    return calls


def missing_functions(module: str, libraries: Mapping[str, Path]) -> tuple[str, ...]:
    """Names of the functions that a lowered kernel calls and the library for its core (AIV, AIC) does not define."""
    missing = set()
    for name, core in called_functions(module):
        searched = [libraries[core]] if core in libraries else libraries.values()
        if not any(name in _library(file) for file in searched):
            missing.add(name)
    return tuple(sorted(missing))
