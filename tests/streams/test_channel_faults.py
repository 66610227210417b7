"""Channels whose peer, key, network or bytes are wrong: each ends with its reason, everybody who waits hears it, nothing else is harmed."""

import asyncio
import contextlib
import random
import struct
import weakref

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from streams import Event, PeerLost, Reason, connect
from streams.frame import Beat, Content, Grant, Header, Hello, Proof, Skip, encoded, head_of
from streams.tcp import TcpChannel
from tests.streams.channel_world import KEY, LIMITS, Cable, ended_with, frame_of, loopback, reason_of, terms, turns

# what was not asked for


def sealed(channel: TcpChannel, header: bytes, payload_bytes: int = 0, step: int = 0, checksum: int = 0) -> bytes:
    """A head as `frame.py` describes it, put together here, of any header, in its place of the sequence."""
    head = struct.pack("<2sBBIQQQ88s", b"FB", 2, len(header), payload_bytes, channel._sequence, step, checksum, header)
    return head + xxhash.xxh3_64_intdigest(head, seed=channel._seed).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("kind", "step", "dtype", "shape", "reason"),
    [
        ("y", 0, "uint8", (8,), Reason.UNEXPECTED),
        ("x", 1, "uint8", (8,), Reason.OUT_OF_STEP),
        ("x", 0, "int8", (8,), Reason.UNEXPECTED),
        ("x", 0, "uint8", (2, 4), Reason.UNEXPECTED),
        ("x", 0, "bytes", (8,), Reason.UNEXPECTED),
        ("x", 0, "float8", (8,), Reason.MALFORMED),
        ("x", 0, "uint8", (9,), Reason.MALFORMED),
    ],
)
async def test_what_was_not_asked_for_ends_the_channel(kind: str, step: int, dtype: str, shape: tuple[int, ...], reason: Reason) -> None:
    """A sealed frame of another kind, step, dtype or shape than was asked for, or whose length lies, ends the channel unread."""
    cable = await Cable(LIMITS).opened()
    into = torch.full((8,), 5, dtype=torch.uint8)
    waiting = [cable.two.receive(into, kind="x", step=0), cable.two.send(into, kind="z", step=0)]
    await cable.settle()
    cable.right.feed(frame_of(cable.one, Content(kind, dtype, shape), bytes(8), step))
    assert await ended_with(cable) == reason
    assert into.eq(5).all()
    for event in waiting:
        assert event.error() is cable.two.ended.error()


async def test_a_peer_that_sends_without_being_asked_is_stopped() -> None:
    """A frame for which no buffer was given ends the channel at its head, also when one was asked for that is not free yet."""
    cable = await Cable(LIMITS).opened()
    cable.two.receive_bytes(kind="x", step=0, bytes_max=8)
    cable.right.feed(frame_of(cable.one, Content("x", "bytes", (8,)), bytes(8)))  # asked for, but never granted
    assert await ended_with(cable) == Reason.UNEXPECTED


async def test_a_slow_reader_stops_the_sender() -> None:
    """Thousands of frames' worth of sending leaves no byte on the wire, in the machine or in the peer beyond what was asked for."""
    cable = await Cable(LIMITS).opened()
    for step in range(64):
        cable.one.send(bytes(100_000), kind="x", step=step)
    await cable.settle()
    assert cable.one.statistics().sent_frames == 0
    assert not cable.left.out
    asked = [cable.two.receive_bytes(kind="x", step=step, bytes_max=100_000) for step in range(2)]
    await cable.settle()
    assert cable.one.statistics().sent_frames == cable.two.statistics().received_frames == 2
    assert all(event.done() for event in asked)


@pytest.mark.parametrize("failure", [None, RuntimeError("failed")])
async def test_grants_that_waited_for_frames_go_once_these_came(failure: Exception | None) -> None:
    """A receive that was posted while the peer had grants enough is granted when those are used up, though nothing else is posted."""
    cable = await Cable(LIMITS).opened()
    copied = Event[None]("copy")
    for step in range(5):
        cable.one.send(b"x", kind="x", step=step, after=(copied,) if step in (1, 2) else ())
    asked = [cable.two.receive_bytes(kind="x", step=step, bytes_max=1) for step in range(3)]
    await cable.settle()
    asked += [cable.two.receive_bytes(kind="x", step=step, bytes_max=1) for step in range(3, 5)]
    await cable.settle()
    assert [event.done() for event in asked] == [True, False, False, False, False]
    copied.settle(None, failure)
    await cable.settle()
    assert [event.done() for event in asked] == [True] * 5


