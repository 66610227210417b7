"""`forebay node` as processes of their own, which a test kills, stops and starts again, under a head in the test's own process."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine.config import ClusterConfig
from engine.engine import Engine
from engine.errors import NodeLost
from engine.generation import Generation
from engine.node.address import Address
from engine.node.far import Far
from engine.node.opening import open_cluster
from engine.protocol import SessionId
from streams import TcpChannel
from tests.engine.node.test_cluster import TOP_K, ids, read
from tests.engine.runs import greedy, run, small

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 1.5
FIRST, SECOND = (ids(150, 1), 12), (ids(3, 2), 12)


class NodeProcess:
    """A node that the test starts again as systemd would."""

    def __init__(
        self, checkpoint: Path, key: Path, host: str, before: tuple[str, ...] = (), timeout_s: float = TIMEOUT_S, *, stage: int = 0,
        stages: str = "2",
    ) -> None:  # fmt: skip
        """Args: before: what the command stands behind. stages: as `--stages`."""
        self.timeout_s, self.stages = timeout_s, stages
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = Address(host, free.getsockname()[1])
        words = ["node", checkpoint, "--listen", self.address, "--stage", stage, "--stages", stages, "--key-file", key]
        words += ["--peer-timeout", timeout_s, "--device", "cpu", "--row-format", "f32", "--append-chunk-rows", 64]
        words += ["--host-memory", "64MiB", "--hot-rows", TOP_K]
        self._command = [*before, sys.executable, str(ROOT / "server.py"), *map(str, words), "--log-format", "json"]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, cwd=ROOT)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    @property
    def descriptors(self) -> int:
        """That the process has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def ended(self) -> int:
        """Wait for the process to end by itself; returns its exit code."""
        return self._process.wait(30)

    def restart(self) -> None:
        """SIGKILL, and a new process at the same address."""
        self.kill()
        self.start()

    def end(self) -> int:
        self._process.terminate()
        return self._process.wait(30)


class Harm:
    """Something that is done to a node."""

    def __init__(self, node: NodeProcess, number: int) -> None:
        self._node, self._number = node, number

    def __call__(self) -> None:
        os.kill(self._node.pid, self._number)


class Strike:
    """Does something, once, right before the head makes a certain call to a node."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.struck: list[str] = []
        self.at_s = 0.0  # of the last one, by the monotonic clock
        self.far: Far | None = None  # of the last one
        self._armed: tuple[str, int, int, Callable[[], None]] | None = None
        self._seen = 0
        real = Far.ask

        def ask(far: Far, name: str, body: object, answer: type[object], *, session: str = "") -> object:
            self._asked(far, name)
            return real(far, name, body, answer, session=session)

        patch.setattr(Far, "ask", ask)

    def at(self, name: str, stage: int, harm: Callable[[], None], *, nth: int = 1) -> None:
        """Args: name: of the call; stage: of the node that is called; nth: such call from now on."""
        assert self._armed is None, f"{self._armed} is still to come"
        self._armed, self._seen = (name, stage, nth, harm), 0

    def _asked(self, far: Far, called: str) -> None:
        if self._armed is None:
            return
        name, stage, nth, harm = self._armed
        if called != name or not far.name.rstrip(")").endswith(f"stage {stage}"):
            return
        self._seen += 1
        if self._seen == nth:
            self._armed = None
            self.struck.append(name)
            self.at_s, self.far = time.monotonic(), far
            harm()

    def cut(self) -> None:
        """As harm: the connection to the node that is called ends without a word."""
        assert self.far is not None, "nothing was struck"
        assert self.far._caller is not None, "it has none"
        channel = self.far._caller._channel
        assert isinstance(channel, TcpChannel)
        channel.connection.abort()


@asynccontextmanager
async def head_of(checkpoint: Path, key: Path, *nodes: NodeProcess) -> AsyncIterator[Engine]:
    """A head over all of its nodes, in order of their stages."""
    cluster = ClusterConfig(nodes=tuple(node.address for node in nodes), key_file=str(key), peer_timeout_s=nodes[0].timeout_s)
    config = small(hot_rows=TOP_K, stages=nodes[0].stages)
    async with asyncio.timeout(240), open_cluster(checkpoint, config, cluster) as engine:
        yield engine


async def expected(checkpoint: Path, *turns: tuple[list[int], int]) -> list[int]:
    """What turns of one session, FIRST and SECOND if none are given, say where nothing happens."""
    return (await run(checkpoint, small(hot_rows=TOP_K), turns or (FIRST, SECOND))).tokens


async def lost_while(engine: Engine, session: SessionId, prompt: list[int], harm: Callable[[], None], after: int) -> float:
    """A turn that is cut off: `harm` happens after so many chunks; returns the seconds from then to the turn's end."""
    generation = engine.generate(prompt, greedy(2000), session=session)
    if after:
        for _ in range(after):
            await anext(generation)
    else:
        await generation.prompt()
    harm()
    return await lost(generation)


async def lost(generation: Generation) -> float:
    """Seconds until what is left of a turn ends with NodeLost."""
    began = time.monotonic()
    with pytest.raises(NodeLost):
        await read(generation, [])
    return time.monotonic() - began


async def again(engine: Engine) -> None:
    """Wait until a cluster whose loss was noticed is whole."""
    while not engine.ready:  # noqa: ASYNC110  # a node's process starts meanwhile
        await asyncio.sleep(0.05)


async def until(true: Callable[[], bool], what: str) -> None:
    """Wait for what comes without anybody being told. Raises AssertionError after a minute."""
    last = time.monotonic() + 60
    while not true():
        assert time.monotonic() < last, what
        await asyncio.sleep(0.02)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
