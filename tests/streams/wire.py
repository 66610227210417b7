"""A wire between two network namespaces as a process of its own: every packet passes through here, and some fare badly.

    python -m tests.streams.wire NAME NAME SEED [WORD=NUMBER ...]

Words: `delay_ms`, `jitter_ms`, `loss`, `twice`, `flip`, `late` (shares of packets; a late one is overtaken for `late_ms`), `bytes_per_s`
of each direction. A first name of `-` is the namespace it was started in. It gives each namespace a card `fb0`, says `ready`, and takes
lines on standard input: `cut` (nothing passes), `cut 0` (nothing of the first's passes), `join`. Needs root and /dev/net/tun. It imitates
latency, loss, duplicates, damage, reordering, slow lines with a queue of 100 ms, cables that are out. What befalls packets is drawn from
the seed in their order, which the machines' speed decides.
"""

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 1, 0x1000, 0x40000000
_QUEUE_S = 0.1


def card(name: str, place: int) -> int:
    """A descriptor of the packets of a new card in that namespace."""
    if name != "-":
        with open(f"/run/netns/{name}") as space:
            if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", b"fb0", _IFF_TUN | _IFF_NO_PI))
    for words in (f"addr add 10.9.8.{place}/24 dev fb0", "link set lo up", "link set fb0 up"):
        subprocess.run(["ip", *words.split()], check=True)
    return descriptor


class Wire:
    def __init__(self, cards: list[int], seed: int, says: dict[str, float]) -> None:
        self.cards = cards
        self.drawn = random.Random(seed)
        self.says = says
        self.cut: set[int] = set()  # directions, by whose packets they are
        self.queue: list[tuple[float, int, int, bytes]] = []  # when, number, to whom, what
        self.free = [0.0, 0.0]  # when a direction's line has sent what it was given
        self.passed = 0

    def share(self, word: str) -> bool:
        return self.drawn.random() < self.says.get(word, 0)

    def take(self, side: int, packet: bytes) -> None:
        """A packet came from `side`."""
        if side in self.cut or self.share("loss"):
            return
        now = time.monotonic()
        rate = self.says.get("bytes_per_s", 0)
        if rate:
            if self.free[side] > now + _QUEUE_S:
                return  # the queue is full
            now = self.free[side] = max(self.free[side], now) + len(packet) / rate
        delay_ms = self.says.get("delay_ms", 0) + self.drawn.uniform(-1, 1) * self.says.get("jitter_ms", 0)
        if self.share("late"):
            delay_ms += self.says.get("late_ms", 0)
        if self.share("flip"):
            place = self.drawn.randrange(len(packet))
            packet = packet[:place] + bytes((packet[place] ^ 1 << self.drawn.randrange(8),)) + packet[place + 1 :]
        for _ in range(2 if self.share("twice") else 1):
            self.passed += 1
            heapq.heappush(self.queue, (now + delay_ms / 1000, self.passed, 1 - side, packet))

    def give(self) -> float | None:
        """Deliver what is due; returns the seconds until the next is, or None."""
        while self.queue and self.queue[0][0] <= time.monotonic():
            _, _, side, packet = heapq.heappop(self.queue)
            if 1 - side not in self.cut:
                with contextlib.suppress(OSError):  # damaged so that the card refuses it, or the queue behind it is full: lost
                    os.write(self.cards[side], packet)
        return max(0.0, self.queue[0][0] - time.monotonic()) if self.queue else None

    def run(self) -> None:
        while True:
            readable, _, _ = select.select([*self.cards, 0], [], [], self.give())
            if 0 in readable:
                line = sys.stdin.readline().split()
                if not line:
                    return
                self.cut = set() if line[0] == "join" else {int(side) for side in line[1:]} or {0, 1}
                print("done", flush=True)
            for side, descriptor in enumerate(self.cards):
                if descriptor in readable:
                    for _ in range(64):
                        try:
                            self.take(side, os.read(descriptor, 65536))
                        except BlockingIOError:
                            break


if __name__ == "__main__":
    _, one, two, seed, *words = sys.argv
    wire = Wire([card(one, 1), card(two, 2)], int(seed), {word: float(number) for word, number in (each.split("=") for each in words)})
    print("ready", flush=True)
    wire.run()
