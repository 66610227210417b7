"""Channels between two processes, where they may in network namespaces of their own: links that go down, are slow or lose packets, peers
that stop or die. What namespaces or shaping need (root, kernel modules) is skipped where it is not there, with the reason.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SILENCE_MS = 1200
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


class Node:
    """A `channel_node` process and the lines it says."""

    def __init__(self, *arguments: object, before: tuple[str, ...] = ()) -> None:
        command = [*before, sys.executable, "-m", "tests.streams.channel_node", *(str(one) for one in arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self.pid = self.process.pid  # `ip netns exec` becomes the command: the same process
        assert self.process.stdout is not None
        self._lines = self.process.stdout

    def wait(self, word: str) -> list[str]:
        """Read lines until one begins with `word`; returns its other words."""
        for line in self._lines:
            first, *rest = line.split()
            if first == word:
                return rest
            assert first != "end", f"it ended while {word!r} was awaited: {line}"
        raise AssertionError(f"{word!r} was never said")

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.wait("step")

    def end(self) -> str:
        """Read to its end: why. Checks that it left no descriptor."""
        for line in self._lines:
            if line.startswith("end "):
                _, reason, _, descriptors = line.split()
                assert descriptors == "0", f"{descriptors} descriptors were left"
                assert self.process.wait(20) == 0
                return reason
        raise AssertionError("it died without a word")

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._lines.close()
        if self.process.stdin is not None:
            self.process.stdin.close()


class Pair:
    """Two nodes with an open channel."""

    def __init__(self, host: str, silence_ms: int = SILENCE_MS, names: tuple[str, str] | None = None) -> None:
        before = [("ip", "netns", "exec", name) for name in names] if names else [(), ()]
        self.one = Node("listen", host, 0, silence_ms, before=before[0])
        port = self.one.wait("port")[0]
        self.two = Node("connect", host, port, silence_ms, before=before[1])
        for node in (self.one, self.two):
            node.wait("open")
            node.steps(3)

    def kill(self) -> None:
        for node in (self.one, self.two):
            node.kill()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair("127.0.0.1")
    yield made
    made.kill()


def test_a_peer_that_is_killed_is_lost_at_once(pair: Pair) -> None:
    """SIGKILL of one node: the other has its reason well before the time-out and leaves nothing."""
    began = time.monotonic()
    pair.two.process.kill()
    assert pair.one.end() == "lost"
    assert time.monotonic() - began < SILENCE_MS / 1000


def test_a_peer_that_stops_for_good_is_lost_within_the_time_out(pair: Pair) -> None:
    """SIGSTOP, whose kernel goes on acknowledging: lost as silent; awake again, the stopped one learns that it was given up."""
    began = time.monotonic()
    os.kill(pair.two.pid, signal.SIGSTOP)
    try:
        assert pair.one.end() == "silent"
        assert time.monotonic() - began < 2 * SILENCE_MS / 1000 + 1
    finally:
        os.kill(pair.two.pid, signal.SIGCONT)
    assert pair.two.end() == "lost"


def test_a_short_stop_costs_nothing(pair: Pair) -> None:
    """SIGSTOP for a third of the time-out, again and again on either side: both go on and every tensor arrives as it was."""
    for node in (pair.one, pair.two) * 2:
        os.kill(node.pid, signal.SIGSTOP)
        time.sleep(SILENCE_MS / 3000)
        os.kill(node.pid, signal.SIGCONT)
        pair.one.steps(5)
        pair.two.steps(5)
    pair.one.stop()
    assert pair.one.end() == "ours"
    assert pair.two.end() == "closed"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def link() -> Iterator[tuple[str, str]]:
    """Two namespaces joined by a pair of virtual cards, 10.9.8.1 and 10.9.8.2; skipped where that is not allowed."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = (f"fb{os.getpid()}a", f"fb{os.getpid()}b")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "fb0", "netns", names[0], "type", "veth", "peer", "name", "fb0", "netns", names[1])
        for place, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.9.8.{place}/24", "dev", "fb0")
            for card in ("lo", "fb0"):
                ip("-n", name, "link", "set", card, "up")
    except subprocess.CalledProcessError as error:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
    yield names
    for name in names:
        ip("netns", "del", name)


def test_a_link_that_goes_down_is_noticed_on_both_sides(link: tuple[str, str]) -> None:
    """The link between two namespaces goes down in the middle of traffic, with no word to anybody: both sides are silent to one another."""
    pair = Pair("10.9.8.1", names=link)
    try:
        began = time.monotonic()
        ip("-n", link[0], "link", "set", "fb0", "down")
        assert pair.one.end() == "silent"
        assert pair.two.end() == "silent"
        assert time.monotonic() - began < 2 * SILENCE_MS / 1000 + 1
    finally:
        pair.kill()


def test_a_link_that_comes_back_in_time_loses_nothing(link: tuple[str, str]) -> None:
    """Down for half a second, twice, and up again: the exchange goes on, to the bit."""
    pair = Pair("10.9.8.1", 8000, names=link)
    try:
        for _ in range(2):
            ip("-n", link[1], "link", "set", "fb0", "down")
            time.sleep(0.5)
            ip("-n", link[1], "link", "set", "fb0", "up")
            pair.one.steps(5)
            pair.two.steps(5)
        pair.two.stop()
        assert pair.two.end() == "ours"
        assert pair.one.end() == "closed"
    finally:
        pair.kill()


@pytest.mark.parametrize(
    "shape",
    ["delay 0.1ms", "delay 50ms 10ms", "loss 3%", "delay 5ms reorder 25% 50%", "rate 8mbit", "delay 10ms duplicate 5% corrupt 0.5%"],
)
def test_bad_networks_are_slow_and_nothing_else(link: tuple[str, str], shape: str) -> None:
    """Latency, loss, reordering, duplicates, corruption and one megabyte a second: every tensor arrives, once, in order."""
    for name in link:
        shaped = ["tc", "-n", name, "qdisc", "add", "dev", "fb0", "root", "netem", *shape.split()]
        done = subprocess.run(shaped, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"this kernel shapes no traffic: {done.stderr.strip()}")
    pair = Pair("10.9.8.1", 8000, names=link)
    try:
        for node in (pair.one, pair.two):
            node.steps(5)
        pair.two.stop()
        assert pair.two.end() == "ours"
        assert pair.one.end() == "closed"
    finally:
        pair.kill()
