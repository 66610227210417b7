"""The routes of `/v1/sessions`: sessions made, listed, read, forked, cut, deleted, and brought to disk and back, over HTTP.

Knows the engine's face and the shelf. What lies on disk is read and deleted there; to fork or cut it, it is restored first. A session of
another key's is as unknown as one that never was.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from engine import api
from engine.errors import BadRequest, SessionBusy, UnknownSession
from engine.http import SERVICE, answer, parsed
from engine.protocol import EngineFace, SessionId, SessionView
from engine.service import Service
from engine.shelf import Shelf

__all__ = ["add_session_routes"]

_Asked = TypeVar("_Asked")


def add_session_routes(router: web.UrlDispatcher) -> None:
    """All of them."""
    router.add_post("/v1/sessions", _create)
    router.add_post("/v1/sessions/import", _import)
    router.add_get("/v1/sessions", _list, allow_head=False)
    router.add_get("/v1/sessions/{session}", _read, allow_head=False)
    router.add_delete("/v1/sessions/{session}", _delete)
    router.add_post("/v1/sessions/{session}/fork", _fork)
    router.add_post("/v1/sessions/{session}/truncate", _truncate)
    router.add_post("/v1/sessions/{session}/export", _export)


async def _found(request: web.Request) -> tuple[EngineFace, SessionView]:
    """The engine and the session that the path names, restored if need be. Raises UnknownSession and what restoring raises."""
    service, name = request.app[SERVICE], request.match_info["session"]
    engine = await service.restored(name)
    return engine, _view(engine, SessionId(name), service.namespace)


def _is_held(engine: EngineFace, session_id: str, service: Service) -> bool:
    view = engine.sessions.get(SessionId(session_id))
    return view is not None and view.namespace == service.namespace


def _shelf(service: Service) -> Shelf:
    if service.shelf is None:
        raise BadRequest("this server keeps no sessions on disk; start it with --sessions-dir DIR")
    return service.shelf


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
    service.admitted()
    archived = [] if service.shelf is None else await service.shelf.archived()
    views = {view.id: view for view in service.admitted().sessions.values() if view.namespace == service.namespace}
    cards = [api.session_card(view) for view in views.values()]
    cards += [api.session_card(each.view, each.disk_bytes) for each in archived if each.view.id not in views]
    return answer(api.encode(api.SessionList(data=tuple(cards))))


async def _read(request: web.Request) -> web.StreamResponse:
    service, name, wanted = request.app[SERVICE], request.match_info["session"], request.query.get("include", "")
    engine, disk_bytes = service.admitted(), None
    if service.shelf is not None and not _is_held(engine, name, service):
        found, ids = await service.shelf.find(name)
        view, disk_bytes = found.view, found.disk_bytes
    else:
        view = _view(engine, SessionId(name), service.namespace)
        ids = list(view.token_ids) if wanted else []
    if wanted not in ("", "tokens"):
        raise api.unknown_include(wanted)
    if not wanted:
        return answer(api.encode(api.session_card(view) if disk_bytes is None else api.session_card(view, disk_bytes)))
    bytes_of = engine.tokenizer.token_bytes if engine.tokenizer.available else None
    return answer(await asyncio.to_thread(api.encode_session, view, ids, bytes_of))


async def _delete(request: web.Request) -> web.StreamResponse:
    service, name = request.app[SERVICE], request.match_info["session"]
    engine = service.admitted()
    if service.shelf is None:
        await engine.close_session(_view(engine, SessionId(name), service.namespace).id)
    elif not await service.shelf.remove(engine, name):
        raise UnknownSession(f"no session {name[:80]!r}", field="session")
    return answer(api.encode(api.SessionDeleted(id=name)))


async def _export(request: web.Request) -> web.StreamResponse:
    await _asked(request, api.parse_nothing)
    service, name = request.app[SERVICE], request.match_info["session"]
    engine, shelf = service.admitted(), _shelf(service)
    if not _is_held(engine, name, service):
        found, _ = await shelf.find(name)  # it lies there as it is
        return answer(api.encode(api.session_card(found.view, found.disk_bytes)))
    with service.running():
        disk_bytes = await shelf.export(engine, SessionId(name))
    return answer(api.encode(api.session_card(_view(engine, SessionId(name), service.namespace), disk_bytes)))


async def _import(request: web.Request) -> web.StreamResponse:
    asked = await parsed(request, api.parse_import)
    service = request.app[SERVICE]
    engine, shelf = service.admitted(), _shelf(service)
    if _is_held(engine, asked.id, service):
        raise SessionBusy(f"session {asked.id} is held already; use it, or delete it first", field="id")
    await shelf.find(asked.id)
    engine = await service.restored(asked.id)
    return answer(api.encode(api.session_card(_view(engine, SessionId(asked.id), service.namespace))))


async def _fork(request: web.Request) -> web.StreamResponse:
    asked = await _asked(request, api.parse_fork)
    engine, view = await _found(request)
    made = await engine.fork_session(view.id, asked.tokens, revision=asked.revision)
    return answer(api.encode(api.session_card(_view(engine, made, view.namespace))), 201)


async def _truncate(request: web.Request) -> web.StreamResponse:
    asked = await parsed(request, api.parse_truncate)
    engine, view = await _found(request)
    await engine.truncate_session(view.id, asked.tokens, revision=asked.revision)
    return answer(api.encode(api.session_card(_view(engine, view.id, view.namespace))))
