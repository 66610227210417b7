"""Sessions that callers hold, in the library: forks, cuts and revisions are exact, also under any interleaving."""

import asyncio
import os
import random
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.errors import BadRequest, NotAdmitted, SessionBroken, SessionBusy, StaleRevision, UnknownSession
from engine.protocol import SessionId
from streams import Fault, SeededOrder, VirtualBackend, sealed
from tests.engine.model.parity import make_checkpoint, named
from tests.engine.runs import Run, greedy, small
from tests.engine.test_prefix_reuse import alike, ask, fresh, ids, rows_of

NAME = "shared"
TOP_K = int(named(NAME).config["index_topk"])

both = pytest.mark.parametrize("placement", ["offload", "resident"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


async def turn(engine: Engine, session: SessionId, prompt: list[int], tokens: int = 6, revision: int | None = None) -> Run:
    """One turn, to its very end."""
    result = Run()
    async for chunk in engine.generate(prompt, greedy(tokens), session=session, revision=revision):
        result.tokens.extend(chunk.token_ids)
        result.logits.extend(chunk.logits)
    await engine._held.settle(engine._sessions[session])
    return result


def tokens_of(engine: Engine, session: SessionId) -> list[int]:
    return list(engine.sessions[session].token_ids)


async def test_a_prompt_stays_what_it_was_when_its_session_is_cut(checkpoint: Path) -> None:
    """What a turn continued is told as long as somebody asks, also once its session goes on elsewhere or has nothing left."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K)) as engine:
        session, first, later = await engine.create_session(), ids(30, 1), ids(10, 2)
        one = engine.generate(first, greedy(4), session=session)
        assert await one.prompt() == tuple(first)
        said = await one.complete()
        two = engine.generate(later, greedy(4), session=session)
        await two.complete()
        whole = (*first, *said.token_ids, *later)
        await engine.truncate_session(session, 20)
        await turn(engine, session, ids(15, 3), 3)
        await engine.truncate_session(session, 0)
        assert await one.prompt() == tuple(first)
        assert await two.prompt() == whole
        assert two.progress.rows_total == len(whole)


@both
@pytest.mark.parametrize(
    ("kept", "cache"),
    [(1, "on"), (2, "off"), (63, "on"), (64, "on"), (65, "off"), (66, "on"), (128, "off"), (129, "on"), (150, "off"), (175, "on")],
)
async def test_cut_or_forked_anywhere_it_goes_on_as_a_fresh_one(checkpoint: Path, placement: str, cache: str, kept: int) -> None:
    """A cut session and a fork of it say what a fresh session says behind the same tokens, and leave the same bytes, MTP rows included."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, placement=placement, prefix_cache=cache)) as engine:
        session = await engine.create_session()
        await turn(engine, session, ids(160, 1), 16)
        held = tokens_of(engine, session)
        fork = await engine.fork_session(session, kept)
        await engine.truncate_session(session, kept)
        assert tokens_of(engine, session) == tokens_of(engine, fork) == held[:kept]
        assert engine.sessions[fork].rows >= kept - 3
        prompt = ids(20, 2)
        got = [await turn(engine, each, prompt, 10) for each in (session, fork)]
        left = [rows_of(engine, engine._sessions[each]) for each in (session, fork)]
    wanted, rows = await fresh(checkpoint, [*held[:kept], *prompt], 10, placement=placement)
    for run, blocks in zip(got, left, strict=True):
        alike(run, wanted)
        assert len(blocks) == len(rows)
        assert all((mine == theirs).all() for mine, theirs in zip(blocks, rows, strict=True))


async def test_going_on_from_token_ids_is_the_next_turn_of_a_session(checkpoint: Path) -> None:
    """A prompt behind another turn's token ids says what a session's next turn says, and finds that turn's rows."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, prefix_cache="on")) as engine:
        session = await engine.create_session()
        await turn(engine, session, ids(160, 1), 16)
        held = tokens_of(engine, session)
        wanted, got = await turn(engine, session, ids(20, 2), 10), Run()
        generation = engine.generate(ids(20, 2), greedy(10), after=held)
        async for chunk in generation:
            got.tokens.extend(chunk.token_ids)
            got.logits.extend(chunk.logits)
        assert await generation.prompt() == (*held, *ids(20, 2))
        assert chunk.usage.cached_tokens >= 128
        alike(got, wanted)
        for bad in ({"after": [-1]}, {"after": held, "session": session}):
            with pytest.raises(BadRequest):
                await engine.generate(ids(2, 1), greedy(1), **bad).prompt()


@both
async def test_a_broken_session_is_not_forked(checkpoint: Path, placement: str) -> None:
    """Whatever failed in a session, nobody begins with its rows afterwards; the refusal leaves nothing behind."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, placement=placement)) as engine:
        session = await engine.create_session()
        await turn(engine, session, ids(20, 1))
        memory = engine._sessions[session].memory
        assert memory is not None
        memory.operations.break_with(OSError("made up"))
        with pytest.raises(BadRequest, match="is broken"):
            await engine.fork_session(session, 10)
        assert list(engine.sessions) == [session]


@both
async def test_a_session_that_broke_is_gone_and_not_busy(checkpoint: Path, placement: str, tmp_path: Path) -> None:
    """Whatever is asked of it afterwards is refused for good: nobody is told to try again between its turns, and nothing is made."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, placement=placement)) as engine:
        session = await engine.create_session()
        await turn(engine, session, ids(20, 1))
        memory = engine._sessions[session].memory
        assert memory is not None
        memory.operations.break_with(OSError("made up"))
        engine.departures.archive_with(lambda name: engine.export_session(name, tmp_path / "a"), "")
        with pytest.raises(SessionBroken, match="made up"):
            await turn(engine, session, ids(5, 2))
        for asked in (
            lambda: engine.export_session(session, tmp_path / "a"),
            lambda: engine.departures.archive(session),
            lambda: engine.truncate_session(session, 3),
            lambda: engine.fork_session(session, 3),
            lambda: turn(engine, session, ids(5, 2)),
        ):
            with pytest.raises(BadRequest, match=f"^session {session} is closed; create another$") as refusal:
                await asked()
            assert not isinstance(refusal.value, SessionBusy)
        assert list(engine.sessions) == [session]
        assert os.listdir(tmp_path) == []
        await engine.close_session(session)


@both
async def test_a_prompt_on_rows_that_never_came_ends_with_its_session(checkpoint: Path, placement: str) -> None:
    """A prompt that begins with a session's rows waits for another to be read; their copy fails: no token is heard, others go on."""
    backend = VirtualBackend(SeededOrder(3, faults=(Fault("fork"),)))
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, placement=placement, prefix_cache="on"), backend=backend) as engine:
        session = await engine.create_session()
        await turn(engine, session, ids(100, 1))
        prompt = [*tokens_of(engine, session)[:90], *ids(20, 3)]
        first = asyncio.ensure_future(ask(engine, ids(150, 2), 3))
        await asyncio.sleep(0)  # so that the other one is asked first
        generation = engine.generate(prompt, greedy(3))
        with pytest.raises(SessionBroken, match="fork failed"):
            await anext(generation)
        assert len((await first)[0].tokens) == 3
        assert len((await turn(engine, session, ids(5, 4), 3)).tokens) == 3
    await backend.close()


