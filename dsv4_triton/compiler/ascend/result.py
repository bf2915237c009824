"""The outcome of an offline compile, and its form on disk and in reports."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import asdict, dataclass, field
from typing import Any

from dsv4_triton.compiler.ascend.facts import Facts
from dsv4_triton.compiler.ascend.tools import Diagnostics

_SIZES = struct.Struct("<QQ")
_TEXTS = ("hivm", "binary")


@dataclass(frozen=True)
class CompileResult:
    """The outcome of one compile.

    status: ok, failed (a compiler refused the kernel), crash, time or memory (a compiler or its limit ended it).
    stage: where it ended: frontend, adapter, hivm, hivmc or facts; "" when ok.
    message: why it is not ok, in the compiler's words; "" when ok.
    said: overflows, notes about features switched off, and errors, as data.
    facts: memory plan, cores and gates; None unless the compiler lowered the kernel.
    missing: functions of the device library that the kernel calls and that the shipped library does not define.
    linked: whether the real `hivmc` made `binary`; without it the last step was skipped.
    seconds: what the compile took when it was done. cached: whether it was done before.
    hivm: the planned and synchronised HIVM, in MLIR's generic form.
    """

    kernel: str
    family: str
    status: str = "failed"
    stage: str = ""
    message: str = ""
    said: Diagnostics = field(default_factory=Diagnostics)
    facts: Facts | None = None
    missing: tuple[str, ...] = ()
    linked: bool = False
    seconds: float = 0.0
    cached: bool = False
    flags: tuple[str, ...] = ()
    hivm: str = field(default="", repr=False)
    binary: bytes | None = field(default=None, repr=False)

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def faults(self) -> list[str]:
        """Why the compiled kernel would be wrong, or would not get as far as a device."""
        if self.facts is None:
            return []
        found = [
            f"{read.operation} reads {read.bytes} bytes of {read.memory} that nothing wrote"
            for read in self.facts.unwritten
        ]
        found += [f"vector code reads {name}, which no vector core loads" for name in self.facts.lost_loads]
        if self.missing:
            found.append(f"the device library lacks {', '.join(self.missing)}")
        return found

    @property
    def losses(self) -> list[str]:
        """What makes the compiled kernel slower than it looks."""
        found = [note for note in self.said.notes if "retrying" not in note]
        if self.facts is None:
            return found
        # A5's compiler never splits it, and is not asked to.
        if self.facts.both_vector_cores is False and "--enable-auto-bind-sub-block=True" in self.flags:
            found.append("vector work is not split over both vector cores")
        if self.facts.scalar_loops:
            found.append(f"{len(self.facts.scalar_loops)} loops over single elements")
        return found + [f"{name.rpartition('.')[2]} goes by single elements" for name in self.facts.scalar_library]

    def as_dict(self) -> dict[str, Any]:
        """Everything but the texts, for JSON."""
        return {name: value for name, value in asdict(self).items() if name not in _TEXTS}

    def encode(self) -> bytes:
        head = json.dumps(self.as_dict()).encode()
        hivm = zlib.compress(self.hivm.encode(), 6)
        return _SIZES.pack(len(head), len(hivm)) + head + hivm + (self.binary or b"")

    @classmethod
    def decode(cls, body: bytes) -> CompileResult:
        head, hivm = _SIZES.unpack_from(body)
        at = _SIZES.size
        values = json.loads(body[at : at + head])
        values["said"] = Diagnostics.of(values["said"])
        values["facts"] = Facts.of(values["facts"]) if values["facts"] is not None else None
        values["missing"], values["flags"] = tuple(values["missing"]), tuple(values["flags"])
        text = zlib.decompress(body[at + head : at + head + hivm]).decode()
        return cls(**values, hivm=text, binary=body[at + head + hivm :] or None)
