"""Who belongs to a cluster: nodes of other stages end the head, and each process may have a second device."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from engine.config import ClusterConfig, EngineConfig
from engine.engine import Engine
from engine.errors import BadSetting
from engine.node.address import Address
from engine.node.far import Far
from engine.node.opening import open_cluster
from engine.node.passage import Passage
from streams import CpuBackend, StreamError
from tests.engine.model.parity import make_checkpoint
from tests.engine.node.cluster_world import LIMITS, Cluster, LocalNode
from tests.engine.runs import collect, run, small
from tests.engine.test_engine_exactness import NAME, TOP_K, ids
from tests.streams.channel_world import KEY, loopback, turns


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "key"
    path.write_bytes(KEY)
    return path


@asynccontextmanager
async def nodes_of(checkpoint: Path, config: EngineConfig, cut: str, stages: tuple[int, ...]) -> AsyncIterator[tuple[Address, ...]]:
    """Nodes of such stages; yields where they listen."""
    layers = Cluster(checkpoint, config, cut, LIMITS, config).stages
    nodes = [LocalNode(checkpoint, config, layers, stage, LIMITS) for stage in stages]
    try:
        for node in nodes:
            await node.start()
        yield tuple(node.address for node in nodes if node.address is not None)
    finally:
        for node in nodes:
            await node.stop()


@asynccontextmanager
async def served(checkpoint: Path, config: EngineConfig, addresses: tuple[Address, ...], key: Path) -> AsyncIterator[Engine]:
    """As `forebay serve --nodes` opens it."""
    cluster = ClusterConfig(nodes=addresses, key_file=str(key), peer_timeout_s=2.0)
    async with asyncio.timeout(60), open_cluster(checkpoint, config, cluster) as engine:
        yield engine


@pytest.mark.parametrize(("stages", "place"), [((0, 0), 1), ((1, 0), 0)], ids=["twice", "reversed"])
async def test_a_node_of_another_stage_ends_the_head(checkpoint: Path, key: Path, stages: tuple[int, int], place: int) -> None:
    """Two nodes started as the first, and nodes named in reverse: the head names who is there, its stage and the one it expected."""
    config = small(hot_rows=TOP_K, stages="1,1,2")
    async with nodes_of(checkpoint, config, "1,1,2", stages) as addresses:
        words = rf"the node at {addresses[place]} is that of stage {stages[place]}, and stage {place} was expected there"
        with pytest.raises(BadSetting, match=words):
            async with served(checkpoint, config, addresses, key):
                pass


async def test_head_and_node_may_each_have_a_peer(checkpoint: Path, key: Path) -> None:
    """As the command line opens it: two devices at the node and at the head give the tokens and logits of one pair."""
    config = small(hot_rows=TOP_K, stages="2", peer="cpu")
    said = [(ids(70, 1), 6)]
    whole = await run(checkpoint, small(hot_rows=TOP_K, peer="cpu"), said)
    async with nodes_of(checkpoint, config, "2", (0,)) as addresses, served(checkpoint, config, addresses, key) as engine:
        assert engine.stage.peer is not None
        assert (await collect(engine, said)).same_bits(whole)


async def test_a_channel_that_has_ended_meets_nobody() -> None:
    """The node lets go right behind the handshake: `met` raises, the node counts as lost, and no callback fails later."""
    failed: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, what: failed.append(what))
    async with loopback() as (one, two, _):
        closing = asyncio.ensure_future(two.close())
        while "ended" not in repr(one):  # noqa: ASYNC110  # its `ended` may be done or not yet
            await asyncio.sleep(0)
        backend = CpuBackend()
        far = Far("x", Passage(None, backend.stream("copies"), torch.device("cpu")))
        with pytest.raises(StreamError):
            far.met(one, "x")
        await closing
        await turns(20)
        assert far.lost is not None
        await backend.close()
    assert not failed
