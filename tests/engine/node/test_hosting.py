"""A node's stage under its head: what is closed while one of its calls is waited for, and the stage where it cannot be opened whole."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.node.held_stage
from engine.node import calls
from engine.node.held_stage import NodeSetup, held_stage
from engine.node.hosting import Hosting, Neighbours
from engine.node.passage import Form
from engine.stage import Stage
from streams import Closed
from tests.engine.model.parity import make_checkpoint
from tests.engine.node.cluster_world import LIMITS
from tests.engine.runs import small
from tests.streams.channel_world import KEY


class Image:
    """The rows of a session, whose way takes until `arrived`."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()

    async def begin(self, rows: int, window: int) -> None:
        """Nothing."""

    async def finish(self, hidden_from: int) -> None:
        """The last of them."""
        await self.arrived.wait()

    async def read_out(self) -> int:
        """As many."""
        await self.arrived.wait()
        return 64


class Memory:
    """Holds nothing."""

    held = reads = extra_bytes = None

    def close(self) -> None:
        """Done."""


class OneSession:
    """A follower."""

    held = None

    def __init__(self) -> None:
        self.rows = Image()

    def open(self, *_: object) -> Memory:
        """Any."""
        return Memory()

    def image(self, memory: int) -> Image:
        """Of any."""
        return self.rows


@pytest.mark.parametrize("call", ["image.finish", "image.out"])
async def test_a_session_that_is_closed_while_its_rows_are_on_their_way_is_no_mistake(call: str) -> None:
    """As where another node of it was lost: the call ends as closed, without a word in the log. Else it says what is held."""
    for closes in (False, True):
        follower: Any = OneSession()
        none: Any = None
        takers = Hosting(follower, Form(8, torch.float32, 0, 64), None, Neighbours(none, none), lambda told: None).takers()
        await takers["open"].begin(calls.Open(7, "s", 64))
        await takers["image.begin"].begin(calls.Load(7, 64, 0))
        asked = asyncio.ensure_future(takers[call].begin(calls.Rows(7, 0)))
        await asyncio.sleep(0)
        if closes:
            takers["close"].begin(calls.Memory(7))
        follower.rows.arrived.set()
        if closes:
            with pytest.raises(Closed, match="memory 7"):
                await asked
        else:
            assert await asked is not None


async def test_a_stage_whose_buffers_find_no_memory_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node lives on for a moment, and what the stage has of the host's memory stands registered until it is closed."""
    closed: list[Stage] = []
    close = Stage.close

    def watched(stage: Stage) -> None:
        closed.append(stage)
        close(stage)

    def full(stage: Stage) -> None:
        raise torch.OutOfMemoryError(f"no room beside {stage.layout}")

    monkeypatch.setattr(Stage, "close", watched)
    monkeypatch.setattr(engine.node.held_stage, "LocalFollower", full)
    setup = NodeSetup(make_checkpoint(tmp_path, "shared"), small(), (range(2), range(2, 5)), 0, KEY, LIMITS)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        async with held_stage(setup, None):
            pytest.fail("it is not there")
    assert len(closed) == 1
