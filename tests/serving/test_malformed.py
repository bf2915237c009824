"""Requests that no server should accept: each is answered with 4xx in OpenAI's form, and nothing else changes.

A body is a JSON value, or bytes that are sent as they are. Fields are put into a request that works.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from dsv4_triton.demo.serve import NAME, Server

WORKS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": NAME, "prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"model": NAME, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/responses": {"model": NAME, "input": "a", "max_output_tokens": 1},
    "/v1/messages": {"model": NAME, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/tokenize": {"model": NAME, "prompt": "a"},
    "/detokenize": {"model": NAME, "tokens": [5]},
    "/inference/v1/generate": {"model": NAME, "token_ids": [5], "sampling_params": {"max_tokens": 1}},
}
ALL = list(WORKS)
NO_REQUEST_HERE = ["/v1/chat/completions/batch", "/v1/completions/render", "/v1/messages/count_tokens", "/invocations",
                   "/generative_scoring"]  # fmt: skip
TEXT = ["/v1/completions", "/v1/chat/completions"]
CHAT = ["/v1/chat/completions", "/v1/messages"]
JSON = {"Content-Type": "application/json"}

BODIES = {
    "array": b"[]", "string": b'"x"', "number": b"1", "null": b"null", "true": b"true", "NaN": b"NaN", "empty": b"",
    "truncated": b'{"model": "dsv4-demo", "prompt": "a', "two values": b"{} {}", "no JSON": b"model=dsv4-demo",
    "invalid UTF-8": b'{"model": "\xff"}', "half a character": b'{"model": "dsv4-demo", "prompt": "\\ud800"}',
    "UTF-32 with a wrong mark": b"\xff\xfe\x00\x00{", "deep arrays": b"[" * 100_000, "deep objects": b'{"a":' * 100_000,
    "endless number": b'{"max_tokens": ' + b"9" * 10_000 + b"}", "no fields": b"{}", "wrong model": b'{"model": 7}',
}  # fmt: skip

NESTED: Any = "x"
for _ in range(200):
    NESTED = [NESTED]

IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}
NO_BACKEND = {"name": "a", "schema": {"type": "object", "patternProperties": {"^a": {"type": "string"}}}}
COMPLETION, CONVERSATION = ["/v1/completions"], ["/v1/chat/completions"]
FIELDS: list[tuple[list[str], str, list[Any]]] = [
    (TEXT, "max_tokens", ["many", -1, 0, 1.5, [], {}, 10**30, float("nan")]),
    (TEXT, "n", [0, -1, "two", 10**6, 1.5, []]),
    (TEXT, "temperature", ["hot", -1, float("nan"), float("inf"), [], {}]),
    (TEXT, "top_p", [0, 1.5, -1, float("nan"), "most"]),
    (TEXT, "top_k", [-2, 1.5, "all"]),
    (TEXT, "seed", [2**64, -(2**64), "x", 1.5]),
    (TEXT, "stop", [5, {}, [5], [""], "\ud800"]),
    (TEXT, "stop_token_ids", [5, ["x"], [2**70]]),
    (TEXT, "logit_bias", [5, {"x": 1}, {"5": "much"}, {"99999": 1}, {"-1": 1}, []]),
    (TEXT, "logprobs", ["x", -2, {}, NESTED]),
    (TEXT, "prompt_logprobs", ["x", -2, [], 10**6]),
    (TEXT, "stream", ["perhaps", {}, 7]),
    (TEXT, "stream_options", [{"include_usage": True}, 5, []]),
    (TEXT, "stream_interval", [2**64, 0, "x"]),
    (TEXT, "response_format", [5, [], {}, {"type": "yaml"}, {"type": "json_schema"}, SCHEMA]),
    (TEXT, "response_format", [{"type": "json_schema", "json_schema": value} for value in (5, NO_BACKEND)]),
    (TEXT, "response_format", [{"type": "structural_tag"}]),
    (TEXT, "structured_outputs", [5, True, "x", [], {"choice": []}, {"regex": 5}, {"regex": "a", "choice": ["a"]}]),
    (TEXT, "structured_outputs", [{"regex": "("}, {"grammar": "x"}, {"json": "{"}, {"json": {"type": 5}}]),
    (TEXT, "model", ["no-such-model", "\ud800", 5, [], {}]),
    (TEXT, "cache_salt", ["", 5, "\ud800"]),
    (TEXT, "bad_words", [5, ["\ud800"]]),
    (TEXT, "ignore_eos", ["x", {}]),
    (TEXT, "min_tokens", [-1, 5, "x"]),
    (TEXT, "presence_penalty", [5, "x", float("nan")]),
    (COMPLETION, "prompt", [{}, [], "", None, 5, [[1, "a"]], [[]], [True, "a"], [None], NESTED]),
    (COMPLETION, "prompt", [[-1], [5, 10**6], [2**40], [2**70]]),
    (COMPLETION, "echo", ["x", {}]),
    (CHAT, "messages", [{}, "x", 5, None, [1], [None], [{}], [{"role": 5, "content": "a"}]]),
    (CHAT, "messages", [[{"role": "user", "content": content}] for content in (5, [5], NESTED)]),
    (CONVERSATION, "messages", [[{"role": "user", "content": [{"type": "text"}]}]]),
    (CHAT, "messages", [[{"role": "user", "content": "\ud800"}], [{"role": "stranger", "content": "a"}]]),
    (CONVERSATION, "messages", [[{"role": "user", "content": [IMAGE]}]]),
    (CONVERSATION, "tools", [1, {}, [1], [{"type": "function"}], [{"type": "function", "function": 5}]]),
    (CONVERSATION, "tool_choice", [5, "sometimes", {"type": "function"}]),
    (CONVERSATION, "tool_choice", [{"type": "function", "function": {"name": "f"}}]),
    (CONVERSATION, "top_logprobs", [5, -1, "x"]),
    (["/v1/messages"], "max_tokens", [-1, "x", 10**30, 4096]),
    (["/v1/messages"], "temperature", [-1, 3, "x"]),
    (["/v1/messages"], "system", [5, "\ud800", "word " * 4096]),
    (["/v1/responses"], "input", [5, [5], None, [{"type": "item_reference", "id": "x"}]]),
    (["/v1/responses"], "previous_response_id", ["x", "resp_x", 5]),
    (["/v1/responses"], "tools", [5, [5], [{"type": "x"}]]),
    (["/tokenize"], "prompt", [5, [], None, {}]),
    (["/detokenize"], "tokens", ["x", [-1], [2**70], [[5]], None]),
    (["/inference/v1/generate"], "token_ids", ["x", [-1], [10**9], [2**70], []]),
    (["/inference/v1/generate"], "sampling_params", [5, [], {"temperature": -1}]),
    (["/inference/v1/generate"], "sampling_params", [{"structured_outputs": {"regex": "("}}]),
]


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    # A server that answers 500 closes the connection; a new one each time keeps one case out of the next.
    with httpx.Client(base_url=server.url, timeout=60, headers={"Connection": "close"}) as client:
        yield client


def usual(http: httpx.Client) -> tuple[list[str], list[float]]:
    """Tokens of a greedy answer and their log-probabilities."""
    body = {"model": NAME, "prompt": "one two three", "max_tokens": 6, "temperature": 0, "logprobs": 1}
    answer = http.post("/v1/completions", json=body | {"ignore_eos": True})
    assert answer.status_code == 200, answer.text
    logprobs = answer.json()["choices"][0]["logprobs"]
    return logprobs["tokens"], logprobs["token_logprobs"]


@pytest.fixture(scope="module", autouse=True)
def _the_server_answers_as_before(http: httpx.Client) -> Iterator[None]:
    tokens, logprobs = usual(http)
    yield
    assert usual(http) == (tokens, pytest.approx(logprobs, abs=1e-4))


def assert_refused(http: httpx.Client, route: str, body: bytes, headers: dict[str, str] = JSON) -> str:
    """The answer's message, its form checked; the server answers something right afterwards."""
    answer = http.post(route, content=body, headers=headers)
    assert 400 <= answer.status_code < 500, f"{answer.status_code}: {answer.text}"
    error = answer.json()["error"]
    assert error["type"] and error["message"]
    assert http.get("/health").status_code == 200
    return error["message"]


