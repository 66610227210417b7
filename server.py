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
import hmac
import math
import os
import re
import sys
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, TypeAlias, TypeVar

import structlog
from aiohttp import web

from engine import api
from engine.api.dialects import CHAT, COMPLETION, Dialect
from engine.chunk import Chunk, Usage
from engine.commands import WhileReady
from engine.commands.line import run_line
from engine.commands.signals import Signals
from engine.commands.terminal import complain, forget_output
from engine.config import ServerConfig
from engine.errors import BadModel, BadRequest, ForebayError
from engine.malformed import MALFORMED, http_logger
from engine.protocol import EngineFace, GenerationFace
from engine.relay import Relay
from engine.request_record import RequestRecord
from engine.service import Service

__all__ = ["CannotBind", "build_app", "main", "serve"]

log = structlog.get_logger()

_OPEN_PATHS = ("/health", "/ready")  # asked by machines that hold no key
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_COUNTS = (
    "sessions", "running", "waiting", "steps", "mirrored_rows", "hot_rows", "ring_rows", "hits", "misses", "ring_reads", "drafts_proposed",
    "drafts_accepted", "host_bytes", "device_bytes", "resident_bytes",
)  # fmt: skip
_LARGE_BYTES = 256 * 1024  # a body of this size takes a few milliseconds to decode and check
_CUT = 499  # a status for the log only: the client left, or the drain was over

_Asked = TypeVar("_Asked")
Route: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class CannotBind(ForebayError):
    """The address cannot be listened on."""

    exit_code = 5
    kind = "cannot_bind"


