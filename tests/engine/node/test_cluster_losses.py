"""Who waits while a node is away, and a way that is cut between two nodes alone."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from engine.engine import Engine
from engine.errors import NodeLost
from streams import TcpChannel
from tests.engine.model.parity import make_checkpoint
from tests.engine.node.cluster_world import LIMITS, Cluster, LocalNode, cluster_of
from tests.engine.node.process_world import Strike, until
from tests.engine.node.test_cluster import NAME, TOP_K, found, ids, left_of, read, tokens, until_ready
from tests.engine.runs import greedy, run, small


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


async def until_waiting(engine: Engine, count: int) -> None:
    for _ in range(2000):
        if engine.statistics().waiting == count:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{engine.statistics().waiting} are waiting, not {count}")


async def test_requests_in_line_go_on_waiting_through_a_loss(checkpoint: Path) -> None:
    """While one request has all the memory of a node, two wait. The node goes, and the first with it; the two stay in line until it is
    back, and then give the tokens of a run in which nothing happened, in their order. One that gives up meanwhile leaves the line."""
    roomy = small(hot_rows=TOP_K, context_max=4096)
    wanted = [(await run(checkpoint, roomy, [(ids(60 + number, number), 8)])).tokens for number in range(2)]
    async with cluster_of(checkpoint, roomy, "2", node_config=replace(roomy, host_memory_bytes=1 << 18)) as (engine, cluster):
        stage = cluster.nodes[0].stage
        assert stage is not None
        first = engine.generate(ids(100, 9), greedy(64 * stage.arena.statistics().blocks - 64 - 100))
        await anext(first)
        told: list[list[int]] = [[], [], []]
        order: list[int] = []
        generations = [engine.generate(ids(60 + number, number), greedy(8)) for number in range(3)]
        waiting = [asyncio.ensure_future(read(generation, told[number])) for number, generation in enumerate(generations)]
        for number, task in enumerate(waiting):
            task.add_done_callback(lambda _, number=number: order.append(number))  # type: ignore[misc]
        await until_waiting(engine, 3)
        await cluster.nodes[0].stop()
        with pytest.raises(NodeLost):
            await read(first, [])
        assert not engine.ready
        await generations[2].aclose()
        await until_waiting(engine, 2)
        assert not any(task.done() for task in waiting[:2])
        await cluster.nodes[0].start()
        await until_ready(engine)
        await asyncio.wait_for(asyncio.gather(*waiting), 60)
        assert told[:2] == wanted
        assert not told[2]
        assert order[-2:] == [0, 1]
        await engine.stage.idle()
        assert await left_of(engine, cluster) == (0, 0)


def way_of(cluster: Cluster) -> TcpChannel:
    """The channel from the first node to the second."""
    node = cluster.nodes[0].node
    assert node is not None
    assert node._behind is not None
    return node._behind


async def test_a_way_cut_between_two_nodes_costs_what_ran_and_nothing_else(checkpoint: Path) -> None:
    """Both nodes live and reach the head, one another they do not: what runs ends, the stages are joined anew, and a session with
    nothing in flight has its rows as they were, on every stage; the cut-off one is read again. No node was let go of, nothing is left."""
    config = small(hot_rows=TOP_K)
    whole = await run(checkpoint, config, [(ids(150, 1), 12), (ids(3, 2), 12)])
    async with cluster_of(checkpoint, config, "1,1,2") as (engine, cluster):
        idle, cut = await engine.create_session(), await engine.create_session()
        assert await tokens(engine, idle, ids(150, 1), 12) == whole.tokens[:12]
        stages, heads, way = (
            [node.stage for node in cluster.nodes],
            [node.node._head for node in cluster.nodes if node.node],
            way_of(cluster),
        )
        generation, seen = engine.generate(ids(150, 1), greedy(64), session=cut), list[int]()
        with capture_logs() as logs:
            seen += (await anext(generation)).token_ids
            way.connection.abort()
            with pytest.raises(NodeLost):
                await read(generation, seen)
            assert not engine.ready
            await until_ready(engine)
        assert [log["session_id"] for log in logs if log["event"] == "session.recovered"] == [cut]
        assert [node.stage for node in cluster.nodes] == stages
        assert [node.node._head for node in cluster.nodes if node.node] == heads, "a head was met anew"
        assert way_of(cluster) is not way
        assert engine.sessions[idle].rows == 161, "rows must be made again"
        assert engine.sessions[cut].rows == 0
        assert await tokens(engine, idle, ids(3, 2), 12) == whole.tokens[12:]
        assert seen[:12] == whole.tokens[: min(12, len(seen))]
        again = await tokens(engine, cut, ids(3, 2), 6)
        await engine.close_session(idle)
        await engine.close_session(cut)
        fresh = await engine.create_session()
        assert again == await tokens(engine, fresh, [*ids(150, 1), *seen, *ids(3, 2)], 6)
        await engine.close_session(fresh)
        await engine.stage.idle()
        assert await left_of(engine, cluster) == (0, 0, 0)


async def test_a_loss_while_rows_come_back_costs_no_archive(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of the second session is cut off, and while the first one gets its rows again the node is lost once more: in the end both have
    the rows of their archives, and neither was said to be back before."""
    config, strike = small(hot_rows=TOP_K), Strike(monkeypatch)
    whole = await run(checkpoint, config, [(ids(150, 1), 12), (ids(3, 2), 12)])
    async with cluster_of(checkpoint, config, "2") as (engine, cluster):
        engine.departures.archive_with(lambda name: engine.export_session(name, tmp_path / name), "", lambda name: found(tmp_path / name))
        idle, broken = await engine.create_session(), await engine.create_session()
        for session in (idle, broken):
            assert await tokens(engine, session, ids(150, 1), 12) == whole.tokens[:12]
            await engine.export_session(session, tmp_path / session)
        with capture_logs() as logs:
            generation = engine.generate(ids(3, 4), greedy(64), session=broken)
            await anext(generation)
            strike.at("step", 0, strike.cut)
            with pytest.raises(NodeLost):
                await read(generation, [])
            strike.at("image.take", 0, strike.cut, nth=2)
            await until(lambda: len(strike.struck) == 2, "no rows came back")
            await until_ready(engine)
        assert [(log["session_id"], log["rows"]) for log in logs if log["event"] == "session.recovered"] == [(broken, 161), (idle, 161)]
        assert await tokens(engine, idle, ids(3, 2), 12) == whole.tokens[12:]
        for session in (idle, broken):
            await engine.close_session(session)
        await engine.stage.idle()
        assert await left_of(engine, cluster) == (0, 0)


