"""Who may speak over a channel: keys, versions, proofs, and strangers, who learn nothing and hold nobody up."""

import asyncio
import contextlib
import gc
import hmac
import os
import socket
import warnings
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from streams import ChannelLimits, PeerLost, Reason, Terms, connect, listen
from streams.frame import VERSION, Hello, head_of
from streams.handshake import BadKey, Handshake, read_key
from streams.meeting import Listener
from streams.tcp import TcpChannel
from tests.streams.channel_world import KEY, Cable, ManualClock, loopback, terms, turns

LIMITS = ChannelLimits(frame_bytes_max=1 << 20, queue_max=64, silence_ms_max=1000, beat_ms=200)


def reason_of(channel: TcpChannel) -> Reason:
    error = channel.ended.error()
    assert isinstance(error, PeerLost), f"{channel!r} did not lose its peer"
    return error.reason


async def ended_with(cable: Cable) -> Reason:
    """The reason for which the right end ended, everything of it settled."""
    await turns()
    assert cable.two.ended.done(), f"{cable.two!r} goes on"
    assert cable.right.gone
    return reason_of(cable.two)


@pytest.mark.parametrize(
    ("key", "mine", "reason"),
    [
        (b"another key of sixteen", terms(1), Reason.UNAUTHENTICATED),
        (KEY, terms(1, "another model"), Reason.MISMATCH),
        (KEY, terms(1, layer_map=((0, 40), (40, 38))), Reason.MISMATCH),
        (KEY, terms(0), Reason.MISMATCH),
    ],
)
async def test_who_does_not_belong_is_refused_and_the_next_one_served(key: bytes, mine: Terms, reason: Reason) -> None:
    """A wrong key, model, layer map or stage is refused with the same reason on both sides, logged, and harms no other channel."""
    async with loopback() as (one, two, listener):
        with capture_logs() as logs, pytest.raises(PeerLost) as lost:
            await connect("127.0.0.1", listener.port, key=key, terms=mine)
        assert lost.value.reason == reason
        assert [(log["event"], log["reason"]) for log in logs] == [("channel.refused", str(reason))]
        asked = two.receive_bytes(kind="m", step=0, bytes_max=9)
        one.send(b"fine", kind="m", step=0)
        assert await asked == b"fine"
        again = await connect("127.0.0.1", listener.port, key=KEY, terms=terms(1))
        await again.close()


async def test_who_listens_may_have_several_terms() -> None:
    """Whoever comes with a fingerprint among them is met with those terms; with another one, or another map, it is refused."""
    rooms = [terms(0, "room", ((0, 1), (1, 1))), terms(0, "yard")]
    listener = await listen("127.0.0.1", 0, key=KEY, terms=terms(0), others=rooms)
    try:
        for mine in (terms(1), terms(1, "room", ((0, 1), (1, 1))), terms(1, "yard")):
            one = await connect("127.0.0.1", listener.port, key=KEY, terms=mine)
            two = await listener.accept()
            assert one.peer.fingerprint == two.peer.fingerprint == mine.fingerprint
            await one.close()
            await two.close()
        for mine in (terms(1, "cellar"), terms(1, "room")):
            with pytest.raises(PeerLost, match="mismatch"):
                await connect("127.0.0.1", listener.port, key=KEY, terms=mine)
    finally:
        await listener.close()


async def test_a_stranger_learns_a_nonce_and_nothing_else() -> None:
    """What a listener has said before anybody proved the key is its challenge alone."""
    cable = Cable(LIMITS)
    assert cable.right.out == head_of(Hello(bytes(cable.right.out)[37:69]), 0, 0)
    cable.left.out.clear()
    await cable.settle()
    assert not cable.right.out


async def test_a_challenge_sent_back_is_refused() -> None:
    """An end that gets its own frames back, challenge first, refuses; so does one that gets its own proof for another's challenge."""
    cable = Cable(LIMITS)
    cable.right.feed(cable.right.out)
    assert await ended_with(cable) == Reason.UNAUTHENTICATED
    connecting = Cable(LIMITS)
    connecting.move(connecting.right)
    proof = bytes(connecting.left.out)[128:]
    assert len(proof) > 128, "no proof was made"
    connecting.left.feed(proof)
    await turns()
    assert reason_of(connecting.one) in (Reason.UNAUTHENTICATED, Reason.OUT_OF_STEP)


def test_a_proof_counts_for_its_part_its_terms_and_its_connection_only() -> None:
    """A proof is refused from the wrong part, with other terms, or on a connection with other nonces; the right one passes."""
    connects, listens = Handshake(KEY, terms(1), connects=True), Handshake(KEY, terms(0), connects=False)
    listens.take(connects.begin(), b"")
    answer = connects.take(listens.begin(), b"")
    assert answer is not None
    proof, payload = answer

    def fresh(connects_itself: bool, nonce: Hello) -> Handshake:
        one = Handshake(KEY, terms(0), connects=connects_itself)
        one.take(nonce, b"")
        return one

    with pytest.raises(PeerLost, match="did not prove"):
        fresh(False, connects.begin()).take(proof, payload)  # other nonces
    with pytest.raises(PeerLost, match="did not prove"):
        listens.take(proof, msgspec.msgpack.encode(terms(1, "forged")))
    mirrored = Handshake(KEY, terms(0), connects=True)
    mirrored._nonce = listens._nonce
    mirrored.take(connects.begin(), b"")
    with pytest.raises(PeerLost, match="did not prove"):
        mirrored.take(proof, payload)  # the same nonces and key, but both sides connect
    assert listens.take(proof, payload) is not None
    listens.agree()
    assert listens.done
    with pytest.raises(PeerLost, match="where the handshake has none"):
        listens.take(proof, payload)


