"""Channels between two processes, where they may in network namespaces of their own: links that go down, are slow or lose packets, peers
that stop or die. What namespaces and the wire between them need (root, /dev/net/tun) is skipped where it is not there, with the reason.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SILENCE_MS = 1200
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(120)]


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
def spaces() -> Iterator[tuple[str, str]]:
    """Two namespaces with nothing in them; skipped where that is not allowed."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = (f"fb{os.getpid()}a", f"fb{os.getpid()}b")
    try:
        for name in names:
            ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        ip_gone(names)
        pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
    yield names
    ip_gone(names)


def ip_gone(names: tuple[str, str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.fixture
def link(spaces: tuple[str, str]) -> tuple[str, str]:
    """The two joined by a pair of virtual cards, 10.9.8.1 and 10.9.8.2."""
    try:
        ip("link", "add", "fb0", "netns", spaces[0], "type", "veth", "peer", "name", "fb0", "netns", spaces[1])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"virtual cards are not allowed here: {error.stderr.strip()}")
    for place, name in enumerate(spaces, 1):
        ip("-n", name, "addr", "add", f"10.9.8.{place}/24", "dev", "fb0")
        for card in ("lo", "fb0"):
            ip("-n", name, "link", "set", card, "up")
    return spaces


class Wire:
    """A `wire` process between the two, 10.9.8.1 and 10.9.8.2, and the pair of nodes over it."""

    def __init__(self, spaces: tuple[str, str], *words: str, silence_ms: int = SILENCE_MS) -> None:
        command = [sys.executable, "-m", "tests.streams.wire", *spaces, "7", *words]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        self.pair = Pair("10.9.8.1", silence_ms, names=spaces)

    def say(self, words: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(words, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "done\n"

    def close(self) -> None:
        self.pair.kill()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def wired(spaces: tuple[str, str]) -> Iterator[Callable[..., Wire]]:
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        pytest.skip("a wire of our own between namespaces needs /dev/net/tun")
    made: list[Wire] = []

    def make(*words: str, silence_ms: int = SILENCE_MS) -> Wire:
        made.append(Wire(spaces, *words, silence_ms=silence_ms))
        return made[-1]

    yield make
    for wire in made:
        wire.close()


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
    [
        pytest.param("delay_ms=0.1", marks=pytest.mark.long),
        "delay_ms=50 jitter_ms=10",
        "loss=0.03",
        "delay_ms=5 late=0.25 late_ms=3",
        pytest.param("bytes_per_s=1000000", marks=pytest.mark.long),
        pytest.param("delay_ms=10 twice=0.05 flip=0.005", marks=pytest.mark.long),
    ],
)
def test_bad_networks_are_slow_and_nothing_else(wired: Callable[..., Wire], shape: str) -> None:
    """Latency, loss, reordering, one megabyte a second, duplicates and damage: every tensor arrives, once, in order."""
    pair = wired(*shape.split(), silence_ms=8000).pair
    for node in (pair.one, pair.two):
        node.steps(5)
    pair.two.stop()
    assert pair.two.end() == "ours"
    assert pair.one.end() == "closed"


def test_a_cable_pulled_in_the_middle_of_a_frame_is_noticed_on_both_sides(wired: Callable[..., Wire]) -> None:
    """On a line so slow that a frame is always under way, the cable is pulled for good: both sides are silent within the time-out."""
    wire = wired("bytes_per_s=1000000")
    began = time.monotonic()
    wire.say("cut")
    assert wire.pair.one.end() == "silent"
    assert wire.pair.two.end() == "silent"
    assert time.monotonic() - began < 2 * SILENCE_MS / 1000 + 1


@pytest.mark.parametrize("side", [0, 1])
def test_a_line_that_is_dead_one_way_ends_both_sides(wired: Callable[..., Wire], side: int) -> None:
    """What one says is lost, what it hears still comes: who hears nothing is the first to say so, and the other learns it in time."""
    wire = wired()
    deaf, dumb = (wire.pair.two, wire.pair.one) if side == 0 else (wire.pair.one, wire.pair.two)
    began = time.monotonic()
    wire.say(f"cut {side}")
    assert deaf.end() == "silent"
    assert dumb.end() in ("lost", "silent")
    assert time.monotonic() - began < 3 * SILENCE_MS / 1000 + 1


def test_a_peer_that_dies_behind_a_pulled_cable_is_lost_within_the_time_out(wired: Callable[..., Wire]) -> None:
    """Half open: the peer is dead and nobody ever said so; who is left finds out by the clock, also if the cable is back by then."""
    wire = wired()
    began = time.monotonic()
    wire.say("cut")
    wire.pair.two.process.kill()
    wire.pair.two.process.wait()
    wire.say("join")
    assert wire.pair.one.end() in ("lost", "silent")
    assert time.monotonic() - began < 2 * SILENCE_MS / 1000 + 1


def test_a_cable_that_is_back_in_time_loses_nothing(wired: Callable[..., Wire]) -> None:
    """Out for a second in the middle of frames, three times, and back: the exchange goes on, to the bit."""
    wire = wired("bytes_per_s=2000000", silence_ms=8000)
    for _ in range(3):
        wire.say("cut")
        time.sleep(1)
        wire.say("join")
        wire.pair.one.steps(3)
        wire.pair.two.steps(3)
    wire.pair.two.stop()
    assert wire.pair.two.end() == "ours"
    assert wire.pair.one.end() == "closed"


@pytest.mark.parametrize(
    ("stopped_s", "silence_ms", "lost"),
    [(1, 8000, False), pytest.param(5, 8000, False, marks=pytest.mark.long), pytest.param(30, 8000, True, marks=pytest.mark.long)],
)
def test_stops_of_one_to_thirty_seconds(stopped_s: int, silence_ms: int, lost: bool) -> None:
    """SIGSTOP shorter than the time-out costs nothing; a longer one loses the peer at the time-out, and the stopped one learns it after."""
    pair = Pair("127.0.0.1", silence_ms)
    try:
        began = time.monotonic()
        os.kill(pair.two.pid, signal.SIGSTOP)
        try:
            if lost:
                assert pair.one.end() == "silent"
                assert time.monotonic() - began < 1.5 * silence_ms / 1000 + 1
            time.sleep(max(0.0, began + stopped_s - time.monotonic()))
        finally:
            os.kill(pair.two.pid, signal.SIGCONT)
        if lost:
            assert pair.two.end() == "lost"
            return
        pair.one.steps(5)
        pair.two.steps(5)
        pair.one.stop()
        assert pair.one.end() == "ours"
        assert pair.two.end() == "closed"
    finally:
        pair.kill()
