"""Requests that vLLM 0.27.1's HTTP server answers with 500 although the client is wrong, answered with 400.

Its pydantic validators run before the types are checked and call `.get` on whatever the body holds; items of
`/v1/responses` that are no messages are read as messages; the DeepSeek-V4 chat encoding and the Messages API report a
client's mistake as their own; a server without a tokenizer fails where it wants to use it. Goes when vLLM answers these
itself: tests/serving/test_malformed.py lists them.
"""

from __future__ import annotations

import functools
import json
import re
import traceback
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NoReturn, get_args

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.chat_utils import parse_chat_messages_async
from vllm.entrypoints.openai.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.entrypoints.serve.utils.error_response import create_error_response
from vllm.entrypoints.serve.utils.server_utils import engine_error_handler, http_exception_handler
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm.v1.structured_output import backend_outlines

_KINDS = {dict: "an object", list: "an array", str: "a string", bool: "true or false", type(None): "null"}
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_TAKE_TOKENS = ("/v1/completions", "/inference/v1/generate", "/abort_requests")
"""What works without a tokenizer; vLLM checks itself that a prompt is given as tokens."""
_CLIENT_ERRORS = (VLLMClientError, ValueError, TypeError, OverflowError)
"""What vLLM blames on the client when it comes out of an endpoint."""
_HANDLERS = ("create_messages", "count_tokens")
_CANNOT_WORK = ("/scale_elastic_ep", "/is_scaling_elastic_ep")
"""Routes that need expert parallelism, which `limits` refuses; vLLM answers even proper requests to them with 500."""


def answer_client_errors(app: FastAPI) -> None:
    """Make `app`, built by vLLM, answer malformed requests with 400 and what is wrong with them."""
    app.dependency_overrides[validate_json_request] = _check_body
    app.add_exception_handler(HTTPException, http_exception_handler)  # vLLM has it for FastAPI's subclass only
    app.add_exception_handler(EngineGenerateError, _answer_engine_error)
    for kind in (AttributeError, LookupError, RecursionError, NotImplementedError):
        app.add_exception_handler(kind, _answer)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) not in _CANNOT_WORK]
    app.middleware_stack = None  # vLLM has built it; the first request builds it again, with these handlers
    # The fallback for schemas that no other backend holds; every request to it ends with 500, as `limits` says.
    backend_outlines.validate_structured_output_request_outlines = _refuse_schema
    for name in _HANDLERS:
        handler = getattr(AnthropicServingMessages, name)
        if not hasattr(handler, "__wrapped__"):
            setattr(AnthropicServingMessages, name, _returning_client_errors(handler))


async def _check_body(raw_request: Request) -> None:
    """Stands in for vLLM's check of the content type: it holds, and the body is a JSON object of proper text.

    Before that, a route that needs a tokenizer is refused where there is none.
    """
    model_config = raw_request.app.state.vllm_config.model_config
    if model_config.skip_tokenizer_init and raw_request.scope["route"].path not in _TAKE_TOKENS:
        raise VLLMValidationError("this needs a tokenizer, and the server was started without (--skip-tokenizer-init)")
    await validate_json_request(raw_request)
    content = await raw_request.body()
    try:
        body = await raw_request.json()
    except ValueError:
        return  # FastAPI or the endpoint says where the JSON breaks off
    if not isinstance(body, dict):
        raise VLLMValidationError(f"the body must be a JSON object, it is {_kind(body)}")
    if _ESCAPED_SURROGATE.search(content):
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            escape = ascii(error.object[error.start])[1:-1]
            raise VLLMValidationError(f"the body holds half a character, {escape}") from None


def _refuse_schema(params: Any) -> NoReturn:
    raise VLLMValidationError("neither xgrammar nor guidance can hold an answer to this schema", parameter="schema")


async def _answer(request: Request, error: Exception) -> JSONResponse:
    response = _client_error(error)
    if response is None:
        raise error  # a fault of the server's own: logged and answered with 500
    return JSONResponse(response.model_dump(), status_code=response.error.code)


async def _answer_engine_error(request: Request, error: EngineGenerateError) -> JSONResponse:
    response = _client_error(error)
    if response is None:
        return await engine_error_handler(request, error)
    return JSONResponse(response.model_dump(), status_code=response.error.code)


def _client_error(error: BaseException) -> ErrorResponse | None:
    """The answer to a request that caused `error`; None where the request is not to blame."""
    if isinstance(error, EngineGenerateError):
        # Wraps a bad value that was found on the way to the engine as well as a failure of the engine itself.
        cause = error.__cause__
        return _client_error(cause) if cause is not None and _frame(cause, AsyncLLM.add_request) else None
    if isinstance(error, _CLIENT_ERRORS):
        return create_error_response(error)
    if isinstance(error, RecursionError):
        return create_error_response("the request is nested too deeply")
    if isinstance(error, NotImplementedError):
        return create_error_response(str(error))
    if isinstance(error, (AttributeError, LookupError)):
        if frame := _frame(error, TypeAdapter.validate_python):
            misfit = _misfit(frame.f_locals["self"]._type, frame.f_locals["object"])
            return create_error_response(misfit or f"the body is malformed: {error}")
        if _frame(error, parse_chat_messages_async):
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            return create_error_response(f"a message or item cannot be read: {reason}")
    return None


def _frame(error: BaseException, function: Callable[..., Any]) -> FrameType | None:
    """The call of `function` that `error` came out of."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((frame for frame in frames if frame.f_code is function.__code__), None)


def _misfit(model: Any, body: Any) -> str | None:
    """The first field of `body` that does not fit `model`, found without the model's own validators."""
    if not isinstance(body, Mapping):
        return f"the body must be a JSON object, it is {_kind(body)}"
    for name, field in [item for part in _models(model) for item in part.model_fields.items() if item[0] in body]:
        try:
            TypeAdapter(field.annotation or Any).validate_python(body[name])
        except ValidationError as misfit:
            first = misfit.errors()[0]
            return f"{'.'.join(map(str, (name, *first['loc'])))}: {first['msg']}"
        except Exception:
            inner = _misfit(field.annotation, body[name])
            return inner and inner.replace("the body", name, 1)
    return None


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models an annotation allows, in its unions too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "a number")


def _returning_client_errors(handler: Callable[..., Any]) -> Callable[..., Any]:
    """A Messages API handler that returns errors of the client's making, where its caller would answer 500."""

    @functools.wraps(handler)
    async def answering(*args: Any, **kwargs: Any) -> Any:
        try:
            return await handler(*args, **kwargs)
        except Exception as error:
            response = _client_error(error)
            if response is None:
                raise
            return response

    return answering