@both
async def test_cuts_and_forks_one_after_another(checkpoint: Path, placement: str) -> None:
    """Cut, cut again, forked from the cut one before any turn, and forked from the fork: each goes on as a fresh one."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, placement=placement)) as engine:
        first = await engine.create_session()
        await turn(engine, first, ids(200, 1), 4)
        held = tokens_of(engine, first)
        await engine.truncate_session(first, 129)
        second = await engine.fork_session(first)
        third = await engine.fork_session(second, 128)
        await engine.truncate_session(first, 100)
        await engine.truncate_session(first, 99)
        fourth = await engine.fork_session(first, 99)
        lengths = {first: 99, second: 129, third: 128, fourth: 99}
        got = {each: await turn(engine, each, ids(5, 7), 8) for each in lengths}
    for each, length in lengths.items():
        alike(got[each], (await fresh(checkpoint, [*held[:length], *ids(5, 7)], 8, placement=placement))[0])


@pytest.mark.parametrize("placement", ["offload", pytest.param("resident", marks=pytest.mark.slow)])
async def test_a_fork_of_a_running_session(checkpoint: Path, placement: str) -> None:
    """Forked while it decodes and while it reads, a session loses nothing, and the forks go on as fresh ones."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, placement=placement)) as engine:
        session = await engine.create_session()
        running = engine.generate(ids(150, 1), greedy(80), session=session)
        said: list[int] = []
        forks: list[tuple[SessionId, list[int]]] = []
        async for chunk in running:
            said.extend(chunk.token_ids)
            if len(said) in (1, 30, 60):
                fork = await engine.fork_session(session, 150 + len(said) - 1)
                forks.append((fork, tokens_of(engine, fork)))
        assert all(held == [*ids(150, 1), *said][: len(held)] for _, held in forks)
        reading = engine.generate(ids(300, 2), greedy(2), session=session)
        whole = asyncio.ensure_future(reading.complete())
        while reading.progress.rows_done < 300:
            await engine.stage.streams.compute.idle()
            await asyncio.sleep(0)
        fork = await engine.fork_session(session, 280)
        forks.append((fork, tokens_of(engine, fork)))
        await whole
        got = [await turn(engine, fork, ids(7, 3)) for fork, _ in forks]
    assert said == (await fresh(checkpoint, ids(150, 1), 80, placement=placement))[0].tokens
    for run, (_, held) in zip(got, forks, strict=True):
        alike(run, (await fresh(checkpoint, [*held, *ids(7, 3)], 6, placement=placement))[0])


