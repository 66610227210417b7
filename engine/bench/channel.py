"""Channels against bare connections between two processes, on loopback or in two network namespaces: throughput and the time of a hop.

1. Only ratios count: each round measures every arm once, in an order that turns round by round, and a ratio is of two arms of one round.
2. What arrives is compared with what was sent before anything is measured.
3. Throughput is payload over the time from the first send to the word that all of it arrived. A hop is half a turn there and back, with
   receives asked for ahead; the peer answers from a callback, as a bare echo does, or from a task.
4. iperf3, where it is installed, moves bytes over a connection of its own, in the same rounds: as many, but at least `_IPERF_BYTES_MIN`,
   since it stops counting once all is sent and leaves out what is still on its way: of a few MiB it may count none.
"""

import asyncio
import json
import multiprocessing
import shutil
import socket
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from rich.table import Table

from engine.bench.channel_peer import BARE, KEY, LIMITS, Plan, serve_peer, terms
from engine.bench.spread import percentile
from engine.bench.two_hosts import Hosts, inside
from engine.errors import BadSetting
from streams import TcpChannel, connect

__all__ = ["ChannelTimes", "as_json", "measure_channel", "table"]

_VERSION = 2
_WIDTH = 6144  # of a row: 12 KiB in bfloat16
_ROWS = 64
_DEPTH = 8  # frames of 64 rows asked for ahead
_IPERF_BYTES_MIN = 128 << 20  # against socket buffers of a few MiB
_HOPS_AHEAD = 4  # rows of a hop asked for ahead
CHANNEL, SMALL, BARE_STREAM, IPERF = "channel, 64 rows a frame", "channel, 1 row a frame", "bare connection", "iperf3"
STREAMS, TASK = "asyncio's streams", "channel, answered by a task"


@dataclass(slots=True)
class ChannelTimes:
    """Bytes a second of each arm, a round each; microseconds of hops, the median of each round."""

    payload_bytes: int
    turns: int
    throughput: dict[str, list[float]] = field(default_factory=dict)
    hop_us: dict[str, list[float]] = field(default_factory=dict)

    def ratio(self, of: str, to: str, what: str) -> float:
        """The median over the rounds of one arm over another. `what`: `throughput` or `hop_us`."""
        arms: dict[str, list[float]] = getattr(self, what)
        return statistics.median(one / two for one, two in zip(arms[of], arms[to], strict=True))


async def measure_channel(
    rounds: int, frames: int, turns: int, watch: Callable[[str, int, int], None], *, hosts: Hosts | None = None
) -> ChannelTimes:  # fmt: skip
    """`frames` of 64 rows and `turns` there and back, `rounds` times; between `hosts`, else on loopback.

    Raises: BadSetting: a count is below 1.
    """
    if min(rounds, frames, turns) < 1:
        raise BadSetting("--rounds, --frames and --turns must be at least 1")
    near, far, address = (None, None, "127.0.0.1") if hosts is None else (hosts.near, hosts.far, hosts.address)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve_peer, args=(theirs, address, far), daemon=True)
    process.start()
    try:
        port, *others = await asyncio.to_thread(ours.recv)
        with inside(near):
            channel = await connect(address, port, key=KEY, terms=terms(1), limits=LIMITS)
            try:
                return await _rounds(_Arms(channel, address, (others[0], others[1]), frames, turns), rounds, watch, far)
            finally:
                await channel.close()
    finally:
        await asyncio.to_thread(process.join, 5)
        process.kill()


