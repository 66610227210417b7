"""Channels for tests: over loopback, and over a cable in memory whose every byte the test moves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from streams import ChannelLimits, Listener, PeerLost, Reason, TcpChannel, Terms, connect, listen
from streams.clock import RealClock
from streams.frame import Header
from streams.handshake import Handshake

KEY = b"a key of at least sixteen bytes"
LAYER_MAP = ((0, 39), (39, 39))
LIMITS = ChannelLimits(frame_bytes_max=1 << 20, queue_max=64, silence_ms_max=1000, beat_ms=200)


def terms(stage: int, fingerprint: str = "model", layer_map: tuple[tuple[int, int], ...] = LAYER_MAP) -> Terms:
    return Terms(fingerprint, layer_map, stage)


def reason_of(channel: TcpChannel) -> Reason:
    """Why the channel, which has ended, lost its peer."""
    error = channel.ended.error()
    assert isinstance(error, PeerLost), f"{channel!r} did not lose its peer"
    return error.reason


@asynccontextmanager
async def loopback(limits: ChannelLimits | None = None) -> AsyncIterator[tuple[TcpChannel, TcpChannel, Listener]]:
    """Two ends over a real connection: who connected, who listened, the listener. All of it is closed after."""
    listener = await listen("127.0.0.1", 0, key=KEY, terms=terms(0), limits=limits)
    try:
        one = await connect("127.0.0.1", listener.port, key=KEY, terms=terms(1), limits=limits)
        two = await listener.accept()
        try:
            yield one, two, listener
        finally:
            await one.close()
            await two.close()
    finally:
        await listener.close()


async def turns(count: int = 8) -> None:
    """Let the loop run some rounds."""
    for _ in range(count):
        await asyncio.sleep(0)


class ManualClock(RealClock):
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.at_ns = 0

    def now_ns(self) -> int:
        return self.at_ns


class End(asyncio.Transport):
    """One end of a cable. The machine behind it takes `room` bytes at a time; the rest is held until the cable moves them on."""

    def __init__(self, channel: TcpChannel, room: int) -> None:
        super().__init__({"peername": ("cable", 1)})
        self.channel = channel
        self.room = room
        self.out = bytearray()  # taken by the machine, not at the other end
        self.held = bytearray()
        self.gone = self.wrote_eof = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0

    def get_write_buffer_size(self) -> int:
        return len(self.held)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.gone:
            self.held += data
            self.fill()

    def writelines(self, list_of_data: object) -> None:
        self.write(b"".join(list_of_data))  # type: ignore[call-overload]  # as asyncio's own does

    def fill(self) -> None:
        taken = min(self.room - len(self.out), len(self.held))
        self.out += self.held[:taken]
        del self.held[:taken]

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.wrote_eof = True

    def abort(self) -> None:
        self.lose(None)

    def lose(self, cause: Exception | None) -> None:
        if not self.gone:
            self.gone = True
            self.held.clear()
            asyncio.get_running_loop().call_soon(self.channel.connection.connection_lost, cause)

    def feed(self, data: bytes | bytearray) -> None:
        """Bytes arrive here."""
        left = memoryview(bytes(data))
        while len(left) and not self.gone:
            space = self.channel.connection.get_buffer(-1)
            assert len(space) > 0
            count = min(len(space), len(left))
            space[:count] = left[:count]
            self.channel.connection.buffer_updated(count)
            left = left[count:]


class Cable:
    """Two channels joined in memory."""

    def __init__(self, limits: ChannelLimits | None = None, *, room: int = 1 << 30, keys: tuple[bytes, bytes] = (KEY, KEY)) -> None:
        limits = limits or ChannelLimits()
        self.clock = ManualClock()
        self.one = TcpChannel(Handshake(keys[0], terms(1), connects=True), limits, self.clock)
        self.two = TcpChannel(Handshake(keys[1], terms(0), connects=False), limits, self.clock)
        self.left, self.right = End(self.one, room), End(self.two, room)
        self.one.connection.connection_made(self.left)
        self.two.connection.connection_made(self.right)

    def other(self, end: End) -> End:
        return self.right if end is self.left else self.left

    def move(self, end: End, count: int | None = None) -> bytes:
        """Take up to `count` bytes that `end` has sent to the other end; returns them."""
        data = bytes(end.out[:count])
        del end.out[: len(data)]
        self.other(end).feed(data)
        if end.gone and not end.out and self.other(end).wrote_eof:
            self.other(end).lose(None)
        if not end.gone:
            end.fill()
            end.channel.connection.resume_writing()
        return data

    async def settle(self) -> None:
        """Move bytes both ways until nobody has any."""
        quiet = 0
        while quiet < 3:
            moved = len(self.move(self.left)) + len(self.move(self.right))
            quiet = 0 if moved else quiet + 1
            await turns(3)

    async def opened(self) -> "Cable":
        await self.settle()
        assert self.one.opened.error() is None, self.one.opened.error()
        assert self.two.opened.error() is None, self.two.opened.error()
        assert self.one.opened.done()
        assert self.two.opened.done()
        return self

    async def pull(self) -> None:
        """The cable is out: both machines say so."""
        for end in (self.left, self.right):
            end.lose(ConnectionResetError("pulled"))
        await turns()

    async def pass_ms(self, duration_ms: int, step_ms: int, *channels: TcpChannel) -> None:
        """Let time pass for these channels, tick by tick."""
        for _ in range(0, duration_ms, step_ms):
            self.clock.at_ns += step_ms * 1_000_000
            for channel in channels or (self.one, self.two):
                channel.connection.tick()
        await turns()


def frame_of(channel: TcpChannel, header: Header, payload: bytes = b"", step: int = 0) -> bytes:
    """A frame as this channel would send it next."""
    return channel._framed(header, step, payload) + payload


async def ended_with(cable: Cable) -> Reason:
    """The reason for which the right end ended, everything of it settled."""
    await turns()
    assert cable.two.ended.done(), f"{cable.two!r} goes on"
    assert cable.right.gone
    return reason_of(cable.two)
