"""Accuracy of transcendental functions, and matrix products of every operand type and many shapes."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl

from dsv4_triton.compiler.host import gemm as host_gemm
from tests.compiler.host import feature_kernels as k
from tests.numeric import assert_close, assert_equal

pytestmark = pytest.mark.usefixtures("host_driver")

INF, NAN = float("inf"), float("nan")
# Function: PyTorch's double version, range, allowed error in units in the last place.
FUNCTIONS = {
    "exp": (torch.exp, -105, 90, 1.5),
    "exp2": (torch.exp2, -151, 129, 1.5),
    "log": (torch.log, 0, 10, 1.5),
    "log2": (torch.log2, 0, 10, 1.5),
    "tanh": (torch.tanh, -10, 10, 2.0),
    "sin": (torch.sin, -100, 100, 1.0),
    "cos": (torch.cos, -100, 100, 1.0),
    "erf": (torch.erf, -4, 4, 1.0),
    "rsqrt": (torch.rsqrt, 0, 100, 2.0),
    "sqrt": (torch.sqrt, 0, 100, 0.51),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name):
    function, low, high, allowed = FUNCTIONS[name]
    special = torch.tensor(
        [0.0, -0.0, INF, -INF, NAN, 1e-45, 1e-38, 3e38, 88.7, 88.8, -87.5, -103.9, -104.5, 128.0, -149.0, 1.0]
    )
    x = torch.cat(
        [torch.rand(1 << 16) * (high - low) + low, torch.randn(1 << 14), torch.randn(1 << 14) * 1e-3, special]
    )
    o = torch.empty_like(x)
    k.function[(-(-x.numel() // 4096),)](x, o, x.numel(), name, 4096)
    exact = function(x.double())
    rounded = exact.float()
    assert torch.equal(o.isnan(), rounded.isnan())
    assert torch.equal(o.isinf(), rounded.isinf())
    finite = torch.isfinite(rounded)
    unit = (torch.nextafter(rounded.abs(), torch.tensor(INF)) - rounded.abs()).double()
    error = ((o.double() - exact).abs() / unit)[finite]
    assert error.max() <= allowed, f"{error.max():.2f} ulp at {x[finite][error.argmax()]:.9g}"


OPERANDS = {
    "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i8": torch.int8,
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2,
}  # fmt: skip


def _operands(name, *shapes):
    if name == "i8":
        return [torch.randint(-128, 128, shape, dtype=torch.int8) for shape in shapes]
    return [torch.randn(shape).to(OPERANDS[name]) for shape in shapes]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("shape", [(1, 64, 64), (4, 32, 16), (16, 16, 16), (64, 32, 64)], ids=str)
def test_dot(operand, shape, transposed):
    m, n, depth = shape
    a, b = _operands(operand, (m, depth), (n, depth) if transposed else (depth, n))
    integer = operand == "i8"
    c = torch.empty(m, n, dtype=torch.int32 if integer else torch.float32)
    k.dot[(1,)](a, b, c, m, n, depth, transposed, tl.int32 if integer else tl.float32)
    wide = (a.double() @ (b.double().t() if transposed else b.double())).to(c.dtype)
    if integer:
        assert_equal(c, wide)
    else:
        # fp32 accumulation of `depth` products of size 1.
        assert_close(c, wide, rtol=1e-6, atol=2e-6 * depth**0.5)


def test_int8_dot_is_exact_at_the_largest_sums():
    a, b = torch.full((16, 1024), -128, dtype=torch.int8), torch.full((16, 1024), -128, dtype=torch.int8)
    c = torch.empty(16, 16, dtype=torch.int32)
    k.dot[(1,)](a, b, c, 16, 16, 1024, True, tl.int32)
    assert (c == 128 * 128 * 1024).all()


def test_batched_dot():
    a, b, c = torch.randn(4, 16, 32), torch.randn(4, 32, 16), torch.empty(4, 16, 16)
    k.batched_dot[(1,)](a, b, c)
    assert_close(c, (a.double() @ b.double()).float(), rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_matmul_with_ragged_edges(dtype):
    a, b = torch.randn(100, 96).to(dtype), torch.randn(96, 130).to(dtype)
    c = torch.empty(100, 130)
    k.matmul[(2, 3)](a, b, c, 100, 130, 96, BM=64, BN=64, BK=32)
    assert_close(c, (a.double() @ b.double()).float(), rtol=1e-6, atol=4e-5)


def test_nan_and_infinity_pass_through_products():
    a, b, c = torch.ones(16, 16), torch.ones(16, 16), torch.empty(16, 16)
    a[2, 3], a[5, 1], b[0, 7] = NAN, INF, -INF
    k.dot[(1,)](a, b, c, 16, 16, 16, False, tl.float32)
    assert_equal(c.isnan(), (a.double() @ b.double()).isnan())
    assert c[5, 0] == INF and c[0, 7] == -INF


@pytest.mark.parametrize("gemm", [
    host_gemm.Gemm("bf16", "bf16", "f32", 8, 160, 512, True),
    host_gemm.Gemm("f32", "f32", "f32", 20, 100, 50, False),
    host_gemm.Gemm("i8", "i8", "i32", 7, 8, 8, True),
], ids=lambda g: g.name)  # fmt: skip
def test_gemm_names_round_trip(gemm):
    assert host_gemm.Gemm.of(gemm.name) == gemm
    assert gemm.supported
    for lanes in (4, 8, 16):
        assert f"@{gemm.name}(" in host_gemm.emit(gemm, lanes)
