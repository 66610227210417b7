"""A head and its nodes, all on one loop and over loopback, with a tiny checkpoint."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from engine.config import EngineConfig
from engine.engine import Engine
from engine.local_stages import cut_layers
from engine.model.config import ModelConfig
from engine.node.address import Address
from engine.node.head import HeadSetup, Locate
from engine.node.held_stage import NodeSetup
from engine.node.process import Node
from engine.stage import Stage
from streams import ChannelLimits, PeerLost, Reason
from tests.streams.channel_world import KEY

LIMITS = ChannelLimits(silence_ms_max=2000, beat_ms=200)


class LocalNode:
    """A node that the test starts, stops and starts again, at another address each time."""

    def __init__(self, model: Path, config: EngineConfig, stages: Sequence[range], stage: int, limits: ChannelLimits) -> None:
        self.setup = NodeSetup(model, config, tuple(stages), stage, KEY, limits)
        self.address: Address | None = None
        self.node: Node | None = None
        self._life: asyncio.Task[None] | None = None

    async def start(self) -> None:
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.node = Node(self.setup, ModelConfig.read(self.setup.model))
        self._life = asyncio.ensure_future(self.node.run(Address("127.0.0.1", 0), port.set_result))
        await asyncio.wait((port, self._life), return_when=asyncio.FIRST_COMPLETED)
        if not port.done():
            await self._life
        self.address = Address("127.0.0.1", port.result())

    async def stop(self) -> None:
        life, self._life, self.address = self._life, None, None
        if life is not None:
            life.cancel()
            await asyncio.wait((life,))
            if not life.cancelled() and (error := life.exception()) is not None:
                raise error

    @property
    def stage(self) -> Stage | None:
        """Its stage, while it lives."""
        held = None if self.node is None or self._life is None else self.node.held
        return None if held is None else held.follower.stage

    async def locate(self) -> Address:
        if self.address is None:
            raise PeerLost(Reason.UNREACHABLE, "the node is away")
        return self.address


class Cluster:
    """The nodes, and what their head is opened with."""

    def __init__(self, model: Path, config: EngineConfig, cut: str, limits: ChannelLimits, node_config: EngineConfig) -> None:
        facts = ModelConfig.read(model)
        self.stages = cut_layers(cut, facts.layers)
        self.nodes = [LocalNode(model, node_config, self.stages, stage, limits) for stage in range(len(self.stages) - 1)]
        locate: list[Locate] = [node.locate for node in self.nodes]
        self.setup = HeadSetup(facts, config, self.stages, locate, KEY, limits)


@asynccontextmanager
async def cluster_of(
    model: Path, config: EngineConfig, cut: str, limits: ChannelLimits = LIMITS, *, node_config: EngineConfig | None = None
) -> AsyncIterator[tuple[Engine, Cluster]]:  # fmt: skip
    """An engine over nodes; all of it is gone after. Args: cut: as `--stages`; the last stage is the head's. node_config: of
    the nodes, where it is another one."""
    cluster = Cluster(model, config, cut, limits, node_config or config)
    async with AsyncExitStack() as nodes:
        for node in cluster.nodes:
            nodes.push_async_callback(node.stop)
            await node.start()
        async with Engine.open(model, config, cluster=cluster.setup) as engine:
            yield engine, cluster
