"""Reading the functions of LLVM bitcode."""

from __future__ import annotations

import llvmlite.binding as llvm
import pytest

from dsv4_triton.compiler.ascend import library
from dsv4_triton.compiler.ascend.library import called_functions, defined_functions, missing_functions
from dsv4_triton.compiler.ascend.tools import tools_for

MODULE = """
@table = constant [4 x i32] [i32 1, i32 2, i32 3, i32 4]
declare i32 @only_declared(i32)
define i32 @_mlir_ciface_add_1d_float(i32 %x) { %y = call i32 @only_declared(i32 %x) ret i32 %y }
define linkonce_odr void @"a name.with-signs"() { ret void }
define internal i64 @_mlir_ciface_nd2nz_half(ptr %p) { %v = load i64, ptr %p ret i64 %v }
"""
CALLS = """
  "func.func"() <{function_type = () -> (), sym_name = "add_1d_float", sym_visibility = "private"}> ({
  }) {hivm.func_core_type = #hivm.func_core_type<AIV>, llvm.emit_c_interface} : () -> ()
  "func.func"() <{function_type = () -> (), sym_name = "nd2nz_half", sym_visibility = "private"}> ({
  }) {hivm.func_core_type = #hivm.func_core_type<AIV>} : () -> ()
  "func.func"() <{function_type = () -> (), sym_name = "either", sym_visibility = "private"}> ({
  }) : () -> ()
  "func.func"() <{function_type = () -> (), sym_name = "kernel"}> ({
    "func.return"() : () -> ()
  }) {hivm.func_core_type = #hivm.func_core_type<AIV>} : () -> ()
"""


def bitcode(text: str) -> bytes:
    return llvm.parse_assembly(text).as_bitcode()


def test_defined_functions():
    names = {"_mlir_ciface_add_1d_float", "a name.with-signs", "_mlir_ciface_nd2nz_half"}
    assert defined_functions(bitcode(MODULE)) == names


def test_what_is_no_bitcode():
    with pytest.raises(ValueError, match="not LLVM bitcode"):
        defined_functions(b"\x7fELF" + bytes(100))


@pytest.mark.parametrize("name", ["meta_op.aic.bc", "meta_op.mix.aiv.bc"])
def test_agrees_with_llvm_on_a_shipped_library(name):
    path = tools_for("c220").libraries["AIC"].parent / name
    data = path.read_bytes()
    theirs = {f.name for f in llvm.parse_bitcode(data).functions if not f.is_declaration}
    assert defined_functions(data) == theirs and len(theirs) > 300


def test_a5_library_that_llvm_refuses_is_read():
    """Its attributes are of a private LLVM."""
    path = tools_for("c310").libraries["AIC"]
    with pytest.raises(RuntimeError, match="bitcode"):
        llvm.parse_bitcode(path.read_bytes())
    assert "nd2nz_bfloat16_t" in library._library(path)


def test_calls_and_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("DSV4_TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert called_functions(CALLS) == [("add_1d_float", "AIV"), ("nd2nz_half", "AIV"), ("either", "")]
    aiv, aic = tmp_path / "aiv.bc", tmp_path / "aic.bc"
    aiv.write_bytes(bitcode(MODULE.replace("nd2nz_half", "either")))
    aic.write_bytes(bitcode(MODULE))
    for _ in range(2):  # read, then from the cache
        library._library.cache_clear()
        assert missing_functions(CALLS, {"AIV": aiv, "AIC": aic}) == ("nd2nz_half",)
