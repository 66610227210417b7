"""The one path of every endpoint that generates: from a body to a whole answer or a stream of server-sent events.

Knows aiohttp, the service and the engine's face. What an endpoint reads and writes is its `Dialect` (engine/api/dialects.py).

1. Nothing of an answer is sent before its first chunk or its error is known, so an early error has the right status. A stream whose first
   chunk takes long begins with comments instead, because clients and proxies give up on silence; its error is then the stream's.
2. A stream ends as its dialect ends one, after a finish reason or after an error.
3. A client that leaves cancels its own generation within one step, and loses nothing else.
4. What a request may take, of its key's share and of time, is checked here; a time that is over ends it as an error does.
5. A slow reader holds up its own stream alone: its chunks wait in a bounded relay and then leave in one write.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import structlog
from aiohttp import web

from engine import api
from engine.api.dialects import AnswerWriter, Dialect
from engine.choices import Choices
from engine.chunk import Chunk
from engine.errors import ForebayError, RequestTimedOut
from engine.http import ACCOUNT, RECORD, SERVICE, Route, answer, check_model, parsed
from engine.protocol import GenerationFace, SessionId
from engine.relay import Relay
from engine.request_record import RequestRecord

__all__ = ["events", "generating"]

log = structlog.get_logger()

_ALIVE = b": the prompt is read\n\n"  # a comment to every reader of such streams
_GRACE_S = 30.0  # that a reader has behind a request's time to take what is left

_Item: TypeAlias = tuple[int, Chunk]  # choice, its next chunk


def generating(dialect_of: Callable[[web.Request], Dialect]) -> Route:
    """The route of one endpoint. Args: dialect_of: its dialect, for this request."""

    async def route(request: web.Request) -> web.StreamResponse:
        account, record = request[ACCOUNT], request[RECORD]
        timeout_s = request.app[SERVICE].config.request_timeout_s
        with account.generating():
            try:
                return await _answered(request, dialect_of(request), asyncio.get_running_loop().time() + timeout_s if timeout_s else None)
            finally:
                if record.first is not None:  # what was refused has taken nothing
                    account.used(record.usage.prompt_tokens - record.usage.cached_tokens + record.usage.completion_tokens)

    return route


async def _answered(request: web.Request, dialect: Dialect, until: float | None) -> web.StreamResponse:
    """One request's answer. Args: until: the loop's time at which it is over."""
    service, record, namespace = request.app[SERVICE], request[RECORD], request[ACCOUNT].namespace
    service.admitted()  # before the body is read; and again after, because that takes a while
    async with _until(until):
        asked = await parsed(request, dialect.parse)
    engine = service.admitted()
    check_model(engine, asked.model)
    samplings = api.to_samplings(asked, engine.default_sampling)
    history = api.to_history(asked, allowed=service.config.synthetic_history)
    head = api.AnswerHead(
        id=dialect.new_id(record.request_id),
        model=engine.model_name,
        created=int(time.time()),
        logprobs=samplings[0].logprobs is not None,
        return_token_ids=bool(asked.return_token_ids),
        include_usage=api.wants_usage(asked),
        token_bytes=engine.tokenizer.token_bytes if engine.tokenizer.available else None,
    )
    prompt, after = dialect.prompt(asked), dialect.after(asked)
    api.check_prompt_size(prompt, engine.context_max)
    arguments = dialect.arguments(asked, engine.template.variables)
    api.check_tools_size((arguments or {}).get("tools"), engine.context_max)
    turn = asked.session
    if turn is not None:
        engine = await service.restored(turn.id, namespace)
    generate = partial(
        engine.generate, session=None if turn is None else SessionId(turn.id), revision=None if turn is None else turn.revision,
        namespace=namespace, request_id=record.request_id, template_arguments=arguments, history=history, after=after,
    )  # fmt: skip
    choices = Choices(generate, prompt, samplings)
    with service.running(None if turn is None else turn.id), service.requests.named(namespace, {record.request_id, head.id}, choices):
        async with _entered(choices, until):
            session = None if turn is None else partial(_left_at, turn.id, choices.first)
            head = replace(head, prompt_token_ids=choices.prompt_ids, session=session)
            record.session_id, record.usage = choices.first.session_id, choices.usage
            writer = dialect.writer(asked, head, len(samplings))
            alive_s = service.config.keep_alive_s if asked.stream else 0.0
            first = await _first(choices, record, until, alive_s)
            if asked.stream:
                return await _stream(request, events(writer, first, choices, record, until, alive_s), until)
            return answer(await _whole(writer, first, choices, record, until))


async def _first(choices: Choices, record: RequestRecord, until: float | None, alive_s: float) -> _Item | None:
    """The first chunk; None where it has not come within `alive_s` seconds, if these are not 0."""
    try:
        async with asyncio.timeout(alive_s or None):
            item = await _next(choices, record, until)
    except TimeoutError:
        return None
    assert item is not None, "a generation has at least one chunk"
    return item


async def _whole(writer: AnswerWriter, first: _Item | None, choices: Choices, record: RequestRecord, until: float | None) -> bytes:
    item: _Item | None = first
    while item is not None:
        choice, chunk = item
        writer.take(choice, chunk)
        await _leave_ended(choices, writer, choice, record)
        item = await _next(choices, record, until)
    return writer.whole(choices.usage)


@asynccontextmanager
async def _until(until: float | None) -> AsyncIterator[None]:
    """The block ends by then. Raises RequestTimedOut."""
    try:
        async with asyncio.timeout_at(until) as scope:
            yield
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise RequestTimedOut("the request took longer than this server lets any take: --request-timeout") from error


@asynccontextmanager
async def _entered(choices: Choices, until: float | None) -> AsyncIterator[None]:
    """The block of `choices`, which begin in time or not at all."""
    async with AsyncExitStack() as stack:
        async with _until(until):
            await stack.enter_async_context(choices)
        yield


def _left_at(session_id: str, generation: GenerationFace) -> api.SessionState:
    return api.SessionState(id=session_id, revision=generation.revision)


async def _next(choices: Choices, record: RequestRecord, until: float | None) -> _Item | None:
    if until is None:
        item = await anext(choices, None)
    else:
        async with _until(until):
            item = await anext(choices, None)
    if item is not None:
        record.saw(item[1], choices.usage)
    return item


async def _leave_ended(choices: Choices, writer: AnswerWriter, choice: int, record: RequestRecord) -> None:
    """Leave a choice that wants no more chunks, before its client hears of the end and asks for the next turn."""
    if writer.ended(choice):
        await choices.leave(choice)
        record.finish_reason = "stop"


async def events(
    writer: AnswerWriter, first: _Item | None, choices: Choices, record: RequestRecord, until: float | None = None, alive_s: float = 0.0
) -> AsyncGenerator[bytes, None]:
    """The parts of a stream as they come: what begins it, one a chunk, and its end or an error.

    Args: first: None: it has not come yet, and every `alive_s` seconds a comment says that somebody works on it. until: the loop's time.
    """
    item, begin, begun = first, b"", False
    try:
        while item is None:
            yield _ALIVE
            item = await _first(choices, record, until, alive_s)
        begin, begun = writer.begin(choices.usage), True
        while item is not None:
            choice, chunk = item
            payload = begin + writer.event(choice, chunk)
            begin = b""
            await _leave_ended(choices, writer, choice, record)
            if payload:  # a chunk may bring nothing yet, and an empty part would be the relay's end
                yield payload
            item = await _next(choices, record, until)
        end = writer.end(choices.usage)
    except Exception as error:  # the edge of this stream: it ends with an error
        if not isinstance(error, ForebayError):
            log.exception("request.failed", request_id=record.request_id)
        record.finish_reason = "error"
        if not begun:
            begin = writer.begin(choices.usage)
        end = begin + writer.failure(error)
    yield end


async def _stream(request: web.Request, parts: AsyncGenerator[bytes, None], until: float | None) -> web.StreamResponse:
    """Write `parts` as they come. Raises ConnectionError when the reader has left, or has not read what was there long after `until`."""
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    )
    await response.prepare(request)
    relay, left = Relay(), None
    async with asyncio.TaskGroup() as group:
        filling = group.create_task(relay.fill(parts))
        try:
            async with asyncio.timeout_at(None if until is None else until + _GRACE_S):
                while payload := await relay.take():
                    await response.write(payload)
        except ConnectionError as error:  # kept out of the group, which would wrap it
            left = error
        except TimeoutError:
            left = ConnectionError("the reader does not read")
        finally:
            filling.cancel()
    if left is not None:
        raise left
    return response
