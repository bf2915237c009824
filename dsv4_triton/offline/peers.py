"""What the best public Triton kernel for the same job costs, where one compiles for A2.

Estimates from static facts of A2, compiled with the toolchain that this project pins and counted with 24 cube and 48
vector cores at 1.8 GHz, 1.6 TB/s of memory, and 20 cycles a vector instruction; starts of kernels and stalls of the
scalar unit are not in them, which is to the peers' favour. Where a peer does less than the op, `less` says what.

Sources: FlagGems-vllm and FlagGems (flagos-ai, commit ed2508bc and its index), vllm-ascend 182b75ea, mojo_opset
b97e98bf, vLLM 0.33.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from dsv4_triton.device import A2_SPEED


@dataclass(frozen=True)
class Peer:
    """`microseconds` of all launches of `name` for the job; `less`: what the op here does besides."""

    name: str
    microseconds: float
    less: str = ""


_FGV, _FG, _VLA, _MOJO, _VLLM = "FlagGems-vllm", "FlagGems", "vllm-ascend", "mojo_opset", "vLLM"
_NO_NORM = "norm, RoPE and insert"
PEERS: dict[tuple[str, str], Peer] = {
    ("hc_pre", "flash/decode/b1"): Peer(_FGV, 7.6),
    ("hc_pre", "flash/decode/b16"): Peer(_FGV, 15.0),
    ("hc_pre", "flash/prefill/t4096"): Peer(_FGV, 321.0),
    ("hc_post", "flash/decode/b1"): Peer(_FGV, 1.01),
    ("hc_post", "flash/decode/b16"): Peer(_FGV, 1.01),
    ("hc_post", "flash/prefill/t4096"): Peer(_FGV, 189.5),
    ("hc_post_pre", "flash/decode/b1"): Peer(_FGV, 1.01 + 7.6),
    ("hc_post_pre", "flash/decode/b16"): Peer(_FGV, 1.01 + 15.0),
    ("hc_post_pre", "flash/prefill/t4096"): Peer(_FGV, 189.5 + 321.0),
    ("hc_head", "flash/decode/b16"): Peer(_FG, 4.84),
    ("q_norm_rope", "flash/decode/b16"): Peer(_FGV, 1.40),
    ("q_norm_rope", "flash/prefill/t4096"): Peer(_FGV, 358.0),
    ("kv_norm_rope_insert", "flash/decode/b16/*"): Peer(_MOJO, 0.75, "norm and RoPE"),
    ("compressor_state_insert", "flash/decode/b16/*/c4"): Peer(_VLLM, 0.20),
    ("compressor_fold", "flash/decode/b16/*/c4"): Peer(_FGV, 1.67, _NO_NORM),
    ("indexer_quant_q", "flash/decode/b16"): Peer(_MOJO, 1.14, "RoPE and Hadamard"),
    # 86 KiB through L2 a page of 128 keys and token, at the rate of this model.
    ("indexer_score", "flash/decode/b1/ctx1m"): Peer(_MOJO, 86 * 1024 * 2048 / A2_SPEED.l2_bytes_per_second * 1e6),
    # 56.8 us for the first stage over 4,096 scores on one core.
    ("indexer_topk", "flash/decode/b1/ctx32k"): Peer(_FG, 2 * 56.8, "the merge of the parts"),
    # 35 us a token and core group with its packing of rows; 6.4 us with a window alone.
    ("sparse_attention", "flash/decode/b16/ctx32k/c4"): Peer(_FGV, 35.0),
    ("sparse_attention", "flash/decode/b16/ctx32k/window"): Peer(_FGV, 6.4),
    ("o_proj", "flash/decode/b16"): Peer(_FG, 53.0, "the inverse RoPE"),
    ("moe_router", "flash/decode/b16/top-k"): Peer(_FGV, 1.06),
    ("moe_router", "flash/prefill/t4096/top-k"): Peer(_FGV, 91.0),
    ("moe_router", "flash/decode/b16/hash"): Peer(_FGV, 1.09),
    ("moe_router", "flash/prefill/t4096/hash"): Peer(_FGV, 94.0),
    # As fast as the memory at 0.25 us for three bf16 tensors; here the first is fp32.
    ("muls_add", "flash/decode/b16"): Peer(_VLA, 0.25 * 8 / 6),
}


def peer_of(op: str, case: str, family: str) -> Peer | None:
    """The best public kernel for a case on `family`; only A2 and A3, whose kernels are the same code, have figures."""
    if family not in ("a2", "a3"):
        return None
    found = [peer for (job, pattern), peer in PEERS.items() if job == op and fnmatchcase(case, pattern)]
    return found[0] if found else None
