"""What a node holds for as long as its process lives: weights of its layers, arena, streams, and the form of what it hands on."""

import asyncio
import functools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.append_cost import LayerSizes
from engine.collector import old_objects_left_out
from engine.config import HOT_ROWS, EngineConfig
from engine.device import device_of, leave, streams_of
from engine.follower import LocalFollower
from engine.model.glm import load_model
from engine.model.marks import marks_of
from engine.model.source import DTYPE_OF
from engine.model.split import parts_of
from engine.node import calls
from engine.node.passage import Form, Passage
from engine.peer_opening import check_peer
from engine.protocol import Progress
from engine.stage import open_stage
from streams import ChannelLimits, Event, Stream

__all__ = ["HeldStage", "NodeSetup", "held_stage"]


@dataclass(frozen=True, slots=True)
class NodeSetup:
    """What a node is: which model, which of its stages, and how. `key`: shared by all processes of the cluster."""

    model: Path
    config: EngineConfig
    stages: tuple[range, ...]
    stage: int
    key: bytes = field(repr=False)
    limits: ChannelLimits


@dataclass(frozen=True, slots=True)
class HeldStage:
    """An open stage that is not the last. `form`: what it hands on; `arrives`: what it is handed, None for the first."""

    follower: LocalFollower
    form: Form
    arrives: Form | None
    arrivals: Passage
    copies: Stream
    device: torch.device
    config: EngineConfig
    marks: dict[str, str]
    lost: Event[None]  # fails when the device does

    def facts(self) -> calls.Facts:
        """What the head has to know. Reads a sample of the weights: call it beside the loop."""
        stage = self.follower.stage
        return calls.Facts(
            process=os.getpid(), device=stage.device.type, dtype=str(stage.model.dtype), block_bytes=stage.layout.block_bytes,
            append_rows=stage.append_rows, hot_rows=self.config.hot_rows or HOT_ROWS, statistics=self.follower.held,
            sizes=tuple(LayerSizes.of(layer) for layer in stage.model.layers), weights=self.follower.weights(),
            marks=self.marks,
        )  # fmt: skip


@asynccontextmanager
async def held_stage(setup: NodeSetup, progress: Progress | None) -> AsyncIterator[HeldStage]:
    """Load the stage's layers and open it, for the length of the block. Raises BadModel, BadSetting, NotAdmitted."""
    config, device = setup.config, device_of(setup.config)
    load = functools.partial(
        load_model, setup.model, layers=setup.stages[setup.stage], load_format=config.load_format, dtype=DTYPE_OF[config.dtype],
        device=device, latent_norm_eps=config.latent_norm_eps, progress=progress,
    )  # fmt: skip
    peer = check_peer(device, config)
    weights, peers = await asyncio.to_thread(parts_of, load, None, peer)
    marks = await asyncio.to_thread(marks_of, setup.model, config.load_format)
    backend = streams_of(device, None, peer=peer)
    facts = weights.config
    context_max = min(config.context_max or facts.context_max, facts.context_max)
    name = f"stage{setup.stage}"
    opening = functools.partial(open_stage, weights, config, backend, name=name, context_max=context_max, peer=peers, alone=False)
    stage = opening() if device.type == "cpu" else await asyncio.to_thread(opening)  # registering host memory takes a while
    picks = facts.top_k if weights.cuts_group else 0
    begun = 0 if weights.layers[0].full else facts.top_k
    form = functools.partial(Form, facts.hidden, weights.dtype, chunk_rows=config.append_chunk_rows)
    copies = backend.stream("stage.transfer")
    try:
        held = HeldStage(
            follower=LocalFollower(stage), form=form(picks),
            arrives=form(begun) if setup.stage else None, arrivals=Passage(None, copies, device),
            copies=copies, device=device, config=config, marks=marks, lost=backend.lost,
        )  # fmt: skip
        with old_objects_left_out(device):
            yield held
    finally:
        if backend.lost.done():
            leave(stage, weights, peers, backend)
        else:
            await backend.close()
            stage.close()