@pytest.mark.parametrize("header", [Hello(b"n" * 32), Proof(b"m" * 32)])
async def test_handshake_frames_after_it_end_the_channel(header: Header) -> None:
    """A second Hello or Proof is refused."""
    cable = await Cable(LIMITS).opened()
    cable.right.feed(frame_of(cable.one, header))
    assert await ended_with(cable) == Reason.UNAUTHENTICATED


@pytest.mark.parametrize("header", [Beat(), Grant("x", 1), Skip("x", ""), Content("x", "bytes", (0,))])
async def test_nothing_counts_before_the_handshake(header: Header) -> None:
    """A stranger's frames of any other sort end the connection."""
    cable = Cable(LIMITS)
    cable.right.feed(head_of(header, 0, 0))
    assert await ended_with(cable) == Reason.UNAUTHENTICATED


async def test_a_payload_past_the_limit_is_refused_at_its_head() -> None:
    """A frame of more than `frame_bytes_max`, or terms of a stranger past 16 KiB, are refused before a byte of them is read."""
    cable = await Cable(LIMITS).opened()
    cable.right.feed(sealed(cable.one, encoded(Content("x", "uint8", (1 << 21,))), 1 << 21))
    assert await ended_with(cable) == Reason.TOO_LARGE
    cable = Cable(LIMITS)
    cable.right.feed(head_of(Proof(b"m" * 32), 0, 0, payload=bytes(16385)))
    assert await ended_with(cable) == Reason.TOO_LARGE


async def test_grants_without_end_are_refused() -> None:
    """A peer that asks for more frames, or for frames of more kinds, than a channel may is refused: they would be remembered."""
    cable = await Cable(LIMITS).opened()
    cable.right.feed(frame_of(cable.one, Grant("x", 64)))
    cable.right.feed(frame_of(cable.one, Grant("x", 1)))
    assert await ended_with(cable) == Reason.TOO_LARGE
    cable = await Cable(LIMITS).opened()
    for place in range(33):
        cable.right.feed(frame_of(cable.one, Grant(f"k{place}", 1)))
    assert await ended_with(cable) == Reason.UNEXPECTED


# bytes that changed on the way


async def traffic() -> tuple[Cable, list[bytes], torch.Tensor]:
    """An open cable whose right end asked for a tensor and a message; the frames on their way there, not delivered; the tensor's place."""
    cable = await Cable(LIMITS).opened()
    into = torch.zeros(3, 5, dtype=torch.bfloat16)
    cable.two.receive(into, kind="x", step=7)
    cable.two.receive_bytes(kind="m", step=2, bytes_max=100)
    await turns()
    cable.left.feed(bytes(cable.right.out))
    cable.right.out.clear()
    cable.one.receive_bytes(kind="back", step=0, bytes_max=1)
    await turns()  # so that it is asked for by a frame of its own
    cable.one.send(torch.arange(15, dtype=torch.bfloat16).reshape(3, 5), kind="x", step=7)
    cable.one.send(b"a message", kind="m", step=2)
    await turns()
    wire = bytes(cable.left.out)
    cable.left.out.clear()
    frames = [wire[:128], wire[128 : 256 + 30], wire[286:]]
    assert len(frames[2]) == 128 + 9
    return cable, frames, into


def run(case: object) -> None:
    asyncio.run(case)  # type: ignore[arg-type]  # a coroutine


async def check_flip(place: int, bit: int) -> None:
    cable, frames, _ = await traffic()
    wire = bytearray(b"".join(frames))
    wire[place % len(wire)] ^= 1 << bit
    cable.right.feed(wire)
    reason = await ended_with(cable)
    assert reason in (Reason.DAMAGED, Reason.MALFORMED, Reason.VERSION), reason
    assert all(event.done() for event in (cable.two.ended, cable.two.opened))
    assert cable.two.statistics().receives_in_flight == 0


@settings(max_examples=100, deadline=None)
@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found(place: int, bit: int) -> None:
    """Whichever bit of heads and payloads flips, the channel ends as damaged (or as another protocol's)."""
    run(check_flip(place, bit))


async def check_cut(keep: int, chunks: list[int]) -> None:
    cable, frames, into = await traffic()
    wire = b"".join(frames)
    keep %= len(wire) + 1
    place = 0
    for chunk in [*chunks, len(wire)]:
        cable.right.feed(wire[place : min(place + chunk, keep)])
        place = min(place + chunk, keep)
    assert not cable.two.ended.done(), "what is merely late is no reason to end"
    whole = keep >= 286
    assert bool(into.eq(torch.arange(15).reshape(3, 5)).all()) == whole or keep >= 128 + 128
    await cable.pull()
    assert await ended_with(cable) == Reason.LOST
    middle = keep not in (0, 128, 286, len(wire))
    assert ("middle of a frame" in str(cable.two.ended.error())) == middle


