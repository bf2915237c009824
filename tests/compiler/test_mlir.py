"""The reader and writer of MLIR's generic form."""

from __future__ import annotations

import pytest

from dsv4_triton.compiler import mlir

MODULE = """#map = affine_map<(d0) -> (d0)>
"builtin.module"() ({
  "func.func"() <{arg_attrs = [{}, {tt.kind = 0 : i32}], function_type = (memref<?xf32>, i32) -> (), sym_name = "f"}> ({
  ^bb0(%arg0: memref<?xf32>, %arg1: i32):
    %0 = "arith.constant"() <{value = "a \\22, }> ({" : !any}> : () -> i32
    %1:2 = "scf.while"(%0, %0) ({
    ^bb0(%a: i32, %b: i32):
      %2 = "arith.cmpi"(%a, %b) <{predicate = 2 : i64}> : (i32, i32) -> i1
      "scf.condition"(%2, %a, %b) : (i1, i32, i32) -> ()
    }, {
    ^bb0(%c: i32, %d: i32):
      "scf.yield"(%d, %c) : (i32, i32) -> ()
    }) {note} : (i32, i32) -> (i32, i32)
    "use"(%1#1) <{indexing_maps = [#map, affine_map<(d0, d1) -> (d1, d0)>], unit}> : (i32) -> ()
    "func.return"() : () -> ()
  }) {global_kernel = "local"} : () -> ()
}) : () -> ()
"""


def test_round_trip():
    module = mlir.parse(MODULE)
    text = str(module)
    assert str(mlir.parse(text)) == text
    (function,) = module.functions
    names = [op.name for op in function.walk()]
    assert names == [
        "func.func",
        "arith.constant",
        "scf.while",
        "arith.cmpi",
        "scf.condition",
        "scf.yield",
        "use",
        "func.return",
    ]
    use = next(op for op in function.walk() if op.name == "use")
    assert use.operands == ["%1#1"]
    assert use.props == {
        "indexing_maps": "[affine_map<(d0) -> (d0), affine_map<(d0, d1) -> (d1, d0)>]",
        "unit": None,
    } or (use.props["indexing_maps"] == "[affine_map<(d0) -> (d0)>, affine_map<(d0, d1) -> (d1, d0)>]")


def test_rename_and_clone():
    module = mlir.parse(MODULE)
    (function,) = module.functions
    mapping: dict[str, str] = {"%arg1": "%other"}
    copies = mlir.clone(function.body.ops, mapping, module.fresh)
    defined = [result for op in copies for nested in op.walk() for result in nested.results]
    assert len(set(defined)) == len(defined) and not set(defined) & {"%0", "%1#0", "%1#1", "%2"}
    assert copies[2].operands == [mapping["%1#1"]]


@pytest.mark.parametrize(("text", "shape", "element", "layout"), [
    ("tensor<4x?xbf16>", (4, -1), "bf16", ""),
    ("memref<f32>", (), "f32", ""),
    ("memref<64x32xf32, strided<[?, 1], offset: ?>>", (64, 32), "f32", "strided<[?, 1], offset: ?>"),
])  # fmt: skip
def test_shaped_types(text, shape, element, layout):
    kind = mlir.Shaped.parse(text)
    assert kind is not None
    assert (kind.shape, kind.element, kind.layout, str(kind)) == (shape, element, layout, text)


def test_scalar_types_are_not_shaped():
    assert mlir.Shaped.parse("i32") is None and mlir.Shaped.parse("!tt.ptr<f32>") is None


@pytest.mark.parametrize("text", ["", "module {", '"a"(%0', "%0 = arith.constant 1 : i32"])
def test_other_text_is_an_error(text):
    with pytest.raises(mlir.MlirSyntaxError):
        mlir.parse(text)
