"""What the user says about serving a model, parsed once and checked here.

`Options.of(additional_config)` reads `--additional-config '{"dsv4_triton": {...}}'`. `resolve` puts it together with
the model's settings and the device. Everything that does not fit raises `ConfigError` with the name, what it got and
what it takes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from dsv4_triton.config import OPTIONS_KEY, WIDTH_STEP, ConfigError, ModelSettings
from dsv4_triton.device import FAMILIES, HOST, Family, IndexFormat, RowFormat

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
            f'{OPTIONS_KEY}.index_cache got {given!r}, it takes either {{"freq": N}}, N at least 1, or '
            f'{{"pattern": "FS..."}} with a letter for each c4 layer, F (selects) or S (shares), F first'
        )

    def shared(self, ratios: Sequence[int]) -> frozenset[int]:
        """Of layers with these ratios the shared ones; ConfigError for a pattern of another length."""
        c4 = [layer for layer, ratio in enumerate(ratios) if ratio == 4]
        if self.pattern and len(self.pattern) != len(c4):
            raise ConfigError(
                f"{OPTIONS_KEY}.index_cache.pattern is {self.pattern!r} with {len(self.pattern)} letters, the "
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
    """Threads that share a kernel's grid on the host, where alone it can be set; `auto` is one a CPU this process may
    use."""

    @classmethod
    def of(cls, additional_config: Any) -> Options:
        """Read the `dsv4_triton` part of vLLM's additional_config (None or without that part: all defaults)."""
        if additional_config is None:
            return cls()
        if not isinstance(additional_config, Mapping):
            raise ConfigError(f"additional_config is {additional_config!r}, it must be a JSON object")
        _reject_near_miss(name for name in additional_config if name != OPTIONS_KEY)
        given = additional_config.get(OPTIONS_KEY)
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise ConfigError(f"{OPTIONS_KEY} is {given!r}, it must be a JSON object of options")
        for name, value in given.items():
            _check_option(name, value)
        options = dict(given)
        if "index_cache" in options:
            options["index_cache"] = IndexCache.of(options["index_cache"])
        return cls(**options)


def _reject_near_miss(names: Iterable[str]) -> None:
    """Other plugins own other keys, but one that looks like ours would be silently without effect."""
    for name in names:
        if difflib.get_close_matches(str(name).replace("-", "_").lower(), [OPTIONS_KEY], cutoff=0.8):
            raise ConfigError(f"additional_config has {name!r}; did you mean {OPTIONS_KEY!r}?")
        if name in {field.name for field in fields(Options)}:
            raise ConfigError(f"additional_config has {name!r} at its top level; it belongs inside {OPTIONS_KEY!r}")


def _check_option(name: str, value: Any) -> None:
    known = [field.name for field in fields(Options)]
    if name not in known:
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise ConfigError(f"{OPTIONS_KEY}: unknown option {name!r}{hint} Known options: {', '.join(known)}")
    if name == "host_threads":
        if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1024):
            raise ConfigError(f'{OPTIONS_KEY}.host_threads got {value!r}, it takes "auto" or a number from 1 to 1024')
    elif name in _CHOICES and (not isinstance(value, str) or value not in _CHOICES[name]):
        takes = ", ".join(f'"{choice}"' for choice in _CHOICES[name])
        raise ConfigError(f"{OPTIONS_KEY}.{name} got {value!r}, it takes {takes}")


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
            f"{OPTIONS_KEY}.device_family is {options.device_family!r} on a device of family {device.name!r}; "
            f'only the development host can take another family\'s formats, use "auto"'
        )
    index_format: IndexFormat
    if options.index_format != "auto":
        index_format = options.index_format
    else:
        index_format = "plain" if exact else family.index_format
    if index_format == "e4m3" and not family.fp8:
        raise ConfigError(
            f"{OPTIONS_KEY}.index_format is 'e4m3', which family {family.name!r} has no instructions for; "
            f'it takes "auto", "int8" or "plain"'
        )
    if options.kv_fake_quant == "off" and family.row_format is RowFormat.RECORD and not exact:
        raise ConfigError(
            f"{OPTIONS_KEY}.kv_fake_quant is 'off', but family {family.name!r} stores rows in fp8, which rounds them; "
            f'it takes "auto" or "on"'
        )
    if options.o_proj_format == "mxfp8":
        if not family.fp8:
            raise ConfigError(
                f"{OPTIONS_KEY}.o_proj_format is 'mxfp8', but family {family.name!r} has no fp8; it takes \"plain\""
            )
        if model.o_lora % WIDTH_STEP:
            raise ConfigError(
                f"{OPTIONS_KEY}.o_proj_format is 'mxfp8', which takes an o_lora_rank that is a multiple of "
                f"{WIDTH_STEP}; config.json has {model.o_lora}"
            )
    if options.prologue_overlap == "on" and device is HOST:
        raise ConfigError(
            f"{OPTIONS_KEY}.prologue_overlap is 'on', but the host has no streams for kernels to overlap on; it takes "
            f'"off"'
        )
    if options.host_threads != "auto" and device is not HOST:
        raise ConfigError(
            f"{OPTIONS_KEY}.host_threads is {options.host_threads}, but no kernel of family {device.name!r} runs on "
            f'the host; it takes "auto"'
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
            f"{OPTIONS_KEY}.geometry is 'fine', but vllm-ascend plans the caches here and knows its own page tables "
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
        f"--block-size is {asked}, which {OPTIONS_KEY}.geometry {geometry!r} has no page tables for: {possible}"
    )
