"""The other process of `forebay bench channel`: it takes or sends back what comes, over a channel and over a bare connection.

1. Answers are as lean as their kind allows: a channel's peer asks for frames ahead and touches no byte; a bare one reads into one
   buffer and, where it echoes, writes that buffer back as soon as a message is whole. A channel's echo comes from the callback of the
   event, as the bare one's does, or from a task that awaited it.
"""

import asyncio
import struct
from multiprocessing.connection import Connection as Pipe

import msgspec
import torch
import uvloop

from engine.bench.two_hosts import inside
from streams import ChannelLimits, Event, PeerLost, TcpChannel, Terms, listen

__all__ = ["BARE", "KEY", "LIMITS", "Plan", "serve_peer", "terms"]

KEY = b"a key for measuring, on loopback"
LIMITS = ChannelLimits(silence_ms_max=60_000, beat_ms=1000)  # a machine shared with others may leave a process waiting
BARE = struct.Struct("<?QQ")  # echo, bytes a message, messages
_READ_BYTES = 1 << 20


class Plan(msgspec.Struct, frozen=True):
    """What is sent next over a channel: `frames` of [rows, width] in bfloat16, `depth` of them asked for ahead."""

    answer: str  # "callback" and "task" send it back, "take" does not
    rows: int
    width: int
    frames: int
    depth: int


def terms(stage: int) -> Terms:
    """Two stages of nothing."""
    return Terms("bench", ((0, 1), (1, 1)), stage)


def serve_peer(pipe: Pipe, address: str, host: str | None) -> None:
    """The process: tells its ports at `address` over the pipe and serves until the channel is closed. `host`: a namespace."""
    torch.set_num_threads(1)
    with inside(host):
        uvloop.run(_serve(pipe, address))


async def _serve(pipe: Pipe, address: str) -> None:
    listener = await listen(address, 0, key=KEY, terms=terms(0), limits=LIMITS)
    bare = await asyncio.get_running_loop().create_server(BareEcho, address, 0)
    echo = await asyncio.start_server(_stream_echo, address, 0)
    pipe.send((listener.port, bare.sockets[0].getsockname()[1], echo.sockets[0].getsockname()[1]))
    channel = await listener.accept()
    try:
        await _follow_plans(channel)
    except PeerLost:
        pass  # the measuring process is done
    finally:
        await channel.close()
        bare.close()
        echo.close()
        await listener.close()


async def _stream_echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An echo as asyncio's streams make it: a `BARE` head, then whole messages, sent back."""
    _, message_bytes, messages = BARE.unpack(await reader.readexactly(BARE.size))
    for _ in range(messages):
        writer.write(await reader.readexactly(message_bytes))
        await writer.drain()
    writer.close()


async def _follow_plans(channel: TcpChannel) -> None:
    turn = 0
    while True:
        plan = msgspec.json.decode(await channel.receive_bytes(kind="plan", step=turn, bytes_max=1000), type=Plan)
        turn += 1
        if plan.answer == "callback":
            await _Answers(channel, plan).done
        else:
            await _follow(channel, plan)
        if plan.answer == "take":
            await channel.send(b"", kind="done", step=turn - 1)


async def _follow(channel: TcpChannel, plan: Plan) -> None:
    buffers = [torch.zeros(plan.rows, plan.width, dtype=torch.bfloat16) for _ in range(plan.depth)]
    asked: list[Event[torch.Tensor]] = [
        channel.receive(buffers[step], kind="there", step=step) for step in range(min(plan.depth, plan.frames))
    ]
    back: Event[None] | None = None
    for step in range(plan.frames):
        into = await asked[step % plan.depth]
        if plan.answer == "task":
            back = channel.send(into, kind="back", step=step)
        if step + plan.depth < plan.frames:
            after = (back,) if back is not None else ()
            asked[step % plan.depth] = channel.receive(into, kind="there", step=step + plan.depth, after=after)


class _Answers:
    """Sends each frame back from its callback."""

    def __init__(self, channel: TcpChannel, plan: Plan) -> None:
        self.done: Event[None] = Event("answers")
        self._channel = channel
        self._plan = plan
        for step in range(min(plan.depth, plan.frames)):
            self._ask(torch.zeros(plan.rows, plan.width, dtype=torch.bfloat16), step, ())

    def _ask(self, into: torch.Tensor, step: int, after: tuple[Event[None], ...]) -> None:
        self._channel.receive(into, kind="there", step=step, after=after).on_done(lambda event: self._answer(event, step))

    def _answer(self, event: Event[torch.Tensor], step: int) -> None:
        if event.error() is not None:
            self.done.settle(None, event.error())
            return
        into = event.result()
        back = self._channel.send(into, kind="back", step=step)
        if step + self._plan.depth < self._plan.frames:
            self._ask(into, step + self._plan.depth, (back,))
        elif step + 1 == self._plan.frames:
            self.done.settle(None, None)


class BareEcho(asyncio.BufferedProtocol):
    """A bare connection: a `BARE` head, then messages. Echoes each, or answers the last with a byte."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._filled = 0
        self._left = 0
        self._message_bytes = 0
        self._echo = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = transport  # type: ignore[assignment]  # uvloop's has the methods and another parent

    def get_buffer(self, sizehint: int) -> memoryview:
        """Called by the loop: the head or an echoed message from the start of the buffer, anything else over what was there."""
        if not self._left:
            return self._buffer[self._filled : BARE.size]
        return self._buffer[self._filled : self._message_bytes] if self._echo else self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Called by the loop."""
        assert self._transport is not None
        if not self._left:
            self._filled += nbytes
            if self._filled == BARE.size:
                self._echo, self._message_bytes, messages = BARE.unpack_from(self._buffer)
                self._left, self._filled = self._message_bytes * messages, 0
            return
        self._left -= nbytes
        if not self._echo:
            if not self._left:
                self._transport.write(b"!")
            return
        self._filled += nbytes
        if self._filled == self._message_bytes:
            self._filled = 0
            self._transport.write(bytes(self._buffer[: self._message_bytes]))
