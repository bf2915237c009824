"""Reading a checkpoint's config and the user's options: what is accepted, and what each error says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dsv4_triton.config import ConfigError, ModelSettings, Yarn
from dsv4_triton.demo.checkpoint import DemoSettings, model_config
from dsv4_triton.device import A2, A3, A5, HOST
from dsv4_triton.options import IndexCache, Options, resolve

DEMO = model_config(DemoSettings())
FLASH_RATIOS = [0, 0, *[4, 128] * 20, 4, 0]
PRO_RATIOS = [128, 128, *[4, 128] * 29, 4, 0]


def settings(**changes: Any) -> ModelSettings:
    return ModelSettings.of({**DEMO, **changes})


def test_demo_config() -> None:
    s = settings()
    assert (s.layers, s.ratios, s.heads, s.experts, s.mtp_layers) == (6, (0, 4, 128, 4, 128, 0), 8, 16, 1)
    assert s.yarn == Yarn(factor=16.0, beta_fast=32.0, beta_slow=1.0, original_positions=1024)
    assert [s.is_hashed(layer) for layer in range(7)] == [True, True, False, False, False, False, False]
    assert not s.trained_in_fp8


def test_object_and_mapping_read_alike() -> None:
    assert ModelSettings.of(SimpleNamespace(**DEMO)) == settings()


@pytest.mark.parametrize(
    ("ratios", "layers", "kinds"),
    [(FLASH_RATIOS, 43, (2, 21, 20)), (PRO_RATIOS, 61, (0, 30, 31))],
    ids=["flash", "pro"],
)
def test_official_schedules(ratios: list[int], layers: int, kinds: tuple[int, int, int]) -> None:
    s = settings(num_hidden_layers=layers, compress_ratios=ratios, num_hash_layers=3)
    assert tuple(s.ratios.count(ratio) for ratio in (0, 4, 128)) == kinds
    assert s.ratio(layers - 1) == 4


def test_layers_past_the_list_are_window_only() -> None:
    """The list may or may not have entries for the MTP blocks; it is never indexed past its end."""
    s = settings(compress_ratios=[4] * 6)
    assert [s.ratio(layer) for layer in (5, 6, 7, 1000)] == [4, 0, 0, 0]
    assert settings(compress_ratios=[4] * 6 + [0, 0, 0]).ratios == (4,) * 6


def test_one_means_window_only() -> None:
    assert settings(compress_ratios=[1, 4, 128, 1, 0, 4]).ratios == (0, 4, 128, 0, 0, 4)


def test_transformers_field_names() -> None:
    """A config that transformers wrote has layer types and nested RoPE parameters instead."""
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    written = {
        **DEMO,
        "compress_ratios": None,
        "num_hash_layers": None,
        "rope_scaling": None,
        "layer_types": [kinds[ratio] for ratio in DEMO["compress_ratios"][:6]],
        "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 4,
        "rope_parameters": {"main": {"rope_type": "default"}, "compress": dict(DEMO["rope_scaling"])},
    }
    assert ModelSettings.of(written) == settings()
    written["mlp_layer_types"] = ["moe", "hash_moe"] + ["moe"] * 4
    with pytest.raises(ConfigError, match="hash layers must come first"):
        ModelSettings.of(written)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"compress_ratios": [0, 4, 8, 4, 128, 0]}, r"compress_ratios\[2\] is 8; layer 2 .* 0, 1, 4, 128"),
        ({"compress_ratios": [0, 4, 128, 4, 128, 0, 5]}, r"compress_ratios\[6\] is 5"),
        ({"compress_ratios": [0, 4, 128, 4, 128, -1]}, r"compress_ratios\[5\] is -1"),
        ({"compress_ratios": [True, 4, 128, 4, 128, 0]}, r"compress_ratios\[0\] is True"),
        ({"compress_ratios": [0, [4], 128, 4, 128, 0]}, r"compress_ratios\[1\] is \[4\]"),
        ({"compress_ratios": [0, 4]}, "2 entries for 6 layers"),
        ({"compress_ratios": "0,4"}, "must be a list"),
        ({"compress_ratios": None}, "compress_ratios is missing"),
        ({"hc_mult": 2}, "hc_mult is 2.* 4 only"),
        ({"head_dim": 256}, "head_dim is 256.* 512 only"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim is 32.* 64 only"),
        ({"index_head_dim": 64}, "index_head_dim is 64.* 128 only"),
        ({"sliding_window": 4096}, "sliding_window is 4096.* 128 only"),
        ({"index_topk": 2049}, "index_topk is 2049.* 2048 at most"),
        ({"index_topk": 0}, "index_topk is 0, it must be at least 1"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'.* 'sqrtsoftplus' only"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"vision_n_layers": 32}, "vision_n_layers is 32"),
        ({"o_groups": 3}, r"num_attention_heads \(8\) must be a multiple of o_groups \(3\)"),
        ({"num_experts_per_tok": 17}, r"num_experts_per_tok \(17\) exceeds n_routed_experts \(16\)"),
        ({"num_hash_layers": 7}, r"num_hash_layers \(7\) exceeds the 6 layers"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6', it must be a number"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor is nan"),
        ({"hidden_size": 256.0}, "hidden_size is 256.0, it must be a number"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "type 'linear'.* 'yarn' only"),
        ({"rope_scaling": {"type": "yarn", "factor": 16}}, "beta_fast is missing"),
        ({"use_index_cache": True}, "use_index_cache is True; leave it out, .* --additional-config .*index_cache"),
        ({"index_topk_freq": 4}, "index_topk_freq is 4; leave it out"),
        ({"index_topk_pattern": "FS"}, "index_topk_pattern is 'FS'; leave it out"),
        ({"rope_scaling": {**DEMO["rope_scaling"], "factor": 0}}, "factor is 0, it must be at least 1"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', it must be a JSON object"),
        ({"rope_theta": 0}, "rope_theta is 0, it must be at least 1"),
        ({"compress_rope_theta": 0.5}, "compress_rope_theta is 0.5"),
        ({"num_attention_heads": 256}, "num_attention_heads is 256, the kernels take 128 at most"),
        ({"n_routed_experts": 2000}, "n_routed_experts is 2000, the kernels take 1024 at most"),
        ({"hidden_size": 250}, "hidden_size is 250, it must be a multiple of 16"),
        ({"moe_intermediate_size": 100}, "moe_intermediate_size is 100, it must be a multiple of 16"),
        ({"num_hash_layers": None, "mlp_layer_types": 5}, "mlp_layer_types is 5, it must be a list"),
        ({"num_hash_layers": None, "mlp_layer_types": ["moe"]}, "mlp_layer_types is .* one entry a layer"),
        ({"num_hash_layers": None, "mlp_layer_types": ["dense"] * 6}, r"mlp_layer_types\[0\] is 'dense'"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_config_errors(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        settings(**changes)


def test_absent_rope_scaling_and_limit() -> None:
    s = settings(rope_scaling=None, swiglu_limit=None, num_nextn_predict_layers=None)
    assert s.yarn is None and s.swiglu_limit == 0.0 and s.mtp_layers == 0


@pytest.mark.parametrize("given", [None, {}, {"other_plugin": {"x": 1}}, {"dsv4_triton": {}}, {"dsv4_triton": None}])
def test_default_options(given: Any) -> None:
    assert Options.of(given) == Options()


def test_options_are_read() -> None:
    options = Options.of({"dsv4_triton": {"device_family": "a5", "kv_fake_quant": "on", "host_threads": 2}})
    assert (options.device_family, options.kv_fake_quant, options.host_threads) == ("a5", "on", 2)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"dsv4_triton": {"kv_fakequant": "on"}}, "'kv_fakequant'; did you mean 'kv_fake_quant'"),
        ({"dsv4_triton": {"zzz": 1}}, "unknown option 'zzz'. Known options: device_family, kv_fake_quant"),
        ({"dsv4_triton": {"kv_fake_quant": True}}, 'kv_fake_quant got True, it takes "auto", "on", "off"'),
        ({"dsv4_triton": {"kv_fake_quant": ["on"]}}, r"kv_fake_quant got \['on'\]"),
        ({"dsv4_triton": {"geometry": "coarse"}}, 'geometry got \'coarse\', it takes "auto", "fine", "vllm-ascend"'),
        ({"dsv4_triton": {"kv_geometry": "fine"}}, "unknown option 'kv_geometry'; did you mean 'geometry'"),
        ({"dsv4_triton": {"device_family": "A2"}}, 'it takes "auto", "a2", "a3", "a5", "host"'),
        ({"dsv4_triton": {"index_format": None}}, "index_format got None"),
        ({"dsv4_triton": {"o_proj_format": "fp8"}}, 'o_proj_format got \'fp8\', it takes "plain", "mxfp8"'),
        ({"dsv4_triton": {"prologue_overlap": True}}, 'prologue_overlap got True, it takes "off", "on"'),
        ({"dsv4_triton": {"host_threads": 0}}, "host_threads got 0"),
        ({"dsv4_triton": {"host_threads": True}}, "host_threads got True"),
        ({"dsv4_triton": {"host_threads": 1.5}}, "host_threads got 1.5"),
        ({"dsv4_triton": "on"}, "dsv4_triton is 'on', it must be a JSON object"),
        ({"dsv4-triton": {}}, "'dsv4-triton'; did you mean 'dsv4_triton'"),
        ({"dsv4-triton": {}, "dsv4_triton": {}}, "'dsv4-triton'; did you mean 'dsv4_triton'"),
        ({"kv_fake_quant": "on"}, "'kv_fake_quant' at its top level; it belongs inside 'dsv4_triton'"),
        ([], "additional_config is .* must be a JSON object"),
    ],
    ids=str,
)
def test_option_errors(given: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Options.of(given)


INDEX_CACHE = r'index_cache got .*, it takes either {"freq": N}, N at least 1, or {"pattern": "FS\.\.\."}'


@pytest.mark.parametrize(
    "given",
    [
        {"freq": 0}, {"freq": -1}, {"freq": True}, {"freq": 2.0}, {"freq": "2"}, {"freq": None}, {"frequency": 2}, {},
        {"freq": 2, "pattern": "FS"}, {"pattern": ""}, {"pattern": "SF"}, {"pattern": "fs"}, {"pattern": "FX"},
        {"pattern": ["F", "S"]}, {"pattern": None}, 2, "FS", None, True, ["FS"],
    ],
    ids=str,
)  # fmt: skip
def test_index_cache_errors(given: Any) -> None:
    with pytest.raises(ConfigError, match=INDEX_CACHE):
        Options.of({"dsv4_triton": {"index_cache": given}})


def shared(option: dict[str, Any], ratios: list[int] = FLASH_RATIOS) -> list[int]:
    options = Options.of({"dsv4_triton": {"index_cache": option}})
    model = settings(num_hidden_layers=len(ratios), compress_ratios=ratios)
    return sorted(resolve(model, options, HOST).shared_indices)


def test_layers_that_share_selections() -> None:
    """With frequency N the c4 layers 0, 1, N + 1, 2 N + 1 ... are full; MTP blocks have no c4 layer to share."""
    c4 = [layer for layer, ratio in enumerate(FLASH_RATIOS) if ratio == 4]
    assert not shared({"freq": 1}) and not resolve(settings(), Options(), HOST).shared_indices
    for freq in (2, 3, 4, 100):
        full = {0, *range(1, len(c4), freq)}
        assert shared({"freq": freq}) == [layer for i, layer in enumerate(c4) if i not in full]
    assert shared({"pattern": "FSSFS"}, [4, 0, 4, 128, 4, 4, 4]) == [2, 4, 6]
    assert shared({"pattern": "FFFFF"}, [4, 0, 4, 128, 4, 4, 4]) == []
    assert shared({"freq": 3}, [0, 128]) == []


@pytest.mark.parametrize(("pattern", "ratios", "letters"), [("FS", FLASH_RATIOS, 21), ("F", [0, 128], 0)])
def test_a_pattern_has_a_letter_for_each_c4_layer(pattern: str, ratios: list[int], letters: int) -> None:
    says = f"pattern is '{pattern}' with {len(pattern)} letters, the checkpoint has {letters} c4 layers; it takes one"
    with pytest.raises(ConfigError, match=says):
        shared({"pattern": pattern}, ratios)


def test_options_can_be_hashed_and_compared() -> None:
    assert Options(index_cache=IndexCache(freq=2)) == Options.of({"dsv4_triton": {"index_cache": {"freq": 2}}})
    assert hash(Options()) == hash(Options.of(None))


def test_resolve_auto() -> None:
    plain, official = settings(), settings(quantization_config={"quant_method": "fp8", "fmt": "e4m3"})
    assert resolve(plain, Options(), HOST).kv_fake_quant is False
    assert resolve(official, Options(), HOST).kv_fake_quant is True
    assert resolve(official, Options(kv_fake_quant="off"), HOST).kv_fake_quant is False
    assert [resolve(plain, Options(), family).index_format for family in (A2, A3, A5, HOST)] == [
        "int8", "int8", "e4m3", "int8",
    ]  # fmt: skip
    assert resolve(plain, Options(), A5, exact=True).index_format == "plain"
    assert resolve(plain, Options(index_format="int8"), A5, exact=True).index_format == "int8"


def test_resolve_family() -> None:
    """The host takes every family's formats; a device only its own."""
    for family in (A2, A3, A5, HOST):
        assert resolve(settings(), Options(device_family=family.name), HOST).family is family  # type: ignore[arg-type]
    assert resolve(settings(), Options(device_family="a3"), A3).family is A3
    for other in ("a2", "host"):
        with pytest.raises(ConfigError, match=f"device_family is '{other}' on a device of family 'a5'"):
            resolve(settings(), Options(device_family=other), A5)  # type: ignore[arg-type]


