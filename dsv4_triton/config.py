"""What a checkpoint says about the model, parsed once and checked here.

`ModelSettings.of(hf_config)` reads config.json with the official field names, or with the names transformers writes.
Everything that does not fit raises `ConfigError` with the name, what it got and what it takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

HC_MULT = 4
HEAD_DIM = 512
ROPE_DIM = 64
INDEX_DIM = 128
WINDOW = 128
MAX_INDEX_TOPK = 2048
"""The widest selection of the top-k kernel, hence of `index_topk`."""
MAX_HEADS = 128
"""The most heads of the attention kernel."""
MAX_EXPERTS = 1024
"""The most experts of the router kernel."""
WIDTH_STEP = 16
"""Hidden and intermediate sizes are multiples of this, and with MXFP8 operands the rank of the output projection: the
tiles of mHC, of the experts and of that projection."""
RATIOS = {0: 0, 1: 0, 4: 4, 128: 128}
"""Compression ratios of a config and what they mean here; vLLM writes 1 for window-only layers."""

OPTIONS_KEY = "dsv4_triton"
"""Where --additional-config has this plugin's options."""

_LAYER_TYPES = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


class ConfigError(ValueError):
    """A checkpoint or an option that cannot be served."""


@dataclass(frozen=True)
class Yarn:
    """YaRN scaling without mscale: frequencies that turn fewer than `beta_slow` times over the original context are
    divided by `factor`, those above `beta_fast` turns stay."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_positions: int


class _Fields:
    """Checked reads from a config object or mapping."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def get(self, name: str, default: Any = None) -> Any:
        if isinstance(self.source, Mapping):
            return self.source.get(name, default)
        return getattr(self.source, name, default)

    def number(self, name: str, kind: type[int] | type[float], *, least: float) -> Any:
        value = self.get(name)
        if value is None:
            raise ConfigError(f"config.json: {name} is missing")
        if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
            raise ConfigError(f"config.json: {name} is {value!r}, it must be a number")
        if not least <= value < float("inf"):
            raise ConfigError(f"config.json: {name} is {value}, it must be at least {least:g}")
        return kind(value)

    def count(self, name: str, least: int = 1) -> int:
        return cast(int, self.number(name, int, least=least))

    def real(self, name: str, least: float = 0.0) -> float:
        return cast(float, self.number(name, float, least=least))

    def expect(self, name: str, *wanted: Any) -> None:
        """The field is one of `wanted` or absent."""
        value = self.get(name)
        if value is not None and value not in wanted:
            takes = " or ".join(repr(w) for w in wanted)
            raise ConfigError(f"config.json: {name} is {value!r}; this model is implemented for {takes} only")


@dataclass(frozen=True)
class ModelSettings:
    """A DeepSeek-V4 checkpoint in numbers. Sizes count elements; `ratios` has one entry (0, 4 or 128) a trunk layer."""

    vocab: int
    hidden: int
    layers: int
    ratios: tuple[int, ...]
    heads: int
    q_lora: int
    o_lora: int
    o_groups: int
    index_heads: int
    index_topk: int
    sinkhorn_iters: int
    hc_eps: float
    rms_eps: float
    experts: int
    experts_per_token: int
    moe_intermediate: int
    hash_layers: int
    routed_scaling: float
    swiglu_limit: float
    """Bound of the expert activations; 0 is none."""
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn | None
    """Scaling of the layers with compressed rows; window-only layers have none."""
    max_positions: int
    mtp_layers: int
    trained_in_fp8: bool
    """The checkpoint carries the official fp8 quantisation, so it was trained with fp8-rounded cache rows."""

    def ratio(self, layer: int) -> int:
        """The compression ratio of a layer; layers past the trunk (the MTP blocks) are window-only."""
        return self.ratios[layer] if layer < self.layers else 0

    def is_hashed(self, layer: int) -> bool:
        """Whether the layer routes by token id; MTP blocks never do."""
        return layer < self.hash_layers

    @classmethod
    def of(cls, hf_config: Any) -> ModelSettings:
        """Read and check a Hugging Face config (object or mapping)."""
        f = _Fields(hf_config)
        f.expect("hc_mult", HC_MULT)
        f.expect("head_dim", HEAD_DIM)
        f.expect("qk_rope_head_dim", ROPE_DIM)
        f.expect("index_head_dim", INDEX_DIM)
        f.expect("sliding_window", WINDOW)
        f.expect("num_key_value_heads", 1)
        f.expect("n_shared_experts", 1)
        f.expect("scoring_func", "sqrtsoftplus")
        f.expect("topk_method", "noaux_tc")
        f.expect("norm_topk_prob", True)
        f.expect("n_group", 1)
        f.expect("hidden_act", "silu")
        f.expect("attention_bias", False)
        f.expect("tie_word_embeddings", False)
        f.expect("vision_n_layers", 0)
        for name, unset in (("use_index_cache", False), ("index_topk_freq", 1), ("index_topk_pattern", "")):
            if f.get(name) not in (None, unset):
                option = f'--additional-config \'{{"{OPTIONS_KEY}": {{"index_cache": {{"freq": 2}}}}}}\''
                raise ConfigError(
                    f"config.json: {name} is {f.get(name)!r}; leave it out, layers share selections by {option}"
                )

        layers = f.count("num_hidden_layers")
        settings = cls(
            vocab=f.count("vocab_size"),
            hidden=f.count("hidden_size"),
            layers=layers,
            ratios=_ratios(f, layers),
            heads=f.count("num_attention_heads"),
            q_lora=f.count("q_lora_rank"),
            o_lora=f.count("o_lora_rank"),
            o_groups=f.count("o_groups"),
            index_heads=f.count("index_n_heads"),
            index_topk=f.count("index_topk"),
            sinkhorn_iters=f.count("hc_sinkhorn_iters"),
            hc_eps=f.real("hc_eps"),
            rms_eps=f.real("rms_norm_eps"),
            experts=f.count("n_routed_experts"),
            experts_per_token=f.count("num_experts_per_tok"),
            moe_intermediate=f.count("moe_intermediate_size"),
            hash_layers=_hash_layers(f, layers),
            routed_scaling=f.real("routed_scaling_factor"),
            swiglu_limit=0.0 if f.get("swiglu_limit") is None else f.real("swiglu_limit"),
            rope_theta=f.real("rope_theta", least=1.0),
            compress_rope_theta=f.real("compress_rope_theta", least=1.0),
            yarn=_yarn(f),
            max_positions=f.count("max_position_embeddings"),
            mtp_layers=0 if f.get("num_nextn_predict_layers") is None else f.count("num_nextn_predict_layers", 0),
            trained_in_fp8=_trained_in_fp8(f),
        )
        settings._check()
        return settings

    def _check(self) -> None:
        if self.index_topk > MAX_INDEX_TOPK:
            raise ConfigError(
                f"config.json: index_topk is {self.index_topk}, the kernels select {MAX_INDEX_TOPK} at most"
            )
        for name, value, most in (
            ("num_attention_heads", self.heads, MAX_HEADS),
            ("n_routed_experts", self.experts, MAX_EXPERTS),
        ):
            if value > most:
                raise ConfigError(f"config.json: {name} is {value}, the kernels take {most} at most")
        for name, value in (("hidden_size", self.hidden), ("moe_intermediate_size", self.moe_intermediate)):
            if value % WIDTH_STEP:
                raise ConfigError(f"config.json: {name} is {value}, it must be a multiple of {WIDTH_STEP}")
        if self.heads % self.o_groups:
            raise ConfigError(
                f"config.json: num_attention_heads ({self.heads}) must be a multiple of o_groups ({self.o_groups})"
            )
        if self.experts_per_token > self.experts:
            raise ConfigError(
                f"config.json: num_experts_per_tok ({self.experts_per_token}) exceeds n_routed_experts ({self.experts})"
            )
        if self.hash_layers > self.layers:
            raise ConfigError(f"config.json: num_hash_layers ({self.hash_layers}) exceeds the {self.layers} layers")