def test_the_proof_is_an_hmac_over_all_that_was_said() -> None:
    """The proof equals an HMAC-SHA256 written out here from the page's description."""
    one = Handshake(KEY, terms(1), connects=True)
    answer = one.take(Hello(b"n" * 32), b"")
    assert answer is not None
    proof, payload = answer
    text = b"\0".join((b"forebay channel", b"connects", bytes((VERSION,)), one.begin().nonce, b"n" * 32, payload))
    assert proof.mac == hmac.new(KEY, text, "sha256").digest()


async def test_another_version_is_named() -> None:
    """A peer of another protocol version is refused by that reason, whatever else its head says."""
    cable = Cable(LIMITS)
    hello = bytearray(cable.left.out)
    hello[2] = VERSION + 1
    cable.right.feed(hello)
    assert await ended_with(cable) == Reason.VERSION
    assert "speaks version" in str(cable.two.ended.error())


def test_a_key_file_that_is_none_says_what_to_do(tmp_path: Path) -> None:
    """A missing, short or huge key file is one line naming it; white space around a key does not count."""
    path = tmp_path / "key"
    for content in (None, b"short", b" " * 40, b"x" * 5000):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(BadKey, match=str(path)) as bad:
            read_key(path)
        assert "\n" not in str(bad.value)
    path.write_bytes(b"\n 0123456789abcdef \n")
    assert read_key(path) == b"0123456789abcdef"


Wires = list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]


async def strangers(listener: Listener, count: int, host: str = "127.0.0.1") -> Wires:
    """So many connections from `host` that say nothing, all of them admitted."""
    wires = [await asyncio.open_connection("127.0.0.1", listener.port, local_addr=(host, 0)) for _ in range(count)]
    for reader, _ in wires:
        await reader.readexactly(128)
    return wires


async def leave(wires: Wires) -> None:
    for _, writer in wires:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_strangers_do_not_keep_out_who_has_the_key() -> None:
    """Sixteen connections may be in their handshake; one more takes the place of the oldest, and who has the key is served at once."""
    listener = await listen("127.0.0.1", 0, key=KEY, terms=terms(0))
    wires = await strangers(listener, 16)
    with capture_logs() as logs:
        one = await connect("127.0.0.1", listener.port, key=KEY, terms=terms(1))
    assert [(log["reason"], log["peer"]) for log in logs if log["event"] == "channel.refused"] == [
        ("busy", "{}:{}".format(*wires[0][1].get_extra_info("sockname")))
    ]
    assert await wires[0][0].read() == b""
    wires += await strangers(listener, 15)  # only now may the second go: the channel that opened has no place any more
    for reader, _ in wires[1:15]:
        assert await reader.read() == b""
    await one.close()
    await listener.close()
    await leave(wires)


async def test_a_crowd_from_one_host_takes_places_from_itself() -> None:
    """However many connections one host makes, one from another host that is in its handshake keeps its place."""
    listener = await listen("127.0.0.1", 0, key=KEY, terms=terms(0))
    slow = await strangers(listener, 1)
    crowd = await strangers(listener, 40, "127.0.0.2")
    for reader, _ in crowd[:25]:
        assert await reader.read() == b""
    assert not slow[0][0].at_eof()
    slow[0][1].write(b"nonsense" * 30)
    assert await slow[0][0].read(), "nobody heard it and said goodbye"
    await listener.close()
    await leave([*slow, *crowd])


async def test_strangers_without_room_cost_a_line_a_second() -> None:
    """The first is a line; those within a second of it are counted, and the next line says how many they were."""
    clock = ManualClock()
    listener = await listen("127.0.0.1", 0, key=KEY, terms=terms(0), clock=clock)
    wires = await strangers(listener, 16)
    with capture_logs() as logs:
        for at_ns in (0, 1, 999_999_999, 1_000_000_000, 1_000_000_001):
            clock.at_ns = at_ns
            wires += await strangers(listener, 1)
    assert [(log["reason"], log.get("more", 0)) for log in logs if log["event"] == "channel.refused"] == [("busy", 0), ("busy", 2)]
    await listener.close()
    await leave(wires)


@pytest.mark.parametrize("rounds", range(6))
async def test_who_comes_while_the_listener_closes_is_let_go(rounds: int) -> None:
    """A connection that the machine took, and the loop too or not yet, leaves nothing behind and nothing to complain of."""
    trouble: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: trouble.append(context))
    listener = await listen("127.0.0.1", 0, key=KEY, terms=terms(0))
    with socket.create_connection(("127.0.0.1", listener.port)) as comes:
        comes.setblocking(False)
        await turns(rounds)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            await listener.close()
            await turns()
            gc.collect()
        with contextlib.suppress(ConnectionError):
            while comes.recv(1 << 10):  # raises BlockingIOError where the connection is still open
                pass
    assert not trouble
    assert not [str(warning.message) for warning in warned]


@pytest.mark.parametrize("rounds", range(12))
async def test_a_listener_whose_opening_is_cut_off_leaves_nothing(rounds: int) -> None:
    """In whatever round it is cancelled: no socket stays that nobody knows of, and nothing is complained of."""
    before = len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        opening = asyncio.create_task(listen("127.0.0.1", 0, key=KEY, terms=terms(0)))
        for _ in range(rounds):
            await asyncio.sleep(0)
        opening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await opening).close()
        await turns()
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [str(warning.message) for warning in warned]
