"""The routes of `/v1/messages`: a message made, and a prompt's tokens counted, as Anthropic's clients ask for them.

Knows aiohttp and the service. Errors below this path have Anthropic's shape (engine/http.py).
"""

import uuid
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from engine import api
from engine.api.chunks import AnswerHead
from engine.api.dialects import AnswerWriter, Dialect
from engine.api.message_requests import MessagesTurn, message_arguments, parse_messages
from engine.api.message_shapes import AnthropicModel, AnthropicModels, TokenCount
from engine.api.message_writer import MessageWriter
from engine.api.translate import to_messages
from engine.generating import generating
from engine.http import RECORD, SERVICE, answer, check_model, parsed

__all__ = ["add_message_routes", "anthropic_models"]


def add_message_routes(router: web.UrlDispatcher) -> None:
    """All of them."""
    router.add_post("/v1/messages", generating(_dialect))
    router.add_post("/v1/messages/count_tokens", _count_tokens)


def anthropic_models(request: web.Request) -> AnthropicModels | None:
    """The list of models for a client of Anthropic's, which its version header tells; None for others."""
    if "Anthropic-Version" not in request.headers:
        return None
    service = request.app[SERVICE]
    engine = service.admitted()
    made = datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z")
    name = engine.model_name
    card = AnthropicModel(id=name, display_name=name, created_at=made, max_input_tokens=engine.context_max)
    return AnthropicModels(data=(card,), first_id=name, last_id=name)


def _new_id(request_id: str) -> str:
    return f"msg_{uuid.uuid4().hex}"


def _dialect(request: web.Request) -> Dialect:
    request_id = request[RECORD].request_id

    def writer(asked: MessagesTurn, head: AnswerHead, count: int) -> AnswerWriter:
        return MessageWriter(asked, head, request_id)

    return Dialect(_new_id, parse_messages, to_messages, message_arguments, writer)


async def _count_tokens(request: web.Request) -> web.StreamResponse:
    """How many tokens the prompt of such a message has."""
    service = request.app[SERVICE]
    asked = await parsed(request, parse_messages)
    engine = service.admitted()
    check_model(engine, asked.model)
    arguments: dict[str, Any] = dict(message_arguments(asked, engine.template.variables))
    api.check_tools_size(arguments.get("tools"), engine.context_max)
    messages = to_messages(asked)
    api.check_prompt_size(messages, engine.context_max)
    ids = await engine.tokenizer.encode_async(engine.template.render(messages, **arguments))
    return answer(api.encode(TokenCount(input_tokens=len(ids))))
