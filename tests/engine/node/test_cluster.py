"""Stages on nodes: the same tokens and logits to the bit as in one process."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from engine.engine import Engine
from engine.errors import BadSetting, NeverFits, NodeLost, NotAdmitted
from engine.generation import Generation
from engine.node.agreement import fingerprint_of, stage_terms
from engine.node.caller import Caller
from engine.node.calls import Facts
from engine.node.visit import Effort, visit
from engine.protocol import SessionId
from streams import PeerLost, Reason, connect
from tests.engine.model.parity import make_checkpoint
from tests.engine.node.cluster_world import LIMITS, Cluster, LocalNode, cluster_of
from tests.engine.runs import collect, greedy, run, small
from tests.engine.test_engine_exactness import NAME, TOP_K, ids
from tests.streams.channel_world import KEY


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


async def tokens(engine: Engine, session: SessionId, prompt: list[int], count: int) -> list[int]:
    return [token async for chunk in engine.generate(prompt, greedy(count), session=session) for token in chunk.token_ids]


async def read(generation: Generation, into: list[int]) -> None:
    async for chunk in generation:
        into += chunk.token_ids


async def until_ready(engine: Engine) -> None:
    for _ in range(2000):
        if engine.ready:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the cluster is not whole again")


def found(path: Path) -> Path | None:
    return path if path.exists() else None


@pytest.mark.slow
async def test_sessions_that_decode_together_keep_every_node_busy(checkpoint: Path) -> None:
    """Five sessions are spread over a lane a device, with drafts, and give what they give in one stage."""
    turns = [[(ids(20 + 9 * number, number), 12)] for number in range(5)]
    config = small(hot_rows=TOP_K, draft_depth=1, append_gap=1000.0)
    async with Engine.open(checkpoint, config) as engine:
        wanted = [await collect(engine, each) for each in turns]
    async with cluster_of(checkpoint, config, "1,1,2") as (engine, _):
        got = await asyncio.gather(*(collect(engine, each) for each in turns))
        assert {shape.lane for shape in engine._loop._batches._buckets} == {0, 1, 2}
    assert all(one.same_bits(other) for one, other in zip(got, wanted, strict=True))


@pytest.mark.parametrize("cut", [pytest.param("2", marks=pytest.mark.slow), "1,1,2"])
async def test_stages_on_nodes_give_the_bits_of_one_stage(checkpoint: Path, cut: str) -> None:
    """Two turns of one session, prompts of several chunks."""
    turns = [(ids(150, 1), 3), (ids(3, 2), 8)]
    config = small(hot_rows=TOP_K)
    whole = await run(checkpoint, config, turns)
    async with cluster_of(checkpoint, config, cut) as (engine, _):
        assert (await collect(engine, turns)).same_bits(whole)


async def left_of(engine: Engine, cluster: Cluster) -> tuple[int, ...]:
    """Blocks that are taken on the head and on every node that lives."""
    stages = [engine.stage, *(node.stage for node in cluster.nodes if node.stage is not None)]
    return tuple(stage.arena.statistics().references for stage in stages)


async def test_a_node_that_is_lost_ends_what_runs_and_its_sessions_go_on(checkpoint: Path, tmp_path: Path) -> None:
    """A node goes in the middle of a generation: that ends with NodeLost, new ones are refused, the other node keeps its stage; when the
    node is back an idle session has its rows from its archive and a cut-off one is read again, and both go on with the tokens of a run
    in which nothing happened. Nothing is left on any node when they are closed."""
    config = small(hot_rows=TOP_K)
    whole = await run(checkpoint, config, [(ids(150, 1), 12), (ids(3, 2), 12)])
    async with cluster_of(checkpoint, config, "3") as (engine, cluster):
        engine.departures.archive_with(lambda name: engine.export_session(name, tmp_path / name), "", lambda name: found(tmp_path / name))
        kept = cluster.nodes[1].stage
        idle, cut = await engine.create_session(), await engine.create_session()
        assert await tokens(engine, idle, ids(150, 1), 12) == whole.tokens[:12]
        await engine.export_session(idle, tmp_path / idle)
        with capture_logs() as logs:
            generation = engine.generate(ids(150, 1), greedy(64), session=cut)
            seen = [token for chunk in [await anext(generation), await anext(generation)] for token in chunk.token_ids]
            await cluster.nodes[0].stop()
            with pytest.raises(NodeLost, match="a node is away"):
                await read(generation, seen)
            assert not engine.ready
            with pytest.raises(NodeLost):
                await anext(engine.generate([1, 2], greedy(1)))
            await cluster.nodes[0].start()
            await until_ready(engine)
        recovered = {log["session_id"]: (log["tokens"], log["rows"]) for log in logs if log["event"] == "session.recovered"}
        assert recovered == {idle: (162, 161), cut: (150 + len(seen), 0)}
        assert cluster.nodes[1].stage is kept
        assert seen[:12] == whole.tokens[: min(12, len(seen))]
        assert await tokens(engine, idle, ids(3, 2), 12) == whole.tokens[12:]
        again = await tokens(engine, cut, ids(3, 2), 6)
        await engine.close_session(idle)
        await engine.close_session(cut)
        fresh = await engine.create_session()
        assert again == await tokens(engine, fresh, [*ids(150, 1), *seen, *ids(3, 2)], 6)
        await engine.close_session(fresh)
        await engine.stage.idle()
        assert await left_of(engine, cluster) == (0, 0, 0)


async def test_who_finds_no_room_on_a_node_waits_for_what_it_frees(checkpoint: Path) -> None:
    """A node with room for one session at a time: turns of sessions that are closed at once follow one another, and none is refused, though
    what a close frees is not known before the node has said so; what can never fit is refused with the node's numbers."""
    roomy = small(hot_rows=TOP_K, context_max=4096)
    async with cluster_of(checkpoint, roomy, "2", node_config=replace(roomy, host_memory_bytes=1 << 18)) as (engine, cluster):
        stage = cluster.nodes[0].stage
        assert stage is not None
        blocks = stage.arena.statistics().blocks
        fits = 64 * blocks - 64
        for turn in range(2):
            session = await engine.create_session()
            assert len(await tokens(engine, session, ids(fits - 40, turn), 4)) == 4
            await engine.close_session(session)
        with pytest.raises(NeverFits, match="bytes of host memory missing"):
            await anext(engine.generate(ids(10, 1), greedy(64 * blocks + 1)))


