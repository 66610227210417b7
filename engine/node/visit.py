"""The doctor at the nodes of a cluster: every node answers for itself, and measures the way to each other one.

Both ends are here: `answer_doctor` serves a channel whose peer came with the doctor's terms; `visit` asks all nodes, and has each measure
its way to the others, one pair after the other, so that no measurement meets another.

1. A node that cannot be reached, or has another key or protocol, is a line in the result, never an error.
2. Nothing of a node changes. What is sent for the bandwidth goes to a buffer that is thrown away.
3. A clock's offset is taken from the quickest of the round-trips: it is wrong by at most half of that.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import torch

from engine.node.address import Address
from engine.node.agreement import DOCTOR_ASKS
from engine.node.answering import Answering, Taker
from engine.node.caller import Caller
from engine.node.report import FRAME_BYTES, Load, NodeReport, Pair, Probe, report_of_here
from streams import ChannelLimits, Event, PeerLost, StreamError, TcpChannel, connect

__all__ = ["Effort", "Findings", "answer_doctor", "visit"]

_AHEAD = 8  # frames that are asked for ahead
_LOAD = "load"


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured, and how long a node may be silent."""

    limits: ChannelLimits
    frames: int = 128  # of 64 rows of 12 KiB
    turns: int = 50


@dataclass(frozen=True, slots=True)
class Findings:
    """What was found. `pairs`: by (from, to). `lost`: why a node said nothing. `offset_ms_of`: its clock less that of who asked."""

    nodes: tuple[Address, ...]
    reports: Mapping[Address, NodeReport]
    lost: Mapping[Address, str]
    offset_ms_of: Mapping[Address, float]
    pairs: Mapping[tuple[Address, Address], Pair]


def answer_doctor(channel: TcpChannel, key: bytes, model: str, run: Callable[..., None]) -> Answering:
    """Answer on `channel` until it ends. Args: model: the node's fingerprint, or nothing; run: as `Answering`'s."""

    async def look(_: None) -> NodeReport:
        return await asyncio.to_thread(report_of_here, model)

    async def load(asked: Load) -> None:
        await _take_load(channel, asked.frames)

    async def measure(asked: Probe) -> Pair:
        return await _pair(asked, key)

    takers = {
        "look": Taker(type(None), look), "clock": Taker(type(None), lambda _: time.time_ns()), "load": Taker(Load, load),
        "measure": Taker(Probe, measure),
    }  # fmt: skip
    return Answering(channel, takers, run)


async def _take_load(channel: TcpChannel, frames: int) -> None:
    buffers = [torch.empty(FRAME_BYTES, dtype=torch.uint8) for _ in range(min(_AHEAD, frames))]
    asked: list[Event[torch.Tensor]] = [channel.receive(buffer, kind=_LOAD, step=step) for step, buffer in enumerate(buffers)]
    for step in range(frames):
        into = await asked[step % _AHEAD]
        if step + _AHEAD < frames:
            asked[step % _AHEAD] = channel.receive(into, kind=_LOAD, step=step + _AHEAD)


async def _pair(probe: Probe, key: bytes) -> Pair:
    """Measure the way from here to another node."""
    limits = ChannelLimits(silence_ms_max=probe.silence_ms, beat_ms=max(1, probe.silence_ms // 5))
    try:
        channel = await connect(probe.host, probe.port, key=key, terms=DOCTOR_ASKS, limits=limits)
    except StreamError as error:
        return Pair(failure=str(error))
    try:
        caller = Caller(channel, lambda _: None)
        round_trip_ms, offset_ms = await _clock(caller, probe.turns)
        rate = await _rate(channel, caller, probe.frames)
        return Pair(round_trip_ms, rate, offset_ms, channel.connection.path_mtu)
    except StreamError as error:
        return Pair(failure=str(error))
    finally:
        await channel.close()


async def _clock(caller: Caller, turns: int) -> tuple[float, float]:
    """Milliseconds: the quickest round-trip, and the other's clock less ours."""
    best_ns, offset_ns = 0, 0.0
    for turn in range(turns):
        before, wall = time.perf_counter_ns(), time.time_ns()
        theirs = await caller.call("clock", None, int)
        taken = time.perf_counter_ns() - before
        if turn == 0 or taken < best_ns:
            best_ns, offset_ns = taken, theirs - (wall + taken / 2)
    return best_ns / 1e6, offset_ns / 1e6


async def _rate(channel: TcpChannel, caller: Caller, frames: int) -> float:
    """Bytes a second, from the first frame to the word that all came."""
    frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
    whole = caller.call("load", Load(frames), type(None))
    began = time.perf_counter()
    for step in range(frames):
        await channel.wait_room()
        sent = channel.send(frame, kind=_LOAD, step=step)
        if step % _AHEAD == _AHEAD - 1:
            await sent
    await whole
    return frames * FRAME_BYTES / (time.perf_counter() - began)


async def visit(nodes: Sequence[Address], key: bytes, effort: Effort, watch: Callable[[int, int], None]) -> Findings:
    """Ask every node, then measure each ordered pair. Args: watch: called with (done, in all) of reports and pairs."""
    reports: dict[Address, NodeReport] = {}
    lost: dict[Address, str] = {}
    offsets: dict[Address, float] = {}
    pairs: dict[tuple[Address, Address], Pair] = {}
    total, done = len(nodes) * len(nodes), 0
    async with AsyncExitStack() as opened:
        callers: dict[Address, Caller] = {}
        for node in nodes:
            try:
                channel = await connect(node.host, node.port, key=key, terms=DOCTOR_ASKS, limits=effort.limits)
                opened.push_async_callback(channel.close)
                callers[node] = Caller(channel, lambda _: None)
                reports[node] = await callers[node].call("look", None, NodeReport)
                offsets[node] = (await _clock(callers[node], effort.turns))[1]
            except StreamError as error:
                lost[node] = str(error)
                callers.pop(node, None)
            done += 1
            watch(done, total)
        for one in nodes:
            for other in nodes:
                if one == other:
                    continue
                pairs[one, other] = await _measured(callers.get(one), other, effort, lost.get(one, ""))
                done += 1
                watch(done, total)
    return Findings(tuple(nodes), reports, lost, offsets, pairs)


async def _measured(caller: Caller | None, to: Address, effort: Effort, why_not: str) -> Pair:
    if caller is None:
        return Pair(failure=why_not)
    probe = Probe(to.host, to.port, effort.frames, effort.turns, effort.limits.silence_ms_max)
    try:
        return await caller.call("measure", probe, Pair)
    except PeerLost as error:
        return Pair(failure=str(error))
