"""A device that fails: everything that runs hears of it, nothing new begins, nothing is freed, and what RAM has is archived."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

import engine.bench.arm
import engine.device
import memory.arena
import server
from engine.config import EngineConfig, ServerConfig
from engine.departures import Departures
from engine.engine import Engine
from engine.errors import ArchiveFailed, DeviceFailed
from engine.generation import Generation
from engine.protocol import SessionId
from engine.session import Phase, Session
from server import serve
from streams import DeviceLost
from tests.engine.losing import REPORTED, LosingBackend
from tests.engine.model.parity import make_checkpoint
from tests.engine.node.process_world import expected, until
from tests.engine.node.test_cluster import NAME, TOP_K, ids, tokens
from tests.engine.runs import greedy, run, small

TURNS = (ids(150, 1), 12), (ids(3, 2), 12)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


async def ends_with(generation: Generation) -> BaseException | None:
    """What it ends with."""
    try:
        async for _ in generation:
            pass
    except Exception as error:
        return error
    return None


async def fail_in(engine: Engine, backend: LosingBackend) -> None:
    """The device fails, and the engine's block is where it was."""
    assert engine.stage.backend is backend
    backend.fail()
    async with asyncio.timeout(10):
        await asyncio.Event().wait()


async def test_all_that_runs_waits_or_comes_hears_of_it(checkpoint: Path) -> None:
    """A generation, one that reads its prompt, one in the line and a new one: all end with DeviceFailed, and so does the engine's block."""
    backend = LosingBackend()

    async def live() -> None:
        async with Engine.open(checkpoint, small(hot_rows=TOP_K, decode_batch_limit=1), backend=backend) as engine:
            session = await engine.create_session()
            decodes = engine.generate(ids(90, 1), greedy(2000), session=session)
            await anext(decodes)
            others = [
                engine.generate(ids(2000, 2), greedy(5)),
                engine.generate(ids(9, 3), greedy(5)),
                engine.generate(ids(9, 4), greedy(5), session=session),
            ]
            ends = [asyncio.ensure_future(ends_with(each)) for each in (decodes, *others)]
            await asyncio.sleep(0)
            try:
                await fail_in(engine, backend)
            finally:
                errors = await asyncio.gather(*ends)
                errors.append(await ends_with(engine.generate(ids(9, 5), greedy(5))))
                assert [(type(error), str(error)) for error in errors] == [(DeviceFailed, REPORTED)] * 5
                assert not engine.ready

    with pytest.raises(DeviceFailed, match="ECC"):
        await live()


async def rest(checkpoint: Path, backend: LosingBackend) -> None:
    """An engine that has said something, and does nothing when its device fails."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K), backend=backend) as engine:
        assert await tokens(engine, await engine.create_session(), *TURNS[0])
        await engine.stage.idle()
        await fail_in(engine, backend)


async def test_a_loop_that_waits_for_somebody_else_ends_too(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine, for one, that in turn waits for what this one will not send any more."""
    backend = LosingBackend()

    async def turn() -> None:
        await asyncio.Event().wait()

    async def live() -> None:
        async with Engine.open(checkpoint, small(hot_rows=TOP_K), backend=backend) as engine:
            monkeypatch.setattr(engine._loop, "_run_turn", turn)
            engine._loop.wake()
            for _ in range(3):
                await asyncio.sleep(0)
            await fail_in(engine, backend)

    with pytest.raises(DeviceFailed, match="ECC"):
        await live()


async def test_an_engine_at_rest_ends_too(checkpoint: Path) -> None:
    """Nothing runs and nobody asks: the block ends all the same, as soon as the device is known to have failed."""
    with pytest.raises(DeviceFailed, match="ECC"):
        await rest(checkpoint, LosingBackend())


@pytest.mark.parametrize(
    ("raised", "comes"), [(torch.AcceleratorError("an illegal memory access\nmore"), DeviceFailed), (KeyError("x"), KeyError)]
)
async def test_an_error_outside_of_streams(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, raised: Exception, comes: type[Exception]
) -> None:  # fmt: skip
    """What torch reports where no operation is asked after ends the same way; any other error of the loop stays what it is."""

    async def turn() -> None:
        raise raised

    async def live() -> None:
        async with Engine.open(checkpoint, small(hot_rows=TOP_K)) as engine:
            monkeypatch.setattr(engine._loop, "_run_turn", turn)
            engine._loop.wake()
            async with asyncio.timeout(10):
                await asyncio.Event().wait()

    with pytest.raises(comes) as caught:
        await live()
    assert comes is KeyError or str(caught.value) == "the device reported an error: an illegal memory access"