class _Arms:
    """The arms, and what they send."""

    def __init__(self, channel: TcpChannel, address: str, ports: tuple[int, int], frames: int, turns: int) -> None:
        self.channel = channel
        self.address = address
        self.bare_port, self.echo_port = ports
        self.frames = frames
        self.turns = turns
        self.plans = 0
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randn(_ROWS, _WIDTH, generator=generator).bfloat16()
        self.row = self.rows[:1].contiguous()

    async def check(self) -> None:
        """What comes back is what went."""
        into = torch.zeros_like(self.rows)
        await self._plan(Plan("task", _ROWS, _WIDTH, 1, 1))
        back = self.channel.receive(into, kind="back", step=0)
        self.channel.send(self.rows, kind="there", step=0)
        await back
        assert torch.equal(into.view(torch.uint8), self.rows.view(torch.uint8)), "a frame came back changed"

    async def _plan(self, plan: Plan) -> int:
        await self.channel.send(msgspec.json.encode(plan), kind="plan", step=self.plans)
        self.plans += 1
        return self.plans - 1

    async def frames_per(self, source: torch.Tensor, frames: int, depth: int) -> float:
        """Bytes a second over the channel."""
        turn = await self._plan(Plan("take", source.shape[0], _WIDTH, frames, depth))
        done = self.channel.receive_bytes(kind="done", step=turn, bytes_max=0)
        began = time.perf_counter()
        for step in range(frames):
            await self.channel.wait_room()
            sent = self.channel.send(source, kind="there", step=step)
            if step % depth == depth - 1:
                await sent
        await done
        return frames * source.numel() * 2 / (time.perf_counter() - began)

    async def hop(self, answer: str) -> float:
        """Microseconds, the median. `answer`: `callback` or `task`."""
        ahead = min(_HOPS_AHEAD, self.turns)
        intos, taken = [torch.zeros_like(self.row) for _ in range(ahead)], []
        await self._plan(Plan(answer, 1, _WIDTH, self.turns, _HOPS_AHEAD))
        asked = [self.channel.receive(into, kind="back", step=step) for step, into in enumerate(intos)]
        for step in range(self.turns):
            began = time.perf_counter()
            self.channel.send(self.row, kind="there", step=step)
            into = await asked[step % ahead]
            taken.append(time.perf_counter() - began)
            if step + ahead < self.turns:
                asked[step % ahead] = self.channel.receive(into, kind="back", step=step + ahead)
        return 1e6 * percentile(tuple(taken), 50) / 2

    async def bare_stream(self) -> float:
        """Bytes a second of plain writes, as much at a time as a frame has."""
        reader, writer = await asyncio.open_connection(self.address, self.bare_port)
        message = self.rows.view(torch.uint8).numpy().tobytes()
        writer.write(BARE.pack(False, len(message), self.frames))
        began = time.perf_counter()
        for _ in range(self.frames):
            writer.write(message)
            await writer.drain()
        await reader.readexactly(1)
        taken = time.perf_counter() - began
        writer.close()
        await writer.wait_closed()
        return self.frames * len(message) / taken

    async def stream_hop(self) -> float:
        """Microseconds, the median: asyncio's streams on either side."""
        reader, writer = await asyncio.open_connection(self.address, self.echo_port)
        message = self.row.view(torch.uint8).numpy().tobytes()
        writer.write(BARE.pack(True, len(message), self.turns))
        taken = []
        for _ in range(self.turns):
            began = time.perf_counter()
            writer.write(message)
            await reader.readexactly(len(message))
            taken.append(time.perf_counter() - began)
        writer.close()
        await writer.wait_closed()
        return 1e6 * percentile(tuple(taken), 50) / 2

    async def bare_hop(self) -> float:
        """Microseconds, the median: a protocol on either side, and one future a turn."""
        message = self.row.view(torch.uint8).numpy().tobytes()
        loop = asyncio.get_running_loop()
        transport, echo = await loop.create_connection(lambda: _BareTurns(len(message)), self.address, self.bare_port)
        transport.write(BARE.pack(True, len(message), self.turns))
        taken = []
        for _ in range(self.turns):
            echo.back = loop.create_future()
            began = time.perf_counter()
            transport.write(message)
            await echo.back
            taken.append(time.perf_counter() - began)
        transport.close()
        return 1e6 * percentile(tuple(taken), 50) / 2


