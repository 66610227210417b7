"""A head and a node as processes with a bad network between them: latency, loss, reordering, a slow line, a cable pulled in the middle.

What it needs (root, iproute2, /dev/net/tun) is skipped where it is not there, with the reason.
"""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.model.parity import make_checkpoint
from tests.engine.node.process_world import FIRST, ROOT, SECOND, NodeProcess, again, expected, head_of, ip, lost_while
from tests.engine.node.test_cluster import NAME, ids, tokens

TIMEOUT_S = 4.0
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]


class Wired:
    """A node behind a wire, 10.9.8.2; this process has the other end."""

    def __init__(self, node: NodeProcess, wire: subprocess.Popen[str], checkpoint: Path, key: Path) -> None:
        self.node, self.checkpoint, self.key = node, checkpoint, key
        self._wire = wire

    def say(self, words: str) -> None:
        assert self._wire.stdin is not None
        assert self._wire.stdout is not None
        print(words, file=self._wire.stdin, flush=True)
        assert self._wire.stdout.readline() == "done\n"


@pytest.fixture
def wired(tmp_path: Path) -> Iterator[Callable[..., Wired]]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        pytest.skip("a wire of our own needs /dev/net/tun")
    name = f"fbw{os.getpid()}"
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
    made: list[subprocess.Popen[str]] = []
    nodes: list[NodeProcess] = []
    key = tmp_path / "key"
    key.write_text("a key for these tests alone")
    checkpoint = make_checkpoint(tmp_path / "model", NAME)

    def make(*words: str) -> Wired:
        command = [sys.executable, "-m", "tests.streams.wire", "-", name, "7", *words]
        made.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT))
        assert made[-1].stdout is not None
        assert made[-1].stdout.readline() == "ready\n"
        nodes.append(NodeProcess(checkpoint, key, "10.9.8.2", ("ip", "netns", "exec", name), TIMEOUT_S))
        return Wired(nodes[-1], made[-1], checkpoint, key)

    yield make
    for node in nodes:
        node.kill()
    for wire in made:
        wire.kill()
        wire.communicate()
    ip("netns", "del", name)


@pytest.mark.parametrize(
    "shape",
    [
        "delay_ms=5 jitter_ms=2 loss=0.01 late=0.1 late_ms=3",
        pytest.param("delay_ms=50 jitter_ms=10", marks=pytest.mark.long),
        pytest.param("delay_ms=0.1", marks=pytest.mark.long),
        pytest.param("bytes_per_s=1000000", marks=pytest.mark.long),
        pytest.param("delay_ms=2 twice=0.05 flip=0.005", marks=pytest.mark.long),
    ],
)
async def test_a_bad_network_changes_no_token(wired: Callable[..., Wired], shape: str) -> None:
    """Prompts and turns over it take longer, and are those of one process; nobody is lost, and the node ends in good order."""
    there = wired(*shape.split())
    whole = await expected(there.checkpoint)
    async with head_of(there.checkpoint, there.key, there.node) as engine:
        first, second = await engine.create_session(), await engine.create_session()
        told = await asyncio.gather(*(tokens(engine, session, *FIRST) for session in (first, second)))
        assert told == [whole[:12]] * 2
        assert await tokens(engine, second, *SECOND) == whole[12:]
        assert engine.sessions[first].revision == engine.sessions[second].revision - 1, "a turn was cut off"
    assert there.node.end() == 0


async def test_a_cable_pulled_in_a_prompt_and_in_a_generation(wired: Callable[..., Wired]) -> None:
    """On a line so slow that a frame is always under way the cable is out for good: noticed within the time-out in either phase, and once
    it is back the same process is taken again and says the same. Out for a third of the time-out it costs nothing but that."""
    there = wired("bytes_per_s=2000000")
    whole = await expected(there.checkpoint)
    async with head_of(there.checkpoint, there.key, there.node) as engine:
        kept, other = await engine.create_session(), await engine.create_session()
        assert await tokens(engine, kept, *FIRST) == whole[:12]
        pid, before = there.node.pid, len(os.listdir("/proc/self/fd"))
        for after in (0, 3):
            assert await lost_while(engine, other, ids(1000, 5), lambda: there.say("cut"), after) < 1.5 * TIMEOUT_S + 1
            await asyncio.sleep(TIMEOUT_S / 2)
            there.say("join")
            await again(engine)
        assert await tokens(engine, kept, *SECOND) == whole[12:]
        assert len(os.listdir("/proc/self/fd")) <= before
        turn = asyncio.ensure_future(tokens(engine, await engine.create_session(), *FIRST))
        await asyncio.sleep(0.02)
        there.say("cut")
        await asyncio.sleep(TIMEOUT_S / 3)
        there.say("join")
        assert await turn == whole[:12]
        assert there.node.pid == pid
    assert there.node.end() == 0
