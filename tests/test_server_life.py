"""The server's life: listening, loading, serving, draining, and the signals between them."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from structlog.testing import capture_logs

import server
from engine.config import ServerConfig
from engine.errors import BadModel
from engine.protocol import EngineFace
from engine.service import Service
from server import CannotBind, listening, serve
from tests.fake_engine import FakeEngine, Opener, words

pytestmark = pytest.mark.both_loops

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
CONFIG = ServerConfig(port=0)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def send_signal() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def sockets() -> set[str]:
    """Those that this process has."""
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return {found for link in links if os.path.lexists(link) and (found := os.readlink(link)).startswith("socket:")}


async def status_of(client: aiohttp.ClientSession, path: str) -> int:
    async with client.get(path) as response:
        return response.status


async def test_a_taken_port_is_one_line(taken_port: int) -> None:
    """A port in use is CannotBind with exit code 5, and the model is never loaded."""
    opener = Opener(FakeEngine([words("x")]))
    with pytest.raises(CannotBind) as caught:
        await serve(opener, ServerConfig(port=taken_port))
    assert caught.value.exit_code == 5
    assert f"127.0.0.1:{taken_port}" in str(caught.value)
    assert "in use" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not opener.opened


async def test_an_address_of_others_is_one_line() -> None:
    """An address that this machine does not have is CannotBind too."""
    with pytest.raises(CannotBind, match=r"203\.0\.113\.1"):
        await serve(Opener(FakeEngine([words("x")])), ServerConfig(host="203.0.113.1", port=0))


@pytest.mark.parametrize(
    ("host", "key", "warned"), [("127.0.0.1", None, False), ("localhost", None, False), ("0.0.0.0", None, True), ("0.0.0.0", "k", False)]
)
async def test_an_open_address_without_a_key_warns(host: str, key: str | None, warned: bool) -> None:
    """Listening for others without a key writes a warning; loopback or a key do not."""
    with capture_logs() as logs:
        async with listening(Service(ServerConfig(host=host, port=0, api_key=key))):
            pass
    assert any(line["event"] == "server.exposed" for line in logs) == warned


@pytest.mark.parametrize("rounds", range(12))
async def test_a_server_that_is_cut_off_as_it_begins_to_listen_leaves_nothing(rounds: int) -> None:
    """In whatever round it is cancelled: no socket stays that nobody knows of."""

    async def listens() -> None:
        async with listening(Service(CONFIG)):
            await asyncio.Event().wait()

    before = sockets()
    starting = asyncio.create_task(listens())
    for _ in range(rounds):
        await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    for _ in range(9):  # uvloop closes some rounds after it was told to
        await asyncio.sleep(0)
    assert sockets() <= before


async def test_it_listens_while_it_loads_and_then_serves() -> None:
    """/health answers during the load, /ready and requests only after it; leaving `while_ready` ends the server."""
    gate, opener_engine = asyncio.Event(), FakeEngine([words("x")])
    service = Service(CONFIG)
    async with listening(service) as address, aiohttp.ClientSession(address) as client:
        opener = Opener(opener_engine, gate=gate)

        async def load() -> None:
            async with opener() as engine:
                service.engine = engine

        async with asyncio.TaskGroup() as group:
            loading = group.create_task(load())
            assert await status_of(client, "/health") == 200
            assert await status_of(client, "/ready") == 503
            gate.set()
            await loading
        assert await status_of(client, "/ready") == 200


async def test_a_signal_while_loading_ends_it_cleanly() -> None:
    """SIGTERM during the load cancels it, and `serve` returns as after any other end."""
    opener = Opener(FakeEngine([words("x")]), gate=asyncio.Event())
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(serve(opener, CONFIG))
        await opener.loading.wait()
        send_signal()
        assert await serving is None
    assert opener.closed == 0


async def test_a_failed_load_is_raised_as_it_is() -> None:
    """A model that cannot be loaded leaves `serve` as its own error, not inside a group."""
    with pytest.raises(BadModel, match="layer 3"):
        await serve(Opener(FakeEngine([words("x")]), error=BadModel("layer 3 is missing")), CONFIG)


async def test_sigterm_lets_running_requests_finish_and_admits_no_more() -> None:
    """After SIGTERM the running stream ends whole, new requests and /ready get 503, and then the server is gone."""
    rest, may_drain = asyncio.Event(), asyncio.Event()
    first, last = words("a", "b")
    engine = FakeEngine([[first, rest, last]], may_drain=may_drain)
    opener = Opener(engine)
    addresses: asyncio.Queue[str] = asyncio.Queue()

    async def announce(address: str, engine: EngineFace) -> None:
        addresses.put_nowait(address)
        await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        serving = group.create_task(serve(opener, ServerConfig(port=0, drain_timeout_s=12.0), announce))
        address = await addresses.get()
        async with aiohttp.ClientSession(address) as client:
            async with client.post(CHAT, json={**HELLO, "stream": True}) as response:
                await engine.generations[0].paused.wait()
                send_signal()
                await engine.draining.wait()
                assert await status_of(client, "/ready") == 503
                async with client.post(CHAT, json=HELLO) as refused:
                    assert refused.status == 503
                    assert "draining" in (await refused.json())["error"]["message"]
                assert opener.closed == 0
                rest.set()
                text = (await response.read()).decode()
            assert '"b"' in text
            assert text.endswith("data: [DONE]\n\n")
            may_drain.set()
            await serving
            with pytest.raises(aiohttp.ClientConnectorError):
                await client.get("/health")
    assert engine.drains == [12.0]
    assert (opener.closed, engine.aborted) == (1, 0)


async def test_a_second_signal_cuts_the_drain() -> None:
    """A second SIGTERM does not wait for what runs: the request is cancelled and the server ends."""
    engine = FakeEngine([[words("a", "b")[0], asyncio.Event()]], may_drain=asyncio.Event())
    addresses: asyncio.Queue[str] = asyncio.Queue()

    async def announce(address: str, engine: EngineFace) -> None:
        addresses.put_nowait(address)
        await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        serving = group.create_task(serve(Opener(engine), CONFIG, announce))
        async with aiohttp.ClientSession(await addresses.get()) as client, client.post(CHAT, json={**HELLO, "stream": True}) as response:
            await engine.generations[0].paused.wait()
            send_signal()
            await engine.draining.wait()
            send_signal()
            await serving
            assert engine.generations[0].closed.is_set()
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()


async def test_leaving_while_ready_ends_the_server() -> None:
    """When `while_ready` returns the server drains and closes by itself; its error leaves unwrapped."""
    opener = Opener(FakeEngine([words("x")]))
    seen = []

    async def once(address: str, engine: EngineFace) -> None:
        async with aiohttp.ClientSession(address) as client:
            seen.append(await status_of(client, "/ready"))

    await serve(opener, CONFIG, once)
    assert (seen, opener.closed) == ([200], 1)

    async def fail(address: str, engine: EngineFace) -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        await serve(opener, CONFIG, fail)
    assert opener.closed == 2


def test_main_prints_one_line_and_the_exit_code(
    taken_port: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`forebay serve` on a taken port prints one line and returns 5."""
    monkeypatch.setattr(server.os, "environ", {})
    assert server.main(["serve", "--demo", "--port", str(taken_port), "--log-format", "json"]) == 5
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("forebay: cannot listen on ")
    assert printed.err.count("\n") == 1
