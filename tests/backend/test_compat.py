"""Where vLLM has moved what a hook changes, the start goes on and says what is then not done."""

from __future__ import annotations

from functools import partial
from pkgutil import resolve_name

import pytest

from dsv4_triton.backend import compat

SAMPLER, DRAFTS = "vllm.v1.sample.rejection_sampler", "vllm.config:SpeculativeConfig"
PLANNING, INPUT = "vllm.v1.core.kv_cache_utils", "vllm.v1.engine.input_processor:InputProcessor"
HOOKS = {
    "expand_batch_to_tokens": (SAMPLER, compat.mend_rejection_sampler, "sampling with drafts was not verified"),
    "hf_config_override": (DRAFTS, partial(compat.check_draft_first, "deepseek_v4", "a:b"), "block is found later"),
    "get_kv_cache_capacity": (PLANNING, partial(compat.check_room_for_a_request, "Some"), "too small is not found"),
    "_validate_model_input": (INPUT, partial(compat.check_token_ids, "Some"), "vocabulary are not refused"),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_name_that_vllm_no_longer_has_is_a_warning(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(compat.logger, "warning", messages.append)
    owner, hook, says = HOOKS[name]
    target = resolve_name(owner)
    monkeypatch.delattr(target, name)
    hook()
    assert len(messages) == 1 and f"has no {name}" in messages[0] and says in messages[0]
    assert not hasattr(target, name), "nothing was put in its place"
