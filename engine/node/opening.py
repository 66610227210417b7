"""How `forebay serve` opens a model that lies on several nodes, from its settings. Knows no HTTP."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from engine.config import ClusterConfig, EngineConfig
from engine.device import device_of
from engine.engine import Engine
from engine.errors import BadSetting
from engine.local_stages import cut_layers
from engine.model.source import config_of
from engine.node.address import Address
from engine.node.head import HeadSetup, Locate
from engine.node.held_stage import NodeSetup
from engine.node.keys import key_of, limits_of, stages_setting
from engine.node.ray_nodes import ray_nodes
from engine.protocol import Progress

__all__ = ["open_cluster"]

_KEY_BYTES = 32


@asynccontextmanager
async def open_cluster(
    model: Path, config: EngineConfig, cluster: ClusterConfig, *, progress: Progress | None = None, ray_address: str = "auto"
) -> AsyncIterator[Engine]:  # fmt: skip
    """An engine whose first layers lie on nodes, for the length of the block; waits for all of them, however long.

    Args: ray_address: of the Ray to join; auto: the one of this machine, or that of RAY_ADDRESS.
    Raises: BadModel, BadSetting, NotAdmitted; Unreachable: there is no Ray.
    """
    facts, limits = config_of(model, config.load_format), limits_of(cluster)
    stages = cut_layers(stages_setting(config.stages, cluster), facts.layers)
    if len(stages) < 2 or (cluster.nodes and len(stages) != len(cluster.nodes) + 1):
        nodes = len(cluster.nodes) if cluster.nodes else "some"
        raise BadSetting(f"stages {config.stages} for {nodes} nodes: the head has the last stage, so there is one more than nodes")
    if cluster.nodes:
        key = key_of(cluster)
        locate: list[Locate] = [_always(address) for address in cluster.nodes]
        async with Engine.open(model, config, progress=progress, cluster=HeadSetup(facts, config, stages, locate, key, limits)) as engine:
            yield engine
        return
    key = key_of(cluster) if cluster.key_file else secrets.token_bytes(_KEY_BYTES)
    place = await asyncio.to_thread(model.absolute)
    setups = [NodeSetup(place, config, stages, stage, key, limits) for stage in range(len(stages) - 1)]
    cards = 0 if device_of(config).type == "cpu" else 2 if config.peer else 1
    async with ray_nodes(setups, cards=cards, address=ray_address) as placed:
        setup = HeadSetup(facts, config, stages, placed, key, limits)
        async with Engine.open(model, config, progress=progress, cluster=setup) as engine:
            yield engine


def _always(address: Address) -> Locate:
    async def locate() -> Address:
        return address

    return locate