async def test_a_node_that_does_not_belong_ends_the_head_with_both_sides_words(checkpoint: Path) -> None:
    """Rows in another format: no time makes it right, so the head says what differs instead of waiting."""
    ours = small(hot_rows=TOP_K)
    with pytest.raises(BadSetting, match=r"rows=q8g64.*rows=f32"):
        async with cluster_of(checkpoint, ours, "2", node_config=replace(ours, row_format="q8g64")):
            pass


async def test_a_head_that_is_refused_leaves_the_nodes_that_it_met(checkpoint: Path) -> None:
    """The first node belongs, the second does not: another head finds the first one free."""
    config = small(hot_rows=TOP_K)
    cluster = Cluster(checkpoint, config, "1,1,2", LIMITS, config)
    first, second = cluster.nodes
    again = LocalNode(checkpoint, config, cluster.stages, 0, LIMITS)
    async with AsyncExitStack() as nodes:
        for node in (first, second, again):
            nodes.push_async_callback(node.stop)
            await node.start()
        wrong = replace(cluster.setup, locate=[first.locate, again.locate])
        async with asyncio.timeout(20):
            with pytest.raises(BadSetting, match="is that of stage 0, and stage 1 was expected"):
                async with Engine.open(checkpoint, config, cluster=wrong):
                    pass
            async with Engine.open(checkpoint, config, cluster=cluster.setup) as engine:
                assert engine.ready


async def test_a_node_answers_the_doctor_before_and_while_a_head_drives_it(checkpoint: Path) -> None:
    """Nodes without weights yet answer too; under a head they say which model they run, and one head alone drives them."""
    config = small(hot_rows=TOP_K)
    async with cluster_of(checkpoint, config, "1,1,2") as (engine, cluster):
        addresses = [node.address for node in cluster.nodes if node.address is not None]
        found = await visit(addresses, KEY, Effort(LIMITS, frames=4, turns=3), lambda done, total: None)
        assert not found.lost
        fingerprint = fingerprint_of(cluster.setup.model, config, LIMITS)
        assert {report.model for report in found.reports.values()} == {fingerprint}
        assert all(not pair.failure for pair in found.pairs.values())
        rival = await connect(*addresses[0], key=KEY, terms=stage_terms(fingerprint, cluster.stages, 2))
        try:
            with pytest.raises(NotAdmitted, match="is driven by the head at"):
                await Caller(rival, lambda _: None).call("begin", None, Facts)
        finally:
            await rival.close()
        assert len(await tokens(engine, await engine.create_session(), ids(70, 1), 3)) == 3


async def test_a_loss_while_sessions_get_their_rows_begins_nothing(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that go again before every session was seen to: the engine stays closed until all of them are there and all sessions were."""
    async with cluster_of(checkpoint, small(hot_rows=TOP_K), "2") as (engine, cluster):
        session = await engine.create_session()
        expected = await tokens(engine, session, ids(70, 1), 4)
        recovery, error = engine.recovery, PeerLost(Reason.LOST, "made up")
        reached, gate = asyncio.Event(), asyncio.Event()

        async def held_up(_: object) -> None:
            reached.set()
            await gate.wait()

        monkeypatch.setattr(recovery._archives, "left", held_up)
        recovery.lost(error)
        finding = asyncio.ensure_future(recovery.found())
        await reached.wait()
        recovery.lost(error)
        gate.set()
        await finding
        assert not engine.ready
        await recovery.found()
        assert engine.ready
        again = await engine.create_session()
        assert await tokens(engine, again, ids(70, 1), 4) == expected
        assert cluster.nodes[0].stage is not None
