"""`forebay session` against a running server: what it prints, what it passes on of refusals, its exit codes."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import server
from tests.test_server_idle import begun, kept


class Line:
    """The command line, aimed at one server."""

    def __init__(self, client: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str], key: str | None = None) -> None:
        base = client._base_url
        assert base is not None
        self._aim = ["--port", str(base.port), *([] if key is None else ["--api-key", key])]
        self._capsys = capsys

    async def run(self, *words: str) -> tuple[int, str, str]:
        """Exit code, standard output, and the one line of refusal."""
        code = await asyncio.to_thread(server.main, ["session", *words, *self._aim])
        output, errors = self._capsys.readouterr()
        return code, output, "".join(line for line in errors.splitlines() if line.startswith("forebay: "))

    async def cards(self, *words: str) -> list[dict[str, Any]]:
        """What a command prints as JSON."""
        code, output, refused = await self.run(*words, "--json")
        assert code == 0, refused
        return [json.loads(line) for line in output.splitlines() if line.startswith('{"id"')]


async def test_a_life_by_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Made, forked, cut, exported, archived, brought back and deleted: each command prints what the session is then."""
    async with kept(tmp_path) as (_, engine, client):
        line = Line(client, capsys)
        (empty,) = await line.cards("create", "--ttl", "90m")
        assert empty["expires_at"] - empty["last_used"] == 5400
        made = await begun(client)
        (fork,) = await line.cards("fork", made, "--tokens", "3", "--revision", "1", "--ttl", "0")
        assert fork["tokens"] == 3
        (cut,) = await line.cards("truncate", made, "2", "--revision", "1")
        assert (cut["tokens"], cut["revision"]) == (2, 2)
        (exported,) = await line.cards("export", made)
        assert (exported["state"], exported["bytes"]["disk"] > 0) == ("ready", True)
        (archived,) = await line.cards("archive", made)
        assert (archived["state"], archived["bytes"]["host"]) == ("archived", 0)
        assert made not in engine.sessions
        (back,) = await line.cards("import", made)
        assert (back["state"], back["revision"]) == ("ready", 2)
        assert {card["id"] for card in await line.cards("list")} == {empty["id"], made, fork["id"]}
        (shown,) = await line.cards("show", made, "--text")
        assert (len(shown["token_ids"]), shown["text"]) == (2, "import os")
        assert (await line.run("show", made, "--text"))[1].startswith("import os")
        code, output, _ = await line.run("show", made)
        assert code == 0
        assert made in output
        assert "ready" in output
        assert (await line.run("delete", made))[0] == 0
        assert {card["id"] for card in await line.cards("list")} == {empty["id"], fork["id"]}


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("show", "0123456789abcdef"), 2, "no session"),
        (("delete", "../../etc"), 2, "no session"),
        (("truncate", "SESSION", "999"), 2, "0 to"),
        (("truncate", "SESSION", "2", "--revision", "7"), 2, "revision 1, not 7"),
        (("import", "SESSION"), 2, "held already"),
        (("export", "SESSION"), 4, "raise --sessions-quota"),
        (("truncate", "SESSION", "few"), 2, "--tokens must be a number"),
        (("create", "--ttl", "soon"), 2, "--ttl must be off, or an age"),
    ],
)
async def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, says: str) -> None:
    """The server's line is printed once, with the exit code of its kind; nothing goes to standard output."""
    async with kept(tmp_path, sessions_quota_bytes=1) as (_, _, client):
        made = await begun(client)
        found, output, refused = await Line(client, capsys).run(*(word.replace("SESSION", made) for word in words))
        assert found == code
        assert says in refused
        assert '"object"' not in output


async def test_the_key_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the server's key sessions are made; without it the refusal says what to send."""
    async with kept(tmp_path, api_key="secret") as (_, _, client):
        code, _, refused = await Line(client, capsys).run("create")
        assert (code, "Authorization" in refused) == (2, True)
        assert len(await Line(client, capsys, "secret").cards("create")) == 1


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Where no server listens the line names the address and the flags; exit code 5."""
    assert server.main(["session", "list", "--port", "1"]) == 5
    said = capsys.readouterr().err
    assert "http://127.0.0.1:1" in said
    assert "--port" in said