@pytest.mark.parametrize("tokens_before", [0, 12])
async def test_a_turn_behind_one_that_is_cut_off_is_told_that_its_session_goes_on(checkpoint: Path, tokens_before: int) -> None:
    """Nobody is told to make another session: not who waits in line behind a turn that ends with a node, nor who asks about a session whose
    first prompt was cut off, so that it has no tokens. It goes on once the node is back."""
    config = small(hot_rows=TOP_K)
    whole = await run(checkpoint, config, [(ids(150, 1), 12), (ids(3, 2), 12)])
    async with cluster_of(checkpoint, config, "2") as (engine, cluster):
        session = await engine.create_session()
        if tokens_before:
            assert await tokens(engine, session, ids(150, 1), tokens_before) == whole.tokens[:12]
        cut_off = engine.generate(ids(2000, 3), greedy(8), session=session)
        await cut_off.prompt()
        if tokens_before:  # else it begins while the node goes, and nothing else wakes the loop before the node is back
            await until(lambda: engine.statistics().running == 1, "no prompt is read")
        behind = asyncio.ensure_future(tokens(engine, session, ids(3, 2), 4))
        await until_waiting(engine, 1)
        await cluster.nodes[0].stop()
        with pytest.raises(NodeLost):
            await read(cut_off, [])
        with pytest.raises(NodeLost, match="its session goes on"):
            await asyncio.wait_for(behind, 20)
        with pytest.raises(NodeLost, match=f"session {session} goes on, try again when it is back"):
            await engine.fork_session(session, 0)
        await cluster.nodes[0].start()
        await until_ready(engine)
        if not tokens_before:
            assert await tokens(engine, session, ids(150, 1), 12) == whole.tokens[:12]
        assert await tokens(engine, session, ids(3, 2), 12) == whole.tokens[12:]
        await engine.close_session(session)
        await engine.stage.idle()
        assert await left_of(engine, cluster) == (0, 0)


@pytest.mark.parametrize("changes", [{"row_format": "bf16"}, {"load_format": "random"}, None], ids=["format", "weights", "stage"])
async def test_a_stranger_in_the_place_of_a_lost_node_costs_no_session(checkpoint: Path, changes: dict[str, str] | None) -> None:
    """A head with sessions does not end for a node that was started wrongly: it says what differs, and goes on with one that belongs."""
    config = small(hot_rows=TOP_K)
    whole = await run(checkpoint, config, [(ids(150, 1), 12), (ids(3, 2), 12)])
    async with cluster_of(checkpoint, config, "1,1,2") as (engine, cluster):
        session = await engine.create_session()
        assert await tokens(engine, session, ids(150, 1), 12) == whole.tokens[:12]
        node = cluster.nodes[0]
        with capture_logs() as logs:
            await node.stop()
            stage = 1 if changes is None else 0
            wrong = LocalNode(checkpoint, replace(config, **(changes or {})), cluster.stages, stage, LIMITS)  # type: ignore[arg-type]
            await wrong.start()
            node.address = wrong.address
            await until(lambda: any(log["event"] == "node.foreign" for log in logs), "nobody said that it does not belong")
            assert not engine.ready
            await wrong.stop()
            await node.start()
            await until_ready(engine)
        assert [log["stage"] for log in logs if log["event"] == "node.foreign"] == [0]
        assert await tokens(engine, session, ids(3, 2), 12) == whole.tokens[12:]
        await engine.close_session(session)
        await engine.stage.idle()
        assert await left_of(engine, cluster) == (0, 0, 0)


@pytest.mark.parametrize("call", ["begin", "part"])
async def test_a_node_that_is_lost_while_the_head_opens_is_found(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Before it said what it has, or behind that: the head opens with it all the same, and takes requests."""
    strike = Strike(monkeypatch)
    strike.at(call, 0, strike.cut)
    async with cluster_of(checkpoint, small(hot_rows=TOP_K), "2") as (engine, _):
        assert strike.struck == [call]
        assert engine.ready
        assert len(await tokens(engine, await engine.create_session(), ids(70, 1), 3)) == 3
