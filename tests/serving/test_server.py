"""The HTTP server as its clients see it, through the OpenAI client.

Greedy answers in fp32 are compared token for token: the sums of a request do not depend on who else is in the batch to
more than the last bits, and the demo's logits are not that close.
"""

from __future__ import annotations

import re
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from dsv4_triton.demo.serve import NAME, Server

WORDS = re.findall(r"\w+", "the machine reads a short word and writes another one while time runs past every model")


def prompt(number: int, words: int) -> str:
    """A prompt of its own for each number, about `words` words long."""
    return " ".join(WORDS[(number * 7 + i * (number + 3)) % len(WORDS)] for i in range(words))


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)


def complete(client: openai.OpenAI, text: str, tokens: int = 16) -> tuple[list[str], list[float]]:
    """Tokens and log-probabilities of a greedy continuation."""
    answer = client.completions.create(
        model=NAME, prompt=text, max_tokens=tokens, temperature=0, logprobs=1, extra_body={"ignore_eos": True}
    )
    logprobs = answer.choices[0].logprobs
    return logprobs.tokens, logprobs.token_logprobs


def running_requests(server: Server) -> int:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_requests_running{")))


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


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_streaming_equals_non_streaming(client: openai.OpenAI, kind: str) -> None:
    options = {"model": NAME, "max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}}
    if kind == "chat":
        options["messages"] = [{"role": "user", "content": prompt(2, 30)}]
        whole = client.chat.completions.create(**options).choices[0].message.content
        chunks = [c.choices[0].delta.content or "" for c in client.chat.completions.create(**options, stream=True)]
    else:
        options["prompt"] = prompt(2, 30)
        whole = client.completions.create(**options).choices[0].text
        chunks = [c.choices[0].text for c in client.completions.create(**options, stream=True)]
    assert len([c for c in chunks if c]) > 1
    assert "".join(chunks) == whole


def test_concurrent_requests_equal_their_solo_runs(client: openai.OpenAI) -> None:
    prompts = [prompt(i, 3 + 11 * i % 180) for i in range(32)]
    solo = [complete(client, text) for text in prompts]
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda text: complete(client, text), prompts))
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
    solo = [complete(client, text, 32) for text in others]
    with ThreadPoolExecutor(len(others)) as pool:
        doomed = client.completions.create(
            model=NAME, prompt=prompt(50, 90), max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        for _, _chunk in zip(range(3), doomed, strict=False):
            pass
        running = [pool.submit(complete, client, text, 32) for text in others]
        time.sleep(0.2)
        doomed.close()
        together = [job.result() for job in running]
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in solo]
    deadline = time.monotonic() + 30
    while running_requests(server) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert running_requests(server) == 0, "the aborted request still runs"


def test_prompt_beyond_the_context_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.completions.create(model=NAME, prompt=[5] * 3000, max_tokens=1)
    assert_serves(client)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"model": 7}', b'{"model": "dsv4-demo", "prompt": "a", "max_tokens": "many"}'],
    ids=["empty", "truncated", "wrong-type", "wrong-number"],
)
def test_malformed_body_is_refused(server: Server, client: openai.OpenAI, body: bytes) -> None:
    answer = httpx.post(
        f"{server.url}/v1/completions", content=body, headers={"Content-Type": "application/json"}, timeout=30
    )
    assert 400 <= answer.status_code < 500, answer.text
    assert_serves(client)


def test_body_that_is_no_object_leaves_the_server_alive(server: Server, client: openai.OpenAI) -> None:
    """vLLM 0.27.1 answers such a body itself, with 500; what matters here is that nothing else breaks."""
    answer = httpx.post(f"{server.url}/v1/completions", json=[], timeout=30)
    assert answer.status_code >= 400, answer.text
    assert_serves(client)


@pytest.mark.parametrize("ids", [[-1], [10**6], [2**40]], ids=["negative", "beyond-vocabulary", "beyond-int32"])
def test_token_ids_outside_the_vocabulary_are_refused(client: openai.OpenAI, ids: list[int]) -> None:
    with pytest.raises(openai.APIStatusError) as error:
        client.completions.create(model=NAME, prompt=[5, *ids], max_tokens=1)
    assert 400 <= error.value.status_code < 500
    assert_serves(client)


def test_unknown_model_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.completions.create(model="no-such-model", prompt="a", max_tokens=1)
