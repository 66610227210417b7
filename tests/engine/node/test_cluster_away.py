"""What callers ask of a session while a node is away and while its rows come back: refused for now, and nothing of it is lost or left."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine.archive import transfers
from engine.engine import Engine
from engine.errors import NodeLost
from engine.protocol import SessionId
from tests.engine.model.parity import make_checkpoint
from tests.engine.node.cluster_world import Cluster, cluster_of
from tests.engine.node.process_world import Strike, until
from tests.engine.node.test_cluster import NAME, TOP_K, found, ids, left_of, read, tokens, until_ready
from tests.engine.runs import greedy, run, small

FIRST, SECOND = (ids(150, 1), 12), (ids(3, 2), 12)
CONFIG = small(hot_rows=TOP_K)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> list[int]:
    """What both turns say where nothing happens."""
    return asyncio.run(run(checkpoint, CONFIG, [FIRST, SECOND])).tokens


@asynccontextmanager
async def archived(checkpoint: Path, whole: list[int], directory: Path) -> AsyncIterator[tuple[Engine, Cluster, SessionId]]:
    """An engine over a node, with a session that has had its first turn and was exported behind it; in the end nothing is left anywhere."""
    async with cluster_of(checkpoint, CONFIG, "2") as (engine, cluster):
        engine.departures.archive_with(
            lambda name: engine.export_session(name, directory / name), "", lambda name: found(directory / name)
        )  # fmt: skip
        session = await engine.create_session()
        assert await tokens(engine, session, *FIRST) == whole[:12]
        await engine.export_session(session, directory / session)
        yield engine, cluster, session
        for each in list(engine.sessions):
            await engine.close_session(each)
        await engine.stage.idle()
        assert await left_of(engine, cluster) == (0, 0)


async def all_refused(engine: Engine, session: SessionId, directory: Path) -> None:
    """Whatever needs all of the session's rows is refused until the node is back."""
    for asked in (
        engine.export_session(session, directory), engine.departures.archive(session), engine.fork_session(session),
        engine.truncate_session(session, 100),
    ):  # fmt: skip
        with pytest.raises(NodeLost, match="try again when it is back"):
            await asked


async def test_a_session_is_left_alone_while_a_node_is_away(checkpoint: Path, whole: list[int], tmp_path: Path) -> None:
    """Exports, forks and cuts are refused with NodeLost, of an idle session and of one whose turn was cut off; only a turn that was cut off
    moves a revision, and the idle one goes on from its archive."""
    async with archived(checkpoint, whole, tmp_path) as (engine, cluster, session):
        cut = await engine.create_session()
        generation = engine.generate(ids(70, 3), greedy(64), session=cut)
        await anext(generation)
        await cluster.nodes[0].stop()
        with pytest.raises(NodeLost):
            await read(generation, [])
        await all_refused(engine, session, tmp_path / session)
        with pytest.raises(NodeLost, match="try again when it is back"):
            await engine.fork_session(cut)
        await cluster.nodes[0].start()
        await until_ready(engine)
        assert (engine.sessions[session].revision, engine.sessions[session].rows) == (1, 161)
        assert await tokens(engine, session, *SECOND) == whole[12:]


async def test_a_node_that_is_lost_before_the_barrier_of_an_export(
    checkpoint: Path, whole: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export has its directory and not the rows yet: it fails with NodeLost, and the session is not broken for it."""
    strike, real = Strike(monkeypatch), transfers.Places.read_out

    async with archived(checkpoint, whole, tmp_path) as (engine, _, session):

        async def read_out(places: transfers.Places, rows_max: int) -> object:
            strike.far = engine.stage.before[0].far  # type: ignore[attr-defined]  # a node's
            strike.cut()
            await until(lambda: not engine.ready, "nobody noticed")
            return await real(places, rows_max)

        with monkeypatch.context() as patch:
            patch.setattr(transfers.Places, "read_out", read_out)
            with pytest.raises(NodeLost, match="could not be archived"):
                await engine.export_session(session, tmp_path / session)
        await until_ready(engine)
        assert (engine.sessions[session].revision, engine.sessions[session].rows) == (1, 161)
        assert await tokens(engine, session, *SECOND) == whole[12:]


async def test_a_session_is_left_alone_while_its_rows_come_back(
    checkpoint: Path, whole: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no rows then: an export would replace the archive that they come from, a cut would leave more rows than tokens."""
    strike, asked = Strike(monkeypatch), list[asyncio.Task[None]]()
    async with archived(checkpoint, whole, tmp_path) as (engine, cluster, session):
        await cluster.nodes[0].stop()
        other = tmp_path / "other"
        strike.at("image.take", 0, lambda: asked.append(asyncio.ensure_future(all_refused(engine, session, other))))
        await cluster.nodes[0].start()
        await until_ready(engine)
        await asked[0]
        assert not other.exists()
        assert engine.sessions[session].rows == 161
        assert await tokens(engine, session, *SECOND) == whole[12:]


async def test_a_session_that_is_closed_while_its_rows_come_back_leaves_nothing(
    checkpoint: Path, whole: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On no stage: what was being filled is let go of."""
    strike, closing = Strike(monkeypatch), list[asyncio.Task[None]]()
    async with archived(checkpoint, whole, tmp_path) as (engine, cluster, session):
        await cluster.nodes[0].stop()
        strike.at("image.take", 0, lambda: closing.append(asyncio.ensure_future(engine.close_session(session))))
        await cluster.nodes[0].start()
        await until_ready(engine)
        await closing[0]
        assert not engine.sessions
        await engine.stage.idle()
        assert await left_of(engine, cluster) == (0, 0)