@pytest.mark.parametrize(("geometry", "sizes"), [("fine", (256,)), ("vllm-ascend", (128, 64, 32))])
def test_block_sizes_of_a_geometry(geometry: Any, sizes: tuple[int, ...]) -> None:
    options = Options(geometry=geometry)
    assert resolve(settings(), options, HOST).block_size == sizes[0]
    for size in sizes:
        assert resolve(settings(), options, A2, block_size=size).block_size == size
    for size in {16, 32, 64, 128, 256, 512}.difference(sizes):
        says = rf'--block-size is {size}, .*geometry \'{geometry}\' .*"fine" takes 256; "vllm-ascend" takes 128, 64, 32'
        with pytest.raises(ConfigError, match=says):
            resolve(settings(), options, A2, block_size=size)


def test_inside_vllm_ascend_pages_are_its_own() -> None:
    assert resolve(settings(), Options(), A2).geometry == "fine"
    for geometry in ("auto", "vllm-ascend"):
        assert resolve(settings(), Options(geometry=geometry), A2, inside_ascend=True).geometry == "vllm-ascend"
    with pytest.raises(ConfigError, match="geometry is 'fine', but vllm-ascend plans the caches here"):
        resolve(settings(), Options(geometry="fine"), A2, inside_ascend=True)


