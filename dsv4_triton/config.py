"""What a checkpoint says about the model and what the user says about serving it; both parsed once and checked here.

`ModelSettings.of(hf_config)` reads config.json with the official field names, or with the names transformers writes.
`Options.of(additional_config)` reads `--additional-config '{"dsv4_triton": {...}}'`. `resolve` puts both together with
the device. Everything that does not fit raises `ConfigError` with the name, what it got and what it takes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, cast

from dsv4_triton.device import FAMILIES, HOST, Family, IndexFormat, RowFormat

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

_LAYER_TYPES = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_OPTIONS_KEY = "dsv4_triton"


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
                option = f'--additional-config \'{{"{_OPTIONS_KEY}": {{"index_cache": {{"freq": 2}}}}}}\''
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


FamilyChoice = Literal["auto", "a2", "a3", "a5", "host"]
Switch = Literal["auto", "on", "off"]
IndexChoice = Literal["auto", "plain", "int8", "e4m3"]
Geometry = Literal["fine", "vllm-ascend"]
GeometryChoice = Literal["auto", "fine", "vllm-ascend"]
OutputFormat = Literal["plain", "mxfp8"]
"""Operands of the grouped output projection: in the activations' dtype, or both quantised to MX blocks of e4m3."""

BLOCK_SIZES: dict[Geometry, tuple[int, ...]] = {"fine": (256,), "vllm-ascend": (128, 64, 32)}
"""--block-size that each geometry takes, its default first."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "device_family": ("auto", *FAMILIES),
    "kv_fake_quant": ("auto", "on", "off"),
    "geometry": ("auto", *BLOCK_SIZES),
    "index_format": ("auto", "plain", "int8", "e4m3"),
    "o_proj_format": ("plain", "mxfp8"),
    "prologue_overlap": ("off", "on"),
    "warm_up": ("on", "off"),
}


@dataclass(frozen=True)
class IndexCache:
    """Which c4 layers attend to the entries that an earlier one selected: by a letter for each of them, or by a number.

    Of layer i of the c4 layers, from 0: with `pattern`, layer i is full or shared by its letter, F or S; with `freq` N
    it is shared if max(i - 1, 0) is no multiple of N, so that 0, 1, N + 1, 2 N + 1 ... are full. The rule is that of
    IndexCache (arXiv 2603.12201) in vllm-ascend.
    """

    freq: int = 1
    pattern: str = ""

    @classmethod
    def of(cls, given: Any) -> IndexCache:
        """Read the option; ConfigError for anything but one of the two forms."""
        if isinstance(given, Mapping) and len(given) == 1:
            ((form, value),) = given.items()
            if form == "freq" and isinstance(value, int) and not isinstance(value, bool) and value >= 1:
                return cls(freq=value)
            if form == "pattern" and isinstance(value, str) and value.startswith("F") and not set(value) - set("FS"):
                return cls(pattern=value)
        raise ConfigError(
            f'{_OPTIONS_KEY}.index_cache got {given!r}, it takes either {{"freq": N}}, N at least 1, or '
            f'{{"pattern": "FS..."}} with a letter for each c4 layer, F (selects) or S (shares), F first'
        )

    def shared(self, ratios: Sequence[int]) -> frozenset[int]:
        """Of layers with these ratios the shared ones; ConfigError for a pattern of another length."""
        c4 = [layer for layer, ratio in enumerate(ratios) if ratio == 4]
        if self.pattern and len(self.pattern) != len(c4):
            raise ConfigError(
                f"{_OPTIONS_KEY}.index_cache.pattern is {self.pattern!r} with {len(self.pattern)} letters, the "
                f"checkpoint has {len(c4)} c4 layers; it takes one letter for each"
            )
        if self.pattern:
            return frozenset(layer for layer, letter in zip(c4, self.pattern, strict=True) if letter == "S")
        return frozenset(layer for i, layer in enumerate(c4) if max(i - 1, 0) % self.freq)


@dataclass(frozen=True)
class Options:
    """The user's options, each with its default."""

    device_family: FamilyChoice = "auto"
    """Whose cache formats and kernel variants to use; `auto` is the device's own. The host takes any family."""
    kv_fake_quant: Switch = "auto"
    """Round window and compressed rows through fp8 as in training; `auto` is on for checkpoints trained that way."""
    geometry: GeometryChoice = "auto"
    """Page layout of the caches: `fine` has prefix-cache hits every 256 tokens, `vllm-ascend` the page tables of
    vllm-ascend, with hits every 128 blocks of --block-size (32, 64 or 128). `auto` is `vllm-ascend` inside vllm-ascend,
    which takes no other, and `fine` elsewhere."""
    index_format: IndexChoice = "auto"
    """Stored indexer keys; `auto` is the family's own format, and `plain` with `--dtype float32`."""
    o_proj_format: OutputFormat = "plain"
    """Operands of the grouped output projection; `mxfp8` quantises its weights once at loading and its inputs at every
    step, where the family has fp8 (A5, host)."""
    prologue_overlap: Literal["off", "on"] = "off"
    """Whether a layer's attention fills its caches on a second stream of an NPU, beside the products of its queries."""
    warm_up: Literal["on", "off"] = "on"
    """Compile at start-up every kernel that the server's limits can ask for; `off` compiles when first used."""
    index_cache: IndexCache = IndexCache()
    """Which c4 layers share the selection of an earlier one; none by default."""
    host_threads: int | Literal["auto"] = "auto"
    """Threads that share a kernel's grid on the host; `auto` is one a CPU this process may use."""

    @classmethod
    def of(cls, additional_config: Any) -> Options:
        """Read the `dsv4_triton` part of vLLM's additional_config (None or without that part: all defaults)."""
        if additional_config is None:
            return cls()
        if not isinstance(additional_config, Mapping):
            raise ConfigError(f"additional_config is {additional_config!r}, it must be a JSON object")
        _reject_near_miss(name for name in additional_config if name != _OPTIONS_KEY)
        given = additional_config.get(_OPTIONS_KEY)
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise ConfigError(f"{_OPTIONS_KEY} is {given!r}, it must be a JSON object of options")
        for name, value in given.items():
            _check_option(name, value)
        options = dict(given)
        if "index_cache" in options:
            options["index_cache"] = IndexCache.of(options["index_cache"])
        return cls(**options)


