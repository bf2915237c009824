"""The MTP block in plain PyTorch, fp32, from the maths alone: no kernel, reference or module of the project."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import silu, softplus

WINDOW, HEAD, ROPE = 128, 512, 64


class DraftBlock:
    """`mtp.0` of a checkpoint's `tensors` and `config`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
        self.all = tensors
        self.w = {name.removeprefix("mtp.0."): t.float() for name, t in tensors.items() if name.startswith("mtp.0.")}
        self.c = config

    def streams(self, previous: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """X [T, 4, D] of one sequence from position 0: `previous` is S [T, 4, D], `tokens` [T] what follows each."""
        e = self.rms(self.all["embed.weight"].float()[tokens], self.w["enorm.weight"])
        g = self.rms(previous, self.w["hnorm.weight"])
        x = (e @ self.w["e_proj.weight"].T)[:, None] + g @ self.w["h_proj.weight"].T
        for part, inner in (("attn", self.attention), ("ffn", self.experts)):
            collapsed, post, comb = self.collapse(x, f"hc_{part}")
            y = inner(self.rms(collapsed, self.w[f"{part}_norm.weight"]))
            x = post[:, :, None] * y[:, None] + torch.einsum("tjk,tjd->tkd", comb, x)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[T, V] of X [T, 4, D]."""
        scale, base = self.w["hc_head_scale"], self.w["hc_head_base"]
        pre = torch.sigmoid(self.mixes(x, "hc_head") * scale + base) + self.c["hc_eps"]
        h = self.rms((pre[:, :, None] * x).sum(1), self.w["norm.weight"])
        return h @ self.all["head.weight"].float().T

    def rms(self, x: torch.Tensor, weight: torch.Tensor | float) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.c["rms_norm_eps"]) * weight

    def mixes(self, x: torch.Tensor, name: str) -> torch.Tensor:
        flat = x.flatten(1)
        root = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.c["rms_norm_eps"])
        return flat @ self.w[f"{name}_fn"].T * root

    def collapse(self, x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mixed, eps = self.mixes(x, name), self.c["hc_eps"]
        scale, base = self.w[f"{name}_scale"], self.w[f"{name}_base"]
        pre = torch.sigmoid(mixed[:, :4] * scale[0] + base[:4]) + eps
        post = 2 * torch.sigmoid(mixed[:, 4:8] * scale[1] + base[4:8])
        comb = (mixed[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4).softmax(-1) + eps
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        for _ in range(self.c["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(2, keepdim=True) + eps)
            comb = comb / (comb.sum(1, keepdim=True) + eps)
        return (pre[:, :, None] * x).sum(1), post, comb

    def rotated(self, x: torch.Tensor, direction: int) -> torch.Tensor:
        """`x` [T, ..., 512] with its last 64 features turned by their position's angles, interleaved pairs."""
        frequencies = self.c["rope_theta"] ** (-torch.arange(0, ROPE, 2, dtype=torch.float32) / ROPE)
        angles = torch.outer(torch.arange(len(x), dtype=torch.float32), frequencies)
        turn = torch.polar(torch.ones_like(angles), direction * angles).view(-1, *[1] * (x.dim() - 2), ROPE // 2)
        pairs = torch.view_as_complex(x[..., -ROPE:].reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.cat((x[..., :-ROPE], torch.view_as_real(pairs * turn).flatten(-2)), dim=-1)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        w = {name.removeprefix("attn."): t for name, t in self.w.items() if name.startswith("attn.")}
        tokens, groups = len(x), self.c["o_groups"]
        latent = self.rms(x @ w["wq_a.weight"].T, w["q_norm.weight"])
        q = self.rotated(self.rms((latent @ w["wq_b.weight"].T).view(tokens, -1, HEAD), 1.0), 1)
        kv = self.rotated(self.rms(x @ w["wkv.weight"].T, w["kv_norm.weight"]), 1)
        scores = torch.einsum("thd,sd->ths", q, kv) * HEAD**-0.5
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        scores = scores.masked_fill(((distance < 0) | (distance >= WINDOW))[:, None], float("-inf"))
        sink = w["attn_sink"].view(1, -1, 1).expand(tokens, -1, 1)
        weights = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
        o = self.rotated(weights @ kv, -1).reshape(tokens, groups, -1)
        z = torch.einsum("tgi,goi->tgo", o, w["wo_a.weight"].view(groups, -1, o.shape[2]))
        return z.flatten(1) @ w["wo_b.weight"].T

    def experts(self, x: torch.Tensor) -> torch.Tensor:
        score = softplus(x @ self.w["ffn.gate.weight"].T).sqrt()
        chosen = (score + self.w["ffn.gate.bias"]).topk(self.c["num_experts_per_tok"]).indices
        weight = score.gather(1, chosen)
        weight = weight / weight.sum(1, keepdim=True) * self.c["routed_scaling_factor"]
        y = self.expert(x, "shared_experts")
        for number in range(self.c["n_routed_experts"]):
            share = torch.where(chosen == number, weight, 0.0).sum(1, keepdim=True)
            y = y + share * self.expert(x, f"experts.{number}")
        return y

    def expert(self, x: torch.Tensor, name: str) -> torch.Tensor:
        limit = self.c["swiglu_limit"]
        gate = (x @ self.w[f"ffn.{name}.w1.weight"].T).clamp(max=limit)
        up = (x @ self.w[f"ffn.{name}.w3.weight"].T).clamp(-limit, limit)
        return (silu(gate) * up) @ self.w[f"ffn.{name}.w2.weight"].T