@settings(max_examples=50, deadline=None)
@given(keep=st.integers(0, 10_000), chunks=st.lists(st.integers(1, 200), max_size=8))
def test_a_cable_pulled_anywhere(keep: int, chunks: list[int]) -> None:
    """However the bytes were cut on the way, and wherever the cable is pulled, the channel ends as lost and says if inside a frame."""
    run(check_cut(keep, chunks))


async def check_order(order: list[int]) -> None:
    cable, frames, _ = await traffic()
    for place in order:
        cable.right.feed(frames[place])
    await turns()
    assert cable.two.ended.done() == (order != list(range(len(order))))
    if cable.two.ended.done():
        assert reason_of(cable.two) == Reason.OUT_OF_STEP


@settings(max_examples=40, deadline=None)
@given(order=st.lists(st.integers(0, 2), max_size=5).filter(lambda order: order[:3] != [0, 1, 2] or len(order) == 3))
def test_replayed_missing_and_reordered_frames(order: list[int]) -> None:
    """Whole, well-sealed frames in any order but their own, or twice, end the channel as out of step."""
    run(check_order(order))


async def test_frames_of_another_connection_do_not_count() -> None:
    """A frame recorded on one connection of the same two nodes is damaged on the next, in its place in the sequence."""
    recorded, frames, _ = await traffic()
    cable, own, _ = await traffic()
    assert recorded.one._seed != cable.one._seed
    cable.right.feed(own[0] + frames[1])
    assert await ended_with(cable) == Reason.DAMAGED


async def check_noise(seed: int, length: int, opened: bool) -> None:
    cable = await Cable(LIMITS).opened() if opened else Cable(LIMITS)
    generator = random.Random(seed)
    noise = generator.randbytes(length)
    if generator.random() < 0.5:
        noise = b"FB\x02" + noise
    cable.right.feed(noise)
    assert await ended_with(cable) in (Reason.MALFORMED, Reason.DAMAGED, Reason.VERSION)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 32), length=st.integers(128, 4000), opened=st.booleans())
def test_noise_in_place_of_frames(seed: int, length: int, opened: bool) -> None:
    """Random bytes, before and after the handshake, end the channel with a reason."""
    run(check_noise(seed, length, opened))


@settings(max_examples=100, deadline=None)
@given(
    header=st.one_of(
        st.binary(max_size=88), st.sampled_from([encoded(Beat()), encoded(Skip("x", "")), encoded(Content("x", "bytes", (8,)))])
    ),
    payload=st.sampled_from((0, 0, 1, 8, 1 << 19, (1 << 32) - 1)),
    step=st.sampled_from((0, 0, 1, (1 << 64) - 1)),
    checksum=st.sampled_from((0, 0, 1)),
)
def test_headers_of_any_bytes_under_a_right_seal(header: bytes, payload: int, step: int, checksum: int) -> None:
    """A peer with the key that seals whatever it likes gets the channel ended, or a frame we know; nothing else is raised."""

    async def case() -> None:
        cable = await Cable(LIMITS).opened()
        cable.right.feed(sealed(cable.one, header, payload, step, checksum))
        await turns()
        assert cable.two.ended.done() == cable.right.gone

    run(case())


@pytest.mark.parametrize(
    ("header", "length", "step", "checksum"),
    [
        (encoded(Beat()), 0, 1, 0),
        (encoded(Grant("x", 1)), 0, 1, 0),
        (encoded(Beat()), 0, 0, 1),
        (encoded(Beat()), 8, 0, 0),
        (encoded(Content("x", "uint8", (0,))), 0, 0, 1),
        (encoded(Content("x", "uint8", (8,))), 8, 1 << 63, 0),
        (encoded(Content("x", "uint8", (8,))), 9, 0, 0),
        (encoded(Grant("x", 1)) + b"\0", 0, 0, 0),
        (encoded(Grant("x", 1))[:-1], 0, 0, 0),
        (encoded(Grant("x", 0)), 0, 0, 0),
        (b"", 0, 0, 0),
    ],
)
async def test_every_field_of_a_head_is_checked(header: bytes, length: int, step: int, checksum: int) -> None:
    """A step, a payload or a checksum where there is none, a header longer or shorter than its words, once read well before or not."""
    for before in ((), (encoded(Grant("x", 1)), encoded(Beat()))):
        cable = await Cable(LIMITS).opened()
        cable.two.receive(torch.zeros(8, dtype=torch.uint8), kind="x", step=1)
        await cable.settle()
        for one in before:
            cable.right.feed(sealed(cable.one, one))
            cable.one._sequence += 1
        cable.right.feed(sealed(cable.one, header, length, step, checksum))
        assert await ended_with(cable) == Reason.MALFORMED


