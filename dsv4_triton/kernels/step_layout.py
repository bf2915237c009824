"""Per-token layout of one step's ragged batch, expanded on the device: one launch per step, no host copy.

Formula, for token i of request b, `query_start_loc[b] <= i < query_start_loc[b + 1]`:
`p = seq_lens[b] - (query_start_loc[b + 1] - i)`, `n_vis_r = (p + 1) // r`. Rows that belong to no request, or whose
position would be negative, are padding: -1, -1, 0, 0. Integers only.
Grid: persistent over requests plus one item for the tail; a request writes its own rows, so each row is written once.
UB: about 45 bytes per row of a block. Source: vLLM's ragged batch metadata; visible counts from the DeepSeek-V4 mask.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton.autotune.space import Choices, Key, Space, buffering
from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels._checks import check_tensor, output

OP = "step_layout"
DECODE_BLOCK = 16
PREFILL_BLOCK = 512


@triton.jit
def _store_rows(positions_ptr, token_req_ptr, n_vis4_ptr, n_vis128_ptr, row, inside, position, request):
    live = position >= 0
    position = tl.where(live, position, -1)
    tl.store(positions_ptr + row, position, mask=inside)
    tl.store(token_req_ptr + row, tl.where(live, request, -1), mask=inside)
    tl.store(n_vis4_ptr + row, (position + 1) >> 2, mask=inside)
    tl.store(n_vis128_ptr + row, (position + 1) >> 7, mask=inside)


@triton.jit(do_not_specialize=["requests", "num_tokens"])
def _step_layout_kernel(
    query_start_loc_ptr,
    seq_lens_ptr,
    positions_ptr,
    token_req_ptr,
    n_vis4_ptr,
    n_vis128_ptr,
    requests,
    num_tokens,
    BLOCK: tl.constexpr,
):
    """Items 0..requests-1 are requests; item `requests` is the padding after the last one."""
    lane = tl.arange(0, BLOCK)
    for item in range(tl.program_id(0), requests + 1, tl.num_programs(0)):
        start = tl.load(query_start_loc_ptr + item)
        if item < requests:
            end = tl.load(query_start_loc_ptr + item + 1)
            first = tl.load(seq_lens_ptr + item) - end
            for base in range(start, tl.minimum(end, num_tokens), BLOCK):
                row = base + lane
                _store_rows(
                    positions_ptr, token_req_ptr, n_vis4_ptr, n_vis128_ptr,
                    row, row < tl.minimum(end, num_tokens), row + first, item,
                )  # fmt: skip
        else:
            for base in range(start, num_tokens, BLOCK):
                row = base + lane
                _store_rows(
                    positions_ptr, token_req_ptr, n_vis4_ptr, n_vis128_ptr,
                    row, row < num_tokens, tl.full((BLOCK,), -1, tl.int32), -1,
                )  # fmt: skip


def _default(family: Family, key: Key) -> dict[str, Any]:
    """BLOCK: rows that are stored at once."""
    block = DECODE_BLOCK if key["tokens"] <= 4 * key["requests"] else PREFILL_BLOCK
    return {"BLOCK": block, "multibuffer": None}


def _candidates(family: Family, key: Key) -> Choices:
    return {"BLOCK": (8, 16, 32, 64, 128, 256, 512, 1024), **buffering(family)}


SPACE = Space(OP, default=_default, candidates=_candidates, buckets=("tokens", "requests"))


def step_layout(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_tokens: int,
    *,
    positions: torch.Tensor | None = None,
    token_req: torch.Tensor | None = None,
    n_vis4: torch.Tensor | None = None,
    n_vis128: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(positions, token_req, n_vis4, n_vis128)`, each `[num_tokens]` int32, of one step.

    `query_start_loc [B + 1]` int32 starts at 0 and does not decrease (repeat its last value for padded requests);
    `seq_lens [B]` int32 counts the tokens of each request after this step. The keyword tensors are outputs to reuse.
    """
    check_tensor(OP, "seq_lens", seq_lens, (None,), torch.int32)
    requests, device = seq_lens.shape[0], seq_lens.device
    check_tensor(OP, "query_start_loc", query_start_loc, (requests + 1,), torch.int32, device=device)
    named = {"positions": positions, "token_req": token_req, "n_vis4": n_vis4, "n_vis128": n_vis128}
    outs = [output(OP, name, out, (num_tokens,), torch.int32, device) for name, out in named.items()]
    if num_tokens > 0:
        family = family_of(device.type)
        config = SPACE(family, tokens=num_tokens, requests=requests)
        grid = (min(requests + 1, family.vector_cores),)
        _step_layout_kernel[grid](
            query_start_loc, seq_lens, *outs, requests, num_tokens, BLOCK=config["BLOCK"], **config.options
        )
    return outs[0], outs[1], outs[2], outs[3]
