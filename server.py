"""The HTTP server: routes, the SSE writer, and the entry point of the `forebay` command. Knows the engine's face and no tensors.

1. Nothing of an answer is sent before its first chunk or its error is known, so an early error has the right status.
2. A stream ends with `[DONE]`, after a chunk with a finish reason or after an error chunk.
3. A client that leaves cancels its own generation within one step, and loses nothing else.
4. A slow reader holds up its own stream alone: its chunks wait in a bounded relay and then leave in one write.
5. No body shows a traceback, and no log line a key or a prompt. One `request.finished` line a request, nothing a token.
6. The server listens before the model is loaded; until then, and while it drains, requests get 503.
"""

import asyncio
import errno
import os
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import structlog
from aiohttp import web

from engine import api
from engine.api.dialects import CHAT, COMPLETION, ChoiceWriter, Dialect
from engine.choices import Choices
from engine.chunk import Chunk
from engine.commands import WhileReady
from engine.commands.line import run_line
from engine.commands.signals import Signals
from engine.commands.terminal import complain, forget_output
from engine.config import ServerConfig
from engine.errors import BadRequest, ForebayError
from engine.http import RECORD, SERVICE, Route, answer, check_model, name_answer, observe, parsed
from engine.malformed import http_logger
from engine.protocol import EngineFace, GenerationFace, SessionId
from engine.relay import Relay
from engine.request_record import RequestRecord
from engine.service import Service
from engine.session_routes import add_session_routes
from engine.shelf import open_shelf

__all__ = ["CannotBind", "build_app", "main", "serve"]

log = structlog.get_logger()

_Item: TypeAlias = tuple[int, Chunk]  # choice, its next chunk
_COUNTS = (
    "sessions", "running", "waiting", "steps", "mirrored_rows", "hot_rows", "ring_rows", "hits", "misses", "ring_reads", "drafts_proposed",
    "drafts_accepted", "stored", "host_bytes", "device_bytes", "resident_bytes",
)  # fmt: skip


class CannotBind(ForebayError):
    """The address cannot be listened on."""

    exit_code = 5
    kind = "cannot_bind"


def _generating(dialect: Dialect) -> Route:
    async def route(request: web.Request) -> web.StreamResponse:
        service, record = request.app[SERVICE], request[RECORD]
        service.admitted()  # before the body is read; and again after, because that takes a while
        asked = await parsed(request, dialect.parse)
        engine = service.admitted()
        check_model(engine, asked.model)
        samplings = api.to_samplings(asked, engine.default_sampling)
        history = api.to_history(asked, allowed=service.config.synthetic_history)
        head = api.AnswerHead(
            id=dialect.id_prefix + record.request_id,
            model=engine.model_name,
            created=int(time.time()),
            logprobs=samplings[0].logprobs is not None,
            return_token_ids=bool(asked.return_token_ids),
            include_usage=api.wants_usage(asked),
            token_bytes=engine.tokenizer.token_bytes if engine.tokenizer.available else None,
        )
        prompt = dialect.prompt(asked)
        api.check_prompt_size(prompt, engine.context_max)
        arguments = dialect.arguments(asked, engine.template.variables)
        api.check_tools_size((arguments or {}).get("tools"), engine.context_max)
        turn = asked.session
        if turn is not None:
            engine = await service.restored(turn.id)
        generate = partial(
            engine.generate, session=None if turn is None else SessionId(turn.id), revision=None if turn is None else turn.revision,
            namespace=service.namespace, request_id=record.request_id, template_arguments=arguments, history=history,
        )  # fmt: skip
        with service.running(None if turn is None else turn.id):
            async with Choices(generate, prompt, samplings) as choices:
                session = None if turn is None else partial(_left_at, turn.id, choices.first)
                head = replace(head, prompt_token_ids=choices.prompt_ids, session=session)
                record.session_id, record.usage = choices.first.session_id, choices.usage
                writers = [dialect.writer(asked, head, index) for index in range(len(samplings))]
                first = await _next(choices, record)
                assert first is not None, "a generation has at least one chunk"
                if asked.stream:
                    return await _stream(request, _events(dialect, head, writers, first, choices, record))
                item: _Item | None = first
                while item is not None:
                    choice, chunk = item
                    writers[choice].take(chunk)
                    await _leave_ended(choices, writers, choice, record)
                    item = await _next(choices, record)
                return answer(api.encode(dialect.answer(head, [writer.choice() for writer in writers], choices.usage)))

    return route


