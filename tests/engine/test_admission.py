"""Who is admitted: what fits alone is served in the end, and no context is ever cut in silence."""

import asyncio
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.errors import BadRequest, NeverFits, NotAdmitted, TooLong
from engine.protocol import SessionId
from engine.sampling import Sampling
from tests.engine.model.parity import make_checkpoint
from tests.engine.runs import greedy, small

LIMIT_S = 60
ROOM = 960  # tokens that 1 MiB holds of the model's rows: 15 blocks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "shared")


async def said(engine: Engine, rows: int, tokens: int, session: SessionId | None = None, priority: int = 0, key: str = "") -> int:
    """How many tokens a request of that size got."""
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True, priority=priority)
    found = await engine.generate([1] * rows, sampling, session=session, namespace=key).complete()
    return len(found.token_ids)


@pytest.mark.parametrize("priorities", [(0, 0), (4, -4), (-4, 4)])
@pytest.mark.parametrize("keys", [("", ""), ("one", "other")])
async def test_two_requests_that_fit_alone_are_both_served(checkpoint: Path, priorities: tuple[int, int], keys: tuple[str, str]) -> None:
    """Each takes most of the memory there is: one waits for the other, whatever their keys and priorities."""
    async with Engine.open(checkpoint, small(host_memory_bytes=1 << 20, hot_rows=16, append_chunk_rows=512)) as engine:
        assert engine.stage.arena.statistics().blocks * 64 == ROOM
        asking = (said(engine, 700, 3, None, priority, key) for priority, key in zip(priorities, keys, strict=True))
        assert await asyncio.wait_for(asyncio.gather(*asking), LIMIT_S) == [3, 3]


@pytest.mark.parametrize("first", [0, 1])
async def test_two_sessions_that_wait_for_each_other_do_not_wait_for_ever(checkpoint: Path, first: int) -> None:
    """Two sessions hold half of the memory each and both ask for more: one is told to come again, and served when the other is gone. Which
    of them came first changes nothing."""
    async with Engine.open(checkpoint, small(host_memory_bytes=1 << 20, hot_rows=16, append_chunk_rows=512)) as engine:
        held = [await engine.create_session() for _ in range(2)]
        for session in held:
            assert await said(engine, 400, 2, session) == 2
        order = held if first == 0 else held[::-1]
        asking = (said(engine, 300, 2, session, priority) for session, priority in zip(order, (2, -2), strict=True))
        found = await asyncio.wait_for(asyncio.gather(*asking, return_exceptions=True), LIMIT_S)
        refused = [place for place, one in enumerate(found) if isinstance(one, NotAdmitted) and not isinstance(one, NeverFits)]
        assert refused, f"two sessions of 702 tokens were served in {ROOM}: {found}"
        left = order[refused[0]]
        for session in held:
            if session != left:
                await engine.close_session(session)
        assert await asyncio.wait_for(said(engine, 300, 2, left), LIMIT_S) == 2


async def test_a_fresh_request_waits_for_a_session_in_its_turn(checkpoint: Path) -> None:
    """A large fresh request that is first in line, and a turn of a session that holds what it needs: both are served or told, none waits
    for ever."""
    async with Engine.open(checkpoint, small(host_memory_bytes=1 << 20, hot_rows=16, append_chunk_rows=512)) as engine:
        session = await engine.create_session()
        assert await said(engine, 400, 2, session) == 2
        asking = (said(engine, 700, 2, None, -4), said(engine, 20, 2, session, 4))
        fresh, turn = await asyncio.wait_for(asyncio.gather(*asking, return_exceptions=True), LIMIT_S)
        assert turn == 2
        assert isinstance(fresh, NotAdmitted)
        await engine.close_session(session)
        assert await asyncio.wait_for(said(engine, 700, 2), LIMIT_S) == 2


async def test_without_a_limit_a_turn_gets_what_memory_holds(checkpoint: Path) -> None:
    """On a small memory a request that names no limit ends with `length` at what can be held, in a session of its own and turn after turn;
    when there is no room for another token it is refused with the missing bytes, and the session is as it was."""
    unlimited = Sampling(temperature=0.0, ignore_eos=True)
    async with Engine.open(checkpoint, small(host_memory_bytes=140_000, hot_rows=16)) as engine:
        room = engine.stage.arena.statistics().blocks * 64
        found = await engine.generate([1] * 30, unlimited).complete()
        assert (len(found.token_ids), found.finish_reason) == (room - 30, "length")
        session = await engine.create_session()
        await engine.generate([1] * 30, greedy(5), session=session).complete()
        found = await engine.generate([1] * 30, unlimited, session=session).complete()
        assert (len(found.token_ids), found.finish_reason) == (room - 65, "length")
        before = list(engine.sessions[session].token_ids)
        with pytest.raises(NeverFits, match=f"a context of {room + 2} tokens can never fit: [0-9]+ bytes of host memory missing"):
            await engine.generate([1], unlimited, session=session).complete()
        assert list(engine.sessions[session].token_ids) == before


async def test_a_named_limit_is_never_cut(checkpoint: Path) -> None:
    """More new tokens than memory can hold, or than the context has, are refused, not cut; the line has both numbers."""
    async with Engine.open(checkpoint, small(host_memory_bytes=1 << 20, hot_rows=16, context_max=1200)) as engine:
        with pytest.raises(NeverFits, match="a context of 961 tokens can never fit"):
            await said(engine, 60, ROOM - 59)
        with pytest.raises(TooLong, match="60 prompt tokens and 1141 new ones exceed the context of 1200 tokens") as caught:
            await said(engine, 60, 1141)
        assert isinstance(caught.value, BadRequest)
        assert caught.value.field == "max_tokens"
        with pytest.raises(TooLong, match="1200 prompt tokens and 1 new ones exceed the context of 1200 tokens"):
            await engine.generate([1] * 1200, Sampling()).complete()
