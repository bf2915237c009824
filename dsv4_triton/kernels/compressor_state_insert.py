"""Write the raw compressor rows of new tokens to the paged state: row = [u | g + ape[p mod r]].

proj [T, 2W] fp32 (= [u | g], W = c * d), ape [r, W] fp32, positions [T] int32 (absolute), slots [T] int32,
state [blocks, rows, 2W] fp32. Nothing is rounded beyond one fp32 addition. The row is written whole, so a later fold
needs neither ape nor the position's phase.

Grid: one program per vector core at most; each walks its tokens with a stride and skips slots below 0. A row is one
transfer in and one out: ape is added to all of it, as -0 to u, which changes no bit.
UB bytes: 3 rows of 2W fp32, doubled (48 KiB at W = 1024). Families: all.
Source: docs/model.md, sections 5 (row, state) and 8 (slots).
"""

import torch
import triton
import triton.language as tl

from dsv4_triton.autotune.space import Space, buffering
from dsv4_triton.device import family_of
from dsv4_triton.kernels._checks import check_filled, check_tensor

OP = "compressor_state_insert"


@triton.jit
def insert_state_row(
    source, ape_ptr, position, state_ptr, slot, block_stride, ROWS: tl.constexpr, RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the row [u | g] at `source` to `slot` (>= 0) of the state."""
    column = tl.arange(0, 2 * WIDTH)
    row = state_ptr + (slot // ROWS).to(tl.int64) * block_stride + (slot % ROWS) * (2 * WIDTH)
    ape = tl.load(ape_ptr + (position % RATIO * WIDTH - WIDTH) + column, mask=column >= WIDTH, other=-0.0)
    tl.store(row + column, tl.load(source + column) + ape)


@triton.jit(do_not_specialize=["tokens"])
def _compressor_state_insert_kernel(
    proj_ptr,
    ape_ptr,
    positions_ptr,
    state_ptr,
    slots_ptr,
    tokens,
    proj_stride,
    block_stride,
    ROWS: tl.constexpr,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
):
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            source = proj_ptr + tl.cast(token, tl.int64) * proj_stride
            position = tl.load(positions_ptr + token)
            insert_state_row(source, ape_ptr, position, state_ptr, slot, block_stride, ROWS, RATIO, WIDTH)


SPACE = Space(
    OP, default=lambda family, key: {"multibuffer": None}, candidates=lambda family, key: buffering(family)
)  # fmt: skip
"""Nothing but an option of the compiler: a row is as wide as it is."""


def compressor_state_insert(
    proj: torch.Tensor, ape: torch.Tensor, positions: torch.Tensor, state: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write `[u | g + ape[p mod r]]` of each token to its state row, in place.

    proj [T, 2W] fp32 is [u | g] (rows may be a slice of a wider tensor), ape [r, W] fp32, positions [T] int32
    absolute, state [blocks, rows, 2W] fp32 (any block stride), slots [T] int32 (block * rows + offset; -1 = skip).
    TypeError or ValueError names the argument that does not fit.
    """
    check_tensor(OP, "ape", ape, (None, None), torch.float32)
    ratio, width = ape.shape
    check_tensor(OP, "proj", proj, (None, 2 * width), torch.float32, layout="rows")
    tokens, device = proj.shape[0], proj.device
    check_tensor(OP, "ape", ape, (ratio, width), torch.float32, device=device)
    check_tensor(OP, "positions", positions, (tokens,), torch.int32, device=device)
    check_tensor(OP, "state", state, (None, None, 2 * width), torch.float32, device=device, layout="page")
    check_tensor(OP, "slots", slots, (tokens,), torch.int32, device=device)
    if tokens == 0:
        return
    check_filled(OP, ape=ape, state=state)
    family = family_of(device.type)
    config = SPACE(family, tokens=tokens, width=width, ratio=ratio)
    grid = (min(tokens, family.vector_cores),)
    _compressor_state_insert_kernel[grid](
        proj,
        ape,
        positions,
        state,
        slots,
        tokens,
        proj.stride(0),
        state.stride(0),
        ROWS=state.shape[1],
        RATIO=ratio,
        WIDTH=width,
        **config.options,
    )
