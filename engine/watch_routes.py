"""The routes for those who watch: `/metrics` for Prometheus, `/v1/live` for the page, and the page itself at `/`.

Knows the service and the engine's face.

1. The page's own files hold nothing secret and need no key; what they show comes from `/v1/live`, which does.
2. A watcher costs a snapshot a second while it is connected. It holds up no drain: its stream ends when one begins.
3. No page is served that could run another's script or be framed by it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from aiohttp import web

from engine.errors import NotAdmitted
from engine.http import ACCOUNT, SERVICE
from engine.live import EVERY_S, snapshot
from engine.measures import ActivityFace
from engine.service import Service

__all__ = ["WATCHERS_MAX", "add_watch_routes"]

WATCHERS_MAX: Final = 32
_PAGE: Final = Path(__file__).parent / "page"
_KINDS: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_PAGE_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_WATCHERS = web.AppKey("_WATCHERS", set[object])
_FILES = web.AppKey("_FILES", dict[str, bytes])


def add_watch_routes(app: web.Application) -> None:
    """All of them, and the loop's lag measured while the application runs."""
    app[_WATCHERS] = set()
    app[_FILES] = {path.name: path.read_bytes() for path in _PAGE.iterdir() if path.suffix in _KINDS}
    app.cleanup_ctx.append(_measure_lag)
    app.router.add_get("/metrics", _metrics, allow_head=False)
    app.router.add_get("/v1/live", _live, allow_head=False)
    app.router.add_get("/", _page, allow_head=False)
    app.router.add_get("/page/{name}", _page, allow_head=False)


async def _measure_lag(app: web.Application) -> AsyncIterator[None]:
    lag = app[SERVICE].metrics.lag
    lag.start()
    yield
    lag.stop()


async def _metrics(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    text, content_type = service.metrics.exposition(request.headers.get("Accept", ""), service.state)
    return web.Response(body=text, headers={"Content-Type": content_type})


async def _page(request: web.Request) -> web.StreamResponse:
    """A file of the page; nothing else can be named."""
    name = request.match_info.get("name", "index.html")
    found = request.app[_FILES].get(name)
    if found is None:
        raise web.HTTPNotFound
    return web.Response(body=found, content_type=_KINDS[Path(name).suffix], charset="utf-8", headers=_PAGE_HEADERS)


async def _live(request: web.Request) -> web.StreamResponse:
    service, watchers = request.app[SERVICE], request.app[_WATCHERS]
    if len(watchers) >= WATCHERS_MAX:
        raise NotAdmitted(f"{len(watchers)} pages watch already; close one", retry_after_s=5.0)
    mark = object()
    watchers.add(mark)
    try:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        await response.prepare(request)
        await _tell(service, response, request[ACCOUNT].namespace)
        return response
    finally:
        watchers.discard(mark)


async def _tell(service: Service, response: web.StreamResponse, namespace: str) -> None:
    """Snapshots until the server drains or the engine has closed; raises ConnectionError when the watcher has left."""
    activity: ActivityFace | None = None
    with ExitStack() as stack:
        while service.state != "draining":
            engine = service.engine
            if engine is not None and not engine.instruments.open:
                break
            if engine is not None and activity is None:
                activity = stack.enter_context(engine.instruments.watch())
            payload = snapshot(service, activity, namespace)
            await response.write(b"data: " + payload + b"\n\n")
            await asyncio.sleep(EVERY_S)
    await response.write(b'data: {"state": "draining"}\n\n')