def _left_at(session_id: str, generation: GenerationFace) -> api.SessionState:
    return api.SessionState(id=session_id, revision=generation.revision)


async def _next(choices: Choices, record: RequestRecord) -> _Item | None:
    item = await anext(choices, None)
    if item is not None:
        record.saw(item[1], choices.usage)
    return item


async def _leave_ended(choices: Choices, writers: Sequence[ChoiceWriter], choice: int, record: RequestRecord) -> None:
    """Leave a choice that wants no more chunks, before its client hears of the end and asks for the next turn."""
    if writers[choice].ended:
        await choices.leave(choice)
        record.finish_reason = "stop"


async def _events(
    dialect: Dialect, head: api.AnswerHead, writers: Sequence[ChoiceWriter], first: _Item, choices: Choices, record: RequestRecord
) -> AsyncGenerator[bytes, None]:
    """The stream's events: chunks, then usage if asked for, or an error; then the end."""
    item: _Item | None = first
    try:
        while item is not None:
            choice, chunk = item
            payload = _event(api.encode(writers[choice].event(chunk)))
            await _leave_ended(choices, writers, choice, record)
            yield payload
            item = await _next(choices, record)
        if head.include_usage:
            yield _event(api.encode(dialect.usage(head, choices.usage)))
    except Exception as error:  # the edge of this stream: it ends with an error chunk
        if not isinstance(error, ForebayError):
            log.exception("request.failed", request_id=record.request_id)
        record.finish_reason = "error"
        yield _event(api.encode(api.error_body(error)[1]))
    yield _event(b"[DONE]")


def _event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


async def _stream(request: web.Request, events: AsyncGenerator[bytes, None]) -> web.StreamResponse:
    """Write `events` as they come. Raises ConnectionError when the reader has left."""
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    )
    await response.prepare(request)
    relay, left = Relay(), None
    async with asyncio.TaskGroup() as group:
        filling = group.create_task(relay.fill(events))
        try:
            while payload := await relay.take():
                await response.write(payload)
        except ConnectionError as error:  # kept out of the group, which would wrap it
            left = error
        finally:
            filling.cancel()
    if left is not None:
        raise left
    return response


