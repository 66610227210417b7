"""Channels whose peer is silent, takes nothing or is closed meanwhile: lost within the time-out, never before it, and ended once."""

import asyncio

import torch

from streams import Closed, Reason
from streams.frame import Beat
from tests.streams.channel_world import LIMITS, Cable, ended_with, frame_of, reason_of, turns


async def test_a_peer_that_falls_silent_is_lost_within_the_time_out() -> None:
    """An end that hears nothing for a second says so, also in the middle of a frame; who waits gets it; before that, nothing happens."""
    cable = await Cable(LIMITS).opened()
    asked = cable.two.receive_bytes(kind="x", step=0, bytes_max=1000)
    await turns()
    cable.move(cable.right)
    cable.one.send(bytes(1000), kind="x", step=0)
    await turns()
    cable.move(cable.left, 500)
    await cable.pass_ms(1000, 200, cable.two)
    assert not cable.two.ended.done(), "the first tick had heard something"
    await cable.pass_ms(200, 200, cable.two)
    assert await ended_with(cable) == Reason.SILENT
    assert asked.error() is cable.two.ended.error()


async def test_beats_keep_an_idle_channel_open_and_do_not_pile_up() -> None:
    """Two ends with nothing to say stay open for many time-outs; towards an end that takes nothing one beat waits, not hundreds."""
    cable = await Cable(LIMITS, room=128).opened()
    for _ in range(100):
        await cable.pass_ms(200, 200)
        await cable.settle()
    assert not cable.one.ended.done()
    assert not cable.two.ended.done()
    for _ in range(4):
        await cable.pass_ms(200, 200)
        assert cable.left.get_write_buffer_size() <= 128


async def test_our_own_standstill_is_not_the_peers_silence() -> None:
    """A loop that stood still for an hour counts it as two beats, and goes on when the peer is heard again."""
    cable = await Cable(LIMITS).opened()
    await cable.pass_ms(200, 200)  # nothing was heard since
    cable.clock.at_ns += 3600 * 10**9
    for channel in (cable.one, cable.two):
        channel.connection.tick()
    await cable.settle()
    assert not cable.two.ended.done()
    await cable.pass_ms(200, 200)
    await cable.settle()
    await cable.pass_ms(800, 200)
    assert not cable.two.ended.done()


async def test_a_peer_that_speaks_and_takes_nothing_is_lost() -> None:
    """A send of which not a byte moves for the time-out ends the channel, though beats come; its buffer is free then."""
    cable = await Cable(LIMITS, room=1000).opened()
    cable.two.receive(torch.zeros(5000, dtype=torch.uint8), kind="x", step=0)
    await cable.settle()
    sent = cable.one.send(torch.ones(5000, dtype=torch.uint8), kind="x", step=0)
    for _ in range(8):
        cable.left.feed(frame_of(cable.two, Beat()))
        await cable.pass_ms(200, 200, cable.one)
    assert reason_of(cable.one) == Reason.SILENT
    assert "was taken" in str(cable.one.ended.error())
    assert sent.error() is cable.one.ended.error()


async def test_a_slow_wire_is_not_silence() -> None:
    """A frame that takes ten time-outs to arrive, a hundred bytes a beat, arrives."""
    cable = await Cable(LIMITS, room=100).opened()
    into = torch.zeros(5000, dtype=torch.uint8)
    received = cable.two.receive(into, kind="x", step=0)
    await cable.settle()
    sent = cable.one.send(torch.ones(5000, dtype=torch.uint8), kind="x", step=0)
    for _ in range(60):
        await cable.pass_ms(200, 200)
        cable.move(cable.left)
        cable.move(cable.right)
    assert await received is into
    assert into.eq(1).all()
    await sent


async def test_what_comes_while_the_last_frame_goes_out_does_not_disturb_it() -> None:
    """Closed in the middle of a frame, with a frame of the peer's half here: ours is finished, theirs is dropped, then both end."""
    cable = await Cable(LIMITS, room=1000).opened()
    into, ours = torch.zeros(5000, dtype=torch.uint8), torch.full((50,), 3, dtype=torch.uint8)
    received = cable.two.receive(into, kind="x", step=0)
    dropped = cable.one.receive(ours, kind="y", step=0)
    await cable.settle()
    sent = cable.one.send(torch.ones(5000, dtype=torch.uint8), kind="x", step=0)
    cable.two.send(torch.ones(50, dtype=torch.uint8), kind="y", step=0)
    await turns()
    assert len(cable.move(cable.right, 150)) == 150  # its head and a part of its payload
    closing = asyncio.ensure_future(cable.one.close())
    await turns()
    assert isinstance(dropped.error(), Closed)
    await cable.settle()
    await closing
    assert sent.error() is None
    assert await received is into
    assert into.eq(1).all()
    assert ours[22:].eq(3).all(), "a buffer was written after its event"
    assert reason_of(cable.two) == Reason.CLOSED


async def test_closing_towards_a_peer_that_takes_nothing_ends_within_the_time_out() -> None:
    """A close in the middle of a frame that nobody takes cuts the frame off after the time-out."""
    cable = await Cable(LIMITS, room=1000).opened()
    cable.two.receive(torch.zeros(5000, dtype=torch.uint8), kind="x", step=0)
    await cable.settle()
    sent = cable.one.send(torch.ones(5000, dtype=torch.uint8), kind="x", step=0)
    await turns()
    closing = asyncio.ensure_future(cable.one.close())
    await turns()
    assert not closing.done()
    await cable.pass_ms(1400, 200, cable.one)
    await closing
    assert sent.error() is not None


async def test_who_closes_stays_until_the_peer_knows() -> None:
    """Let go at once, a connection is reset by what the peer still sends, and the last word, lost on its way, never comes."""
    cable = await Cable(LIMITS).opened()
    closing = asyncio.ensure_future(cable.one.close())
    await turns()
    cable.two.send(torch.ones(50, dtype=torch.uint8), kind="y", step=0)  # knows nothing yet
    cable.move(cable.right)
    await turns()
    assert cable.left.wrote_eof
    assert not cable.left.gone
    assert not closing.done()
    await cable.settle()
    await closing
    assert reason_of(cable.two) == Reason.CLOSED


async def test_a_peer_that_never_learns_of_the_close_is_left_after_the_time_out() -> None:
    """Nothing of the last word arrives, while the peer goes on beating: the close ends all the same."""
    cable = await Cable(LIMITS).opened()
    closing = asyncio.ensure_future(cable.one.close())
    for _ in range(5):
        await turns()
        assert not closing.done()
        await cable.pass_ms(200, 200)
        cable.move(cable.right)
    await turns()
    assert cable.left.gone
    await closing


async def test_callbacks_may_close_the_channel_they_are_told_by() -> None:
    """A receive's callback that ends the channel while more frames follow in the same bytes leaves everything settled."""
    cable = await Cable(LIMITS).opened()
    closing: list[asyncio.Future[None]] = []
    first = cable.two.receive_bytes(kind="x", step=0, bytes_max=10)
    second = cable.two.receive_bytes(kind="x", step=1, bytes_max=10)
    first.on_done(lambda _: closing.append(asyncio.ensure_future(cable.two.close())))
    await cable.settle()
    for step in range(2):
        cable.one.send(b"x", kind="x", step=step)
    await cable.settle()
    await closing[0]
    assert (first.done(), second.done(), cable.two.ended.done(), cable.one.ended.done()) == (True, True, True, True)
