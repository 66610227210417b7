"""Requests and sessions around failures, closings and full memory: nobody hangs, nobody else is harmed."""

import asyncio
from pathlib import Path

import pytest

import memory.copyback
import memory.offload
from engine.append_queue import AppendQueue
from engine.decode import DecodeStep
from engine.engine import Engine
from engine.errors import BadRequest, BadSetting, NotAdmitted, SessionBroken, UnknownSession
from engine.generation import Generation
from streams import Full, Tape
from streams.tape import Completed, Submitted
from tests.engine.model.parity import make_checkpoint
from tests.engine.runs import collect, greedy, small

LIMIT_S = 60


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "shared")


async def read(generation: Generation) -> list[int]:
    return [token async for chunk in generation for token in chunk.token_ids]


async def test_a_dead_loop_ends_every_request_and_says_why(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the step loop itself fails, readers get an error, the block raises the cause, and nothing hangs."""

    def full(*_: object) -> None:
        raise Full("no room on the stream")

    async def life() -> None:
        async with Engine.open(checkpoint, small(hot_rows=16)) as engine:
            generation = engine.generate([1] * 60, greedy(50))
            await anext(generation)
            reading.append(asyncio.ensure_future(read(generation)))
            monkeypatch.setattr(memory.offload.OffloadSession, "commit", full)
            await asyncio.sleep(LIMIT_S)

    reading: list[asyncio.Future[list[int]]] = []
    with pytest.raises(Full, match="no room"):
        await asyncio.wait_for(life(), LIMIT_S)
    with pytest.raises(SessionBroken, match="no room"):
        await reading[0]


async def test_a_loop_that_dies_of_a_request_ends_that_one_too(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is between two lines when the step loop fails gets the error as well."""

    def fail(*_: object) -> None:
        raise RuntimeError("no such append")

    async def life() -> None:
        async with Engine.open(checkpoint, small(hot_rows=16)) as engine:
            monkeypatch.setattr(AppendQueue, "start", fail)
            reading.append(asyncio.ensure_future(read(engine.generate([1] * 60, greedy(5)))))
            await asyncio.sleep(LIMIT_S)

    reading: list[asyncio.Future[list[int]]] = []
    with pytest.raises(RuntimeError, match="no such append"):
        await asyncio.wait_for(life(), LIMIT_S)
    with pytest.raises(SessionBroken, match="no such append"):
        await asyncio.wait_for(reading[0], LIMIT_S)


async def test_a_failed_step_ends_its_own_sessions_only(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four sessions take turns in steps of one; one operation fails: one session breaks, three give the tokens of a run alone."""
    real, armed = DecodeStep._attend, [False]

    def attend(self: DecodeStep, *arguments: object) -> None:
        if armed[0]:
            armed[0] = False
            raise RuntimeError("boom")
        real(self, *arguments)  # type: ignore[arg-type]  # passed through

    monkeypatch.setattr(DecodeStep, "_attend", attend)
    async with Engine.open(checkpoint, small(hot_rows=16, decode_batch_limit=1)) as engine:
        alone = [(await collect(engine, [([number + 1] * 3, 40)])).tokens for number in range(4)]
        generations = [engine.generate([number + 1] * 3, greedy(40)) for number in range(4)]
        first = [list(chunk.token_ids) for chunk in await asyncio.gather(*map(anext, generations))]
        assert len(engine._loop.decoding) >= 3, "the sessions do not take turns"
        armed[0] = True
        rest = await asyncio.wait_for(asyncio.gather(*map(read, generations), return_exceptions=True), LIMIT_S)
        broken = [result for result in rest if isinstance(result, SessionBroken)]
        assert len(broken) == 1
        for number, result in enumerate(rest):
            if isinstance(result, list):
                assert first[number] + result == alone[number], f"session {number}"
        assert engine._stage.arena.statistics().references == 0


async def test_closing_a_session_against_a_new_request(checkpoint: Path) -> None:
    """A session that closes takes no new request, closes once, and the engine goes on."""
    async with Engine.open(checkpoint, small(hot_rows=16)) as engine:
        session = await engine.create_session()
        running = engine.generate([1] * 600, greedy(300), session=session)
        await running.prompt()
        closings = [asyncio.ensure_future(engine.close_session(session)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(UnknownSession):
            await engine.generate([4] * 300, greedy(50), session=session).prompt()
        results = await asyncio.wait_for(asyncio.gather(*closings, return_exceptions=True), LIMIT_S)
        assert [type(result) for result in results] == [type(None), UnknownSession]
        assert (await engine.generate([1], greedy(2)).complete()).finish_reason == "length"


async def test_an_empty_turn_behind_an_aborted_append_is_refused(checkpoint: Path) -> None:
    """Nothing to feed is judged when the request starts: BadRequest, and the engine goes on."""
    async with Engine.open(checkpoint, small(hot_rows=16)) as engine:
        session = await engine.create_session()
        first = engine.generate([1] * 2000, greedy(5), session=session)
        await first.prompt()
        while first.progress.rows_done < 64:  # noqa: ASYNC110 - a count that moves with the loop
            await asyncio.sleep(0)
        second = engine.generate([], greedy(5), session=session)
        await second.prompt()
        await first.aclose()
        with pytest.raises(BadRequest, match="no tokens"):
            await asyncio.wait_for(second.complete(), LIMIT_S)
        assert (await engine.generate([1], greedy(2)).complete()).finish_reason == "length"


async def test_equal_request_ids_are_two_requests(checkpoint: Path) -> None:
    """Ids are the caller's business: two requests with one id both get their own tokens."""
    async with Engine.open(checkpoint, small(hot_rows=16)) as engine:
        alone = [(await engine.generate([number + 1] * 90, greedy(4)).complete()).token_ids for number in range(2)]
        both = [engine.generate([number + 1] * 90, greedy(4), request_id="x").complete() for number in range(2)]
        assert [one.token_ids for one in await asyncio.wait_for(asyncio.gather(*both), LIMIT_S)] == alone


async def test_memory_that_is_being_given_back_is_waited_for(checkpoint: Path) -> None:
    """A request as large as the arena starts although the copy of the one before is still in flight."""
    async with Engine.open(checkpoint, small(host_memory_bytes=1 << 20, hot_rows=16)) as engine:
        whole = engine._stage.arena.statistics().blocks * 64
        small_one, large = engine.generate([1] * 60, greedy(5)), engine.generate([2] * (whole - 10), greedy(5))
        results = await asyncio.wait_for(asyncio.gather(small_one.complete(), large.complete()), LIMIT_S)
        assert [len(one.token_ids) for one in results] == [5, 5]


async def test_what_never_fits_holds_nobody_up(checkpoint: Path) -> None:
    """A request larger than the arena is refused at once, also while others run."""
    async with Engine.open(checkpoint, small(host_memory_bytes=1 << 20, hot_rows=16)) as engine:
        running = engine.generate([1], greedy(600))
        await anext(running)
        with pytest.raises(NotAdmitted, match="can never fit"):
            await anext(engine.generate([1], greedy(3900)))
        assert (await engine.generate([1], greedy(2)).complete()).finish_reason == "length"
        assert not running._ended
        await running.aclose()


async def test_a_lost_copy_ends_its_session_while_others_decode(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session whose copy to RAM failed is told at its next step, not when everybody else has finished."""
    real = memory.copyback.copy_bytes
    async with Engine.open(checkpoint, small(hot_rows=16)) as engine:
        sessions = [await engine.create_session() for _ in range(2)]
        victim, neighbour = (engine.generate([1] * 10, greedy(900), session=session) for session in sessions)
        await anext(victim)
        await anext(neighbour)
        held = engine._sessions[sessions[0]].memory
        assert held is not None
        assert held.ring is not None
        ring = held.ring.buffer

        def lossy(target: object, source: object) -> None:
            if ring.data_ptr() <= source.data_ptr() < ring.data_ptr() + ring.numel():  # type: ignore[attr-defined]  # a tensor
                raise OSError("the bus fell silent")
            real(target, source)  # type: ignore[arg-type]

        monkeypatch.setattr(memory.copyback, "copy_bytes", lossy)
        with pytest.raises(SessionBroken, match="bus fell silent"):
            await asyncio.wait_for(read(victim), LIMIT_S)
        assert not neighbour._ended
        await neighbour.aclose()


async def test_an_append_lets_go_of_its_scratch(checkpoint: Path) -> None:
    """Once the prompt is read nothing of its append outlives it, and its progress still counts."""
    async with Engine.open(checkpoint, small(hot_rows=16)) as engine:
        generation = engine.generate([1] * 300, greedy(20))
        await anext(generation)
        request = generation._request
        assert request is not None
        assert request.append is None
        assert generation.progress.rows_done == generation.progress.rows_total == 300
        await generation.aclose()
        assert request.session.memory is None


async def test_everything_is_given_back_at_the_end(checkpoint: Path) -> None:
    """After the block the ledger holds nothing, and the closed engine refuses politely."""
    async with Engine.open(checkpoint, small(hot_rows=16)) as engine:
        await engine.create_session()
        await engine.generate([1, 2], greedy(3)).complete()
    assert engine._stage.ledger.total("host").allocated_bytes == 0
    assert engine._stage.ledger.total("device").allocated_bytes == 0
    with pytest.raises(NotAdmitted):
        await anext(engine.generate("text", greedy(1)))


async def test_an_engine_on_tape(checkpoint: Path, tmp_path: Path) -> None:
    """With a tape set, every operation of the run is on it; a path that cannot be written is one line."""
    path = tmp_path / "run.jsonl"
    async with Engine.open(checkpoint, small(hot_rows=16, tape=str(path))) as engine:
        await engine.generate([1, 2, 3], greedy(5)).complete()
    tape = Tape.read(path)
    labels = {record.label for record in tape.records if isinstance(record, Submitted)}
    assert {"step.begin", "step.finish", "append.finish"} <= labels
    assert sum(isinstance(record, Completed) for record in tape.records) == sum(isinstance(record, Submitted) for record in tape.records)
    with pytest.raises(BadSetting, match="--tape: cannot write"):
        async with Engine.open(checkpoint, small(tape=str(tmp_path / "none" / "run.jsonl"))):
            pass
