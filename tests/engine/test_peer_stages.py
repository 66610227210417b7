"""Several stages, each on two devices: the bits of one stage on two devices, and the same bytes on both devices of every stage."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import NodeLost, SessionBroken
from engine.follower import LocalMemory
from engine.joint import JointMemory
from engine.node.remote_memory import RemoteMemory
from engine.protocol import SyntheticHistory
from engine.stage_calls import FollowerMemory
from kernels.layout import BlockLayout
from memory.barrier import verify_mirror
from memory.offload import OffloadSession
from memory.replica import PairSession, verify_replica
from memory.session import SessionMemory
from streams import Backend, Fault, SeededOrder, VirtualBackend
from tests.engine.model.parity import make_checkpoint
from tests.engine.node.cluster_world import LocalNode, cluster_of
from tests.engine.node.process_world import Strike
from tests.engine.node.test_cluster import found, read, until_ready
from tests.engine.runs import Run, collect, greedy, run
from tests.engine.test_engine_exactness import NAME, ids
from tests.engine.test_peer import peered
from tests.engine.test_peer import spoken as spoken_by_pair

slow, long = pytest.mark.slow, pytest.mark.long
TURNS = [(ids(70, 1), 6), (ids(3, 2), 5)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


def pairs_of(memory: SessionMemory, engine: Engine, nodes: Sequence[LocalNode]) -> list[tuple[SessionMemory, BlockLayout]]:
    """A session's memory on every stage, with the layout there. Args: nodes: that have the stages before, where nodes have them."""
    assert isinstance(memory, JointMemory)
    held = [(memory.own, engine.stage.layout)]
    for place, (part, stage) in enumerate(zip(memory.parts, engine.stage.before, strict=True)):
        there: FollowerMemory = part
        if isinstance(part, RemoteMemory):
            node = nodes[place].node
            assert node is not None
            assert node._head is not None
            assert node._head.hosting is not None
            there = node._head.hosting._session(part.session.number).memory
        assert isinstance(there, LocalMemory)
        held.append((there.memory, stage.layout))
    return held


async def check_pairs(engine: Engine, nodes: Sequence[LocalNode] = ()) -> int:
    """Compare owner's and peer's bytes of every session on every stage, with nothing in flight. Returns how many pairs there were."""
    checked = 0
    for memory in engine.memories.values():
        await memory.operations.settle()
        for each, layout in pairs_of(memory, engine, nodes):
            await each.operations.settle()
            assert isinstance(each, PairSession)
            each.check_integrity()
            verify_replica(each, layout)
            verify_mirror(each.owner, layout)
            checked += 1
    return checked


def check_hot_caches(engine: Engine, nodes: Sequence[LocalNode]) -> int:
    """Compare the rows that lie in the hot caches of an owner and of its peer, right behind `check_pairs`. Returns how many there were."""
    rows = 0
    for memory in engine.memories.values():
        for each, _ in pairs_of(memory, engine, nodes):
            assert isinstance(each, PairSession)
            assert isinstance(each.owner, OffloadSession)
            assert isinstance(each.peer, OffloadSession)
            for mine, its in zip(each.owner.hot, each.peer.hot, strict=True):
                both = ((mine.slot_of >= 0) & (its.slot_of >= 0)).nonzero().flatten()
                here, there = mine.slots[:, mine.slot_of[both].long()], its.slots[:, its.slot_of[both].long()]
                assert torch.equal(here, there), "owner and peer have other bytes of a row in a hot slot"
                rows += both.numel()
    return rows


async def spoken(model: Path, config: EngineConfig, turns: Sequence[tuple[Sequence[int], int]], backend: Backend | None = None) -> Run:
    """Turns in one session, bytes compared on every stage behind every one."""
    return await spoken_by_pair(model, config, turns, backend, check_pairs)


@pytest.mark.parametrize(
    ("stages", "settings"),
    [
        ("2", {"draft_depth": 1}),  # cut inside a group
        pytest.param("1,3", {"placement": "resident", "append_chunk_rows": 17}, marks=slow),
        pytest.param("4", {"mirror_replicas": 2, "draft_depth": 3, "graphs": "on", "row_format": "q8g64"}, marks=slow),
        pytest.param("2", {"graphs": "on", "mirror_replicas": 2}, marks=slow),
        pytest.param("3,1", {"draft_depth": 3, "append_chunk_rows": 17}, marks=long),
        pytest.param("4", {"append_chunk_rows": 16, "placement": "resident", "graphs": "on"}, marks=long),
    ],
)
async def test_any_cut_gives_the_bits_of_one_pair(checkpoint: Path, stages: str, settings: dict[str, object]) -> None:
    """Even and uneven cuts, inside a group too: tokens and logits of one stage with a peer, to the bit."""
    one = await run(checkpoint, peered(**settings), TURNS)
    assert one.statistics is not None
    assert one.statistics.misses > 0 or settings.get("placement") == "resident", "nothing was read from RAM"
    assert (await spoken(checkpoint, peered(stages=stages, **settings), TURNS)).same_bits(one)


@pytest.mark.parametrize("seed", [pytest.param(1, marks=slow), *(pytest.param(seed, marks=long) for seed in range(2, 8))])
async def test_interleavings_of_four_devices(checkpoint: Path, seed: int) -> None:
    """Under each seed the same: nothing of one device or stage is read before another has written it."""
    config = peered(stages="2", draft_depth=seed % 4, mirror_replicas=1 + seed % 2)
    one = await run(checkpoint, peered(draft_depth=seed % 4), TURNS)
    backend = VirtualBackend(seed)
    found = await spoken(checkpoint, config, TURNS, backend)
    await backend.close()
    assert found.same_bits(one)