async def test_revisions(checkpoint: Path) -> None:
    """They move once a turn, once a turn that was left anywhere, once a cut, and not with a refusal or a cut of nothing."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K)) as engine:
        session = await engine.create_session()
        await turn(engine, session, ids(10, 1), revision=0)
        for wrong in (0, 2):
            with pytest.raises(StaleRevision, match="revision 1") as caught:
                await turn(engine, session, ids(3, 2), revision=wrong)
            assert caught.value.revision == 1
        await engine.truncate_session(session, 16, revision=1)
        assert engine.sessions[session].revision == 1
        await engine.truncate_session(session, 12, revision=1)
        assert engine.sessions[session].revision == 2
        with pytest.raises(BadRequest, match="0 to 12"):
            await engine.truncate_session(session, 13)
        with pytest.raises(BadRequest, match="0 to 12"):
            await engine.fork_session(session, -1)
        async with engine.generate(ids(400, 3), greedy(4), session=session, revision=2) as leaving:
            reading = asyncio.ensure_future(anext(leaving, None))
            while leaving.progress.rows_done < 76:
                await engine.stage.streams.compute.idle()
                await asyncio.sleep(0)
        reading.cancel()
        view = engine.sessions[session]
        assert view.revision == 3
        assert 76 <= len(view.token_ids) == view.rows < 412
        leaving = engine.generate(ids(3, 3), greedy(50), session=session, revision=3)
        async for _ in leaving:
            break
        with pytest.raises(StaleRevision, match="turn running"):
            await engine.generate(ids(3, 4), session=session, revision=3).prompt()
        with pytest.raises(StaleRevision):
            await engine.fork_session(session, revision=3)
        with pytest.raises(SessionBusy, match="between its turns"):
            await engine.truncate_session(session, 1)
        await leaving.aclose()
        assert engine.sessions[session].revision == 4
        with pytest.raises(UnknownSession):
            await engine.truncate_session(SessionId("nobody"), 1)


async def test_two_turns_of_one_revision(checkpoint: Path) -> None:
    """Of two turns that name the same revision at once, exactly one is taken."""
    async with Engine.open(checkpoint, small()) as engine:
        session = await engine.create_session()
        asked = [turn(engine, session, ids(5, seed), revision=0) for seed in range(2)]
        got = await asyncio.gather(*asked, return_exceptions=True)
        assert sorted(type(each).__name__ for each in got) == ["Run", "StaleRevision"]
        assert engine.sessions[session].revision == 1


async def test_what_has_no_rows_forks_too(checkpoint: Path) -> None:
    """Forks of an empty session, and of none of a session's tokens, are empty; cut to nothing, a session begins again."""
    async with Engine.open(checkpoint, small()) as engine:
        session = await engine.create_session()
        forks = [await engine.fork_session(session)]
        await turn(engine, session, ids(70, 1))
        forks.append(await engine.fork_session(session, 0))
        await engine.truncate_session(session, 0)
        got = [await turn(engine, each, ids(70, 2)) for each in (session, *forks)]
    wanted, _ = await fresh(checkpoint, ids(70, 2), 6)
    for each in got:
        alike(each, wanted)


async def test_a_fork_that_does_not_fit_is_refused_whole(checkpoint: Path) -> None:
    """Without memory for a fork nothing of it stays, and the source goes on; closed sessions make room for it."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K)) as engine:
        session = await engine.create_session()
        await turn(engine, session, ids(100, 1))
        pool = engine.stage.pool.statistics()
        engine.stage.pool._budget_bytes = pool.allocated_bytes + pool.reserved_bytes
        with pytest.raises(NotAdmitted, match="does not fit now"):
            await engine.fork_session(session)
        assert len(engine.sessions) == 1
        engine.stage.pool._budget_bytes = None
        await engine.fork_session(session)
        await turn(engine, session, ids(3, 2))


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["offload", "resident"])
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 12))])
async def test_any_interleaving_of_shared_histories(checkpoint: Path, placement: str, seed: int) -> None:
    """Stateless prompts that begin alike, aborts, forks and cuts under a drawn order of completions: each answer is a fresh run's."""
    await interleaved(checkpoint, placement, seed)


