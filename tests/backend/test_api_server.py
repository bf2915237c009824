"""The HTTP app's answers to malformed requests, without an engine behind it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from dsv4_triton.backend import compat, plugin
from tests.backend.servers import fake_server

JSON = {"Content-Type": "application/json"}


def extend(target: list[Any]) -> None:
    target.append("extended")


EXTENSION = f"{__name__}:extend"


@pytest.mark.parametrize("key", [compat.API_SERVER, "__main__"], ids=["vllm serve", "python -m"])
def test_only_apps_of_the_model_are_extended_and_once(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    module = fake_server(monkeypatch, key, build_app=lambda args, tasks=None, model=None: [args, tasks, model])
    compat.extend_api_server("Ours", EXTENSION)
    compat.extend_api_server("Ours", EXTENSION)
    ours, other = SimpleNamespace(architectures=["Ours"]), SimpleNamespace(architectures=["Other"])
    assert module.build_app("args", ("generate",), ours) == ["args", ("generate",), ours, "extended"]
    assert module.build_app("args", ("generate",), other) == ["args", ("generate",), other]
    assert module.build_app("args", ("render",)) == ["args", ("render",), None]


def test_a_process_without_a_server_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, compat.API_SERVER, raising=False)
    compat.extend_api_server("Ours", EXTENSION)
    assert compat.API_SERVER not in sys.modules


@pytest.mark.parametrize(
    "extension",
    [
        f"{__name__}:no_such_function",
        "dsv4_triton.no_such_module:extend",
    ],
    ids=["no function", "no module"],
)
def test_a_server_that_cannot_be_extended_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, extension: str
) -> None:
    module = fake_server(monkeypatch, compat.API_SERVER, build_app=lambda args, tasks=None, model=None: [])
    monkeypatch.setattr(compat.logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    compat.extend_api_server("Ours", extension)
    assert module.build_app("args", None, SimpleNamespace(architectures=["Ours"])) == []
    assert "malformed requests will be answered with 500" in caplog.text


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    """vLLM's own app for the model, with three routes more that fail each in its way."""
    from vllm.entrypoints.openai import api_server
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineGenerateError

    build = api_server.build_app
    plugin.register()
    model_config = SimpleNamespace(architectures=[plugin.ARCHITECTURE], get_pooling_task=lambda tasks: None)
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    app: FastAPI = api_server.build_app(args, ("generate",), model_config)
    app.state.engine_client = SimpleNamespace(errored=False, is_running=True)
    app.state.server = None
    app.state.vllm_config = SimpleNamespace(model_config=SimpleNamespace(skip_tokenizer_init=False))

    @app.get("/fails/{how}")
    async def fail(how: str, request: Request) -> None:
        if how == "lookup":
            raise KeyError("a fault of the server")
        if how == "not implemented":
            raise NotImplementedError("Unknown role: x")
        try:
            if how == "before the engine":
                # The attributes it reads are missing, so it fails as it starts.
                await AsyncLLM.add_request(Unreadable(), "id", "prompt", None)
            raise ValueError("inside the engine")
        except ValueError as error:
            raise EngineGenerateError from error

    yield TestClient(app, raise_server_exceptions=False)
    api_server.build_app = build


class Unreadable:
    """An engine whose every attribute is a bad value of the request."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError("Grammar error: the parenthesis is not closed")


def error_of(answer: Any, status: int) -> str:
    """The message of an OpenAI error, checked for its form."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == status and error["type"] and error["message"]
    return error["message"]


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/messages"])
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"[]", "must be a JSON object, it is an array"),
        (b'"text"', "must be a JSON object, it is a string"),
        (b"12", "must be a JSON object, it is a number"),
        (b"true", "must be a JSON object, it is true or false"),
        (b"null", "must be a JSON object, it is null"),
        (b'{"prompt": ["\\ud83d\\ude00", "a \\uD800 b"]}', "half a character, \\ud800"),
        (b"[" * 100_000, "pars|deep"),
    ],
    ids=["array", "string", "number", "boolean", "null", "half-a-character", "deep"],
)
def test_a_body_that_is_no_object_is_refused(client: TestClient, route: str, body: bytes, says: str) -> None:
    message = error_of(client.post(route, content=body, headers=JSON), 400)
    assert any(part in message for part in says.split("|")), message


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("value", ["5", "true", '"x"', "[]", "1e400"])
def test_a_field_of_the_wrong_kind_is_named(client: TestClient, route: str, value: str) -> None:
    body = f'{{"model": "m", "prompt": "a", "messages": [], "structured_outputs": {value}}}'
    assert error_of(client.post(route, content=body, headers=JSON), 400).startswith("structured_outputs: Input should")


def test_a_field_of_a_nested_request_is_named(client: TestClient) -> None:
    answer = client.post("/v1/chat/completions/derender", json={"chat_request": []})
    assert error_of(answer, 400) == "chat_request must be a JSON object, it is an array"


def test_the_content_type_is_still_checked(client: TestClient) -> None:
    answer = client.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"})
    assert "application/json" in error_of(answer, 400)


@pytest.mark.parametrize("route", ["/v1/nowhere", "/scale_elastic_ep"], ids=["unknown", "cannot work"])
def test_a_route_that_is_not_served_has_an_error_of_the_same_form(client: TestClient, route: str) -> None:
    assert error_of(client.post(route, json={"new_data_parallel_size": 2}), 404) == "Not Found"


def test_faults_of_the_server_stay_faults_of_the_server(client: TestClient) -> None:
    assert "a fault of the server" in error_of(client.get("/fails/lookup"), 500)
    assert client.get("/fails/inside the engine").status_code == 500


def test_without_a_tokenizer_what_needs_one_is_refused(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    state = client.app.state  # type: ignore[attr-defined]
    monkeypatch.setattr(state.vllm_config.model_config, "skip_tokenizer_init", True)
    for route in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize", "/invocations"):
        assert "--skip-tokenizer-init" in error_of(client.post(route, json={"model": "m"}), 400)
    assert "JSON object" in error_of(client.post("/v1/completions", json=[]), 400)


def test_faults_of_the_request_found_on_the_way(client: TestClient) -> None:
    assert error_of(client.get("/fails/not implemented"), 400) == "Unknown role: x"
    assert "the parenthesis is not closed" in error_of(client.get("/fails/before the engine"), 400)
