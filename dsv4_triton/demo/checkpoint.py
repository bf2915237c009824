"""A small random DeepSeek-V4 checkpoint: official file layout, field names and tensor names, every kind of layer.

Matrices have standard deviation 1/sqrt(inputs), which keeps activations of order one. The projections that write into
the residual streams (`wo_b`, `w2`) get a quarter of it: at full strength such a network amplifies rounding errors until
two correct implementations disagree in the second digit. Everything that a loader could silently leave at a default
(norm weights, sinks, biases, mixing parameters) differs from its default.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dsv4_triton.demo import tokenizer as demo_tokenizer

if TYPE_CHECKING:
    import torch

MARKER = "demo_settings.json"
"""Holds the settings a demo checkpoint was written with; a folder without it is never replaced."""
FORMAT = 1
"""Part of the settings: goes up when the same settings give other files."""
HC = 4
"""Residual streams (hc_mult); the model is defined for this number only."""
HEAD_DIM, ROPE_DIM, INDEX_HEAD_DIM, WINDOW = 512, 64, 128, 128
KEY_SCALE = 2.0
"""Mean weight of the key norms. At 1 the softmax is so flat that attention hardly contributes to the result, and a
wrong key among 128 goes unnoticed; at 2 an attention sub-layer contributes as much as a mixture of experts."""


class DemoError(ValueError):
    """Settings that make no checkpoint, or a folder that must not be overwritten."""


def default_ratios(layers: int) -> tuple[int, ...]:
    """Window-only first and (from four layers on) last, alternating 4 and 128 between: 6 gives 0 4 128 4 128 0."""
    inner = layers - (2 if layers >= 4 else 1)
    middle = tuple(4 if i % 2 == 0 else 128 for i in range(max(inner, 0)))
    return (0, *middle, 0) if layers >= 4 else (0, *middle)


@dataclass(frozen=True)
class DemoSettings:
    """What the checkpoint looks like. Sizes are counts of elements; `ratios` has one entry a layer (0, 4 or 128)."""

    ratios: tuple[int, ...] = default_ratios(6)
    hash_layers: int = 2
    mtp_layers: int = 1
    hidden: int = 256
    heads: int = 8
    q_lora: int = 128
    o_groups: int = 2
    o_lora: int = 64
    index_heads: int = 8
    index_topk: int = 32
    experts: int = 16
    experts_per_token: int = 6
    intermediate: int = 128
    vocab: int = 512
    context: int = 16384
    swiglu_limit: float = 2.5
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.ratios or any(ratio not in (0, 4, 128) for ratio in self.ratios):
            raise DemoError(f"ratios are {list(self.ratios)}, each layer takes 0, 4 or 128")
        for name in ("hidden", "heads", "q_lora", "o_groups", "o_lora", "index_heads", "index_topk", "experts",
                     "experts_per_token", "intermediate"):  # fmt: skip
            if getattr(self, name) < 1:
                raise DemoError(f"{name} is {getattr(self, name)}, it must be at least 1")
        for name in ("hidden", "intermediate"):
            if getattr(self, name) % 16:
                raise DemoError(f"{name} is {getattr(self, name)}, it must be a multiple of 16 to be served")
        for name, most in (("heads", 128), ("experts", 1024)):
            if getattr(self, name) > most:
                raise DemoError(f"{name} is {getattr(self, name)}, at most {most} can be served")
        if not 0 <= self.hash_layers <= len(self.ratios):
            raise DemoError(f"hash_layers is {self.hash_layers}, there are {len(self.ratios)} layers")
        if not 0 <= self.mtp_layers <= 1:
            raise DemoError(f"mtp_layers is {self.mtp_layers}, it must be 0 or 1")
        if self.heads % self.o_groups:
            raise DemoError(f"heads ({self.heads}) must be a multiple of o_groups ({self.o_groups})")
        if self.experts_per_token > self.experts:
            raise DemoError(f"experts_per_token ({self.experts_per_token}) exceeds experts ({self.experts})")
        if self.context < 256 or self.context % 16:
            raise DemoError(f"context is {self.context}, it must be a multiple of 16, at least 256")
        if self.vocab < demo_tokenizer.MIN_VOCAB:
            raise DemoError(f"vocab is {self.vocab}, it must be at least {demo_tokenizer.MIN_VOCAB}")
        if not 0 <= self.seed < 2**32:
            raise DemoError(f"seed is {self.seed}, it must be at least 0 and fit 32 bits")
        if self.dtype not in ("bfloat16", "float32"):
            raise DemoError(f"dtype is {self.dtype!r}, it must be bfloat16 or float32")


@dataclass(frozen=True)
class _Tensor:
    """How one tensor is filled: normal with `mean` and `std`, or the expert table of a hash layer."""

    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    kind: Literal["weight", "fp32", "table"] = "weight"


def _matrix(rows: int, columns: int, gain: float = 1.0) -> _Tensor:
    return _Tensor((rows, columns), std=gain * columns**-0.5)


def _norm(size: int, mean: float = 1.0) -> _Tensor:
    return _Tensor((size,), mean=mean, std=0.2 * mean)


def _fp32(*shape: int, std: float, mean: float = 0.0) -> _Tensor:
    return _Tensor(shape, std=std, mean=mean, kind="fp32")


def _mixing(name: str, outputs: int, scales: int, hidden: int) -> dict[str, _Tensor]:
    return {
        f"{name}_fn": _fp32(outputs, HC * hidden, std=(HC * hidden) ** -0.5),
        f"{name}_base": _fp32(outputs, std=0.5),
        f"{name}_scale": _fp32(scales, mean=1.0, std=0.2),
    }


def _compressor(prefix: str, ratio: int, width: int, hidden: int) -> dict[str, _Tensor]:
    columns = width * (2 if ratio == 4 else 1)
    return {
        f"{prefix}.ape": _fp32(ratio, columns, std=0.5),
        f"{prefix}.wkv.weight": _matrix(columns, hidden),
        f"{prefix}.wgate.weight": _matrix(columns, hidden),
        f"{prefix}.norm.weight": _norm(width, mean=KEY_SCALE),
    }


def _expert(prefix: str, hidden: int, intermediate: int) -> dict[str, _Tensor]:
    return {
        f"{prefix}.w1.weight": _matrix(intermediate, hidden),
        f"{prefix}.w2.weight": _matrix(hidden, intermediate, gain=0.25),
        f"{prefix}.w3.weight": _matrix(intermediate, hidden),
    }


def _layer(s: DemoSettings, ratio: int, hashed: bool) -> dict[str, _Tensor]:
    """The tensors of one layer, without its prefix."""
    tensors = {
        "attn_norm.weight": _norm(s.hidden),
        "ffn_norm.weight": _norm(s.hidden),
        **_mixing("hc_attn", HC * (HC + 2), 3, s.hidden),
        **_mixing("hc_ffn", HC * (HC + 2), 3, s.hidden),
        "attn.wq_a.weight": _matrix(s.q_lora, s.hidden),
        "attn.q_norm.weight": _norm(s.q_lora),
        "attn.wq_b.weight": _matrix(s.heads * HEAD_DIM, s.q_lora),
        "attn.wkv.weight": _matrix(HEAD_DIM, s.hidden),
        "attn.kv_norm.weight": _norm(HEAD_DIM, mean=KEY_SCALE),
        "attn.wo_a.weight": _matrix(s.o_groups * s.o_lora, s.heads // s.o_groups * HEAD_DIM),
        "attn.wo_b.weight": _matrix(s.hidden, s.o_groups * s.o_lora, gain=0.25),
        "attn.attn_sink": _fp32(s.heads, std=1.0),
    }
    if ratio:
        tensors |= _compressor("attn.compressor", ratio, HEAD_DIM, s.hidden)
    if ratio == 4:
        tensors |= {
            "attn.indexer.wq_b.weight": _matrix(s.index_heads * INDEX_HEAD_DIM, s.q_lora),
            "attn.indexer.weights_proj.weight": _matrix(s.index_heads, s.hidden),
            **_compressor("attn.indexer.compressor", 4, INDEX_HEAD_DIM, s.hidden),
        }
    tensors["ffn.gate.weight"] = _matrix(s.experts, s.hidden)
    if hashed:
        tensors["ffn.gate.tid2eid"] = _Tensor((s.vocab, s.experts_per_token), std=0.0, kind="table")
    else:
        tensors["ffn.gate.bias"] = _fp32(s.experts, std=0.1)
    for expert in range(s.experts):
        tensors |= _expert(f"ffn.experts.{expert}", s.hidden, s.intermediate)
    return tensors | _expert("ffn.shared_experts", s.hidden, s.intermediate)


def _shards(s: DemoSettings) -> Iterator[dict[str, _Tensor]]:
    """The contents of each weight file: the embedding, the layers, the MTP blocks, the head."""
    yield {"embed.weight": _Tensor((s.vocab, s.hidden), std=1.0)}
    for index, ratio in enumerate(s.ratios):
        layer = _layer(s, ratio, hashed=index < s.hash_layers)
        yield {f"layers.{index}.{name}": tensor for name, tensor in layer.items()}
    for index in range(s.mtp_layers):
        extra = {
            "e_proj.weight": _matrix(s.hidden, s.hidden),
            "h_proj.weight": _matrix(s.hidden, s.hidden),
            "enorm.weight": _norm(s.hidden),
            "hnorm.weight": _norm(s.hidden),
            "norm.weight": _norm(s.hidden),
            **_mixing("hc_head", HC, 1, s.hidden),
        }
        block = extra | _layer(s, 0, hashed=False)
        yield {f"mtp.{index}.{name}": tensor for name, tensor in block.items()}
    yield {
        "norm.weight": _norm(s.hidden),
        "head.weight": _matrix(s.vocab, s.hidden),
        **_mixing("hc_head", HC, 1, s.hidden),
    }


def _fill(s: DemoSettings, name: str, tensor: _Tensor, words: list[int]) -> torch.Tensor:
    """The values of a tensor: they depend on the seed, the name and the shape, not on the dtype or on other tensors."""
    import torch

    generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), s.seed))
    if tensor.kind == "table":
        order = torch.rand((s.vocab, s.experts), generator=generator).argsort(dim=1)
        return order[:, : s.experts_per_token].contiguous()
    values = torch.randn(tensor.shape, generator=generator) * tensor.std + tensor.mean
    if name == "head.weight":
        # Greedy answers then consist of words; bytes, fragments and control tokens stay possible.
        loud = torch.full((s.vocab, 1), 0.3)
        loud[words] = 1.0
        values *= loud
    return values.to(torch.float32 if tensor.kind == "fp32" else getattr(torch, s.dtype))


def model_config(s: DemoSettings) -> dict[str, Any]:
    """config.json with the official field names.

    The YaRN factor is the official one; the original length is 1/16 of the context as in the official checkpoints
    (65,536 of 1,048,576), because vLLM derives the default `--max-model-len` from original length times factor.
    """
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "num_hidden_layers": len(s.ratios),
        "num_attention_heads": s.heads,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "qk_rope_head_dim": ROPE_DIM,
        "q_lora_rank": s.q_lora,
        "o_lora_rank": s.o_lora,
        "o_groups": s.o_groups,
        "sliding_window": WINDOW,
        "compress_ratios": [*s.ratios, *[0] * s.mtp_layers],
        "index_n_heads": s.index_heads,
        "index_head_dim": INDEX_HEAD_DIM,
        "index_topk": s.index_topk,
        "hc_mult": HC,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "n_routed_experts": s.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": s.experts_per_token,
        "moe_intermediate_size": s.intermediate,
        "num_hash_layers": s.hash_layers,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": s.swiglu_limit,
        "hidden_act": "silu",
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": s.context // 16,
        },
        "max_position_embeddings": s.context,
        "num_nextn_predict_layers": s.mtp_layers,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": s.dtype,
    }


def _dump(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _record(s: DemoSettings) -> dict[str, Any]:
    return json.loads(json.dumps({"format": FORMAT, **asdict(s)}))


def _write_files(directory: Path, s: DemoSettings) -> None:
    from safetensors.torch import save_file

    tokenizer = demo_tokenizer.build(s.vocab)
    demo_tokenizer.write(directory, tokenizer, s.context)
    words = demo_tokenizer.word_ids(tokenizer)
    shards = list(_shards(s))
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _fill(s, name, tensor, words) for name, tensor in shard.items()}
        save_file(tensors, str(directory / file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    _dump(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    _dump(directory / "config.json", model_config(s))
    _dump(
        directory / "generation_config.json",
        {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 1.0, "top_p": 1.0},
    )
    _dump(directory / MARKER, _record(s))


def _is_current(directory: Path, settings: DemoSettings) -> bool:
    """Whether the demo in `directory` has these settings."""
    try:
        return bool(json.loads((directory / MARKER).read_text()) == _record(settings))
    except (OSError, ValueError):
        return False


def _refuse_foreign(directory: Path) -> None:
    """DemoError unless `directory` is new, empty or an earlier demo."""
    if (directory / MARKER).is_file() or not directory.exists():
        return
    if not directory.is_dir():
        raise DemoError(f"{directory} is a file; give a folder that is new, empty or holds an earlier demo")
    if any(directory.iterdir()):
        raise DemoError(
            f"{directory} is not empty and no demo checkpoint (it has no {MARKER}); give a new or empty folder"
        )


def _locked(folder: Path) -> int:
    """Make `folder` and take its lock, which goes with the process; DemoError while another one has it."""
    while True:
        folder.mkdir(exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(folder)):
                return lock
        except FileNotFoundError:
            pass  # removed by its owner since it was opened
        except BlockingIOError:
            os.close(lock)
            raise DemoError(f"another process is writing there ({folder} is locked)") from None
        os.close(lock)


@contextmanager
def _staging(directory: Path) -> Iterator[tuple[Path, Path]]:
    """Where the new demo is written and where the earlier one goes meanwhile, in a folder that is gone at the end.

    The folder's name is always the same: the next run finds what a run that was killed has left, puts the earlier demo
    back if it was being replaced at that moment, and removes the rest.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    folder = directory.parent / f".{directory.name}.unfinished"
    new, old = folder / "new", folder / "old"
    lock = _locked(folder)
    try:
        if old.exists() and not directory.exists():
            old.rename(directory)
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)
        new.mkdir()
        yield new, old
    finally:
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)
        with suppress(OSError):
            folder.rmdir()
        os.close(lock)


def write_checkpoint(directory: Path, settings: DemoSettings) -> bool:
    """Write the checkpoint to `directory`; False when it is already there with the same settings.

    The files appear all at once: they are written to a sibling folder that is renamed at the end. DemoError for a path
    that is a file or a folder with anything but an earlier demo in it.
    """
    directory = Path(os.path.abspath(directory))
    _refuse_foreign(directory)
    if _is_current(directory, settings):
        return False
    with _staging(directory) as (new, old):
        if _is_current(directory, settings):
            return False
        _write_files(new, settings)
        try:
            if (directory / MARKER).is_file():
                directory.rename(old)
            new.rename(directory)
        except BaseException:  # an interrupt between the two as well
            if old.exists() and not directory.exists():
                old.rename(directory)
            raise
    return True
