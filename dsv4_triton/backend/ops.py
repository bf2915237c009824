"""The ops the backend and the model call."""

from __future__ import annotations

from dsv4_triton.reference.compressor_fold import compressor_fold
from dsv4_triton.reference.compressor_state_insert import compressor_state_insert
from dsv4_triton.reference.hadamard import sylvester
from dsv4_triton.reference.hc_head import hc_head
from dsv4_triton.reference.hc_post import hc_post
from dsv4_triton.reference.hc_pre import hc_pre, split_fn
from dsv4_triton.reference.indexer_insert_k import indexer_insert_k
from dsv4_triton.reference.indexer_quant_q import indexer_quant_q
from dsv4_triton.reference.indexer_score import indexer_score
from dsv4_triton.reference.indexer_topk import indexer_topk
from dsv4_triton.reference.kv_norm_rope_insert import kv_norm_rope_insert
from dsv4_triton.reference.moe_experts import moe_experts
from dsv4_triton.reference.moe_router import moe_router
from dsv4_triton.reference.muls_add import muls_add
from dsv4_triton.reference.o_proj import o_proj
from dsv4_triton.reference.q_norm_rope import q_norm_rope
from dsv4_triton.reference.sparse_attention import sparse_attention
from dsv4_triton.reference.step_layout import step_layout
from dsv4_triton.reference.swiglu import swiglu
from dsv4_triton.reference.token_slots import token_slots

__all__ = [
    "compressor_fold",
    "compressor_state_insert",
    "hc_head",
    "hc_post",
    "hc_pre",
    "indexer_insert_k",
    "indexer_quant_q",
    "indexer_score",
    "indexer_topk",
    "kv_norm_rope_insert",
    "moe_experts",
    "moe_router",
    "muls_add",
    "o_proj",
    "q_norm_rope",
    "sparse_attention",
    "split_fn",
    "step_layout",
    "swiglu",
    "sylvester",
    "token_slots",
]
