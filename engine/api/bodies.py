"""A request's body as it was before the client compressed it.

Knows gzip and deflate, the encodings that every HTTP client has. No JSON here.

1. What comes out is never larger than the limit, whatever the few bytes that came in promise.
2. A body that is cut short, or goes on after its end, is refused.
"""

import zlib

from engine.errors import BadRequest, shown

__all__ = ["BodyTooLarge", "UnknownEncoding", "decompress"]

_PLAIN = ("", "identity")
_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


class BodyTooLarge(BadRequest):
    """More bytes than the server takes."""

    status = 413


class UnknownEncoding(BadRequest):
    """A content-encoding that is not read here."""

    status = 415


def decompress(body: bytes, encoding: str, bytes_max: int) -> bytes:
    """The plain body. Args: encoding: the Content-Encoding header. bytes_max: what the plain body may have.

    Raises: UnknownEncoding, BodyTooLarge; BadRequest: not what its encoding says.
    """
    name = encoding.strip().lower()
    if name in _PLAIN:
        return body
    if name not in _WINDOW_BITS:
        raise UnknownEncoding(f"Content-Encoding {shown(encoding)} is not read: send the body plain, or as gzip or deflate")
    inflating = zlib.decompressobj(_WINDOW_BITS[name])
    try:
        plain = inflating.decompress(body, bytes_max + 1)
    except zlib.error as error:
        raise BadRequest(f"the body is not {name}, which Content-Encoding says it is") from error
    if len(plain) > bytes_max:
        raise BodyTooLarge(f"the body is larger than {bytes_max} bytes")
    if not inflating.eof or inflating.unused_data:
        raise BadRequest(f"the body is not one whole {name} stream, which Content-Encoding says it is")
    return plain
