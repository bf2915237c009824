"""What the installed versions of the toolchain get wrong, and how it is put right: one table.

Each entry names the versions it is for and is applied with those alone. `tests/compiler/test_ascend_fixups.py` compiles
a kernel that needs it with and without it, so the test fails when an entry can go.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True)
class Fixup:
    """One workaround.

    arch: the instruction set it is for, "" for all.
    versions: distribution -> the releases that need it; all distributions must match.
    rewrite: ttadapter MLIR text -> text that the HIVM compiler reads; None where it acts elsewhere (`reason`).
    """

    name: str
    arch: str
    versions: Mapping[str, tuple[str, ...]]
    reason: str
    rewrite: Callable[[str], str] | None = None

    @property
    def applies(self) -> bool:
        """Whether the installed versions need it."""
        for package, releases in self.versions.items():
            with contextlib.suppress(metadata.PackageNotFoundError):
                if metadata.version(package).split("+")[0] in releases:
                    continue
            return False
        return True


_SKEW = {"triton-ascend": ("3.2.0",), "ascendnpu-ir": ("1.2.0",)}

FIXUPS = (
    Fixup(
        "fp8 types", "", {"triton-ascend": ("3.2.0",)},
        "the front end takes fp8 types by a constant of two modules instead of an option, which `fp8_types` sets",
    ),
    Fixup(
        "unsigned_src", "c310", _SKEW,
        "the A5 compiler wants an attribute on reductions with an index that the adapter does not write",
        lambda text: re.sub(r'(tie_break_left = "\w+")(?!, unsigned_src)', r'\1, unsigned_src = "false"', text),
    ),
    Fixup(
        "fp_to_fp", "c310", _SKEW,
        "the adapter leaves Triton's cast from fp8, which the A5 compiler reads as arith.extf",
        lambda text: re.sub(r"tt\.fp_to_fp (%\S+) : (\S+) -> (\S+)", r"arith.extf \1 : \2 to \3", text),
    ),
)  # fmt: skip
"""Entries with a `rewrite` change the text between triton-ascend's adapter and AscendNPU IR's compiler."""


@contextmanager
def fp8_types(enabled: bool) -> Iterator[None]:
    """Whether the language front end knows fp8 types, for the length of a `with` block."""
    from triton.triton_patch.language import core, semantic

    saved = core.is_compile_on_910_95, semantic.is_compile_on_910_95
    core.is_compile_on_910_95 = semantic.is_compile_on_910_95 = enabled
    try:
        yield
    finally:
        core.is_compile_on_910_95, semantic.is_compile_on_910_95 = saved


def rewrite(text: str, arch: str, *, without: str = "") -> str:
    """ttadapter MLIR as the compiler for `arch` reads it; `without` names an entry to leave out."""
    for fixup in FIXUPS:
        if fixup.rewrite is not None and fixup.arch in ("", arch) and fixup.name != without and fixup.applies:
            text = fixup.rewrite(text)
    return text
