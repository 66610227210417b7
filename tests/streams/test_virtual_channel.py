"""Channels on the virtual backend: what a real one promises, under every order, with poison where a real one would be late."""

import asyncio

import pytest
import torch

from streams import (
    BufferChanged,
    Channel,
    Closed,
    Event,
    Fault,
    PeerLost,
    Reason,
    SeededOrder,
    TransferFailed,
    VirtualBackend,
    sealed,
    virtual_pair,
)
from tests.streams.channel_world import turns

pytestmark = pytest.mark.both_loops
SEEDS = range(20)


async def exchange(one: Channel, two: Channel, said: list[str]) -> None:
    """Ten tensors of two kinds each way, asked for early and late, and a message."""
    sources = [torch.full((4,), float(step)) for step in range(10)]
    intos = [[torch.zeros(4) for _ in sources] for _ in range(2)]
    events: list[Event[torch.Tensor] | Event[None] | Event[bytes]] = []
    for step, source in enumerate(sources):
        for place, (near, far) in enumerate(((one, two), (two, one))):
            kind = f"k{step % 2}"
            for late in (step % 3 == 0, step % 3 != 0):
                if late:
                    received = far.receive(intos[place][step], kind=kind, step=step)
                    received.on_done(lambda event: said.append(f"{event.stream} {event.label}"))
                    events.append(received)
                else:
                    events.append(near.send(source, kind=kind, step=step))
        await asyncio.sleep(0)
    events += [two.receive_bytes(kind="m", step=0, bytes_max=5), one.send(b"hello", kind="m", step=0)]
    for event in events:
        await event
    assert all(torch.equal(into, source) for side in intos for into, source in zip(side, sources, strict=True))


async def test_every_order_brings_everything_and_a_seed_repeats_itself() -> None:
    """Under twenty seeds all arrives; the same seed gives the same order of completions, and not all seeds the same."""
    orders = set()
    for seed in SEEDS:
        runs = []
        for _ in range(2):
            said: list[str] = []
            backend = VirtualBackend(seed)
            with sealed():
                one, two = virtual_pair(backend)
                await exchange(one, two, said)
                assert two.statistics().received_bytes == 165
                await one.close()
                await two.ended.wait_done()
                await backend.close()
            runs.append(tuple(said))
        assert runs[0] == runs[1]
        orders.add(runs[0])
    assert len(orders) > 5


async def test_what_is_not_awaited_is_poison() -> None:
    """From `receive` to its event the buffer is NaN, whether or not the send is there; nothing is sent before it was asked for."""
    backend = VirtualBackend(1)
    one, two = virtual_pair(backend)
    sent = one.send(torch.ones(4), kind="x", step=0)
    await turns(300)
    assert not sent.done()
    into = torch.zeros(4)
    received = two.receive(into, kind="x", step=0)
    assert into.isnan().all()
    assert (await received).eq(1).all()
    await sent
    await one.close()
    await backend.close()


async def test_a_source_that_is_written_in_flight_is_found() -> None:
    """Writing what is being sent is a bug that the backend names."""
    backend = VirtualBackend(1)
    one, two = virtual_pair(backend)
    source = torch.ones(4)
    received = two.receive(torch.zeros(4), kind="x", step=0)
    sent = one.send(source, kind="x", step=0)
    source.fill_(2)
    with pytest.raises(BufferChanged):
        await sent
    with pytest.raises(TransferFailed):
        await received
    await one.close()
    with pytest.raises(BufferChanged):
        await backend.close()


@pytest.mark.parametrize("label", ["send x", "receive x"])
async def test_a_failed_transfer_fails_alone(label: str) -> None:
    """By order of a fault, or after a failed copy, one frame fails on the side that waits for it; those around it arrive."""
    backend = VirtualBackend(SeededOrder(3, faults=(Fault(label, 1),)))
    one, two = virtual_pair(backend)
    copied = Event[None]("copy")
    receives = [two.receive(torch.zeros(2), kind="x", step=step) for step in range(4)]
    sends = [one.send(torch.ones(2), kind="x", step=step, after=(copied,) if step == 2 else ()) for step in range(4)]
    copied.settle(None, RuntimeError("the card is gone"))
    for event in (*receives, *sends):
        await event.wait_done()
    failed = [TransferFailed if event.error() else None for event in receives]
    assert failed == [None, TransferFailed, TransferFailed, None]
    assert isinstance(receives[2].error(), TransferFailed)
    assert [event.error() is None for event in sends] == [True, label != "send x", False, True]
    await one.close()
    await backend.close()


@pytest.mark.parametrize(
    ("step", "into", "reason"),
    [(1, torch.zeros(2), Reason.OUT_OF_STEP), (0, torch.zeros(3), Reason.UNEXPECTED), (0, torch.zeros(2).half(), Reason.UNEXPECTED)],
)
async def test_what_was_not_asked_for_ends_both_ends(step: int, into: torch.Tensor, reason: Reason) -> None:
    """Another step, shape or dtype than was asked for fails everything in flight with its reason, and both ends are over."""
    backend = VirtualBackend(2)
    one, two = virtual_pair(backend)
    others = [one.send(torch.ones(2), kind="y", step=0), two.receive(torch.zeros(2), kind="z", step=0)]
    received = two.receive(into, kind="x", step=step)
    sent = one.send(torch.ones(2), kind="x", step=0)
    for event in (*others, received, sent):
        with pytest.raises(PeerLost) as lost:
            await event
        assert lost.value.reason == reason
    await one.ended.wait_done()
    await two.ended.wait_done()
    with pytest.raises(PeerLost):
        one.send(b"", kind="x", step=1)
    await backend.close()


async def test_a_lost_and_a_closed_end() -> None:
    """A broken connection is `lost` on both sides; a close is Closed here and `closed` there; buffers are poison then."""
    for broken in (True, False):
        backend = VirtualBackend(4)
        one, two = virtual_pair(backend)
        into = torch.zeros(2)
        waits = one.receive(into, kind="x", step=0), two.receive_bytes(kind="y", step=0, bytes_max=1)
        if broken:
            one.lose()
        else:
            await one.close()
        for event in waits:
            await event.wait_done()
        await one.ended.wait_done()
        await two.ended.wait_done()
        assert isinstance(waits[0].error(), PeerLost if broken else Closed)
        far = waits[1].error()
        assert isinstance(far, PeerLost)
        assert far.reason == (Reason.LOST if broken else Reason.CLOSED)
        assert into.isnan().all()
        await backend.close()