async def test_what_hides_behind_a_header_is_refused() -> None:
    """Bytes between a header's end and the seal, where only zeros belong, are no frame of ours, though the seal holds."""
    cable = await Cable(LIMITS).opened()
    good = encoded(Beat())
    head = bytearray(sealed(cable.one, good))[:120]
    head[32 + len(good)] = 1
    cable.right.feed(head + xxhash.xxh3_64_intdigest(bytes(head), seed=cable.one._seed).to_bytes(8, "little"))
    assert await ended_with(cable) == Reason.MALFORMED


async def check_streams_of_frames(sizes: list[int], chunks: list[int], unwanted: int) -> None:
    cable = await Cable(LIMITS).opened()
    sources = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size)) for size in sizes]
    intos = [torch.zeros_like(source) for source in sources]
    failed = Event[None]("copy")
    failed.settle(None, RuntimeError("failed"))
    for step, into in enumerate(intos):
        cable.two.receive(into, kind="x", step=step, after=(failed,) if step == unwanted else ())
    asked = cable.two.receive_bytes(kind="last", step=0, bytes_max=4)
    await cable.settle()
    for step, source in enumerate(sources):
        cable.one.send(source, kind="x", step=step)
    cable.one.send(b"last", kind="last", step=0)
    await turns()
    wire, place = bytes(cable.left.out), 0
    for chunk in [*chunks, len(wire)]:
        cable.right.feed(wire[place : place + chunk])
        place += chunk
    assert asked.result() == b"last"
    for step, (source, into) in enumerate(zip(sources, intos, strict=True)):
        assert torch.equal(source, into) if step != unwanted else not into.any()


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.sampled_from((0, 1, 127, 128, 5000, 65407, 65408, 65409, 65536, 200_000)), min_size=1, max_size=8),
    chunks=st.lists(st.sampled_from((1, 100, 128, 129, 12_416, 65535, 65536, 100_000)), max_size=12),
    unwanted=st.integers(-1, 7),
)
def test_frames_are_the_same_however_they_are_cut_and_read(sizes: list[int], chunks: list[int], unwanted: int) -> None:
    """Frames of no byte up to several reads', many in one read or one in many, one of them wanted by nobody: each arrives as it went."""
    run(check_streams_of_frames(sizes, chunks, unwanted))


async def test_buffers_are_held_until_the_connection_is_gone() -> None:
    """A send that fails because the channel ended keeps its buffer alive until the connection can no longer read from it."""
    cable = await Cable(LIMITS, room=1000).opened()
    cable.two.receive(torch.zeros(5000, dtype=torch.uint8), kind="x", step=0)
    await cable.settle()
    source = torch.ones(5000, dtype=torch.uint8)
    left = weakref.ref(source)
    sent = cable.one.send(source, kind="x", step=0)
    del source
    cable.left.feed(bytes(128))
    assert isinstance(sent.error(), PeerLost)
    assert left() is not None
    await turns()
    assert cable.left.gone
    assert left() is None


@pytest.mark.slow
async def test_millions_of_random_bytes_at_a_listener() -> None:
    """Four million random bytes in connections of every length, some beginning like ours: the listener and its open channel live on."""
    generator, left = random.Random(11), 4_000_000
    async with loopback() as (one, two, listener):
        while left > 0:
            noise = generator.randbytes(min(int(generator.lognormvariate(6, 3)) + 1, 200_000))
            left -= len(noise)
            if generator.random() < 0.5:
                noise = (b"FB\x02" if generator.random() < 0.5 else head_of(Hello(noise[:32].ljust(32)), 0, 0)) + noise
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            writer.write(noise)
            writer.write_eof()
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
            writer.close()
        asked = two.receive_bytes(kind="m", step=0, bytes_max=9)
        one.send(b"fine", kind="m", step=0)
        assert await asked == b"fine"
        another = await connect("127.0.0.1", listener.port, key=KEY, terms=terms(1))
        await another.close()
