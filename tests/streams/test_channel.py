"""Channels over a real connection: what goes in comes out, in every dtype, both ways, under cancellation, with nothing left over."""

import asyncio
import os
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
import torch

from streams import (
    ChannelLimits,
    Closed,
    DependencyFailed,
    Event,
    Full,
    PeerLost,
    Reason,
    TransferFailed,
    connect,
    listen,
)
from tests.streams.channel_world import KEY, loopback, terms, turns

pytestmark = pytest.mark.both_loops
DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def noise(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Every bit pattern a dtype has, NaN and infinities included."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


async def test_every_dtype_and_shape_arrives_to_the_bit() -> None:
    """Tensors of every dtype, of any bits, with no, one and six dimensions and without elements come out as they went in."""
    shapes: tuple[tuple[int, ...], ...] = ((), (1,), (0,), (3, 0, 2), (5, 7), (1, 2, 1, 3, 1, 2))
    async with loopback() as (one, two, _):
        events = []
        for step, (dtype, shape) in enumerate((dtype, shape) for dtype in DTYPES for shape in shapes):
            source, into = noise(dtype, *shape, seed=step), torch.zeros(shape, dtype=dtype)
            sender, receiver = (one, two) if step % 2 else (two, one)
            events.append((receiver.receive(into, kind="x", step=step), sender.send(source, kind="x", step=step), source, into))
        for received, sent, source, into in events:
            assert await received is into
            await sent
            assert raw(source) == raw(into)
        assert one.statistics().sent_frames == two.statistics().received_frames == len(DTYPES) * len(shapes) // 2


async def test_many_in_flight_both_ways_keep_their_order() -> None:
    """A hundred and twenty large and small frames each way at once, of two kinds, asked for late, arrive whole and in order."""
    async with loopback() as (one, two, _):
        sources = [noise(torch.bfloat16, 1 + 4099 * (step % 7), 3, seed=step) for step in range(120)]
        sends = [end.send(source, kind=f"k{step % 2}", step=step) for step, source in enumerate(sources) for end in (one, two)]
        await turns()
        assert not any(event.done() for event in sends), "nothing may go that nobody asked for"
        intos = [(torch.zeros_like(source), torch.zeros_like(source)) for source in sources]
        receives = [
            end.receive(into, kind=f"k{step % 2}", step=step)
            for step, pair in enumerate(intos)
            for end, into in zip((one, two), pair, strict=True)
        ]
        for event in (*receives, *sends):
            await event
        assert all(raw(source) == raw(first) == raw(second) for source, (first, second) in zip(sources, intos, strict=True))
        for end in (one, two):
            counts = end.statistics()
            assert (counts.sends_in_flight, counts.receives_in_flight) == (0, 0)
            assert counts.sent_bytes == counts.received_bytes == sum(source.numel() * 2 for source in sources)


async def test_kinds_do_not_wait_for_one_another() -> None:
    """A kind that nobody asks for holds up no other one."""
    async with loopback() as (one, two, _):
        stuck = one.send(torch.zeros(4), kind="late", step=0)
        message = two.receive_bytes(kind="note", step=9, bytes_max=100)
        one.send(b"through", kind="note", step=9)
        assert await message == b"through"
        assert not stuck.done()
        into = two.receive(torch.ones(4), kind="late", step=0)
        assert (await into).eq(0).all()
        await stuck


async def test_grants_go_with_frames_whether_these_have_room_for_them_or_not() -> None:
    """Frames sent beside receives of no, one, two, three and six kinds of the longest names: whatever carries the grants, all arrive."""
    async with loopback() as (one, two, _):
        for kinds in (0, 1, 2, 3, 6):
            names = [f"{place}".rjust(16, "k") for place in range(kinds)]
            there, back = torch.zeros(1, 1, 1, 1, 2, 3), [torch.zeros(4) for _ in names]
            asked = [two.receive(there, kind="there", step=kinds)]
            await turns()
            asked += [one.receive(into, kind=name, step=kinds) for name, into in zip(names, back, strict=True)]
            one.send(noise(torch.float32, 1, 1, 1, 1, 2, 3, seed=kinds), kind="there", step=kinds)
            for name in names:
                two.send(torch.full((4,), float(kinds)), kind=name, step=kinds)
            for event in asked:
                await event
            assert raw(there) == raw(noise(torch.float32, 1, 1, 1, 1, 2, 3, seed=kinds))
            assert all(into.eq(kinds).all() for into in back)


async def test_messages_of_any_length_up_to_the_limit() -> None:
    """Messages of no byte and of as many as were allowed arrive; one byte more ends the channel."""
    async with loopback() as (one, two, _):
        for step, length in enumerate((0, 1, 70000)):
            asked = two.receive_bytes(kind="m", step=step, bytes_max=70000)
            one.send(bytes(range(256)) * (length // 256) + bytes(length % 256), kind="m", step=step)
            assert len(await asked) == length
        asked = two.receive_bytes(kind="m", step=3, bytes_max=7)
        one.send(bytes(8), kind="m", step=3)
        with pytest.raises(PeerLost, match="at most 7 were expected") as lost:
            await asked
        assert lost.value.reason == Reason.TOO_LARGE


async def test_a_cancelled_wait_leaves_the_transfer_alone() -> None:
    """Tasks that wait for a send and a receive are cancelled while they are under way: both transfers end as if nobody had."""
    async with loopback() as (one, two, _):
        source, into = noise(torch.uint8, 3_000_000, seed=3), torch.zeros(3_000_000, dtype=torch.uint8)
        received = two.receive(into, kind="x", step=0)
        sent = one.send(source, kind="x", step=0)

        async def wait(event: Event[torch.Tensor] | Event[None]) -> None:
            await event

        tasks = [asyncio.ensure_future(wait(event)) for event in (received, sent)]
        await turns(3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await received
        await sent
        assert raw(source) == raw(into)
        again = two.receive(into, kind="x", step=1)
        one.send(source.flip(0), kind="x", step=1)
        assert raw(await again) == raw(source.flip(0))


async def test_transfers_wait_for_what_they_come_after() -> None:
    """A send starts after its events, a receive gives its buffer away after its own; both then go through."""
    async with loopback() as (one, two, _):
        copied, free = Event[None]("copy"), Event[None]("use")
        source, into = torch.zeros(8), torch.full((8,), 5.0)
        sent = one.send(source, kind="x", step=0, after=(copied,))
        received = two.receive(into, kind="x", step=0, after=(free,))
        ping = two.receive_bytes(kind="p", step=0, bytes_max=1)
        one.send(b"p", kind="p", step=0)
        await ping
        source.fill_(7)
        copied.settle(None, None)
        ping = two.receive_bytes(kind="p", step=1, bytes_max=1)
        one.send(b"p", kind="p", step=1)
        await ping
        assert into.eq(5).all(), "the buffer was given away before it was free"
        assert (sent.done(), received.done()) == (False, False)
        free.settle(None, None)
        assert (await received).eq(7).all()


async def test_what_a_failed_copy_was_to_send_fails_on_both_sides_and_nothing_else() -> None:
    """A send after a failure fails here with DependencyFailed, there with TransferFailed; the frames around it arrive."""
    async with loopback() as (one, two, _):
        copied, free = Event[None]("copy"), Event[None]("use")
        intos = [torch.zeros(4) for _ in range(5)]
        receives = [two.receive(into, kind="x", step=step, after=(free,) if step == 3 else ()) for step, into in enumerate(intos)]
        sends = [one.send(torch.full((4,), float(step)), kind="x", step=step, after=(copied,) if step == 1 else ()) for step in range(5)]
        copied.settle(None, RuntimeError("the card is gone"))
        free.settle(None, RuntimeError("the buffer is gone"))
        assert (await receives[0]).eq(0).all()
        with pytest.raises(DependencyFailed, match="the card is gone"):
            await sends[1]
        with pytest.raises(TransferFailed, match="x of step 1 will not come"):
            await receives[1]
        assert (await receives[2]).eq(2).all()
        with pytest.raises(DependencyFailed, match="the buffer is gone"):
            await receives[3]
        assert (await receives[4]).eq(4).all()
        await sends[3]
        assert intos[3].eq(0).all(), "a buffer was written whose receive had failed"
        assert two.statistics().skipped_frames == 1


async def test_a_full_queue_refuses_and_room_comes_back() -> None:
    """Past `queue_max` sends and receives raise Full; `wait_room` returns once a frame has gone, and the cancelled waiter is forgotten."""
    limits = ChannelLimits(queue_max=3)
    async with loopback(limits) as (one, two, _):
        for step in range(3):
            one.send(b"x", kind="m", step=step)
        with pytest.raises(Full):
            one.send(b"x", kind="m", step=3)
        waiting = [asyncio.ensure_future(one.wait_room()) for _ in range(2)]
        await turns()
        waiting[0].cancel()
        assert not waiting[1].done()
        asked = [two.receive_bytes(kind="m", step=step, bytes_max=1) for step in range(3)]
        with pytest.raises(Full):
            two.receive_bytes(kind="m", step=3, bytes_max=1)
        for event in asked:
            await event
        await waiting[1]
        one.send(b"x", kind="m", step=3)
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]


async def test_closing_fails_what_is_in_flight_on_both_sides_and_leaves_nothing() -> None:
    """After `close` everything in flight failed with Closed here and PeerLost there; no task, no descriptor and no buffer is left."""
    async with loopback():
        pass  # what a loop opens once for itself
    await turns()
    before, tasks = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
    async with loopback() as (one, two, _):
        ours = [one.send(torch.zeros(1000), kind="x", step=0), one.receive_bytes(kind="y", step=0, bytes_max=9)]
        theirs = [two.send(torch.zeros(1000), kind="z", step=0), two.receive_bytes(kind="w", step=0, bytes_max=9)]
        room = asyncio.ensure_future(one.wait_room())
        await one.close()
        with pytest.raises(Closed):
            await room
        for event in ours:
            with pytest.raises(Closed):
                event.result()
        await two.ended.wait_done()
        for event in theirs:
            with pytest.raises(PeerLost) as lost:
                event.result()
            assert lost.value.reason == Reason.CLOSED
        assert one.ended.error() is None
        with pytest.raises(Closed):
            one.send(b"", kind="x", step=1)
        with pytest.raises(Closed):
            await one.wait_room()
        with pytest.raises(PeerLost):
            two.receive_bytes(kind="x", step=1, bytes_max=1)
        assert ours[0].held is None  # type: ignore[attr-defined]  # the channel's own kind of event
    await turns()
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(asyncio.all_tasks()) == tasks


async def test_a_large_send_that_is_closed_in_the_middle_is_finished_first() -> None:
    """Closing while the connection holds a part of a frame finishes that frame: the buffer is not let go before."""
    async with loopback() as (one, two, _):
        source, into = noise(torch.uint8, 8 << 20, seed=5), torch.zeros(8 << 20, dtype=torch.uint8)
        received = two.receive(into, kind="x", step=0)
        sent = one.send(source, kind="x", step=0)
        for _ in range(1000):
            if one.connection.held_bytes:
                break
            await asyncio.sleep(0)
        assert not sent.done(), "8 MiB went out at once: the case was not met"
        await one.close()
        assert sent.error() is None
        assert raw(await received) == raw(source)


async def test_several_channels_of_one_listener_do_not_touch_one_another() -> None:
    """One of three channels ends with a reason; the others go on. Two tasks that accept get one each, a cancelled one nothing."""
    async with loopback() as (one, two, listener):
        cancelled = asyncio.ensure_future(listener.accept())
        accepts = [asyncio.ensure_future(listener.accept()) for _ in range(2)]
        await turns()
        cancelled.cancel()
        others = [await connect("127.0.0.1", listener.port, key=KEY, terms=terms(1)) for _ in range(2)]
        ends = [await task for task in accepts]
        broken = ends[0].receive_bytes(kind="m", step=1, bytes_max=9)
        for other in others:
            other.send(b"m", kind="m", step=0)
        with pytest.raises(PeerLost):
            await broken
        asked = ends[1].receive_bytes(kind="m", step=0, bytes_max=9)
        assert await asked == b"m"
        asked = two.receive_bytes(kind="m", step=0, bytes_max=9)
        one.send(b"alive", kind="m", step=0)
        assert await asked == b"alive"
        for channel in (*others, *ends):
            await channel.close()


async def test_who_is_not_there_and_who_says_nothing() -> None:
    """A closed port is `unreachable`; a listener of something else, which never answers, is lost after the time-out."""
    with pytest.raises(PeerLost, match="cannot be reached") as lost:
        await connect("127.0.0.1", 1, key=KEY, terms=terms(1))
    assert lost.value.reason == Reason.UNREACHABLE
    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda reader, writer: writers.append(writer), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(PeerLost, match="handshake was not done") as lost:
        await connect("127.0.0.1", port, key=KEY, terms=terms(1), limits=ChannelLimits(silence_ms_max=20, beat_ms=10))
    assert lost.value.reason == Reason.SILENT
    for writer in writers:
        writer.close()
    server.close()
    await server.wait_closed()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-made certificate for localhost, and its key, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("a certificate is made by the openssl command, which is not here")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", "-", "-out", "-"],
        capture_output=True, check=True,
    )  # fmt: skip
    path.write_bytes(made.stdout)
    return path


async def test_tls_with_a_certificate_of_our_own(certificate: Path) -> None:
    """Frames larger than TLS records go both ways; a client that does not know the certificate, or speaks plainly, is refused."""
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate)
    client = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(certificate))
    limits = ChannelLimits(silence_ms_max=2000, beat_ms=50)
    listener = await listen("127.0.0.1", 0, key=KEY, terms=terms(0), tls=server, limits=limits)
    one = await connect("127.0.0.1", listener.port, key=KEY, terms=terms(1), tls=client, server_hostname="localhost", limits=limits)
    two = await listener.accept()
    source = noise(torch.bfloat16, 64, 6144, seed=8)
    receives = [end.receive(torch.zeros_like(source), kind="x", step=step) for step in range(6) for end in (one, two)]
    sends = [end.send(source, kind="x", step=step) for step in range(6) for end in (one, two)]
    for event in (*receives, *sends):
        await event
    assert all(raw(event.result()) == raw(source) for event in receives)
    with pytest.raises(PeerLost, match="cannot be reached"):
        await connect("127.0.0.1", listener.port, key=KEY, terms=terms(1), tls=ssl.create_default_context(), server_hostname="localhost")
    with pytest.raises(PeerLost):
        await connect("127.0.0.1", listener.port, key=KEY, terms=terms(1), limits=limits)
    for channel in (one, two):
        await channel.close()
    await listener.close()
