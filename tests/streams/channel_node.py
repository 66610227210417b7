"""One node of two, as a process of its own: exchanges tensors with the other until the channel ends, and says on standard output how.

    python -m tests.streams.channel_node listen|connect HOST PORT SILENCE_MS

Lines: `port N` (who listens), `open`, `step N` after each exchange, and last `end REASON STEPS DESCRIPTORS`: descriptors beyond those
from before the channel. It ends by itself in good order when standard input does.
"""

import asyncio
import os
import sys

import torch
import uvloop

from streams import ChannelLimits, PeerLost, StreamError, TcpChannel, connect, listen
from tests.streams.channel_world import KEY, loopback, terms

_SHAPE = (16, 6144)


def noise(step: int, stage: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2 * step + stage)
    return torch.randint(-(2**15), 2**15, _SHAPE, dtype=torch.int16, generator=generator).view(torch.bfloat16)


def say(*words: object) -> None:
    print(*words, flush=True)


async def exchange(channel: TcpChannel, stage: int, told: list[int]) -> None:
    into = torch.zeros(_SHAPE, dtype=torch.bfloat16)
    for step in range(1 << 30):
        received = channel.receive(into, kind="x", step=step)
        sent = channel.send(noise(step, stage), kind="x", step=step)
        await received
        await sent
        assert torch.equal(into.view(torch.int16), noise(step, 1 - stage).view(torch.int16)), f"step {step} arrived changed"
        told[0] = step + 1
        say("step", step)


async def live(role: str, host: str, port: int, silence_ms: int) -> None:
    async with loopback():
        pass  # what a loop opens once for itself
    limits = ChannelLimits(silence_ms_max=silence_ms, beat_ms=silence_ms // 4)
    loop, told = asyncio.get_running_loop(), [0]
    before = len(os.listdir("/proc/self/fd"))
    if role == "listen":
        listener = await listen(host, port, key=KEY, terms=terms(0), limits=limits)
        say("port", listener.port)
        channel = await listener.accept()
        await listener.close()
    else:
        channel = await connect(host, port, key=KEY, terms=terms(1), limits=limits)
    say("open")
    ended = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
    working = asyncio.ensure_future(exchange(channel, channel.peer.stage ^ 1, told))
    await asyncio.wait((ended, working), return_when=asyncio.FIRST_COMPLETED)
    reason = "ours"
    if working.done():
        error = working.exception()
        assert isinstance(error, StreamError), repr(error)
        reason = error.reason if isinstance(error, PeerLost) else type(error).__name__
    await channel.close()
    await asyncio.wait((working,))
    say("end", reason.replace(" ", "_"), told[0], len(os.listdir("/proc/self/fd")) - before)
    assert loop is asyncio.get_running_loop()
    os._exit(0)  # a thread still reads standard input


if __name__ == "__main__":
    torch.set_num_threads(1)
    uvloop.run(live(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