def _reject_near_miss(names: Iterable[str]) -> None:
    """Other plugins own other keys, but one that looks like ours would be silently without effect."""
    for name in names:
        if difflib.get_close_matches(str(name).replace("-", "_").lower(), [_OPTIONS_KEY], cutoff=0.8):
            raise ConfigError(f"additional_config has {name!r}; did you mean {_OPTIONS_KEY!r}?")
        if name in {field.name for field in fields(Options)}:
            raise ConfigError(f"additional_config has {name!r} at its top level; it belongs inside {_OPTIONS_KEY!r}")


def _check_option(name: str, value: Any) -> None:
    known = [field.name for field in fields(Options)]
    if name not in known:
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise ConfigError(f"{_OPTIONS_KEY}: unknown option {name!r}{hint} Known options: {', '.join(known)}")
    if name == "host_threads":
        if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1024):
            raise ConfigError(f'{_OPTIONS_KEY}.host_threads got {value!r}, it takes "auto" or a number from 1 to 1024')
    elif name in _CHOICES and (not isinstance(value, str) or value not in _CHOICES[name]):
        takes = ", ".join(f'"{choice}"' for choice in _CHOICES[name])
        raise ConfigError(f"{_OPTIONS_KEY}.{name} got {value!r}, it takes {takes}")


@dataclass(frozen=True)
class Choices:
    """What `auto` came to."""

    family: Family
    kv_fake_quant: bool
    index_format: IndexFormat
    geometry: Geometry
    block_size: int
    o_proj_format: OutputFormat = "plain"
    shared_indices: frozenset[int] = frozenset()
    """The c4 layers that take over the selection of the nearest c4 layer before them which is not among these."""
    prologue_overlap: bool = False


