"""The gates on compiled code: local memory that is read and never written, and loops over single elements."""

from __future__ import annotations

import pytest
import torch

from dsv4_triton.compiler.ascend import compile
from dsv4_triton.compiler.ascend.facts import Facts, ScalarLoop, UnwrittenRead
from dsv4_triton.device import A2, A3, A5
from tests.compiler.ascend import kernels as k
from tests.compiler.ascend.kernels import FLASH, MATMUL, SQUARES, empty, launch


def facts_of(wanted: k.Launch, family=A2) -> Facts:
    result = compile(wanted.kernel, wanted.signature, family, wanted.options)
    assert result.ok and not result.said.notes, result.message
    return result.facts


class TestUnwrittenReads:
    @pytest.mark.parametrize("family", [A2, A3], ids=lambda family: family.name)
    def test_the_lost_load(self, family):
        """A tile used by `tl.dot` and by vector code in an accumulating loop: the vector core never loads it.

        When this fails because nothing is unwritten, the fault of AscendNPU IR 1.2.0 is mended and the gate's users can
        let go of their second pointers.
        """
        facts = facts_of(SQUARES(twice=False), family)
        tiles = 2 * 16 * 128 * 2  # the buffer of two unrolled steps, bf16
        assert facts.unwritten == (UnwrittenRead("aiv", "vcast", "UB", 0, tiles, reused=False),)
        assert facts.loads == {"aic": 2, "aiv": 0} and facts.lost_loads == ("x",)

    @pytest.mark.parametrize("family", [A2, A3], ids=lambda family: family.name)
    def test_a_second_pointer_brings_it_back(self, family):
        facts = facts_of(SQUARES(twice=True), family)
        assert facts.unwritten == () == facts.lost_loads and facts.loads == {"aic": 2, "aiv": 1}

    def test_without_a_loop_it_is_there(self):
        x = (16, 128)
        facts = facts_of(launch(k.product_of_one_step, x, x, empty(16, 16), empty(16), B=128))
        assert facts.unwritten == () == facts.lost_loads and facts.loads["aiv"] == 1

    def test_a5_loads_it(self):
        facts = facts_of(SQUARES(twice=False), A5)
        assert facts.unwritten == () and facts.loads["aiv"] == 1

    def test_buffers_behind_selects_loops_and_views_are_followed(self):
        """Double-buffered tiles (`arith.select`), loop-carried accumulators and reshaped rows."""
        for facts in (facts_of(FLASH()), facts_of(MATMUL())):
            assert facts.unwritten == () == facts.lost_loads


def scalar_loops(kernel, *arguments, family=A2, **keywords) -> tuple[ScalarLoop, ...]:
    return facts_of(launch(kernel, *arguments, **keywords), family).scalar_loops


INDEX = empty(64, dtype=torch.int32)


class TestScalarLoops:
    def test_gather_of_elements(self):
        loops = scalar_loops(k.gather_elements, empty(64), INDEX, empty(64), N=64)
        assert loops == (ScalarLoop("aiv", depth=1, trips=64, global_loads=1, local_loads=1, stores=1, element_dmas=0),)

    def test_scatter_of_elements(self):
        (loop,) = scalar_loops(k.scatter_elements, empty(64), INDEX, empty(64), N=64)
        assert (loop.trips, loop.element_dmas) == (64, 1)

    def test_prefix_sum_is_scalar_code_on_a2_only(self):
        arguments = (empty(16, 64), empty(16, 64))
        on_a2 = facts_of(launch(k.prefix_sum, *arguments, M=16, N=64))
        assert on_a2.scalar_library == ("hivm.hir.vcumsum",)
        on_a5 = facts_of(launch(k.prefix_sum, *arguments, M=16, N=64), A5)
        assert on_a5.scalar_library == () and on_a5.scalar_loops == ()

    @pytest.mark.parametrize("family", [A2, A5], ids=lambda family: family.name)
    def test_rows_are_no_elements(self, family):
        """One scalar and one DMA a row is how rows are gathered."""
        rows = (empty(64, 64), INDEX, empty(64, 64))
        assert scalar_loops(k.gather_rows, *rows, N=64, D=64, family=family) == ()
        assert scalar_loops(k.insert_rows, *rows, 64, D=64, family=family) == ()

    def test_counters_of_the_compiler_are_no_elements(self):
        """A5's matmul counts its steps in a variable on the stack."""
        assert facts_of(MATMUL(), A5).scalar_loops == ()
