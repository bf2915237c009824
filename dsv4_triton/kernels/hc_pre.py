"""mHC: collapse the four streams into a sub-layer's input and make the coefficients that write its output back.

    F = x as [T, 4D], stream-major;  s = rsqrt(mean(F^2) + norm_eps);  m = (F @ fn^T) * s
    pre_j = sigmoid(m[j] scale[0] + base[j]) + hc_eps
    post_j = 2 sigmoid(m[4+j] scale[1] + base[4+j])
    comb = Sinkhorn(m[8:] scale[2] + base[8:]): row softmax + hc_eps, then alternately columns and rows, columns last
    y = sum_j pre_j x_j, and optionally the sub-layer's RMS norm of it

Two kernels: the mixing product (`_hc.py`) and this file's finish. x, y bf16 or fp32 [T, 4, D] and [T, D]; fn as parts
in x's dtype; scale, base, post, comb fp32. Everything is fp32; y is rounded once to x's dtype before the norm and
once after. Finish: vector cores; a persistent loop over runs of tokens; the gates and Sinkhorn of the 16 tokens
around them are tiles [4, 16] and [4, 4, 16], then one row of D per token. UB: about 5 fp32 rows of D. Source of the
formula: `hc_pre` and `hc_split_sinkhorn` of the official DeepSeek inference code; the split of fn in bf16 parts is
ours.
"""

import torch
import triton
import triton.language as tl

from dsv4_triton.device import family_of
from dsv4_triton.kernels._checks import FLOATS, check_filled, check_tensor, output
from dsv4_triton.kernels._hc import LANES, collapse_token, gate, inverse_rms, mix, mix_row, tokens_per_program

_ROWS = 24


