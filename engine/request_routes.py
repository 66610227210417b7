"""The route that ends a request by its id.

Knows aiohttp and the service, which knows the requests that run.
"""

from aiohttp import web

from engine import api
from engine.api.responses import RequestEnded
from engine.http import ACCOUNT, SERVICE, answer

__all__ = ["add_request_routes"]


def add_request_routes(router: web.UrlDispatcher) -> None:
    """The one there is."""
    router.add_post("/v1/requests/{request}/cancel", _cancel)


async def _cancel(request: web.Request) -> web.StreamResponse:
    name = request.match_info["request"]
    await request.app[SERVICE].requests.end(request[ACCOUNT].namespace, name)
    return answer(api.encode(RequestEnded(id=name)))
