"""The server against what goes wrong around it: logs nobody reads, outputs that are closed, bodies that are no bodies."""

import asyncio
import io
import json
import sys
import threading
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from structlog.testing import capture_logs

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


async def test_what_cannot_fit_is_refused_before_the_engine_hears_of_it() -> None:
    """Ids, texts and messages beyond the context are 400 with the numbers; what fits arrives, however large its body."""
    engine = FakeEngine([words("fine")], context_max=40_000)
    text = "x" * (16 * 40_000)
    bodies: list[tuple[str, dict[str, object], str | None]] = [
        ("/v1/completions", {"prompt": [1] * 40_000}, "prompt"),
        ("/v1/completions", {"prompt": text + "x"}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": text + "x"}]}, "messages"),
        ("/tokenize", {"prompt": text + "x"}, "prompt"),
        ("/tokenize", {"prompt": text[:40_001], "return_token_strs": True}, "return_token_strs"),
        ("/v1/completions", {"prompt": [1] * 39_999}, None),
        (CHAT, {"messages": [{"role": "user", "content": text}]}, None),
        ("/tokenize", {"prompt": text[:40_001]}, None),
        ("/tokenize", {"prompt": text[:40_000], "return_token_strs": True}, None),
    ]
    async with served(engine) as client:
        for path, body, field in bodies:
            async with client.post(path, json=body) as response:
                answer = await response.json()
                assert response.status == (200 if field is None else 400), answer
                if field is not None:
                    assert answer["error"]["param"] == field
                    assert len(answer["error"]["message"]) < 200
                elif path == "/tokenize":
                    assert answer["count"] == len(str(body["prompt"]))
                    assert len(answer.get("token_strs", [])) in (0, 40_000)
    assert len(engine.calls) == 2


async def test_a_large_body_is_decoded_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body above 256 KiB is parsed on another thread, a small one on the loop's own, and both are refused alike."""
    seen: list[bool] = []
    real = server.api.parse_tokenize

    def parse(body: bytes) -> object:
        seen.append(threading.current_thread() is threading.main_thread())
        return real(body)

    monkeypatch.setattr(server.api, "parse_tokenize", parse)
    async with served(FakeEngine([words("x")])) as client:
        for size in (1_000, 300_000):
            async with client.post("/tokenize", json={"prompt": 5, "model": "x" * size}) as response:
                assert response.status == 400
    assert seen == [True, False]


PLAIN = json.dumps(HELLO).encode()
GZIP = zlib.compress(PLAIN, wbits=31)


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("gzip", GZIP, 200), ("GZIP", GZIP, 200), ("deflate", zlib.compress(PLAIN), 200), ("identity", PLAIN, 200), ("", PLAIN, 200),
        ("gzip", b"garbage", 400), ("gzip", b"", 400), ("gzip", GZIP[:-9], 400), ("gzip", GZIP + b"more", 400), ("gzip", PLAIN, 400),
        ("deflate", GZIP, 400), ("deflate", b"garbage", 400),
        ("br", b"garbage", 415), ("zstd", b"garbage", 415), ("nonsense", PLAIN, 415), ("gzip, gzip", GZIP, 415),
        ("gzip", zlib.compress(b" " * 1_000_000, wbits=31), 413), ("gzip", zlib.compress(b" " * 65_537, wbits=31), 413),
    ],
    ids=map(str, range(18)),
)  # fmt: skip
async def test_compressed_bodies(encoding: str, body: bytes, status: int) -> None:
    """gzip and deflate are read, up to the limit of a plain body; all else is refused in our shape, without a traceback in the log."""
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    with capture_logs() as lines:
        async with (
            served(FakeEngine([words("fine")]), body_bytes_max=65_536) as client,
            client.post(CHAT, data=body, headers=headers) as response,
        ):
            assert response.status == status
            assert response.content_type == "application/json"
            if status != 200:
                assert (await response.json())["error"]["type"] == "invalid_request_error"
    assert [line["event"] for line in lines if line["log_level"] != "debug"] == ["request.finished"]


async def answer_to(client: aiohttp.ClientSession, sent: bytes) -> bytes:
    """What comes back for bytes sent as they stand."""
    assert client._base_url is not None
    reader, writer = await asyncio.open_connection(client._base_url.host, client._base_url.port)
    writer.write(sent)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nAuthorization: Bearer s3cr\x00et\r\n\r\n",
        b"GET /" + b"s3cret" * 2_000 + b" HTTP/1.1\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\n{  \r\ns3cret\r\n\r\n",
    ],
    ids=["version", "path", "header", "long", "length", "chunk", "second chunk"],
)
async def test_what_is_no_http_is_one_line(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Bytes that are no request get a 400, and one log line that repeats none of them and holds no traceback."""
    with capture_logs() as lines:
        async with served(FakeEngine([words("x")])) as client:
            answer = await answer_to(client, sent)
    assert answer.split()[1] == b"400"
    assert [line["event"] for line in lines if line["event"] == "request.malformed"] == ["request.malformed"]
    assert not any("exception" in line or "exc_info" in line for line in lines)
    assert "s3c" not in str(lines)
    assert caplog.records == []