def split_fn(fn: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The fp32 mixing matrix `[N, K]` as `[P, N, K]` parts in the activations' dtype that add up to it.

    fp32 activations take it whole (P = 1). For bf16 activations it is two bf16 parts, `bf16(fn)` and
    `bf16(fn - bf16(fn))`: relative error at most 2^-17, and products with bf16 activations are exact in fp32.
    """
    if dtype == torch.float32:
        return fn.float()[None].contiguous()
    if dtype != torch.bfloat16:
        raise TypeError(f"split_fn: activations have dtype {dtype}, expected torch.bfloat16 or torch.float32")
    high = fn.to(torch.bfloat16)
    return torch.stack((high, (fn.float() - high.float()).to(torch.bfloat16)))


@triton.jit
def _sinkhorn(c, eps, ITERS: tl.constexpr):
    """Softmax of the rows (axis 1) of [4, 4, lanes], then ITERS column and ITERS - 1 row normalisations."""
    c = tl.exp(c - tl.max(c, axis=1)[:, None, :])
    c = c * (1.0 / tl.sum(c, axis=1))[:, None, :] + eps
    c = c * (1.0 / (tl.sum(c, axis=0) + eps))[None, :, :]
    for _ in range(ITERS - 1):
        c = c * (1.0 / (tl.sum(c, axis=1) + eps))[:, None, :]
        c = c * (1.0 / (tl.sum(c, axis=0) + eps))[None, :, :]
    return c


@triton.jit(do_not_specialize=["T", "TP", "BT", "slices", "tokens"])
def _hc_pre_finish_kernel(
    x_ptr,
    part_ptr,
    gram_ptr,
    scale_ptr,
    base_ptr,
    norm_ptr,
    y_ptr,
    post_ptr,
    comb_ptr,
    T,
    TP,
    BT,
    slices,
    tokens,
    norm_eps,
    hc_eps,
    D: tl.constexpr,
    BD: tl.constexpr,
    P: tl.constexpr,
    ITERS: tl.constexpr,
    LANES: tl.constexpr,
):
    four = tl.arange(0, 4)
    lane = tl.arange(0, LANES)
    for item in range(tl.program_id(0), tl.cdiv(T, tokens), tl.num_programs(0)):
        first = item * tokens // LANES * LANES
        rms = inverse_rms(gram_ptr, first, slices, TP, BT, norm_eps, 4 * D, LANES)
        pre = gate(part_ptr, base_ptr, tl.load(scale_ptr), rms, four, first, slices, TP, 24, P, LANES) + hc_eps
        post = 2.0 * gate(part_ptr, base_ptr, tl.load(scale_ptr + 1), rms, 4 + four, first, slices, TP, 24, P, LANES)
        row = 8 + tl.arange(0, 16)
        logits = mix_row(part_ptr, row, first, slices, TP, 24, P, LANES) * rms[None, :]
        logits = logits * tl.load(scale_ptr + 2) + tl.load(base_ptr + row)[:, None]
        comb = tl.reshape(_sinkhorn(tl.reshape(logits, (4, 4, LANES)), hc_eps, ITERS), (16, LANES))
        for t in range(item * tokens, tl.minimum(item * tokens + tokens, T)):
            here = (lane == t - first)[None, :]
            collapse_token(x_ptr, norm_ptr, y_ptr, t, pre, here, norm_eps, D, BD)
            tl.store(post_ptr + t * 4 + four, tl.sum(tl.where(here, post, 0.0), axis=1))
            tl.store(comb_ptr + t * 16 + tl.arange(0, 16), tl.sum(tl.where(here, comb, 0.0), axis=1))


def hc_pre(
    x: torch.Tensor,
    fn_parts: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iters: int = 20,
    norm_weight: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
    post: torch.Tensor | None = None,
    comb: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(y [T, D] in x's dtype, post [T, 4] fp32, comb [T, 4, 4] fp32)` of the streams `x [T, 4, D]`.

    `fn_parts [P, 24, 4D]` comes from `split_fn` for x's dtype; scale [3] and base [24] are fp32 (rows: 4 pre, 4 post,
    16 comb, row-major). `norm_weight [D]` (bf16 or fp32) fuses the sub-layer's RMS norm with `norm_eps`. D is a
    multiple of 16. y, post and comb may be given as memory for the results.
    """
    check_tensor("hc_pre", "x", x, (None, 4, None), FLOATS)
    T, _, D = x.shape
    check_tensor("hc_pre", "fn_parts", fn_parts, (None, _ROWS, 4 * D), x.dtype, device=x.device)
    check_tensor("hc_pre", "scale", scale, (3,), torch.float32, device=x.device)
    check_tensor("hc_pre", "base", base, (_ROWS,), torch.float32, device=x.device)
    if norm_weight is not None:
        check_tensor("hc_pre", "norm_weight", norm_weight, (D,), FLOATS, device=x.device)
    if D % 16:
        raise ValueError(f"hc_pre: D is {D}, expected a multiple of 16")
    if sinkhorn_iters < 1:
        raise ValueError(f"hc_pre: sinkhorn_iters is {sinkhorn_iters}, expected at least 1")
    y = output("hc_pre", "y", y, (T, D), x.dtype, x.device)
    post = output("hc_pre", "post", post, (T, 4), torch.float32, x.device)
    comb = output("hc_pre", "comb", comb, (T, 4, 4), torch.float32, x.device)
    if T == 0:
        return y, post, comb
    check_filled("hc_pre", fn_parts=fn_parts)
    part, gram = mix(x, fn_parts)
    cores = family_of(x.device.type).vector_cores
    tokens = tokens_per_program(T, cores)
    grid = (min(triton.cdiv(T, tokens), cores),)
    _hc_pre_finish_kernel[grid](
        x,
        part,
        gram,
        scale,
        base,
        norm_weight,
        y,
        post,
        comb,
        T,
        part.shape[2],
        gram.shape[2],
        part.shape[0],
        tokens,
        norm_eps,
        hc_eps,
        D=D,
        BD=D,
        P=fn_parts.shape[0],
        ITERS=sinkhorn_iters,
        LANES=LANES,
    )
    return y, post, comb
