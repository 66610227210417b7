"""What `/v1/sessions` takes and answers. Types and pure functions; the routes are `engine/session_routes.py`."""

from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from engine.api.requests import decode
from engine.errors import BadRequest, shown
from engine.protocol import SessionView

__all__ = [
    "CreateRequest", "ForkRequest", "ImportRequest", "Nothing", "SessionCard", "SessionDeleted", "SessionList", "TierBytes",
    "TruncateRequest",
    "encode_session", "parse_create", "parse_fork", "parse_import", "parse_nothing", "parse_truncate", "session_card", "unknown_include",
]  # fmt: skip

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


Age = Annotated[float, msgspec.Meta(ge=0, lt=2**53)]


class Nothing(msgspec.Struct, kw_only=True):
    """Body of an export: nothing is asked."""


class CreateRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/sessions. `ttl`: seconds after its last use at which it is removed; 0: never; without it the server's."""

    ttl: Age | None = None


class ForkRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/sessions/{id}/fork. Without `tokens` all of them are kept; without `ttl` it is the other's."""

    tokens: Count | None = None
    revision: Count | None = None
    ttl: Age | None = None


class TruncateRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/sessions/{id}/truncate."""

    tokens: Count
    revision: Count | None = None


class ImportRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/sessions/import."""

    id: str


class TierBytes(msgspec.Struct, kw_only=True, frozen=True):
    """Allocated bytes; what sessions share counts for each of them. `disk`: of the files of its last archive, if it has one."""

    host: int
    device: int
    disk: int | UnsetType = UNSET


class SessionCard(msgspec.Struct, kw_only=True, frozen=True):
    """One session. `rows`: tokens that cost nothing any more. `text` and `token_ids` only where asked for."""

    id: str
    object: Literal["session"] = "session"
    revision: int
    state: str
    tokens: int
    rows: int
    bytes: TierBytes
    last_used: int  # seconds since the epoch
    expires_at: int | UnsetType = UNSET  # likewise; absent: never
    token_ids: list[int] | UnsetType = UNSET
    text: str | UnsetType | None = UNSET  # null: the model has no tokenizer


class SessionList(msgspec.Struct, kw_only=True, frozen=True):
    object: Literal["list"] = "list"
    data: tuple[SessionCard, ...]


class SessionDeleted(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    object: Literal["session"] = "session"
    deleted: bool = True


def parse_nothing(body: bytes) -> Nothing:
    """Raises BadRequest."""
    return decode(body, Nothing)


def parse_create(body: bytes) -> CreateRequest:
    """Raises BadRequest naming the field."""
    return decode(body, CreateRequest)


def parse_fork(body: bytes) -> ForkRequest:
    """Raises BadRequest naming the field."""
    return decode(body, ForkRequest)


def parse_truncate(body: bytes) -> TruncateRequest:
    """Raises BadRequest naming the field."""
    return decode(body, TruncateRequest)


def parse_import(body: bytes) -> ImportRequest:
    """Raises BadRequest naming the field."""
    return decode(body, ImportRequest)


def unknown_include(wanted: str) -> BadRequest:
    """What a query that asks for something else gets."""
    return BadRequest(f"include must be 'tokens', not {shown(wanted)}", field="include")


def session_card(view: SessionView, disk_bytes: int | UnsetType = UNSET, expires_at: float | None = None) -> SessionCard:
    """A session without its tokens."""
    return SessionCard(
        id=view.id, revision=view.revision, state=view.phase, tokens=len(view.token_ids), rows=view.rows,
        bytes=TierBytes(host=view.host_bytes, device=view.device_bytes, disk=disk_bytes), last_used=int(view.used_at),
        expires_at=UNSET if expires_at is None else int(expires_at),
    )  # fmt: skip


def encode_session(card: SessionCard, ids: list[int], bytes_of: Callable[[int], bytes] | None) -> bytes:
    """The body of a session with its tokens: `ids`, those of the view when it was made, and their text. A pass over them."""
    text = None if bytes_of is None else b"".join(map(bytes_of, ids)).decode(errors="replace")
    return msgspec.json.encode(msgspec.structs.replace(card, tokens=len(ids), token_ids=ids, text=text))