@pytest.mark.parametrize("placement", ["offload", pytest.param("resident", marks=pytest.mark.slow)])
async def test_one_interleaving_of_shared_histories(checkpoint: Path, placement: str) -> None:
    """As above, with one order."""
    await interleaved(checkpoint, placement, 100)


async def interleaved(checkpoint: Path, placement: str, seed: int) -> None:
    draw = random.Random(seed)
    base = ids(200, 1)
    backend = VirtualBackend(seed)
    answers: list[tuple[list[int], Run]] = []

    async def ask(engine: Engine, prompt: list[int]) -> None:
        got, leaves = Run(), draw.random() < 0.25
        async with engine.generate(prompt, greedy(12)) as generation:
            async for chunk in generation:
                got.tokens.extend(chunk.token_ids)
                got.logits.extend(chunk.logits)
                if leaves and len(got.tokens) == 5:
                    break
        answers.append((prompt, got))

    async def explicit(engine: Engine) -> None:
        session = await engine.create_session()
        for _ in range(2):
            await turn(engine, session, ids(draw.randrange(1, 90), draw.randrange(4)), 5)
            kept = draw.randrange(1, len(tokens_of(engine, session)) + 1)
            fork = await engine.fork_session(session, kept)
            await engine.truncate_session(session, kept)
            for each in (session, fork):
                held, prompt = tokens_of(engine, each), ids(3, draw.randrange(4))
                answers.append(([*held, *prompt], await turn(engine, each, prompt, 12)))

    async with Engine.open(checkpoint, small(hot_rows=TOP_K, placement=placement, prefix_cache="on"), backend=backend) as engine:
        with sealed():
            async with asyncio.TaskGroup() as group:
                for _ in range(7):
                    kept = draw.choice([0, 3, 64, 65, 128, 190, 200])
                    prompt = [*base[:kept], *ids(draw.randrange(1, 80), draw.randrange(3))]
                    group.create_task(ask(engine, prompt))
                group.create_task(explicit(engine))
            await ask(engine, [*base, *ids(9, 9)])
        assert engine.statistics().stored > 0
        stage = engine.stage
    await backend.close()
    assert stage.ledger.total("device").allocated_bytes == 0
    for prompt, got in answers:
        wanted, _ = await fresh(checkpoint, prompt, 12, placement=placement)
        assert got.tokens == wanted.tokens[: len(got.tokens)]


@both
@pytest.mark.parametrize("kept", [40, 100])
async def test_a_session_at_rest_takes_a_shorter_turn(checkpoint: Path, placement: str, kept: int) -> None:
    """A session that gave up its hot caches, is cut, and then needs no more room than it had, says what a fresh one says."""
    config = small(hot_rows=TOP_K, placement=placement)
    async with Engine.open(checkpoint, config) as engine:
        session = await engine.create_session()
        await turn(engine, session, ids(150, 1), 8)
        memory = engine._sessions[session].memory
        assert memory is not None
        assert engine.stage.placement.rest(memory) or placement == "resident"
        held = tokens_of(engine, session)[:kept]
        await engine.truncate_session(session, kept)
        got = await turn(engine, session, ids(5, 2), 6)
    wanted, _ = await fresh(checkpoint, [*held, *ids(5, 2)], 6, placement=placement)
    assert got.tokens == wanted.tokens


@pytest.mark.parametrize("started", [1, 3])
async def test_closing_a_session_with_a_turn_behind_the_running_one(checkpoint: Path, started: int) -> None:
    """A session closed while one turn runs and two wait: all of them end, the engine goes on, and nothing stays held."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K)) as engine:
        before = engine.statistics().host_bytes
        session = await engine.create_session()
        running = engine.generate(ids(40, 1), greedy(200), session=session)
        for _ in range(started):
            await anext(running)
        waiting = [asyncio.create_task(turn(engine, session, ids(3, number), 3)) for number in range(2)]
        await asyncio.sleep(0)
        await engine.close_session(session)
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(each, Run | Exception) for each in ended)
        assert [chunk async for chunk in running][-1].finish_reason == "abort"
        other = await engine.create_session()
        assert len((await turn(engine, other, ids(9, 4), 5)).tokens) == 5
        await engine.close_session(other)
        assert engine.statistics().host_bytes == before
