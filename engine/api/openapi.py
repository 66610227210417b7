"""The interface as one OpenAPI document, made from the types that requests and answers are.

`OPERATIONS` is the table: a line a route. What is not JSON is named by its media type. A test compares the table with the server's routes,
another sends what the document allows and compares what comes back with it.

1. Schemas are msgspec's own of the types that decode and encode: nothing is written twice.
2. What may be asked of a field beyond its type (ranges, combinations) is in docs/api.md, and refused with status 400.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from engine.api.message_requests import MessagesRequest
from engine.api.message_shapes import MessageBody, TokenCount
from engine.api.requests import ChatRequest, CompletionRequest, TokenizeRequest
from engine.api.response_requests import ResponsesRequest
from engine.api.response_shapes import ResponseBody, ResponseDeleted
from engine.api.responses import ChatAnswer, ChatChunk, CompletionAnswer, ModelCard, ModelList, RequestEnded, TokenizeAnswer
from engine.api.sessions import (
    CreateRequest,
    ForkRequest,
    ImportRequest,
    Nothing,
    SessionCard,
    SessionDeleted,
    SessionList,
    TruncateRequest,
)  # fmt: skip

__all__ = ["OPERATIONS", "ErrorBody", "Operation", "encode_openapi"]

_SSE = "text/event-stream"
_Answer: TypeAlias = type[msgspec.Struct] | str  # a JSON object, or another media type


class ErrorFields(msgspec.Struct, kw_only=True, frozen=True):
    """`param`: the field that it is about. `code`: as OpenAI names it, where clients act on one."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, kw_only=True, frozen=True):
    """What every refusal is. `revision`: the session's present one, with a conflict over it."""

    error: ErrorFields
    revision: int | UnsetType = UNSET


class MessageErrorFields(msgspec.Struct, kw_only=True, frozen=True):
    type: str
    message: str


class MessageErrorBody(msgspec.Struct, kw_only=True, frozen=True):
    """What a refusal of /v1/messages is."""

    type: str
    error: MessageErrorFields
    request_id: str | None = None


class Health(msgspec.Struct, kw_only=True, frozen=True):
    status: str


