"""`forebay session` against a running server: list, show, create, fork, truncate, export, archive, import and delete its sessions.

Speaks `/v1/sessions`; knows no engine. What the server refuses is its own line here, with an exit code by its status: 2 the request,
3 a damaged archive, 4 it does not fit; 5 where no server answers.
"""

import argparse
import asyncio
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote

from rich.table import Table

from engine.commands.command import Invocation
from engine.commands.display import bytes_text
from engine.commands.measuring import results
from engine.config import ServerConfig
from engine.errors import BadSetting, ForebayError
from engine.remote import Unreachable, address_of
from engine.settings import add_flags, parse_age

__all__ = ["ACTIONS", "add_actions", "add_server_flags", "list_at_server"]

_EXIT_CODE: Final = {403: 4, 422: 3, 429: 4, 503: 4, 507: 4}  # of refusals; of the others 2, of what is the server's fault 1
_TIMEOUT_S: Final = 3600.0  # a large session takes minutes to and from a slow disk


class _Refused(ForebayError):
    """The server's own words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = _EXIT_CODE.get(status, 2 if status < 500 else 1)


async def _asked(config: ServerConfig, method: str, path: str, body: Mapping[str, object] | None) -> Any:
    import aiohttp
    from yarl import URL

    headers = {} if config.api_key is None else {"Authorization": f"Bearer {config.api_key}"}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S, sock_connect=10)
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as client,
            client.request(method, URL(address_of(config) + path, encoded=True), json=body) as response,
        ):
            status, answer = response.status, json.loads(await response.text())
    except (OSError, aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise Unreachable.at(config, error) from error
    if status >= 400:
        raise _Refused(status, str(answer["error"]["message"]))
    return answer


def _ask(invocation: Invocation, method: str, path: str = "", body: Mapping[str, object] | None = None) -> Any:
    """The server's answer. Raises ForebayError."""
    return asyncio.run(_asked(invocation.settings.server, method, f"/v1/sessions{path}", body))


def _path(invocation: Invocation, action: str = "") -> str:
    return f"/{quote(str(invocation.options['id']), safe='')}{action}"


def _given(invocation: Invocation, *names: str) -> dict[str, object]:
    """Those of the numbers that were given. Raises BadSetting."""
    found: dict[str, object] = {}
    for name in names:
        text = invocation.options.get(name)
        if isinstance(text, str):
            try:
                found[name] = parse_age(text) if name == "ttl" else int(text)
            except ValueError as error:
                wanted = f"{error}" if name == "ttl" else "a number"
                raise BadSetting(f"--{name} must be {wanted}, not {text!r}") from None
    return found


def _time(seconds: int | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _show(invocation: Invocation, *cards: Mapping[str, Any]) -> int:
    """Print sessions; returns 0."""
    if invocation.options.get("as_json"):
        for card in cards:
            print(json.dumps(card))
        return 0
    table = Table()
    for name in ("session", "state", "revision", "tokens", "rows", "RAM", "device", "disk", "last used (UTC)", "expires (UTC)"):
        table.add_column(name, justify="right" if name in ("revision", "tokens", "rows", "RAM", "device", "disk") else "left")
    for card in cards:
        held = card["bytes"]
        table.add_row(
            card["id"], card["state"], str(card["revision"]), f"{card['tokens']:,}", f"{card['rows']:,}",
            *(bytes_text(held[tier]) if tier in held else "" for tier in ("host", "device", "disk")),
            _time(card["last_used"]), _time(card.get("expires_at")),
        )  # fmt: skip
    results().print(table)
    return 0


def list_at_server(invocation: Invocation) -> int:
    """All of the key's, held and archived. Returns 0."""
    return _show(invocation, *_ask(invocation, "GET")["data"])


def _read(invocation: Invocation) -> int:
    card = _ask(invocation, "GET", _path(invocation, "?include=tokens" if invocation.options.get("text") else ""))
    if invocation.options.get("text") and not invocation.options.get("as_json"):
        if card["text"] is None:
            raise BadSetting("the server's model has no tokenizer; --json shows the token ids")
        print(card["text"], end="")
        return 0
    return _show(invocation, card)


def _create(invocation: Invocation) -> int:
    return _show(invocation, _ask(invocation, "POST", body=_given(invocation, "ttl")))


def _fork(invocation: Invocation) -> int:
    return _show(invocation, _ask(invocation, "POST", _path(invocation, "/fork"), _given(invocation, "tokens", "revision", "ttl")))


def _truncate(invocation: Invocation) -> int:
    return _show(invocation, _ask(invocation, "POST", _path(invocation, "/truncate"), _given(invocation, "tokens", "revision")))


def _export(invocation: Invocation) -> int:
    return _show(invocation, _ask(invocation, "POST", _path(invocation, "/export")))


def _archive(invocation: Invocation) -> int:
    return _show(invocation, _ask(invocation, "POST", _path(invocation, "/archive")))


def _import(invocation: Invocation) -> int:
    return _show(invocation, _ask(invocation, "POST", "/import", {"id": str(invocation.options["id"])}))


def _delete(invocation: Invocation) -> int:
    _ask(invocation, "DELETE", _path(invocation))
    return 0


ACTIONS: Final[Mapping[str, Callable[[Invocation], int]]] = {
    "show": _read, "create": _create, "fork": _fork, "truncate": _truncate, "export": _export, "archive": _archive, "import": _import,
    "delete": _delete,
}  # fmt: skip
_SUMMARIES: Final = {
    "show": "one session of a running server", "create": "make an empty session",
    "fork": "a second session that begins with the tokens of one", "truncate": "keep a session's first tokens",
    "export": "write a session to the server's directory; it stays in memory", "archive": "the same, and let go of its memory",
    "import": "bring an archived session back into memory", "delete": "remove a session and its archive",
}  # fmt: skip


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Where the server is, as the settings that it was started with."""
    add_flags(parser, ("host", "port", "api_key", "api_key_file"))
    parser.add_argument("--json", dest="as_json", action="store_true", help="the server's JSON, a line a session")


def add_actions(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Their parsers."""
    for name, summary in _SUMMARIES.items():
        parser = actions.add_parser(name, help=summary, allow_abbrev=False)
        if name != "create":
            parser.add_argument("id", metavar="ID", help="of the session")
        if name == "truncate":
            parser.add_argument("tokens", metavar="TOKENS", help="how many to keep")
        if name == "fork":
            parser.add_argument("--tokens", metavar="N", help="how many to begin with; default: all")
        if name in ("fork", "truncate"):
            parser.add_argument("--revision", metavar="N", help="refuse unless the session is at this one")
        if name in ("create", "fork"):
            parser.add_argument("--ttl", metavar="AGE", help="remove it this long after its last use, like 90m or 7d; 0: never")
        if name == "show":
            parser.add_argument("--text", action="store_true", help="print its text; with --json also its token ids")
        add_server_flags(parser)