def test_resolve_rejects_fp8_keys_without_fp8() -> None:
    with pytest.raises(ConfigError, match="'e4m3', which family 'a2' has no instructions for"):
        resolve(settings(), Options(device_family="a2", index_format="e4m3"), HOST)


def test_resolve_format_of_the_output_projection() -> None:
    assert resolve(settings(), Options(), A5).o_proj_format == "plain"
    for family in (A5, HOST):
        assert resolve(settings(), Options(o_proj_format="mxfp8"), family).o_proj_format == "mxfp8"
    for family in (A2, A3):
        with pytest.raises(ConfigError, match=f"o_proj_format is 'mxfp8', but family '{family.name}' has no fp8"):
            resolve(settings(), Options(o_proj_format="mxfp8"), family)
    with pytest.raises(ConfigError, match=r"multiple of 16; config\.json has 40"):
        resolve(settings(o_lora_rank=40), Options(o_proj_format="mxfp8"), HOST)


def test_resolve_streams_of_the_prologue() -> None:
    options = Options(prologue_overlap="on")
    assert resolve(settings(), options, A2).prologue_overlap and not resolve(settings(), Options(), A2).prologue_overlap
    with pytest.raises(ConfigError, match="prologue_overlap is 'on', but the host has no streams"):
        resolve(settings(), Options(device_family="a2", prologue_overlap="on"), HOST)


def test_resolve_rejects_unrounded_fp8_rows() -> None:
    options = Options(device_family="a5", kv_fake_quant="off")
    with pytest.raises(ConfigError, match="kv_fake_quant is 'off', but family 'a5' stores rows in fp8"):
        resolve(settings(), options, HOST)
    assert resolve(settings(), options, HOST, exact=True).kv_fake_quant is False
