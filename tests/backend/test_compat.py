"""Where vLLM has moved what this project replaces, DeepSeek-V4 is not served, and the message names what is missing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest

from dsv4_triton.backend import capture_rules, compat, limits, plugin
from tests.backend.servers import fake_server

HOOKS: dict[str, tuple[str, Callable[[], None]]] = {
    "hf_config_override": ("vllm.config:SpeculativeConfig", partial(compat.check_draft_first, "deepseek_v4", "a:b")),
    "get_kv_cache_capacity": ("vllm.v1.core.kv_cache_utils", partial(compat.check_room_for_a_request, "Some")),
    "_validate_model_input": (
        "vllm.v1.engine.input_processor:InputProcessor", partial(compat.check_token_ids, "Some"),
    ),
}  # fmt: skip
"""What the plugin replaces in every process of vLLM, by name: its owner, and what replaces it."""
REPLACED: dict[str, tuple[str, Callable[[], None]]] = {
    "_attention_ops": ("vllm.config:CompilationConfig", partial(compat.split_graph_at, "vllm::some")),
    "expand_batch_to_tokens": ("vllm.v1.sample.rejection_sampler", compat.mend_rejection_sampler),
    "MODELS_CONFIG_MAP": ("vllm.model_executor.models.config", partial(compat.check_first, "Some", "a:b")),
}
"""What is replaced for DeepSeek-V4 alone, or must be."""


@pytest.fixture(autouse=True)
def _nothing_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_lost", set())


@pytest.mark.parametrize("name", HOOKS)
def test_a_lost_hook_ends_the_start_of_this_model_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin itself goes on, for the sake of other models."""
    compat.check_hooks()
    owner, hook = HOOKS[name]
    target = resolve_name(owner)
    monkeypatch.delattr(target, name)
    hook()
    hook()
    assert not hasattr(target, name), "nothing was put in its place"
    config = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"))
    with pytest.raises(compat.UpstreamChangedError, match=f"^[A-Za-z0-9_.]+ has no {name}: .* verified with 0.27.1$"):
        limits.check(config)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", REPLACED)
def test_a_lost_name_ends_the_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, replaces = REPLACED[name]
    target = resolve_name(owner)
    monkeypatch.delattr(target, name)
    with pytest.raises(compat.UpstreamChangedError, match=f" has no {name}: .* verified with 0.27.1$"):
        replaces()
    assert not hasattr(target, name)


def test_a_registry_without_its_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.model_executor.models.registry.ModelRegistry", SimpleNamespace())
    compat.pin_model("Some", "a:B")
    with pytest.raises(compat.UpstreamChangedError, match=r"^ModelRegistry has no register_model: "):
        compat.check_hooks()


def test_a_server_without_the_function_that_is_extended(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_server(monkeypatch, compat.API_SERVER)
    compat.extend_api_server("Some", "a:b")
    with pytest.raises(compat.UpstreamChangedError, match="api_server has no build_app"):
        compat.check_hooks()


def test_all_that_is_lost_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (owner, hook) in HOOKS.items():
        monkeypatch.delattr(resolve_name(owner), name)
        hook()
    with pytest.raises(compat.UpstreamChangedError) as error:
        compat.check_hooks()
    assert str(error.value).count(" has no ") == len(HOOKS) and str(error.value).count("0.27.1") == 1


def test_nothing_is_lost_in_the_vllm_that_is_installed() -> None:
    plugin.register()
    compat.check_hooks()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("triton.runtime.jit:JITFunction", "cache_hook"),
        ("triton.runtime.jit:JITFunction", "run"),
        ("triton.runtime.autotuner:Autotuner", "run"),
        ("triton.runtime.autotuner", "Autotuner"),
    ],
)
def test_what_triton_has_lost_is_said_of_triton(owner: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name whose value is None, as the hook's is by default, is there."""
    capture_rules.check()
    monkeypatch.delattr(resolve_name(owner), name)
    message = f" has no {name}: this version of triton-ascend is not known here, .* verified with 3.2.0$"
    with pytest.raises(compat.UpstreamChangedError, match=message):
        capture_rules.check()
