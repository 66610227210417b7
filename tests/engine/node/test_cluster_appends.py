"""What a node holds for a prompt: until it is done where the head goes in the middle, and no longer than the prompt takes."""

import asyncio
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.append import AppendRun
from engine.config import EngineConfig
from engine.engine import Engine
from engine.peer_append import PeerAppend
from tests.engine.model.parity import make_checkpoint
from tests.engine.node.cluster_world import LocalNode, cluster_of
from tests.engine.node.test_cluster import NAME, TOP_K, ids, read, tokens, until_ready
from tests.engine.runs import greedy, small
from tests.engine.test_peer import peered
from tests.streams.conformance import turns


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


class Held:
    """Work of a node that stays under way, in the thread that does it, from its `nth` time until `go`."""

    def __init__(self, patch: pytest.MonkeyPatch, kind: type[Any], name: str, nth: int) -> None:
        self.entered, self.go, self.over = threading.Event(), threading.Event(), threading.Event()
        self._work: Callable[..., None] = getattr(kind, name)
        self._times, self._nth = 0, nth
        patch.setattr(kind, name, lambda run, *given, **named: self._run(run, *given, **named))

    def _run(self, run: Any, *given: Any, **named: Any) -> None:
        if isinstance(run, AppendRun) and run._stage.model.is_last:  # the head's own part
            return self._work(run, *given, **named)
        self._times += 1
        if self._times != self._nth:
            return self._work(run, *given, **named)
        self.entered.set()
        assert self.go.wait(60), "nobody let it go on"
        self._work(run, *given, **named)
        self.over.set()


def held_by(node: LocalNode) -> tuple[int, int]:
    """References to its blocks, and bytes of its device's pool."""
    assert node.stage is not None
    return node.stage.arena.statistics().references, node.stage.pool.statistics().allocated_bytes


OFFLOAD = small(hot_rows=TOP_K)


@pytest.mark.parametrize(
    ("config", "kind", "name", "nth"),
    [
        pytest.param(OFFLOAD, AppendRun, "_attend", 3, id="compute"),  # of the second chunk, over two layers
        pytest.param(OFFLOAD, AppendRun, "_fetch", 4, id="prefetch"),
        pytest.param(small(placement="resident"), AppendRun, "_attend", 3, id="resident"),
        pytest.param(peered(hot_rows=TOP_K), PeerAppend, "_attend", 1, id="peer"),
    ],
)
async def test_a_head_lost_in_a_prompt_takes_no_memory_from_under_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, config: EngineConfig, kind: type[Any], name: str, nth: int
) -> None:
    """The cable to the head is pulled while a thread of the node computes a unit: the session is let go of at once, its memory once that
    is done. Then the node is free, and the head that comes back has its turn."""
    work = Held(monkeypatch, kind, name, nth)
    async with cluster_of(checkpoint, config, "2") as (engine, cluster):
        one = cluster.nodes[0]
        before, asked = held_by(one), asyncio.ensure_future(read(engine.generate(ids(150, 1), greedy(4)), []))
        try:
            assert await asyncio.to_thread(work.entered.wait, 60)
            node, during = one.node, held_by(one)
            assert during > before
            assert node is not None
            assert node._head is not None
            hosting = node._head.hosting
            assert hosting is not None
            assert hosting.sessions == 1
            node._head.channel.connection.abort()
            while hosting.sessions:  # noqa: ASYNC110  # the node's release takes its turns on this loop
                await asyncio.sleep(0)
            assert not work.over.is_set()
            assert held_by(one) == during
        finally:
            work.go.set()
        await asyncio.wait((asked,))
        assert asked.exception() is not None
        await until_ready(engine)
        assert work.over.is_set()
        assert held_by(one) == before
        session = await engine.create_session()
        assert len(await tokens(engine, session, ids(150, 1), 4)) == 4


def appends_of(engine: Engine) -> int:
    return len(engine._loop.appending)


@pytest.mark.parametrize("stopped", ["none", "running", "queued"])
async def test_scratch_goes_with_the_append_and_not_with_the_session(
    checkpoint: Path, stopped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that has its answer keeps no scratch on a node, nor does one whose caller has left in the middle of the prompt, or before
    its first chunk."""
    work = Held(monkeypatch, AppendRun, "_attend", 3)
    async with cluster_of(checkpoint, OFFLOAD, "2") as (engine, cluster):
        sessions = [await engine.create_session() for _ in range(2 if stopped == "queued" else 1)]
        generations = [engine.generate(ids(150, 1), greedy(3), session=session) for session in sessions]
        reading = [asyncio.ensure_future(read(generation, [])) for generation in generations]
        try:
            assert await asyncio.to_thread(work.entered.wait, 60)
            while appends_of(engine) < len(sessions):  # noqa: ASYNC110  # the loop takes its turns here
                await asyncio.sleep(0)
            assert cluster.nodes[0].node is not None
            assert cluster.nodes[0].node.held is not None
            follower = cluster.nodes[0].node.held.follower
            assert follower._scratch is not None
            assert follower._scratch() is not None
            leaving = [] if stopped == "none" else [asyncio.ensure_future(generations[-1].aclose())]
            await turns()
        finally:
            work.go.set()
        await asyncio.gather(*reading, *leaving)
        while appends_of(engine):  # noqa: ASYNC110  # as above
            await asyncio.sleep(0)
        for session in sessions:
            await engine.memories[session].operations.settle()
        await engine.stage.idle()
        gc.collect()
        assert follower._scratch() is None
        assert engine.sessions[sessions[-1]].rows == {"none": 152, "running": 64, "queued": 0}[stopped]
