"""The routes of `/v1/responses`: a response made, read again with its input, and deleted.

Knows aiohttp and the service, which keeps the responses of each namespace (engine/api/response_turns.py).
"""

import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import msgspec
from aiohttp import web

from engine import api
from engine.api.chunks import AnswerHead
from engine.api.dialects import AnswerWriter, Dialect
from engine.api.response_requests import InputItem, ResponsesTurn, parse_responses, renamed
from engine.api.response_shapes import ResponseDeleted
from engine.api.response_turns import KeptResponses, kept_turn, response_prompt, tokens_before
from engine.api.response_writer import ResponseWriter
from engine.api.translate import template_arguments
from engine.errors import BadRequest
from engine.generating import generating
from engine.http import ACCOUNT, SERVICE, answer
from engine.protocol import Prompt

__all__ = ["add_response_routes"]

_LIST_MAX = 100


def add_response_routes(router: web.UrlDispatcher) -> None:
    """All of them."""
    router.add_post("/v1/responses", generating(lambda request: _dialect(_kept(request))))
    router.add_get("/v1/responses/{response}", _read, allow_head=False)
    router.add_get("/v1/responses/{response}/input_items", _input_items, allow_head=False)
    router.add_delete("/v1/responses/{response}", _delete)
    router.add_post("/v1/responses/{response}/cancel", _cancel)


def _kept(request: web.Request) -> KeptResponses:
    service = request.app[SERVICE]
    service.admitted()
    return service.responses[request[ACCOUNT].namespace]


def _new_id(request_id: str) -> str:
    """Not made of the request's id, which a client may send twice."""
    return f"resp_{uuid.uuid4().hex}"


def _dialect(kept: KeptResponses) -> Dialect:
    def writer(asked: ResponsesTurn, head: AnswerHead, count: int) -> AnswerWriter:
        return ResponseWriter(asked, head, lambda body, prompt_ids, answer_ids: kept_turn(asked, body, prompt_ids, answer_ids, kept))

    def prompt(asked: ResponsesTurn) -> Prompt:
        with _own_names():
            return response_prompt(asked, kept)

    def arguments(asked: ResponsesTurn, variables: Collection[str] | None) -> Mapping[str, object]:
        with _own_names():
            return template_arguments(asked, variables)

    return Dialect(_new_id, parse_responses, prompt, arguments, writer, lambda asked: tokens_before(asked, kept))


@contextmanager
def _own_names() -> Iterator[None]:
    """What the chat's code refuses in the block is refused by this endpoint's names."""
    try:
        yield
    except BadRequest as error:
        raise renamed(error) from error


async def _read(request: web.Request) -> web.StreamResponse:
    if request.query.get("stream", "false") != "false":
        raise BadRequest("stream is not served here: an answer is streamed when it is made", field="stream")
    return answer(_kept(request).find(request.match_info["response"]).body)


async def _delete(request: web.Request) -> web.StreamResponse:
    name = request.match_info["response"]
    _kept(request).remove(name)
    return answer(api.encode(ResponseDeleted(id=name)))


async def _cancel(request: web.Request) -> web.StreamResponse:
    """End one that is running, as `/v1/requests/{id}/cancel` does; what it had said its own stream has told."""
    name = request.match_info["response"]
    await request.app[SERVICE].requests.end(request[ACCOUNT].namespace, name)
    return answer(api.encode({"id": name, "object": "response", "status": "cancelled", "output": []}))


async def _input_items(request: web.Request) -> web.StreamResponse:
    """The input of one request, the last item first unless `order` is asc."""
    found = _kept(request).find(request.match_info["response"])
    order, limit = request.query.get("order", "desc"), request.query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise BadRequest("order must be asc or desc", field="order")
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= _LIST_MAX):
        raise BadRequest(f"limit must be an integer from 1 to {_LIST_MAX}", field="limit")
    named = [(item.id or f"item_{index}", item) for index, item in enumerate(found.input)]
    if order == "desc":
        named.reverse()
    after = request.query.get("after")
    if after is not None:
        names = [name for name, _ in named]
        if after not in names:
            raise BadRequest("after must be the id of an item", field="after")
        named = named[names.index(after) + 1 :]
    shown = named[: int(limit)]
    data = [_listed(name, item) for name, item in shown]
    ends = {"first_id": shown[0][0] if shown else None, "last_id": shown[-1][0] if shown else None}
    return answer(api.encode({"object": "list", "data": data, **ends, "has_more": len(named) > len(shown)}))


def _listed(name: str, item: InputItem) -> dict[str, object]:
    """An item as it is listed: with an id and a type, its text in parts."""
    found: dict[str, object] = {**msgspec.to_builtins(item), "id": name, "type": item.type or "message"}
    if isinstance(item.content, str) and found["type"] == "message":
        kind = "output_text" if item.role == "assistant" else "input_text"
        found["content"] = [{"type": kind, "text": item.content}]
    return found
