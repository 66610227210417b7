"""The HTTP server: its routes and the entry point of the `forebay` command. Knows the engine's face and no tensors.

1. What a request gets, and how a stream ends, is the same for every endpoint (engine/generating.py, engine/http.py).
2. No body shows a traceback, and no log line a key or a prompt. One `request.finished` line a request, nothing a token.
3. The server listens before the model is loaded; until then, and while it drains, requests get 503.
"""

import asyncio
import errno
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import structlog
from aiohttp import web

from engine import api
from engine.api.dialects import CHAT, COMPLETION
from engine.api.openapi import encode_openapi
from engine.commands import WhileReady
from engine.commands.line import run_line
from engine.commands.signals import Signals
from engine.commands.terminal import complain, forget_output, leave_at_once
from engine.config import ServerConfig
from engine.device import reported_failure
from engine.errors import BadRequest, DeviceFailed, ForebayError
from engine.generating import generating
from engine.http import SERVICE, answer, check_model, name_answer, observe, parsed
from engine.malformed import http_logger
from engine.message_routes import add_message_routes, anthropic_models
from engine.protocol import EngineFace
from engine.request_routes import add_request_routes
from engine.response_routes import add_response_routes
from engine.service import Service
from engine.session_routes import add_session_routes
from engine.shelf import open_shelves
from engine.watch_routes import add_watch_routes

__all__ = ["CannotBind", "build_app", "main", "serve"]

log = structlog.get_logger()

_COUNTS = (
    "sessions", "running", "waiting", "steps", "mirrored_rows", "hot_rows", "ring_rows", "hits", "misses", "ring_reads", "drafts_proposed",
    "drafts_accepted", "stored", "host_bytes", "device_bytes", "resident_bytes",
)  # fmt: skip


class CannotBind(ForebayError):
    """The address cannot be listened on."""

    exit_code = 5
    kind = "cannot_bind"


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
    theirs = anthropic_models(request)
    if theirs is not None:
        return answer(api.encode(theirs))
    return answer(api.encode(api.ModelList(data=(_card(service, service.admitted()),))))


async def _model(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    engine = service.admitted()
    check_model(engine, request.match_info["model"])
    theirs = anthropic_models(request)
    if theirs is not None:
        return answer(api.encode(theirs.data[0]))
    return answer(api.encode(_card(service, engine)))


async def _openapi(request: web.Request) -> web.StreamResponse:
    return answer(encode_openapi())


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
    app.router.add_post("/v1/chat/completions", generating(lambda request: CHAT))
    app.router.add_post("/v1/completions", generating(lambda request: COMPLETION))
    app.router.add_post("/tokenize", _tokenize)
    app.router.add_get("/v1/models", _models, allow_head=False)
    app.router.add_get("/v1/models/{model:.+}", _model, allow_head=False)
    add_request_routes(app.router)
    add_response_routes(app.router)
    add_message_routes(app.router)
    add_session_routes(app.router)
    add_watch_routes(app)
    app.router.add_get("/openapi.json", _openapi, allow_head=False)
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
            await _whole(web.TCPSite(runner, config.host, config.port).start())
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


async def _whole(work: Coroutine[Any, Any, None]) -> None:
    """Await `work` to its end, also where this is cancelled: asyncio's loop forgets the socket of a server whose making is cut off."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    finally:
        await asyncio.wait([task])


async def serve(
    open_engine: Callable[[], AbstractAsyncContextManager[EngineFace]], config: ServerConfig, while_ready: WhileReady | None = None
) -> None:
    """Listen, open the engine, run `while_ready` (for ever when None), drain, bring sessions to disk, close.

    A signal ends the loading or `while_ready`; a second one ends the drain, one more the archiving. Raises CannotBind, BadSetting and
    what opening raises.
    """
    service, signals = Service(config), Signals()
    shelves = open_shelves(
        config.sessions_dir, [account.namespace for account in service.accounts], quota_bytes=config.sessions_quota_bytes,
        retention=service.retention,
    )  # fmt: skip
    with shelves as service.shelves, signals.caught():
        async with listening(service) as address:
            try:
                async with AsyncExitStack() as stack:
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
            except DeviceFailed:
                async with signals.until_signal():
                    await service.keep()
                raise


def main(words: Sequence[str] | None = None) -> int:
    """The `forebay` command. Returns the exit code."""
    if sys.flags.optimize:
        complain("python -O removes the checks that guard the histories; run without -O and PYTHONOPTIMIZE")
        return 2
    try:
        return run_line(sys.argv[1:] if words is None else words, os.environ, serve)
    except ForebayError as error:
        complain(str(error))
        if isinstance(error, DeviceFailed):
            leave_at_once(error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has left; nothing is wrong here
        forget_output()
        return 0
    except Exception as error:
        failed = reported_failure(error)
        if failed is None:
            raise
        complain(str(failed))
        leave_at_once(failed.exit_code)


if __name__ == "__main__":
    sys.exit(main())