class _BareTurns(asyncio.BufferedProtocol):
    """Wakes who waits once a whole message came back."""

    def __init__(self, message_bytes: int) -> None:
        self.back: asyncio.Future[None] | None = None
        self._buffer = memoryview(bytearray(message_bytes))
        self._filled = 0

    def get_buffer(self, sizehint: int) -> memoryview:
        """Called by the loop."""
        return self._buffer[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Called by the loop."""
        self._filled += nbytes
        if self._filled == len(self._buffer):
            self._filled = 0
            if self.back is not None:
                self.back.set_result(None)


async def _iperf(payload_bytes: int, address: str, far: str | None) -> float | None:
    """Bytes a second that iperf3 received, or None where it is not installed or fails. `far`: the namespace it listens in."""
    if shutil.which("iperf3") is None:
        return None
    with socket.socket() as found:
        found.bind(("", 0))
        port = str(found.getsockname()[1])  # free here; a namespace of its own has nothing that listens
    there = () if far is None else ("ip", "netns", "exec", far)
    server = await asyncio.create_subprocess_exec(
        *there, "iperf3", "-s", "-1", "--forceflush", "-p", port, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )  # fmt: skip
    try:
        assert server.stdout is not None
        await server.stdout.readline()
        await server.stdout.readline()  # it listens
        client = await asyncio.create_subprocess_exec(
            "iperf3", "-c", address, "-p", port, "-n", str(max(payload_bytes, _IPERF_BYTES_MIN)), "-J", stdout=asyncio.subprocess.PIPE
        )  # fmt: skip
        output, _ = await client.communicate()
        rate = float(json.loads(output)["end"]["sum_received"]["bits_per_second"]) / 8 if client.returncode == 0 else 0.0
        return rate or None
    finally:
        if server.returncode is None:
            server.terminate()
        await server.wait()


async def _rounds(arms: _Arms, rounds: int, watch: Callable[[str, int, int], None], far: str | None) -> ChannelTimes:
    found = ChannelTimes(arms.frames * arms.rows.numel() * 2, arms.turns)
    await arms.check()
    throughput: list[tuple[str, Callable[[], Awaitable[float | None]]]] = [
        (CHANNEL, lambda: arms.frames_per(arms.rows, arms.frames, _DEPTH)),
        (BARE_STREAM, arms.bare_stream),
        (IPERF, lambda: _iperf(found.payload_bytes, arms.address, far)),
        (SMALL, lambda: arms.frames_per(arms.row, arms.frames * _ROWS // 4, _ROWS)),
    ]
    hops: list[tuple[str, Callable[[], Awaitable[float]]]] = [
        (CHANNEL, lambda: arms.hop("callback")), (BARE_STREAM, arms.bare_hop), (TASK, lambda: arms.hop("task")), (STREAMS, arms.stream_hop),
    ]  # fmt: skip
    for turn in range(-1, rounds):  # one round that is not counted
        for place in range(len(throughput)):
            name, measure = throughput[(place + turn) % len(throughput)]
            value = await measure()
            if turn >= 0 and value is not None:
                found.throughput.setdefault(name, []).append(value)
        for place in range(len(hops)):
            name, hop = hops[(place + turn) % len(hops)]
            value = await hop()
            if turn >= 0:
                found.hop_us.setdefault(name, []).append(value)
        watch("rounds", turn + 1, rounds)
    return found


def _ratios(found: ChannelTimes) -> dict[str, float]:
    ratios = {}
    for name in found.throughput:
        for to in (BARE_STREAM, IPERF):
            if name not in (to, BARE_STREAM, IPERF) and len(found.throughput.get(to, ())) == len(found.throughput[name]):
                ratios[f"throughput: {name} / {to}"] = found.ratio(name, to, "throughput")
    for name, to, said in (
        (CHANNEL, BARE_STREAM, "hop: channel / bare protocol"),
        (TASK, STREAMS, "hop: channel, tasks / asyncio's streams"),
    ):
        ratios[said] = found.ratio(name, to, "hop_us")
    ratios["hop: channel, tasks / bare protocol"] = found.ratio(TASK, BARE_STREAM, "hop_us")
    return ratios


def as_json(found: ChannelTimes, machine: dict[str, Any], *, namespaces: bool) -> dict[str, Any]:
    """Everything."""
    return {
        "version": _VERSION, "kind": "channel", "namespaces": namespaces, "payload_bytes": found.payload_bytes, "turns": found.turns,
        "ratios": _ratios(found), "bytes_per_second": found.throughput, "hop_us": found.hop_us, "machine": machine,
    }  # fmt: skip


def table(found: ChannelTimes) -> Table:
    """A row a ratio, with its spread over the rounds."""
    drawn = Table(title="channels against bare connections", title_justify="left")
    drawn.add_column("")
    drawn.add_column("median ratio", justify="right")
    for name, value in _ratios(found).items():
        drawn.add_row(name, f"{value:.2f}")
    return drawn
