"""Pages of other origins: which may ask this server, as browsers want it said (CORS).

Knows aiohttp's requests. Keys are sent as headers and never as cookies, so answers carry no permission for credentials.
"""

from aiohttp import hdrs, web

__all__ = ["asks_beforehand", "cross_origin", "permission"]

_METHODS = "GET, POST, DELETE, OPTIONS"
_SHOWN = "X-Request-Id, Retry-After"
_AGE_S = 600


def _may(request: web.Request, origins: tuple[str, ...]) -> bool:
    origin = request.headers.get(hdrs.ORIGIN)
    return origin is not None and ("*" in origins or origin in origins)


def asks_beforehand(request: web.Request, origins: tuple[str, ...]) -> bool:
    """Whether a browser asks if a page may ask. Such a request carries no key."""
    return request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers and _may(request, origins)


def permission(request: web.Request) -> web.Response:
    """The answer to `asks_beforehand`; whatever headers are named are allowed."""
    allowed = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
    headers = {hdrs.ACCESS_CONTROL_ALLOW_METHODS: _METHODS, hdrs.ACCESS_CONTROL_MAX_AGE: str(_AGE_S)}
    if allowed:
        headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = allowed
    return web.Response(status=204, headers=headers)


def cross_origin(request: web.Request, origins: tuple[str, ...]) -> dict[str, str]:
    """Headers of every answer to a page that may ask."""
    if not origins:
        return {}
    if not _may(request, origins):
        return {hdrs.VARY: hdrs.ORIGIN}
    origin = "*" if "*" in origins else request.headers[hdrs.ORIGIN]
    return {hdrs.ACCESS_CONTROL_ALLOW_ORIGIN: origin, hdrs.ACCESS_CONTROL_EXPOSE_HEADERS: _SHOWN, hdrs.VARY: hdrs.ORIGIN}