class HttpError(ForebayError):
    """What HTTP itself refuses; `code` and `kind` as OpenAI names them."""

    def __init__(self, status: int, message: str, *, kind: str = "invalid_request_error", code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.code = status, kind, code


SERVICE = web.AppKey("SERVICE", Service)
RECORD = web.RequestKey("RECORD", RequestRecord)


def _json(body: Mapping[str, object] | bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    payload = body if isinstance(body, bytes) else api.encode(dict(body))
    return web.Response(body=payload, status=status, headers=headers, content_type="application/json")


def _failure(error: BaseException) -> web.Response:
    status, body = api.error_body(error)
    headers: dict[str, str] = {}
    if isinstance(error, HttpError):
        body = api.error_fields(str(error), error.kind, code=error.code)
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return _json(body, status, headers)


def _refusal(error: web.HTTPException, request: web.Request) -> web.StreamResponse:
    """aiohttp's own refusals in our shape; redirects and the like pass."""
    if error.status < 400:
        raise error
    said = {
        404: f"no route {request.path}",
        405: f"{request.path} does not take {request.method}",
        413: f"the body is larger than {request.app[SERVICE].config.body_bytes_max} bytes",
    }
    kind = "not_found_error" if error.status == 404 else "invalid_request_error"
    response = _failure(HttpError(error.status, said.get(error.status, error.reason or "refused"), kind=kind))
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def _authorise(request: web.Request) -> None:
    """Raises HttpError 401. Compared in constant time."""
    key = request.app[SERVICE].config.api_key
    if key is None or request.path in _OPEN_PATHS:
        return
    scheme, _, sent = request.headers.get("Authorization", "").partition(" ")
    given = sent.strip().encode("utf-8", "surrogateescape")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given, key.encode()):
        raise HttpError(401, "send the server's key as 'Authorization: Bearer KEY'", kind="authentication_error", code="invalid_api_key")


@web.middleware
async def observe(request: web.Request, handler: Route) -> web.StreamResponse:
    """Around every request: its id, the key, errors as bodies, the one log line."""
    sent = request.headers.get("X-Request-Id", "")
    record = request[RECORD] = RequestRecord(sent if _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex)
    response: web.StreamResponse
    try:
        try:
            _authorise(request)
            response = await handler(request)
        except web.HTTPException as error:
            response = _refusal(error, request)
        except BadModel as error:  # a request that needs a tokenizer or template that this model does not have
            response = _failure(BadRequest(str(error)))
        except ForebayError as error:
            response = _failure(error)
        except ConnectionError:
            raise
        except Exception as error:
            log.exception("request.failed", request_id=record.request_id)
            response = _failure(error)
        record.status = response.status
        return response
    except (asyncio.CancelledError, ConnectionError):
        record.status, record.finish_reason = _CUT, "abort"
        raise
    finally:
        record.write(request.method, request.path, quiet=request.path in _OPEN_PATHS)


async def _name_answer(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["X-Request-Id"] = request[RECORD].request_id


async def _body(request: web.Request) -> bytes:
    """The JSON body. Raises HttpError 413, 415."""
    if request.content_type != "application/json":
        raise HttpError(415, f"send Content-Type: application/json, not {request.content_type}")
    if (request.content_length or 0) > request.app[SERVICE].config.body_bytes_max:
        raise web.HTTPRequestEntityTooLarge(request.app[SERVICE].config.body_bytes_max, request.content_length or 0)
    try:
        return await request.read()
    except MALFORMED as error:
        raise HttpError(400, "the body breaks off, or is not framed as its headers say") from error


async def _parsed(request: web.Request, parse: Callable[[bytes], _Asked]) -> _Asked:
    """The checked request; a large body is decoded beside the loop."""
    body, encoding = await _body(request), request.headers.get("Content-Encoding", "")

    def read() -> _Asked:
        return parse(api.decompress(body, encoding, request.app[SERVICE].config.body_bytes_max))

    return read() if len(body) <= _LARGE_BYTES and not encoding else await asyncio.to_thread(read)


def _check_model(engine: EngineFace, name: str | None) -> None:
    if name is not None and name != engine.model_name:
        raise HttpError(
            404, f"no model {name[:80]!r} here; this server has {engine.model_name!r}", kind="not_found_error", code="model_not_found"
        )


def _generating(dialect: Dialect) -> Route:
    async def route(request: web.Request) -> web.StreamResponse:
        service, record = request.app[SERVICE], request[RECORD]
        service.admitted()  # before the body is read; and again after, because that takes a while
        asked = await _parsed(request, dialect.parse)
        engine = service.admitted()
        _check_model(engine, asked.model)
        sampling = api.to_sampling(asked, engine.default_sampling)
        history = api.to_history(asked, allowed=service.config.synthetic_history)
        head = api.AnswerHead(
            id=dialect.id_prefix + record.request_id,
            model=engine.model_name,
            created=int(time.time()),
            logprobs=sampling.logprobs is not None,
            return_token_ids=bool(asked.return_token_ids),
            include_usage=api.wants_usage(asked),
            token_bytes=engine.tokenizer.token_bytes if engine.tokenizer.available else None,
        )
        prompt = dialect.prompt(asked)
        api.check_prompt_size(prompt, engine.context_max)
        opening = engine.generate(
            prompt, sampling, request_id=record.request_id, template_arguments=dialect.arguments(asked), history=history
        )  # fmt: skip
        with service.running():
            async with opening as generation:
                prompt_ids = await generation.prompt()
                record.session_id, record.usage = generation.session_id, Usage(len(prompt_ids), 0)
                first = await anext(generation, None)
                assert first is not None, "a generation has at least one chunk"
                record.saw(first)
                if asked.stream:
                    return await _stream(request, _events(dialect, head, first, generation, prompt_ids, record))
                chunks = [first]
                async for chunk in generation:
                    record.saw(chunk)
                    chunks.append(chunk)
                return _json(api.encode(dialect.answer(head, chunks, prompt_ids)))

    return route


async def _events(
    dialect: Dialect, head: api.AnswerHead, first: Chunk, generation: GenerationFace, prompt_ids: Sequence[int], record: RequestRecord
) -> AsyncGenerator[bytes, None]:
    """The stream's events: chunks, then usage if asked for, or an error; then the end."""
    offset, chunk = api.token_characters(first), first
    try:
        yield _event(api.encode(dialect.chunk(head, first, True, 0, prompt_ids)))
        async for chunk in generation:
            record.saw(chunk)
            yield _event(api.encode(dialect.chunk(head, chunk, False, offset, ())))
            offset += api.token_characters(chunk)
        if head.include_usage:
            yield _event(api.encode(dialect.usage(head, chunk.usage)))
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
    asked = await _parsed(request, api.parse_tokenize)
    engine = service.admitted()
    _check_model(engine, asked.model)
    text = asked.prompt
    if text is None:
        arguments: dict[str, Any] = {**api.template_arguments(asked), "add_generation_prompt": asked.add_generation_prompt is not False}
        text = engine.template.render(api.to_messages(asked), **arguments)
    api.check_text_size(len(text), engine.context_max, "prompt" if asked.messages is None else "messages")
    ids = await engine.tokenizer.encode_async(text)
    if asked.return_token_strs and len(ids) > engine.context_max:
        raise BadRequest(f"return_token_strs gives at most {engine.context_max} tokens, not {len(ids)}", field="return_token_strs")
    text_of = engine.tokenizer.token_text if asked.return_token_strs else None
    return _json(await asyncio.to_thread(api.encode_tokenized, ids, engine.context_max, text_of))


def _card(service: Service, engine: EngineFace) -> api.ModelCard:
    return api.ModelCard(id=engine.model_name, created=service.created, max_model_len=engine.context_max)


async def _models(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    return _json(api.encode(api.ModelList(data=(_card(service, service.admitted()),))))


async def _model(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    engine = service.admitted()
    _check_model(engine, request.match_info["model"])
    return _json(api.encode(_card(service, engine)))


async def _health(request: web.Request) -> web.StreamResponse:
    return _json({"status": "ok"})


async def _ready(request: web.Request) -> web.StreamResponse:
    state = request.app[SERVICE].state
    return _json({"status": state}, 200 if state == "ready" else 503)


async def _statistics(request: web.Request) -> web.StreamResponse:
    found = request.app[SERVICE].admitted().statistics()
    return _json({name: getattr(found, name) for name in _COUNTS})


def build_app(service: Service) -> web.Application:
    """The routes over `service`."""
    app = web.Application(middlewares=[observe], client_max_size=service.config.body_bytes_max)
    app[SERVICE] = service
    app.on_response_prepare.append(_name_answer)
    app.router.add_post("/v1/chat/completions", _generating(CHAT))
    app.router.add_post("/v1/completions", _generating(COMPLETION))
    app.router.add_post("/tokenize", _tokenize)
    app.router.add_get("/v1/models", _models, allow_head=False)
    app.router.add_get("/v1/models/{model:.+}", _model, allow_head=False)
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
    """Listen, open the engine, run `while_ready` (for ever when None), drain, close.

    A signal ends the loading or `while_ready`; a second one ends the drain. Raises CannotBind and what opening raises.
    """
    service, signals = Service(config), Signals()
    with signals.caught():
        async with listening(service) as address, AsyncExitStack() as stack:
            async with signals.until_signal():
                service.engine = engine = await stack.enter_async_context(open_engine())
                await (while_ready(address, engine) if while_ready is not None else asyncio.Event().wait())
            async with signals.until_signal():
                await service.drain()
            await service.cut()


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