def resolve(
    model: ModelSettings,
    options: Options,
    device: Family,
    *,
    exact: bool = False,
    block_size: int | None = None,
    inside_ascend: bool = False,
) -> Choices:
    """Decide the `auto` options for a checkpoint on a device.

    `exact` says that activations are fp32 (`--dtype float32`), for comparisons: indexer keys are then kept as they are.
    `block_size` is --block-size, None where the user gave none; `inside_ascend` says that vllm-ascend plans the caches.
    ConfigError for options that exclude each other.
    """
    geometry = resolve_geometry(options, inside_ascend=inside_ascend)
    family = device if options.device_family == "auto" else FAMILIES[options.device_family]
    if device is not HOST and family is not device:
        raise ConfigError(
            f"{_OPTIONS_KEY}.device_family is {options.device_family!r} on a device of family {device.name!r}; "
            f'only the development host can take another family\'s formats, use "auto"'
        )
    index_format: IndexFormat
    if options.index_format != "auto":
        index_format = options.index_format
    else:
        index_format = "plain" if exact else family.index_format
    if index_format == "e4m3" and not family.fp8:
        raise ConfigError(
            f"{_OPTIONS_KEY}.index_format is 'e4m3', which family {family.name!r} has no instructions for; "
            f'it takes "auto", "int8" or "plain"'
        )
    if options.kv_fake_quant == "off" and family.row_format is RowFormat.RECORD and not exact:
        raise ConfigError(
            f"{_OPTIONS_KEY}.kv_fake_quant is 'off', but family {family.name!r} stores rows in fp8, which rounds them; "
            f'it takes "auto" or "on"'
        )
    if options.o_proj_format == "mxfp8":
        if not family.fp8:
            raise ConfigError(
                f"{_OPTIONS_KEY}.o_proj_format is 'mxfp8', but family {family.name!r} has no fp8; it takes \"plain\""
            )
        if model.o_lora % WIDTH_STEP:
            raise ConfigError(
                f"{_OPTIONS_KEY}.o_proj_format is 'mxfp8', which takes an o_lora_rank that is a multiple of "
                f"{WIDTH_STEP}; config.json has {model.o_lora}"
            )
    if options.prologue_overlap == "on" and device is HOST:
        raise ConfigError(
            f"{_OPTIONS_KEY}.prologue_overlap is 'on', but the host has no streams for kernels to overlap on; it takes "
            f'"off"'
        )
    fake_quant = {"on": True, "off": False, "auto": model.trained_in_fp8}[options.kv_fake_quant]
    return Choices(
        family=family,
        kv_fake_quant=fake_quant,
        index_format=index_format,
        geometry=geometry,
        block_size=check_block_size(geometry, block_size),
        o_proj_format=options.o_proj_format,
        shared_indices=options.index_cache.shared(model.ratios),
        prologue_overlap=options.prologue_overlap == "on",
    )


def resolve_geometry(options: Options, *, inside_ascend: bool) -> Geometry:
    """What `auto` comes to; ConfigError for pages that vllm-ascend cannot plan."""
    if options.geometry == "fine" and inside_ascend:
        raise ConfigError(
            f"{_OPTIONS_KEY}.geometry is 'fine', but vllm-ascend plans the caches here and knows its own page tables "
            f'only; it takes "auto" or "vllm-ascend"'
        )
    if options.geometry == "auto":
        return "vllm-ascend" if inside_ascend else "fine"
    return options.geometry


def check_block_size(geometry: Geometry, asked: int | None) -> int:
    """The block size for `asked`, which is None where the user gave none; ConfigError for one without page tables."""
    sizes = BLOCK_SIZES[geometry]
    if asked is None or asked in sizes:
        return asked or sizes[0]
    possible = "; ".join(f'"{name}" takes {", ".join(map(str, takes))}' for name, takes in BLOCK_SIZES.items())
    raise ConfigError(
        f"--block-size is {asked}, which {_OPTIONS_KEY}.geometry {geometry!r} has no page tables for: {possible}"
    )