async def _tokenize(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    asked = await parsed(request, api.parse_tokenize)
    engine = service.admitted()
    check_model(engine, asked.model)
    text = asked.prompt
    if text is None:
        given = api.template_arguments(asked, engine.template.variables)
        api.check_tools_size(given.get("tools"), engine.context_max)
        arguments: dict[str, Any] = {**given, "add_generation_prompt": asked.add_generation_prompt is not False}
        text = engine.template.render(api.to_messages(asked), **arguments)
    api.check_text_size(len(text), engine.context_max, "prompt" if asked.messages is None else "messages")
    ids = await engine.tokenizer.encode_async(text)
    if asked.return_token_strs and len(ids) > engine.context_max:
        raise BadRequest(f"return_token_strs gives at most {engine.context_max} tokens, not {len(ids)}", field="return_token_strs")
    text_of = engine.tokenizer.token_text if asked.return_token_strs else None
    return answer(await asyncio.to_thread(api.encode_tokenized, ids, engine.context_max, text_of))


def _card(service: Service, engine: EngineFace) -> api.ModelCard:
    return api.ModelCard(id=engine.model_name, created=service.created, max_model_len=engine.context_max)


async def _models(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    return answer(api.encode(api.ModelList(data=(_card(service, service.admitted()),))))


async def _model(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    engine = service.admitted()
    check_model(engine, request.match_info["model"])
    return answer(api.encode(_card(service, engine)))


async def _health(request: web.Request) -> web.StreamResponse:
    return answer({"status": "ok"})


async def _ready(request: web.Request) -> web.StreamResponse:
    state = request.app[SERVICE].state
    return answer({"status": state}, 200 if state == "ready" else 503)


async def _statistics(request: web.Request) -> web.StreamResponse:
    found = request.app[SERVICE].admitted().statistics()
    return answer({name: getattr(found, name) for name in _COUNTS})


def build_app(service: Service) -> web.Application:
    """The routes over `service`."""
    app = web.Application(middlewares=[observe], client_max_size=service.config.body_bytes_max)
    app[SERVICE] = service
    app.on_response_prepare.append(name_answer)
    app.router.add_post("/v1/chat/completions", _generating(CHAT))
    app.router.add_post("/v1/completions", _generating(COMPLETION))
    app.router.add_post("/tokenize", _tokenize)
    app.router.add_get("/v1/models", _models, allow_head=False)
    app.router.add_get("/v1/models/{model:.+}", _model, allow_head=False)
    add_session_routes(app.router)
    app.router.add_get("/statistics", _statistics)
    app.router.add_get("/health", _health)
    app.router.add_get("/ready", _ready)
    return app


@asynccontextmanager
async def listening(service: Service) -> AsyncIterator[str]:
    """Listen while the block runs; yields the address. Raises CannotBind."""
    config = service.config
    runner = web.AppRunner(
        build_app(service), handler_cancellation=True, access_log=None, shutdown_timeout=1.0, auto_decompress=False, logger=http_logger()
    )  # fmt: skip
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, config.host, config.port).start()
        except OSError as error:
            number = error.errno or 0  # failed look-ups of names have numbers of their own
            why = os.strerror(number) if number in errno.errorcode else error.strerror or str(error)
            raise CannotBind(f"cannot listen on {config.host}:{config.port}: {why}; choose another --host or --port") from error
        if config.exposed:
            log.warning("server.exposed", host=config.host, advice="anyone who reaches this address may use it: set --api-key-file")
        host, port = runner.addresses[0][:2]
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def serve(
    open_engine: Callable[[], AbstractAsyncContextManager[EngineFace]], config: ServerConfig, while_ready: WhileReady | None = None
) -> None:
    """Listen, open the engine, run `while_ready` (for ever when None), drain, bring sessions to disk, close.

    A signal ends the loading or `while_ready`; a second one ends the drain, one more the archiving. Raises CannotBind, BadSetting and
    what opening raises.
    """
    service, signals = Service(config), Signals()
    shelf = open_shelf(
        config.sessions_dir, service.namespace, quota_bytes=config.sessions_quota_bytes, retention=service.retention
    )  # fmt: skip
    with shelf as service.shelf, signals.caught():
        async with listening(service) as address, AsyncExitStack() as stack:
            async with signals.until_signal():
                engine = await stack.enter_async_context(open_engine())
                service.opened(engine)
                async with service.tended():
                    await (while_ready(address, engine) if while_ready is not None else asyncio.Event().wait())
            async with signals.until_signal():
                await service.drain()
            await service.cut()
            async with signals.until_signal():
                await service.keep()


def main(words: Sequence[str] | None = None) -> int:
    """The `forebay` command. Returns the exit code."""
    if sys.flags.optimize:
        complain("python -O removes the checks that guard the histories; run without -O and PYTHONOPTIMIZE")
        return 2
    try:
        return run_line(sys.argv[1:] if words is None else words, os.environ, serve)
    except ForebayError as error:
        complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has left; nothing is wrong here
        forget_output()
        return 0


if __name__ == "__main__":
    sys.exit(main())
