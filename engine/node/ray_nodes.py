"""Nodes as Ray actors: Ray places one a machine, notices when one dies and starts it again. Nothing else of Ray is used.

The extra `forebay[cluster]` brings ray; without it this module says so. Rows, steps and tokens never pass through Ray: an actor tells where
it listens, and from then on head and nodes speak over channels like any others.

Invariants:
1. An actor a stage, named, in a placement group that spreads them; without a limit of restarts. One that restarts keeps its bundle, and so
   its machine if that lives.
2. Actors and placement group end with the head that made them.
3. The key is made anew for each head, unless a file of one is named, and goes to the actors with their arguments.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import structlog

from engine.errors import BadSetting, ForebayError
from engine.node.address import Address
from engine.node.head import Locate
from engine.node.held_stage import NodeSetup
from engine.remote import Unreachable
from streams import PeerLost, Reason

__all__ = ["NAMESPACE", "actor_name", "ray_nodes"]

NAMESPACE = "forebay"
_PLACED_S = 60.0
_log = structlog.get_logger("engine")


def actor_name(stage: int) -> str:
    """By which Ray knows the node of a stage."""
    return f"forebay-stage-{stage}"


class _Actor:
    """A node in a process of Ray's. Its loop is Ray's own; the node lives on it from the first question for its address on."""

    def __init__(self, setup: NodeSetup) -> None:
        self._setup = setup
        self._life: asyncio.Future[None] | None = None
        self._port: asyncio.Future[int] | None = None

    async def address(self) -> tuple[str, int, int]:
        """Host and port on which the node listens, and its process."""
        import ray.util

        from engine import logs
        from engine.node.process import Node

        host = ray.util.get_node_ip_address()
        if self._port is None:
            import torch

            from engine.model.source import config_of

            torch.set_num_threads(1)
            logs.configure("json")
            self._port = port = asyncio.get_running_loop().create_future()
            facts = config_of(self._setup.model, self._setup.config.load_format)
            self._life = asyncio.ensure_future(Node(self._setup, facts).run(Address(host, 0), port.set_result))
            self._life.add_done_callback(self._over)
        return host, await self._port, os.getpid()

    def _over(self, life: "asyncio.Future[None]") -> None:
        """The node's life has ended by itself: so does the process, and Ray starts it again."""
        error = None if life.cancelled() else life.exception()
        print(f"the node has ended: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code if isinstance(error, ForebayError) else 1)


@asynccontextmanager
async def ray_nodes(setups: list[NodeSetup], *, cards: int, address: str = "auto") -> AsyncIterator[list[Locate]]:
    """One actor a setup, for the length of the block; yields how each is found.

    Args: cards: each takes so many of its machine's GPUs. address: of Ray's head, as ray.init takes it.
    Raises: BadSetting: ray is not installed, or there are too few machines; Unreachable: there is no Ray to join.
    """
    try:
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    except ImportError as error:
        raise BadSetting("--cluster ray needs ray: pip install 'forebay[cluster]'") from error
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        await asyncio.to_thread(ray.init, address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError) as error:
        raise Unreachable("no Ray runs here: ray start --head on one machine, ray start --address=... on the others") from error
    group = None
    try:
        needs = {"CPU": 1.0, **({"GPU": float(cards)} if cards else {})}
        group = placement_group([needs] * len(setups), strategy="SPREAD")
        if not await asyncio.to_thread(group.wait, _PLACED_S):
            raise BadSetting(f"Ray has no place for {len(setups)} nodes with {needs} each: add machines with ray start --address=...")
        remote = ray.remote(_Actor)
        actors = [
            remote.options(
                name=actor_name(setup.stage), max_restarts=-1, max_task_retries=0, num_cpus=1, num_gpus=cards,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place),
            ).remote(replace(setup))
            for place, setup in enumerate(setups)
        ]  # fmt: skip
        yield [_located(actor) for actor in actors]
    finally:
        if group is not None:
            await asyncio.to_thread(remove_placement_group, group)
        await asyncio.to_thread(ray.shutdown)


def _located(actor: Any) -> Locate:
    async def locate() -> Address:
        import ray

        try:
            host, port, process = await actor.address.remote()
        except ray.exceptions.RayTaskError as error:
            raise BadSetting(f"the node ended: {str(error.cause).splitlines()[0]}") from error
        except ray.exceptions.RayError as error:
            raise PeerLost(Reason.UNREACHABLE, f"Ray has not started the node again: {type(error).__name__}") from error
        _log.info("node.located", address=f"{host}:{port}", process=process)
        return Address(host, port)

    return locate