async def test_nothing_of_it_is_freed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device that hangs may still touch is neither given back nor asked about: no arena closes."""
    closed: list[object] = []
    monkeypatch.setattr(memory.arena.Arena, "close", lambda arena: closed.append(arena))
    with pytest.raises(DeviceFailed):
        await rest(checkpoint, LosingBackend())
    assert not closed
    async with Engine.open(checkpoint, small(hot_rows=TOP_K)):
        pass
    assert closed, "an engine whose device works closes its arena"


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"draft_depth": 2}, {"stages": "1,3"}, {"peer": "cpu"}, {"peer": "cpu", "mirror_replicas": 2}],
    ids=str,
)
async def test_what_ram_has_is_archived(checkpoint: Path, tmp_path: Path, settings: dict[str, object]) -> None:
    """Sessions at rest, in the middle of an answer and of a prompt: each archive has its whole blocks and every token that was said, a
    prompt that was not read to its end is in none, an archive that is up to date stays, and the next process goes on with equal tokens."""
    config = small(hot_rows=TOP_K, **settings)
    long = (await run(checkpoint, small(hot_rows=TOP_K), [(ids(150, 1), 200)])).tokens
    whole = await expected(checkpoint, *TURNS)
    backend, said, engines = LosingBackend(), list[int](), list[Engine]()
    sessions = dict[str, SessionId]()

    async def live() -> None:
        async with Engine.open(checkpoint, config, backend=backend) as engine:
            engines.append(engine)
            for name in ("archived", "rests", "reads", "says", "empty"):
                sessions[name] = await engine.create_session()
                if name in ("archived", "rests", "reads"):
                    assert await tokens(engine, sessions[name], *TURNS[0]) == whole[:12]
            assert (await engine.export_session(sessions["archived"], tmp_path / sessions["archived"])).rows == 161
            end = asyncio.ensure_future(ends_with(engine.generate(ids(1500, 9), greedy(5), session=sessions["reads"])))
            saying = engine.generate(ids(150, 1), greedy(200), session=sessions["says"])
            while len(said) < 40 or engine.sessions[sessions["reads"]].rows <= 300:
                said.extend((await anext(saying)).token_ids)
            assert engine.statistics().running == 2
            try:
                await fail_in(engine, backend)
            finally:
                assert isinstance(await end, DeviceFailed)

    with pytest.raises(DeviceFailed):
        await live()
    (engine,) = engines
    manifest = (tmp_path / sessions["archived"] / "manifest.json").read_bytes()
    for name, session in sessions.items():
        if name == "empty":
            with pytest.raises(ArchiveFailed, match="nothing of session"):
                await engine.export_session(session, tmp_path / session)
            assert not (tmp_path / session / "manifest.json").exists()
        else:
            await engine.export_session(session, tmp_path / session)
    assert (tmp_path / sessions["archived"] / "manifest.json").read_bytes() == manifest
    async with Engine.open(checkpoint, config) as engine:
        for name in ("archived", "rests", "reads", "says"):
            assert await engine.import_session(tmp_path / sessions[name]) == sessions[name]
        views = {name: engine.sessions[sessions[name]] for name in ("archived", "rests", "reads", "says")}
        assert [views[name].rows for name in ("archived", "rests", "reads")] == [161, 128, 128]
        assert [views[name].revision for name in views] == [1, 1, 2, 1]
        assert len(views["reads"].token_ids) == 162
        told = len(views["says"].token_ids) - 150
        assert 40 <= told < 200
        assert said == long[: len(said)]
        assert views["says"].rows % 64 == 0
        assert 128 <= views["says"].rows <= 150 + told
        assert await tokens(engine, sessions["says"], [], 200 - told) == long[told:]
        for name in ("archived", "rests", "reads"):
            assert await tokens(engine, sessions[name], *TURNS[1]) == whole[12:]


async def test_a_failure_behind_a_drain_is_heard_too(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop has ended, and sessions go to disk: the block ends with DeviceFailed, nothing is freed, and what RAM has is archived."""
    backend, closed = LosingBackend(), list[object]()
    monkeypatch.setattr(memory.arena.Arena, "close", lambda arena: closed.append(arena))

    async def live() -> None:
        async with Engine.open(checkpoint, small(hot_rows=TOP_K), backend=backend) as engine:
            session = await engine.create_session()
            assert await tokens(engine, session, *TURNS[0])
            await engine.export_session(await engine.fork_session(session), tmp_path / "another")
            await engine.drain(10)
            backend.fail()
            assert (await engine.export_session(session, tmp_path / session)).rows == 128

    with pytest.raises(DeviceFailed, match="ECC"):
        await live()
    assert not closed


