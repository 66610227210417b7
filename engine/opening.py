"""What opening an engine needs beside its model: stage, head of nodes, tape, name, how histories are stored. Knows no requests."""

import asyncio
import functools
import time
from pathlib import Path

import structlog

from engine.config import EngineConfig
from engine.errors import BadSetting
from engine.local_stages import led, open_stages
from engine.model.glm import Model
from engine.model.marks import marks_of
from engine.model.split import PeerModel
from engine.node.head import Head, HeadSetup
from engine.running_tape import RunningTape
from engine.stage import Stage, open_stage
from engine.stored import Storing
from streams import Backend

__all__ = ["head_for", "name_of", "stage_for", "storing", "tape_at"]

_log = structlog.get_logger("engine")


def storing(config: EngineConfig, name: str) -> Storing | None:
    """How histories are stored; None: they are not. Forced selections give rows that are not their tokens'."""
    if config.prefix_cache != "on" or config.force_miss_rate:
        return None
    identity = f"{name}|{config.row_format}|{config.index_key_format}|{config.latent_norm_eps}"
    return Storing(identity.encode(), config.sessions_max)


def name_of(directory: Path) -> str:
    """The directory's own name, as the model's; also for "." and the like."""
    return directory.absolute().resolve().name


async def head_for(setup: HeadSetup, directory: Path, weights: Model, streams: Backend) -> Head:
    """The head of a cluster, whose own stage has `weights` of that directory. Raises BadModel."""
    marks = await asyncio.to_thread(marks_of, directory, setup.config.load_format)
    return Head(setup, weights.dtype, weights.device, streams.stream("stage.transfer"), marks)


async def stage_for(
    weights: Model, config: EngineConfig, streams: Backend, context_max: int, peer: PeerModel | None = None, head: Head | None = None
) -> Stage:  # fmt: skip
    """On a device beside the loop: registering host memory takes seconds, and health checks must be answered.

    Args: head: of the nodes that have the stages before; None: all stages are here. Raises: BadSetting, NotAdmitted.
    """
    if head is not None:
        return await _last_stage(weights, config, streams, context_max, peer, head)
    if weights.device.type == "cpu":
        return open_stages(weights, config, streams, context_max=context_max, peer=peer)
    started = time.monotonic()

    def told(blocks: int, blocks_max: int) -> None:
        if blocks == blocks_max:
            _log.info("arena.registered", blocks=blocks, seconds=round(time.monotonic() - started, 1))

    return await asyncio.to_thread(open_stages, weights, config, streams, context_max=context_max, peer=peer, progress=told)


async def _last_stage(
    weights: Model, config: EngineConfig, streams: Backend, context_max: int, peer: PeerModel | None, head: Head
) -> Stage:  # fmt: skip
    """The head's own stage, behind those of the nodes."""
    name = f"stage{len(head.followers)}"
    opening = functools.partial(open_stage, weights, config, streams, name=name, context_max=context_max, peer=peer, alone=False)
    own = opening() if weights.device.type == "cpu" else await asyncio.to_thread(opening)
    return led(own, head.followers, config)


def tape_at(name: str) -> RunningTape:
    """Raises BadSetting when the file cannot be written."""
    try:
        return RunningTape(Path(name))
    except OSError as error:
        raise BadSetting(f"--tape: cannot write {name}: {error.strerror}") from error