@pytest.mark.parametrize("label", [pytest.param("group.0.replica", marks=slow), *(pytest.param(each, marks=long) for each in (
    "layer.0.peer.attend", "append.0.replica", "append.1.peer.forward", "peer.table.rewrite"))])  # fmt: skip
async def test_a_failed_operation_breaks_its_session_only(checkpoint: Path, label: str) -> None:
    """Of any stage's peer: the request ends with SessionBroken, another says its usual tokens on equal bytes, nothing is left in flight."""
    usual = await spoken(checkpoint, peered(stages="2"), [(ids(70, 3), 3)])
    backend = VirtualBackend(SeededOrder(1, faults=(Fault(label, nth=1),)))
    async with Engine.open(checkpoint, peered(stages="2", prefix_cache="off"), backend=backend) as engine:
        broken = 0
        for _ in range(2):
            try:
                await collect(engine, [(ids(80, 1), 8)])
            except SessionBroken:
                broken += 1
        assert broken == 1, f"{label} failed {broken} times"
        session = await engine.create_session()
        said = [token async for chunk in engine.generate(ids(70, 3), greedy(3), session=session) for token in chunk.token_ids]
        assert await check_pairs(engine) >= 2
    await backend.close()
    assert said == usual.tokens


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=slow), pytest.param(2, marks=long)])
async def test_forks_cuts_archives_and_made_up_histories(checkpoint: Path, replicas: int, tmp_path: Path) -> None:
    """What happens to sessions happens on both devices of every stage; one that came back from its archive says what it would have said."""
    async with Engine.open(checkpoint, peered(stages="2", draft_depth=1, mirror_replicas=replicas)) as engine:
        session = await engine.create_session()
        await _said(engine, session, ids(140, 5), 9)
        fork = await engine.fork_session(session, 100)
        assert await check_pairs(engine) == 4
        await engine.truncate_session(fork, 70)
        assert await check_pairs(engine) == 4
        async with engine.generate(ids(5, 6), greedy(20), session=fork) as left:
            async for _ in left:
                break
        await engine.export_session(session, tmp_path / "kept")
        again = await engine.import_session(tmp_path / "kept")
        assert await check_pairs(engine) == 6
        assert await _said(engine, session, ids(4, 7), 6) == await _said(engine, again, ids(4, 7), 6)
        made_up = await engine.create_session()
        history = SyntheticHistory(seed=7, rows=300)
        async for _ in engine.generate(ids(3, 1), greedy(4), session=made_up, history=history):
            pass
        assert await check_pairs(engine) == 8


async def _said(engine: Engine, session: str, prompt: list[int], count: int) -> list[int]:
    return [token async for chunk in engine.generate(prompt, greedy(count), session=session) for token in chunk.token_ids]


@slow
async def test_pairs_on_nodes_give_the_bits_of_one_pair(checkpoint: Path) -> None:
    """The head and its node with two devices each, and so after the node was lost; only the head with two: one device's tokens."""
    config = peered(draft_depth=1)
    one = await run(checkpoint, config, TURNS)
    async with cluster_of(checkpoint, config, "2") as (engine, cluster):
        assert (await collect(engine, TURNS)).same_bits(one)
        await cluster.nodes[0].stop()
        await cluster.nodes[0].start()
        await until_ready(engine)
        assert (await collect(engine, TURNS)).same_bits(one)
        stage = cluster.nodes[0].stage
        assert stage is not None
        assert stage.peer is not None
    async with cluster_of(checkpoint, config, "2", node_config=EngineConfig(**{**_fields(config), "peer": ""})) as (engine, _):
        assert (await collect(engine, TURNS)).tokens == one.tokens


@slow
@pytest.mark.parametrize(("replicas", "calls"), [(1, []), (2, ["image.take"])], ids=["once", "twice"])
async def test_pairs_on_nodes_have_the_same_bytes_after_a_loss(
    checkpoint: Path, replicas: int, calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node of two is lost in the middle of a generation, and maybe the other while rows come back: rows from the archive, and those made
    again behind it, are the same on both devices of every stage, of the node that stayed too; so are those of who is read again."""
    strike = Strike(monkeypatch)
    config = peered(draft_depth=1, mirror_replicas=replicas)
    turns = [(ids(150, 1), 12), (ids(70, 2), 8), (ids(3, 3), 8)]
    one = (await run(checkpoint, config, turns)).tokens
    async with cluster_of(checkpoint, config, "1,1,2") as (engine, cluster):
        engine.departures.archive_with(lambda name: engine.export_session(name, tmp_path / name), "", lambda name: found(tmp_path / name))
        kept, cut = await engine.create_session(), await engine.create_session()
        assert await _said(engine, kept, *turns[0]) == one[:12]
        await engine.export_session(kept, tmp_path / kept)
        assert await _said(engine, kept, *turns[1]) == one[12:20]
        generation = engine.generate(ids(90, 4), greedy(64), session=cut)
        await anext(generation)
        stays = cluster.nodes[1].stage
        await cluster.nodes[0].stop()
        with pytest.raises(NodeLost):
            await read(generation, [])
        for call in calls:
            strike.at(call, 1, strike.cut, nth=2)
        await cluster.nodes[0].start()
        await until_ready(engine)
        assert strike.struck == calls
        assert cluster.nodes[1].stage is stays
        assert list(engine.memories) == [kept]
        assert engine.sessions[kept].rows < 230, "nothing is to be made again"
        assert await check_pairs(engine, cluster.nodes) == 3
        assert await _said(engine, kept, *turns[2]) == one[20:]
        await _said(engine, cut, ids(3, 5), 4)
        assert await check_pairs(engine, cluster.nodes) == 6
        assert check_hot_caches(engine, cluster.nodes) > 0, "no row lies in a hot slot of both"


def _fields(config: EngineConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}
