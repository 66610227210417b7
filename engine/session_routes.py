"""The routes of `/v1/sessions`: sessions made, listed, read, forked, cut and deleted over HTTP.

Knows the engine's face. A session of another key's is as unknown as one that never was.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from engine import api
from engine.errors import UnknownSession
from engine.http import SERVICE, answer, parsed
from engine.protocol import EngineFace, SessionId, SessionView

__all__ = ["add_session_routes"]

_Asked = TypeVar("_Asked")


def add_session_routes(router: web.UrlDispatcher) -> None:
    """All of them."""
    router.add_post("/v1/sessions", _create)
    router.add_get("/v1/sessions", _list, allow_head=False)
    router.add_get("/v1/sessions/{session}", _read, allow_head=False)
    router.add_delete("/v1/sessions/{session}", _delete)
    router.add_post("/v1/sessions/{session}/fork", _fork)
    router.add_post("/v1/sessions/{session}/truncate", _truncate)


def _found(request: web.Request) -> tuple[EngineFace, SessionView]:
    """The engine and the session that the path names. Raises UnknownSession."""
    service = request.app[SERVICE]
    engine, name = service.admitted(), request.match_info["session"]
    return engine, _view(engine, SessionId(name), service.namespace)


def _view(engine: EngineFace, session_id: SessionId, namespace: str) -> SessionView:
    view = engine.sessions.get(session_id)
    if view is None or view.namespace != namespace:
        raise UnknownSession(f"no session {session_id[:80]!r}", field="session")
    return view


async def _asked(request: web.Request, parse: Callable[[bytes], _Asked]) -> _Asked:
    """The body; none at all is an empty one."""
    return await parsed(request, parse) if request.can_read_body else parse(b"{}")


async def _create(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    await _asked(request, api.parse_nothing)
    engine = service.admitted()
    made = await engine.create_session(service.namespace)
    return answer(api.encode(api.session_card(_view(engine, made, service.namespace))), 201)


async def _list(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    views = service.admitted().sessions.values()
    cards = tuple(api.session_card(view) for view in views if view.namespace == service.namespace)
    return answer(api.encode(api.SessionList(data=cards)))


async def _read(request: web.Request) -> web.StreamResponse:
    engine, view = _found(request)
    wanted = request.query.get("include", "")
    if wanted not in ("", "tokens"):
        raise api.unknown_include(wanted)
    if not wanted:
        return answer(api.encode(api.session_card(view)))
    ids, bytes_of = list(view.token_ids), engine.tokenizer.token_bytes if engine.tokenizer.available else None
    return answer(await asyncio.to_thread(api.encode_session, view, ids, bytes_of))


async def _delete(request: web.Request) -> web.StreamResponse:
    engine, view = _found(request)
    await engine.close_session(view.id)
    return answer(api.encode(api.SessionDeleted(id=view.id)))


async def _fork(request: web.Request) -> web.StreamResponse:
    asked = await _asked(request, api.parse_fork)
    engine, view = _found(request)
    made = await engine.fork_session(view.id, asked.tokens, revision=asked.revision)
    return answer(api.encode(api.session_card(_view(engine, made, view.namespace))), 201)


async def _truncate(request: web.Request) -> web.StreamResponse:
    asked = await parsed(request, api.parse_truncate)
    engine, view = _found(request)
    await engine.truncate_session(view.id, asked.tokens, revision=asked.revision)
    return answer(api.encode(api.session_card(_view(engine, view.id, view.namespace))))
