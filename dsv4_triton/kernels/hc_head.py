"""mHC: collapse the four streams before the language-model head.

    F = x as [T, 4D], stream-major;  m = (F @ fn^T) * rsqrt(mean(F^2) + norm_eps)
    pre_j = sigmoid(m_j scale[0] + base_j) + hc_eps;  h = sum_j pre_j x_j, and optionally the final RMS norm of it

Two kernels: the mixing product (`_hc.py`) and this file's finish; dtypes, rounding, loops and UB as in `hc_pre`.
Source of the formula: `hc_head` of the official DeepSeek inference code.
"""

import torch
import triton
import triton.language as tl

from dsv4_triton.autotune.space import Space, buffering
from dsv4_triton.device import Family, family_of
from dsv4_triton.kernels._checks import FLOATS, check_filled, check_tensor, output
from dsv4_triton.kernels._hc import (
    LANES,
    MAX_CHUNK,
    collapse_runs,
    finish_candidates,
    finish_fits,
    mix,
    mix_workspace,
    parts_of,
    run_length,
)

OP = "hc_head"
_ROWS = 4


@triton.jit(do_not_specialize=["T", "TP", "BT"])
def _hc_head_finish_kernel(
    x_ptr, part_ptr, gram_ptr, scale_ptr, base_ptr, norm_ptr, out_ptr, T, TP, BT, norm_eps, hc_eps,
    D: tl.constexpr, PARTIALS: tl.constexpr, CHUNK: tl.constexpr, SLICES: tl.constexpr, RUN: tl.constexpr,
    LANES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    collapse_runs(
        x_ptr, part_ptr, gram_ptr, scale_ptr, base_ptr, norm_ptr, out_ptr, None, T, TP, BT, norm_eps, hc_eps,
        tl.program_id(0), D, 4, PARTIALS, CHUNK, SLICES, RUN, LANES, True, WHOLE,
    )  # fmt: skip


SPACE = Space(
    OP,
    default=lambda family, key: {
        "RUN": run_length(key["tokens"], family.vector_cores), "CHUNK": MAX_CHUNK, **dict.fromkeys(buffering(family))
    },
    candidates=lambda family, key: finish_candidates(family),
    fits=lambda family, key, config: finish_fits(config),
)  # fmt: skip


def hc_head_workspace(tokens: int, dtype: torch.dtype, family: Family) -> int:
    """Bytes of scratch that `hc_head` takes at most for up to `tokens` tokens of `dtype`."""
    return mix_workspace(tokens, _ROWS * parts_of(dtype), family)


def hc_head(
    x: torch.Tensor,
    fn_parts: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    norm_weight: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """The collapsed stream [T, D] in x's dtype of the streams `x [T, 4, D]`.

    `fn_parts [P, 4, 4D]` comes from `hc_pre.split_fn` for x's dtype; scale [1] and base [4] are fp32; `norm_weight
    [D]` (bf16 or fp32) fuses the final RMS norm with `norm_eps`. D is a multiple of 16. `workspace`:
    `hc_head_workspace` bytes, uint8.
    """
    check_tensor(OP, "x", x, (None, 4, None), FLOATS)
    T, _, D = x.shape
    check_tensor(OP, "fn_parts", fn_parts, (None, _ROWS, 4 * D), x.dtype, device=x.device)
    check_tensor(OP, "scale", scale, (1,), torch.float32, device=x.device)
    check_tensor(OP, "base", base, (_ROWS,), torch.float32, device=x.device)
    if norm_weight is not None:
        check_tensor(OP, "norm_weight", norm_weight, (D,), FLOATS, device=x.device)
    if D % 16:
        raise ValueError(f"{OP}: D is {D}, expected a multiple of 16")
    out = output(OP, "out", out, (T, D), x.dtype, x.device)
    if T == 0:
        return out
    check_filled(OP, fn_parts=fn_parts)
    mixed = mix(OP, x, fn_parts, workspace)
    part, gram = mixed
    family = family_of(x.device.type)
    config = SPACE(family, tokens=T, width=D, dtype=x.dtype, normed=norm_weight is not None)
    run = config["RUN"]
    _hc_head_finish_kernel[(min(triton.cdiv(T, run), family.vector_cores),)](
        x, part, gram, scale, base, norm_weight, out, T, part.shape[2], gram.shape[2], norm_eps, hc_eps,
        D=D, PARTIALS=part.shape[0], CHUNK=mixed.chunk(config["CHUNK"]), SLICES=gram.shape[0], RUN=run, LANES=LANES,
        WHOLE=part.shape[2] == LANES, **config.options,
    )  # fmt: skip
    return out