def _ratios(f: _Fields, layers: int) -> tuple[int, ...]:
    name, known = "compress_ratios", RATIOS
    listed = f.get(name)
    if listed is None:
        name, known = "layer_types", _LAYER_TYPES  # type: ignore[assignment]
        listed = f.get(name)
    if listed is None:
        raise ConfigError("config.json: compress_ratios is missing; it says which layers compress their keys")
    if isinstance(listed, str) or not isinstance(listed, Sequence):
        raise ConfigError(f"config.json: {name} is {listed!r}, it must be a list with one entry a layer")
    if len(listed) < layers:
        raise ConfigError(f"config.json: {name} has {len(listed)} entries for {layers} layers")
    for layer, entry in enumerate(listed):
        if isinstance(entry, bool) or not isinstance(entry, (int, str)) or entry not in known:
            takes = ", ".join(str(key) for key in known)
            raise ConfigError(f"config.json: {name}[{layer}] is {entry!r}; layer {layer} can have one of {takes}")
    return tuple(known[entry] for entry in listed[:layers])


def _hash_layers(f: _Fields, layers: int) -> int:
    kinds = f.get("mlp_layer_types")
    if f.get("num_hash_layers") is None and kinds is not None:
        if isinstance(kinds, str) or not isinstance(kinds, Sequence) or len(kinds) < layers:
            raise ConfigError(f"config.json: mlp_layer_types is {kinds!r}, it must be a list with one entry a layer")
        for layer, kind in enumerate(kinds):
            if kind not in ("hash_moe", "moe"):
                raise ConfigError(f"config.json: mlp_layer_types[{layer}] is {kind!r}, it can be 'hash_moe' or 'moe'")
        hashed = sum(kind == "hash_moe" for kind in kinds)
        if any(kind != "hash_moe" for kind in kinds[:hashed]):
            raise ConfigError(f"config.json: mlp_layer_types is {kinds!r}; hash layers must come first")
        return hashed
    return f.count("num_hash_layers", 0)


def _yarn(f: _Fields) -> Yarn | None:
    name = "rope_scaling" if f.get("rope_scaling") else "rope_parameters"
    scaling = f.get(name)
    if isinstance(scaling, Mapping) and "compress" in scaling:
        scaling = scaling["compress"]
    if not scaling:
        return None
    if not isinstance(scaling, Mapping):
        raise ConfigError(f"config.json: {name} is {scaling!r}, it must be a JSON object")
    r = _Fields(scaling)
    kind = r.get("rope_type", r.get("type"))
    if kind in (None, "default"):
        return None
    if kind != "yarn":
        raise ConfigError(f"config.json: rope_scaling has type {kind!r}; this model is implemented for 'yarn' only")
    return Yarn(
        factor=r.real("factor", least=1.0),
        beta_fast=r.real("beta_fast"),
        beta_slow=r.real("beta_slow"),
        original_positions=r.count("original_max_position_embeddings"),
    )


def _trained_in_fp8(f: _Fields) -> bool:
    quantisation = f.get("quantization_config")
    return bool(quantisation) and _Fields(quantisation).get("quant_method") == "fp8"
