"""The server against what goes wrong around it: logs nobody reads, outputs that are closed, bodies that are no bodies."""

import io
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

import server
from engine import logs
from engine.config import ServerConfig
from engine.errors import BadModel
from engine.service import Service
from server import listening
from tests.fake_engine import FakeEngine, words

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def served(engine: FakeEngine, **settings: object) -> AsyncIterator[aiohttp.ClientSession]:
    service = Service(ServerConfig(port=0, **settings))  # type: ignore[arg-type]  # a test's own keywords
    service.engine = engine
    async with listening(service) as address, aiohttp.ClientSession(address) as client:
        yield client


class Leaky(io.StringIO):
    """A stream whose reader has left; it has no file of its own."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


async def test_a_log_that_cannot_be_written_changes_no_answer() -> None:
    """Answers and refusals are what they were although every log line is lost."""
    logs.configure("json", Leaky())
    async with served(FakeEngine([words("fine")])) as client:
        async with client.post(CHAT, json=HELLO) as response:
            assert response.status == 200
            assert (await response.json())["choices"][0]["message"]["content"] == "fine"
        async with client.post(CHAT, json={}) as response:
            assert response.status == 400
            assert response.content_type == "application/json"


@pytest.mark.parametrize(("error", "code"), [(BrokenPipeError(32, "Broken pipe"), 0), (BadModel("no file"), 3)])
def test_main_ends_quietly_when_nobody_reads(error: Exception, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that has left is no failure, and an error nobody can be told of keeps its exit code."""

    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(server, "run_line", fail)
    monkeypatch.setattr(sys, "stderr", Leaky())
    monkeypatch.setattr(sys, "stdout", Leaky())
    assert server.main(["serve", "x"]) == code