@pytest.mark.parametrize("route", ALL)
def test_the_request_that_is_changed_works(http: httpx.Client, route: str) -> None:
    answer = http.post(route, json=WORKS[route])
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("route", [*ALL, *NO_REQUEST_HERE])
@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_no_request(http: httpx.Client, route: str, name: str) -> None:
    message = assert_refused(http, route, BODIES[name])
    if name in ("array", "string", "number", "null", "true"):
        assert message.startswith("the body must be a JSON object, it is "), message


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_body_of_another_type(http: httpx.Client, content_type: str) -> None:
    body = json.dumps(WORKS["/v1/completions"]).encode()
    assert_refused(http, "/v1/completions", body, {"Content-Type": content_type})


@pytest.mark.parametrize(
    ("route", "field", "values"), [pytest.param(r, f, v, id=f"{r}-{f}") for routes, f, v in FIELDS for r in routes]
)
def test_fields_of_a_wrong_kind(http: httpx.Client, route: str, field: str, values: list[Any]) -> None:
    for value in values:
        body = json.dumps(WORKS[route] | {field: value}).encode()
        try:
            assert_refused(http, route, body)
        except AssertionError as error:
            raise AssertionError(f"{field} = {value!r}") from error


def test_a_repeated_key_counts_once(http: httpx.Client) -> None:
    """JSON leaves open which one counts; the last does."""
    body = b'{"model": 5, "model": "dsv4-demo", "prompt": "a", "max_tokens": "x", "max_tokens": 1}'
    assert http.post("/v1/completions", content=body, headers=JSON).status_code == 200
