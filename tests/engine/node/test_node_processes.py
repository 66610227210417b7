"""`forebay node` as a process of its own, killed, stopped, or behind a link that goes down, under a head in this process.

What network namespaces need (root, iproute2) is skipped where it is not there, with the reason.
"""

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.model.parity import make_checkpoint
from tests.engine.node.process_world import FIRST, SECOND, TIMEOUT_S, Harm, NodeProcess, again, expected, head_of, ip, lost_while
from tests.engine.node.test_cluster import NAME, ids, tokens

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "key"
    path.write_text("a key for these tests alone")
    return path


@pytest.fixture
def node(checkpoint: Path, key: Path) -> Iterator[NodeProcess]:
    made = NodeProcess(checkpoint, key, "127.0.0.1")
    yield made
    made.kill()


async def test_a_node_that_is_killed_and_started_again_in_each_phase(
    checkpoint: Path, key: Path, node: NodeProcess, tmp_path: Path
) -> None:
    """SIGKILL while a prompt is read, while tokens are made, and while nothing runs: what runs ends at once, and each time the session that
    was exported goes on from its archive with the tokens of a run in which nothing happened. The head has as many descriptors as before."""
    whole = await expected(checkpoint)
    async with head_of(checkpoint, key, node) as engine:
        engine.departures.archive_with(lambda name: engine.export_session(name, tmp_path / name), "", lambda name: tmp_path / name)
        before = len(os.listdir("/proc/self/fd"))
        for after in (0, 3, None):
            kept = await engine.create_session()
            assert await tokens(engine, kept, *FIRST) == whole[:12]
            await engine.export_session(kept, tmp_path / kept)
            other = await engine.create_session()
            if after is None:
                node.kill()
            else:
                assert await lost_while(engine, other, ids(2000, 5), Harm(node, signal.SIGKILL), after) < TIMEOUT_S
                node.kill()
            node.start()
            await asyncio.sleep(0.1)
            await again(engine)
            assert await tokens(engine, kept, *SECOND) == whole[12:]
            for session in (kept, other):
                await engine.close_session(session)
        assert len(os.listdir("/proc/self/fd")) <= before
    assert node.end() == 0


async def test_a_node_that_hangs_is_noticed_within_the_time_out_and_taken_back(checkpoint: Path, key: Path, node: NodeProcess) -> None:
    """SIGSTOP for longer than the time-out in the middle of a generation: that ends within it; awake again, the same process is taken back,
    and what is read again gives the same tokens. A short stop costs nothing but the time."""
    whole = await expected(checkpoint)
    async with head_of(checkpoint, key, node) as engine:
        session, other = await engine.create_session(), await engine.create_session()
        assert await tokens(engine, session, *FIRST) == whole[:12]
        try:
            assert await lost_while(engine, other, ids(70, 3), Harm(node, signal.SIGSTOP), 3) < 2 * TIMEOUT_S + 1
        finally:
            os.kill(node.pid, signal.SIGCONT)
        await again(engine)
        assert await tokens(engine, session, *SECOND) == whole[12:]
        os.kill(node.pid, signal.SIGSTOP)
        asyncio.get_running_loop().call_later(TIMEOUT_S / 3, os.kill, node.pid, signal.SIGCONT)
        fresh = await engine.create_session()
        assert await tokens(engine, fresh, *FIRST) == whole[:12]
    assert node.end() == 0


@pytest.fixture
def far_node(checkpoint: Path, key: Path) -> Iterator[tuple[NodeProcess, str]]:
    """A node in a network namespace of its own, 10.9.7.2, behind a link to this one, 10.9.7.1; skipped where that is not allowed."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    name = f"fbn{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("link", "add", "fbn0", "type", "veth", "peer", "name", "fbn1", "netns", name)
        ip("addr", "add", "10.9.7.1/24", "dev", "fbn0")
        ip("link", "set", "fbn0", "up")
        ip("-n", name, "addr", "add", "10.9.7.2/24", "dev", "fbn1")
        for card in ("lo", "fbn1"):
            ip("-n", name, "link", "set", card, "up")
    except subprocess.CalledProcessError as error:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
    made = NodeProcess(checkpoint, key, "10.9.7.2", before=("ip", "netns", "exec", name))
    yield made, name
    made.kill()
    ip("netns", "del", name)


async def test_a_node_that_is_cut_off_is_lost_and_found(checkpoint: Path, key: Path, far_node: tuple[NodeProcess, str]) -> None:
    """The link goes down without a word to anybody, in the middle of a generation, and comes back later: lost within the time-out, found
    again as the process it was, with the same tokens."""
    node, _ = far_node
    whole = await expected(checkpoint)
    async with head_of(checkpoint, key, node) as engine:
        session, other = await engine.create_session(), await engine.create_session()
        assert await tokens(engine, session, *FIRST) == whole[:12]

        def cut() -> None:
            ip("link", "set", "fbn0", "down")

        assert await lost_while(engine, other, ids(70, 3), cut, 3) < 2 * TIMEOUT_S + 1
        await asyncio.sleep(TIMEOUT_S)
        ip("link", "set", "fbn0", "up")
        await again(engine)
        assert await tokens(engine, session, *SECOND) == whole[12:]
    assert node.end() == 0
