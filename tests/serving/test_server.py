"""The HTTP server as its clients see it, through the OpenAI client.

Greedy answers in fp32 are compared token for token: the sums of a request do not depend on who else is in the batch to
more than the last bits, and the demo's logits are not that close.
"""

from __future__ import annotations

import re
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from dsv4_triton.demo.serve import NAME, Server

SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [*range(10), True, False]}}}
WORDS = re.findall(r"\w+", "the machine reads a short word and writes another one while time runs past every model")


def prompt(number: int, words: int) -> str:
    """A prompt of its own for each number, about `words` words long."""
    return " ".join(WORDS[(number * 7 + i * (number + 3)) % len(WORDS)] for i in range(words))


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)


def complete(client: openai.OpenAI, text: str, tokens: int = 16, salt: str = "") -> tuple[list[str], list[float]]:
    """Tokens and log-probabilities of a greedy continuation; prompts of different `salt` share no cached pages."""
    extra = {"ignore_eos": True} | ({"cache_salt": salt} if salt else {})
    answer = client.completions.create(
        model=NAME, prompt=text, max_tokens=tokens, temperature=0, logprobs=1, extra_body=extra
    )
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == tokens
    return logprobs.tokens, logprobs.token_logprobs


def metric(server: Server, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}{{"))


def assert_serves(client: openai.OpenAI) -> None:
    assert len(complete(client, "still there", 2)[0]) == 2


def test_completion_reports_usage(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt=prompt(1, 20), max_tokens=8, temperature=0)
    assert answer.choices[0].text
    assert answer.usage.completion_tokens <= 8 and answer.usage.prompt_tokens > 0
    assert answer.choices[0].finish_reason in ("length", "stop")


def test_chat_follows_the_conversation(client: openai.OpenAI) -> None:
    def ask(*messages: tuple[str, str]) -> str:
        answer = client.chat.completions.create(
            model=NAME,
            messages=[{"role": role, "content": content} for role, content in messages],
            max_tokens=16,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        assert answer.choices[0].message.content
        return answer.choices[0].message.content

    first = ask(("user", "one word"))
    assert ask(("user", "one word")) == first
    assert ask(("system", "be brief"), ("user", "one word"), ("assistant", first), ("user", "go on")) != first


@pytest.mark.parametrize("limit", ["length", "stop"])
@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_streaming_equals_non_streaming(client: openai.OpenAI, kind: str, limit: str) -> None:
    """Text, log-probabilities, token counts and the reason to end; ended by the count and by a stop text."""
    options: dict[str, Any] = {"model": NAME, "max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}}
    if kind == "chat":
        create: Any = client.chat.completions.create
        options |= {"messages": [{"role": "user", "content": prompt(2, 30)}], "logprobs": True}
    else:
        create = client.completions.create
        options |= {"prompt": prompt(2, 30), "logprobs": 1}
    if limit == "stop":
        text = text_of(create(**options).choices[0])
        options["stop"] = text[len(text) // 2 :][:3]
    whole = create(**options)
    chunks = list(create(**options, stream=True, stream_options={"include_usage": True}))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert sum(bool(text_of(choice)) for choice in choices) > 3, "it comes in pieces"
    assert "".join(map(text_of, choices)) == text_of(whole.choices[0])
    assert [pair for choice in choices for pair in logprobs_of(choice)] == logprobs_of(whole.choices[0])
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == [limit]
    assert whole.choices[0].finish_reason == limit
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def text_of(choice: Any) -> str:
    message = getattr(choice, "message", None) or getattr(choice, "delta", None)
    return (message.content if message else choice.text) or ""


def logprobs_of(choice: Any) -> list[tuple[str, float]]:
    """Tokens with their log-probabilities, of a chat or a completion, whole or a piece."""
    if choice.logprobs is None:
        return []
    if hasattr(choice.logprobs, "tokens"):
        return list(zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True))
    return [(entry.token, entry.logprob) for entry in choice.logprobs.content or ()]


def test_concurrent_requests_equal_their_solo_runs(server: Server, client: openai.OpenAI) -> None:
    prompts = [prompt(i, 3 + 11 * i % 180) for i in range(32)]
    solo = [complete(client, text, 8, salt="solo") for text in prompts]
    assert len({tuple(tokens) for tokens, _ in solo}) > 24, "the answers differ, so that a mix-up shows"
    peak = 0.0
    with ThreadPoolExecutor(32) as pool:
        jobs = [pool.submit(complete, client, text, 8, salt="together") for text in prompts]
        while not all(job.done() for job in jobs):
            peak = max(peak, metric(server, "num_requests_running"))
        together = [job.result() for job in jobs]
    assert peak >= 16, "they ran one after the other"
    for number, (alone, shared) in enumerate(zip(solo, together, strict=True)):
        assert shared[0] == alone[0], f"request {number}"
        assert shared[1] == pytest.approx(alone[1], abs=1e-4), f"request {number}"


def test_repeated_prompt_hits_the_prefix_cache(client: openai.OpenAI) -> None:
    text = prompt(5, 400)
    options = {"model": NAME, "prompt": text, "max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
    cold, warm = (client.completions.create(**options) for _ in range(2))
    assert warm.choices[0].text == cold.choices[0].text
    cached = warm.usage.prompt_tokens_details.cached_tokens
    assert cached >= 256 and cached % 256 == 0 and cached > warm.usage.prompt_tokens - 512


def test_abort_in_the_middle_disturbs_nobody(server: Server, client: openai.OpenAI) -> None:
    others = [prompt(40 + i, 60 + i) for i in range(6)]
    solo = [complete(client, text, 16, salt="solo") for text in others]
    with ThreadPoolExecutor(len(others)) as pool:
        doomed = client.completions.create(
            model=NAME, prompt=prompt(50, 90), max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        for _, _chunk in zip(range(3), doomed, strict=False):
            pass
        running = [pool.submit(complete, client, text, 16, salt="disturbed") for text in others]
        time.sleep(0.2)
        assert metric(server, "num_requests_running") >= 1
        doomed.close()
        together = [job.result() for job in running]
    for alone, shared in zip(solo, together, strict=True):
        assert shared[0] == alone[0]
        assert shared[1] == pytest.approx(alone[1], abs=1e-4)
    deadline = time.monotonic() + 30
    while metric(server, "num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.2)
    assert metric(server, "num_requests_running") == 0, "the aborted request still runs"


def test_prompt_beyond_the_context_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.completions.create(model=NAME, prompt=[5] * 3000, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": prompt(1, 3000)}], max_tokens=1
        )
    assert_serves(client)


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ({"structured_outputs": {"choice": ["one", "two"]}}, "one|two"),
        ({"structured_outputs": {"regex": "[a-z]{3,9}"}}, "[a-z]{3,9}"),
        ({"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}}, "yes|no"),
        ({"response_format": SCHEMA}, "[0-9]|true|false"),
    ],
    ids=["choice", "regex", "grammar", "json"],
)
def test_structured_output(client: openai.OpenAI, wanted: dict[str, Any], fits: str) -> None:
    """Each language is finite: a model of random weights would go on for ever in any other."""
    answer = client.completions.create(model=NAME, prompt="a", max_tokens=30, temperature=0, extra_body=wanted)
    assert answer.choices[0].finish_reason == "stop"
    assert re.fullmatch(fits, answer.choices[0].text), answer.choices[0].text


@pytest.mark.parametrize("ids", [[-1], [10**6], [2**40]], ids=["negative", "beyond-vocabulary", "beyond-int32"])
def test_token_ids_outside_the_vocabulary_are_refused(client: openai.OpenAI, ids: list[int]) -> None:
    with pytest.raises(openai.APIStatusError) as error:
        client.completions.create(model=NAME, prompt=[5, *ids], max_tokens=1)
    assert 400 <= error.value.status_code < 500
    assert_serves(client)


def test_unknown_model_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.completions.create(model="no-such-model", prompt="a", max_tokens=1)