class Items(msgspec.Struct, kw_only=True, frozen=True):
    """Input of a response, as it was sent."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


@dataclass(frozen=True, slots=True)
class Operation:
    """A route. stream: what the events of a stream hold, where it answers with one when asked to. queries: name and what it does."""

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    answer: _Answer = Nothing
    status: int = 200
    stream: str = ""
    queries: tuple[tuple[str, str], ...] = ()
    required: bool = True
    error: type[msgspec.Struct] = ErrorBody
    open: bool = False  # wants no key


OPERATIONS: tuple[Operation, ...] = (
    Operation("post", "/v1/chat/completions", "One turn of a chat", ChatRequest, ChatAnswer, stream="ChatChunk objects, then [DONE]"),
    Operation("post", "/v1/completions", "A text that goes on from a prompt", CompletionRequest, CompletionAnswer,
              stream="CompletionAnswer objects, then [DONE]"),
    Operation("post", "/v1/responses", "One turn, as OpenAI's Responses API", ResponsesRequest, ResponseBody,
              stream="the events of OpenAI's Responses API"),
    Operation("get", "/v1/responses/{response}", "A response that was stored", answer=ResponseBody),
    Operation("get", "/v1/responses/{response}/input_items", "What it was asked with", answer=Items,
              queries=(("order", "asc or desc"), ("limit", "at most so many"), ("after", "the id behind which to begin"))),
    Operation("delete", "/v1/responses/{response}", "Forget a response", answer=ResponseDeleted),
    Operation("post", "/v1/responses/{response}/cancel", "End a response that runs", answer="application/json"),
    Operation("post", "/v1/messages", "One turn, as Anthropic's Messages API", MessagesRequest, MessageBody,
              stream="the events of Anthropic's Messages API", error=MessageErrorBody),
    Operation("post", "/v1/messages/count_tokens", "How many tokens such a one has", MessagesRequest, TokenCount, error=MessageErrorBody),
    Operation("post", "/v1/requests/{request}/cancel", "End a request that runs or waits, by its X-Request-Id", answer=RequestEnded),
    Operation("post", "/tokenize", "Token ids of a text, or of messages as the template renders them", TokenizeRequest, TokenizeAnswer),
    Operation("get", "/v1/models", "The model", answer=ModelList),
    Operation("get", "/v1/models/{model}", "The model, by name", answer=ModelCard),
    Operation("post", "/v1/sessions", "Make an empty session", CreateRequest, SessionCard, 201, required=False),
    Operation("get", "/v1/sessions", "The key's sessions, held and archived", answer=SessionList),
    Operation("post", "/v1/sessions/import", "Bring an archived session back", ImportRequest, SessionCard),
    Operation("get", "/v1/sessions/{session}", "One session", answer=SessionCard, queries=(("include", "tokens"),)),
    Operation("delete", "/v1/sessions/{session}", "Remove a session and its archive", answer=SessionDeleted),
    Operation("post", "/v1/sessions/{session}/fork", "A second session that begins alike", ForkRequest, SessionCard, 201, required=False),
    Operation("post", "/v1/sessions/{session}/truncate", "Keep its first tokens", TruncateRequest, SessionCard),
    Operation("post", "/v1/sessions/{session}/export", "Write it to disk", Nothing, SessionCard, required=False),
    Operation("post", "/v1/sessions/{session}/archive", "Write it to disk and let go of its memory", Nothing, SessionCard, required=False),
    Operation("get", "/statistics", "Counts of steps, hits, misses, rows and bytes", answer="application/json"),
    Operation("get", "/metrics", "The same and more for Prometheus", answer="text/plain"),
    Operation("get", "/v1/live", "A picture a second of what the server does", answer=_SSE),
    Operation("get", "/openapi.json", "This document", answer="application/json"),
    Operation("get", "/health", "Whether the process listens", answer=Health, open=True),
    Operation("get", "/ready", "Whether requests are served", answer=Health, open=True),
    Operation("get", "/", "A page to look at", answer="text/html", open=True),
    Operation("get", "/page/{name}", "Its files", answer="*/*", open=True),
)  # fmt: skip


@cache
def encode_openapi() -> bytes:
    """The document as JSON; the same every time."""
    types = sorted({kind for operation in OPERATIONS for kind in _types(operation)}, key=lambda kind: kind.__name__)
    _, components = msgspec.json.schema_components(
        [*types, ChatChunk], schema_hook=_any_schema, ref_template="#/components/schemas/{name}"
    )  # fmt: skip
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "Forebay", "version": _version(), "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "A decode engine for GLM-5 models. Fields that are not named are ignored, null is the same as leaving one out.",
        },
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }  # fmt: skip
    return msgspec.json.encode(document)


def _any_schema(kind: type) -> dict[str, object]:
    """Of fields that are passed on as they are."""
    assert kind is object, f"no schema is known of {kind}"
    return {"description": "any JSON value"}


def _types(operation: Operation) -> Iterable[type[msgspec.Struct]]:
    return (kind for kind in (operation.body, operation.answer, operation.error) if isinstance(kind, type))


def _described(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": re.sub(r"\W+", "_", f"{operation.method} {operation.path}").strip("_"),
        "responses": {str(operation.status): _answered(operation)},
    }
    named = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in _names(operation.path)
    ]
    asked = [{"name": name, "in": "query", "description": said, "schema": {"type": "string"}} for name, said in operation.queries]
    if named or asked:
        described["parameters"] = [*named, *asked]
    if operation.body is not None:
        content = {"application/json": {"schema": _reference(operation.body)}}
        described["requestBody"] = {"required": operation.required, "content": content}
    if operation.open:
        described["security"] = [{}]
    if operation.path == "/ready":
        described["responses"]["503"] = _answered(operation) | {"description": "Loading or draining"}
    refused = {"content": {"application/json": {"schema": _reference(operation.error)}}}
    described["responses"]["4XX"] = {"description": "Refused: a line that says what to do", **refused}
    described["responses"]["5XX"] = {"description": "Not served now (503), or this server's fault", **refused}
    return described


def _answered(operation: Operation) -> dict[str, Any]:
    kind = operation.answer
    content: dict[str, Any] = {kind: {}} if isinstance(kind, str) else {"application/json": {"schema": _reference(kind)}}
    if operation.stream:
        content[_SSE] = {"schema": {"type": "string", "description": f"with stream: {operation.stream}"}}
    return {"description": operation.summary, "content": content}


def _names(path: str) -> list[str]:
    return re.findall(r"{(\w+)}", path)


def _reference(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _version() -> str:
    try:
        return version("forebay")
    except PackageNotFoundError:
        return "0"
