"""The routes of `/v1/sessions`: sessions made, listed, read, forked, cut, deleted, and brought to disk and back, over HTTP.

Knows the engine's face and the shelf. What lies on disk is read and deleted there; to fork or cut it, it is restored first. A session of
another key's is as unknown as one that never was.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from aiohttp import web
from msgspec import UNSET, UnsetType

from engine import api
from engine.api.sessions import SessionCard, parse_create
from engine.errors import BadRequest, SessionBusy, UnknownSession
from engine.http import ACCOUNT, SERVICE, answer, parsed
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
    router.add_post("/v1/sessions/{session}/archive", _archive)


async def _found(request: web.Request) -> tuple[EngineFace, SessionView]:
    """The engine and the session that the path names, restored if need be. Raises UnknownSession and what restoring raises."""
    service, name = request.app[SERVICE], request.match_info["session"]
    engine = await service.restored(name, _namespace(request))
    return engine, _view(engine, SessionId(name), _namespace(request))


def _namespace(request: web.Request) -> str:
    return request[ACCOUNT].namespace


def _is_held(engine: EngineFace, session_id: str, request: web.Request) -> bool:
    view = engine.sessions.get(SessionId(session_id))
    return view is not None and view.namespace == _namespace(request)


def _any_shelf(request: web.Request) -> Shelf | None:
    return request.app[SERVICE].shelves.get(_namespace(request))


def _shelf(request: web.Request) -> Shelf:
    shelf = _any_shelf(request)
    if shelf is None:
        raise BadRequest("this server keeps no sessions on disk; start it with --sessions-dir DIR")
    return shelf


def _view(engine: EngineFace, session_id: SessionId, namespace: str) -> SessionView:
    view = engine.sessions.get(session_id)
    if view is None or view.namespace != namespace:
        raise UnknownSession(f"no session {session_id[:80]!r}", field="session")
    return view


def _card(service: Service, view: SessionView, disk_bytes: int | UnsetType = UNSET) -> SessionCard:
    return api.session_card(view, disk_bytes, service.retention.expires_at(view.id, view.used_at))


async def _asked(request: web.Request, parse: Callable[[bytes], _Asked]) -> _Asked:
    """The body; none at all is an empty one."""
    return await parsed(request, parse) if request.can_read_body else parse(b"{}")


async def _create(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    asked = await _asked(request, parse_create)
    engine = service.admitted()
    made = await engine.create_session(_namespace(request))
    service.retention.give(made, asked.ttl)
    return answer(api.encode(_card(service, _view(engine, made, _namespace(request)))), 201)


async def _list(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    service.admitted()
    shelf = _any_shelf(request)
    archived = [] if shelf is None else await shelf.archived()
    views = {view.id: view for view in service.admitted().sessions.values() if view.namespace == _namespace(request)}
    disk_bytes = {each.view.id: each.disk_bytes for each in archived}
    cards = [_card(service, view, disk_bytes.get(view.id, UNSET)) for view in views.values()]
    cards += [_card(service, each.view, each.disk_bytes) for each in archived if each.view.id not in views]
    return answer(api.encode(api.SessionList(data=tuple(cards))))


async def _read(request: web.Request) -> web.StreamResponse:
    service, name, wanted = request.app[SERVICE], request.match_info["session"], request.query.get("include", "")
    engine = service.admitted()
    disk_bytes: int | UnsetType = UNSET
    shelf = _any_shelf(request)
    if shelf is not None and not _is_held(engine, name, request):
        found, ids = await shelf.find(name)
        view, disk_bytes = found.view, found.disk_bytes
    else:
        view = _view(engine, SessionId(name), _namespace(request))
        ids = list(view.token_ids) if wanted else []
        found_bytes = None if shelf is None else await shelf.disk_bytes(name)
        disk_bytes = UNSET if found_bytes is None else found_bytes
    if wanted not in ("", "tokens"):
        raise api.unknown_include(wanted)
    card = _card(service, view, disk_bytes)
    if not wanted:
        return answer(api.encode(card))
    bytes_of = engine.tokenizer.token_bytes if engine.tokenizer.available else None
    return answer(await asyncio.to_thread(api.encode_session, card, ids, bytes_of))


async def _delete(request: web.Request) -> web.StreamResponse:
    service, name = request.app[SERVICE], request.match_info["session"]
    if not await service.remove(name, _namespace(request)):
        raise UnknownSession(f"no session {name[:80]!r}", field="session")
    return answer(api.encode(api.SessionDeleted(id=name)))


async def _export(request: web.Request) -> web.StreamResponse:
    await _asked(request, api.parse_nothing)
    service, name = request.app[SERVICE], request.match_info["session"]
    engine, shelf = service.admitted(), _shelf(request)
    disk_bytes: int | UnsetType = UNSET
    if _is_held(engine, name, request):
        with service.running(), suppress(UnknownSession):  # it may leave by itself before its turn comes
            disk_bytes = await shelf.export(engine, SessionId(name))
    return await _found_card(request, name, disk_bytes)


async def _archive(request: web.Request) -> web.StreamResponse:
    await _asked(request, api.parse_nothing)
    service, name = request.app[SERVICE], request.match_info["session"]
    engine, shelf = service.admitted(), _shelf(request)
    if _is_held(engine, name, request):
        with service.running(), suppress(UnknownSession):
            if not await engine.departures.archive(SessionId(name)):
                raise SessionBusy(f"session {name} was asked for while it was archived, and stays; archive it later", field="session")
    found, _ = await shelf.find(name)
    return answer(api.encode(_card(service, found.view, found.disk_bytes)))


async def _found_card(request: web.Request, name: str, disk_bytes: int | UnsetType) -> web.StreamResponse:
    """The card of a session, wherever it is by now."""
    service = request.app[SERVICE]
    engine = service.admitted()
    if _is_held(engine, name, request):
        return answer(api.encode(_card(service, _view(engine, SessionId(name), _namespace(request)), disk_bytes)))
    found, _ = await _shelf(request).find(name)
    return answer(api.encode(_card(service, found.view, found.disk_bytes)))


async def _import(request: web.Request) -> web.StreamResponse:
    asked = await parsed(request, api.parse_import)
    service = request.app[SERVICE]
    engine, shelf = service.admitted(), _shelf(request)
    if _is_held(engine, asked.id, request):
        raise SessionBusy(f"session {asked.id} is held already; use it, or delete it first", field="id")
    await shelf.find(asked.id)
    engine = await service.restored(asked.id, _namespace(request))
    return answer(api.encode(_card(service, _view(engine, SessionId(asked.id), _namespace(request)))))


async def _fork(request: web.Request) -> web.StreamResponse:
    asked = await _asked(request, api.parse_fork)
    service = request.app[SERVICE]
    engine, view = await _found(request)
    made = await engine.fork_session(view.id, asked.tokens, revision=asked.revision)
    service.retention.give(made, service.retention.given_s(view.id) if asked.ttl is None else asked.ttl)
    return answer(api.encode(_card(service, _view(engine, made, view.namespace))), 201)


async def _truncate(request: web.Request) -> web.StreamResponse:
    asked = await parsed(request, api.parse_truncate)
    engine, view = await _found(request)
    await engine.truncate_session(view.id, asked.tokens, revision=asked.revision)
    return answer(api.encode(_card(request.app[SERVICE], _view(engine, view.id, view.namespace))))