async def test_a_session_that_comes_in_hears_of_it(checkpoint: Path, tmp_path: Path) -> None:
    """An import that the failure cuts off fails with DeviceFailed, not with what its operation met."""
    backend, ends = LosingBackend(), list[object]()

    async def live() -> None:
        async with Engine.open(checkpoint, small(hot_rows=TOP_K), backend=backend) as engine:
            session = await engine.create_session()
            assert await tokens(engine, session, *TURNS[0])
            await engine.export_session(session, tmp_path / session)
            comes = asyncio.ensure_future(engine.import_session(tmp_path / session, lambda done, total: backend.fail()))
            try:
                await asyncio.Event().wait()
            finally:
                ends.extend(await asyncio.gather(comes, return_exceptions=True))

    with pytest.raises(DeviceFailed, match="ECC"):
        async with asyncio.timeout(10):
            await live()
    assert [type(end) for end in ends] == [DeviceFailed]


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (torch.AcceleratorError("out of order\nmore"), "the device reported an error: out of order"),
        (DeviceLost(REPORTED), REPORTED),
        (DeviceFailed(REPORTED), REPORTED),
    ],
)
def test_a_device_that_fails_where_no_engine_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], raised: Exception, said: str
) -> None:
    """While a model is loaded, or below a measurement: the command says one line and leaves with 70 all the same."""

    def run_line(*_: object) -> int:
        raise raised

    monkeypatch.setattr(server, "run_line", run_line)
    monkeypatch.setattr(server, "leave_at_once", sys.exit)
    with pytest.raises(SystemExit) as left:
        server.main([])
    assert left.value.code == 70
    assert capsys.readouterr().err == f"forebay: {said}\n"


async def test_a_measurement_asks_a_failed_device_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine held is not given back where the device failed: to ask would be another error, or hang."""
    asked = list[bool]()
    monkeypatch.setattr(engine.bench.arm, "device_of", lambda config: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append(True))
    for left in ([], ["an engine"]):
        monkeypatch.setattr(engine.device, "_LEFT", left)
        await engine.bench.arm.forget_engines(EngineConfig())
    assert asked == [True]


async def test_who_waits_for_room_hears_of_the_end() -> None:
    """The task of departures is cancelled with the loop's before it has looked at who was asked to leave: nobody waits for ever."""
    session = Session(SessionId("a" * 16), temporary=False)
    for phase in (Phase.ARCHIVED, Phase.READY):
        session.move(phase)
    session.tokens.append(1)
    departures = Departures(lambda: [session], lambda _: (), lambda _: None, lambda: None)
    departures.held[session.id] = session
    departures.archive_with(lambda _: asyncio.sleep(0), "")
    running = asyncio.ensure_future(departures.run())
    await asyncio.sleep(0)
    waiting = asyncio.ensure_future(departures.make_room())
    await asyncio.sleep(0)
    running.cancel()
    async with asyncio.timeout(5):
        assert await waiting
    assert not await departures.make_room()
    assert session.phase is Phase.READY


def _body(**more: Any) -> dict[str, Any]:
    return {"prompt": ids(90, 1), "max_tokens": 2000, "temperature": 0, "ignore_eos": True, **more}


async def test_a_server_tells_its_clients_and_ends(checkpoint: Path) -> None:
    """A stream ends with an error chunk, a whole answer is 503 with Retry-After, and `serve` raises what its command ends with 70 of."""
    backend, seen = LosingBackend(), dict[str, Any]()

    async def visit(address: str, _: object) -> None:
        async def whole() -> None:
            async with client.post("/v1/completions", json=_body()) as response:
                seen["whole"] = response.status, response.headers["Retry-After"], (await response.json())["error"]["type"]

        async def streamed() -> None:
            async with client.post("/v1/completions", json=_body(stream=True)) as response:
                lines = [line async for line in response.content if line.startswith(b"data: ")]
                seen["stream"] = response.status, len(lines) > 3, json.loads(lines[-1 if b"error" in lines[-1] else -2][6:])["error"]

        async with aiohttp.ClientSession(address) as client:
            asked = [asyncio.ensure_future(one()) for one in (whole, streamed)]
            await until(lambda: backend.statistics().completed > 2_000, "both decode")
            backend.fail()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.gather(*asked)

    with pytest.raises(DeviceFailed) as caught:
        await serve(lambda: Engine.open(checkpoint, small(hot_rows=TOP_K), backend=backend), ServerConfig(port=0), visit)
    assert caught.value.exit_code == 70
    assert seen["whole"] == (503, "10", "device_failed")
    assert seen["stream"][:2] == (200, True)
    assert (seen["stream"][2]["type"], seen["stream"][2]["message"]) == ("device_failed", REPORTED)
