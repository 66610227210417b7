"""What every route shares: the key, the body, errors as answers, and the one log line around each request.

Knows the service and aiohttp; knows no route.

1. No body shows a traceback, and no log line a key or a prompt. One `request.finished` line a request.
2. A refusal of aiohttp's own has our shape too.
"""

import asyncio
import math
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias, TypeVar

import structlog
from aiohttp import web

from engine import api
from engine.api.message_writer import anthropic_error
from engine.api_keys import Account, find_account
from engine.cross_origin import asks_beforehand, cross_origin, permission
from engine.errors import BadModel, BadRequest, ForebayError
from engine.malformed import MALFORMED
from engine.protocol import EngineFace
from engine.request_record import RequestRecord
from engine.service import Service

__all__ = ["ACCOUNT", "RECORD", "SERVICE", "HttpError", "Route", "answer", "check_model", "name_answer", "observe", "parsed"]

log = structlog.get_logger()

_OPEN_PATHS = ("/health", "/ready")  # asked by machines that hold no key
_PAGE_PATH = re.compile(r"/(page/[^/]*)?")  # files of the page, which holds nothing: whoever opens it gives the key there
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_UNSERVED = {  # paths that clients of such servers know, and what to tell them
    "/v1/embeddings": "embeddings are not served: this server generates text only",
    "/v1/moderations": "moderations are not served: this server generates text only",
}
_ANTHROPIC_PATH = "/v1/messages"  # below it errors have the shape that its clients read
_LARGE_BYTES = 256 * 1024  # a body of this size takes a few milliseconds to decode and check
_CUT = 499  # a status for the log only: the client left, or the drain was over

_Asked = TypeVar("_Asked")
Route: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpError(ForebayError):
    """What HTTP itself refuses; `code` and `kind` as OpenAI names them."""

    def __init__(self, status: int, message: str, *, kind: str = "invalid_request_error", code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.code = status, kind, code


SERVICE = web.AppKey("SERVICE", Service)
RECORD = web.RequestKey("RECORD", RequestRecord)
ACCOUNT = web.RequestKey("ACCOUNT", Account)  # where the path is not open to everybody


def answer(body: Mapping[str, object] | bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    payload = body if isinstance(body, bytes) else api.encode(dict(body))
    return web.Response(body=payload, status=status, headers=headers, content_type="application/json")


def _failure(error: BaseException, request: web.Request) -> web.Response:
    status, body = api.error_body(error)
    headers: dict[str, str] = {}
    if isinstance(error, HttpError):
        body = api.error_fields(str(error), error.kind, code=error.code)
    if request.path.startswith(_ANTHROPIC_PATH):
        body = anthropic_error(status, body, request[RECORD].request_id)
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    if isinstance(error, ForebayError) and not error.retry:
        headers["X-Should-Retry"] = "false"  # which both vendors' packages obey
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return answer(body, status, headers)


def _refusal(error: web.HTTPException, request: web.Request) -> web.StreamResponse:
    """aiohttp's own refusals in our shape; redirects and the like pass."""
    if error.status < 400:
        raise error
    said = {
        404: _UNSERVED.get(request.path, f"no route {request.path}"),
        405: f"{request.path} does not take {request.method}",
        413: f"the body is larger than {request.app[SERVICE].config.body_bytes_max} bytes",
    }
    kind = "not_found_error" if error.status == 404 else "invalid_request_error"
    response = _failure(HttpError(error.status, said.get(error.status, error.reason or "refused"), kind=kind), request)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def _authorise(request: web.Request) -> None:
    """Raises HttpError 401. Compared in constant time."""
    service, path = request.app[SERVICE], request.path
    config = service.config
    if not config.keys:
        (request[ACCOUNT],) = service.accounts
        return
    if path in _OPEN_PATHS or _PAGE_PATH.fullmatch(path) or (config.metrics_open and path == "/metrics"):
        return
    scheme, _, sent = request.headers.get("Authorization", "").partition(" ")
    if not sent and "X-Api-Key" in request.headers:  # how Anthropic's clients send it
        scheme, sent = "bearer", request.headers["X-Api-Key"]
    given = sent.strip().encode("utf-8", "surrogateescape")
    found = find_account(service.accounts, given) if scheme.lower() == "bearer" else None
    if found is None:
        raise HttpError(401, "send the server's key as 'Authorization: Bearer KEY'", kind="authentication_error", code="invalid_api_key")
    request[ACCOUNT] = found
    request[RECORD].key_name = found.name


@web.middleware
async def observe(request: web.Request, handler: Route) -> web.StreamResponse:
    """Around every request: its id, the key, errors as bodies, the one log line."""
    sent = request.headers.get("X-Request-Id", "")
    record = request[RECORD] = RequestRecord(sent if _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex)
    response: web.StreamResponse
    try:
        try:
            if asks_beforehand(request, _origins(request)):
                response = permission(request)
            else:
                _authorise(request)
                response = await handler(request)
        except web.HTTPException as error:
            response = _refusal(error, request)
        except BadModel as error:  # a request that needs a tokenizer or template that this model does not have
            response = _failure(BadRequest(str(error)), request)
        except ForebayError as error:
            response = _failure(error, request)
        except ConnectionError:
            raise
        except Exception as error:
            log.exception("request.failed", request_id=record.request_id)
            response = _failure(error, request)
        record.status = response.status
        return response
    except (asyncio.CancelledError, ConnectionError):
        record.status, record.finish_reason = _CUT, "abort"
        raise
    finally:
        record.write(request.method, request.path, quiet=_is_quiet(request.path))
        request.app[SERVICE].metrics.finished(record, _pattern(request))


def _is_quiet(path: str) -> bool:
    """Whether the path is asked for again and again, by machines and pages, so that a line each time would say nothing."""
    return path in _OPEN_PATHS or path == "/metrics" or _PAGE_PATH.fullmatch(path) is not None


def _pattern(request: web.Request) -> str:
    """The route as it was declared; nothing that a client made up."""
    resource = request.match_info.route.resource
    return "" if resource is None else resource.canonical


def _origins(request: web.Request) -> tuple[str, ...]:
    return request.app[SERVICE].config.origins


async def name_answer(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["X-Request-Id"] = request[RECORD].request_id
    response.headers.update(cross_origin(request, _origins(request)))


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


async def parsed(request: web.Request, parse: Callable[[bytes], _Asked]) -> _Asked:
    """The checked request; a large body is decoded beside the loop."""
    body, encoding = await _body(request), request.headers.get("Content-Encoding", "")

    def read() -> _Asked:
        return parse(api.decompress(body, encoding, request.app[SERVICE].config.body_bytes_max))

    return read() if len(body) <= _LARGE_BYTES and not encoding else await asyncio.to_thread(read)


def check_model(engine: EngineFace, name: str | None) -> None:
    if name is not None and name != engine.model_name:
        raise HttpError(
            404, f"no model {name[:80]!r} here; this server has {engine.model_name!r}", kind="not_found_error", code="model_not_found"
        )
