"""How two nodes' channels meet: one listens, one connects.

Knows addresses and TLS contexts; the protocol is `tcp.py`'s. No retries and no membership: who is not there is `PeerLost`, and whoever
wants it tries again.

Invariants:
1. `accept` and `connect` give channels whose handshake is done, or raise; whoever failed it costs a log line and nothing else, and no more
   than one line a second for each reason.
2. At most `_STRANGERS_MAX` connections are in their handshake. One more takes the place of the oldest from the host that has the most of
   them: who has the key needs its place for a round-trip, so those without it cannot keep it out. As many again wait to be accepted; those
   have the key, and more are let go at once.
3. After `close`, nothing of the listener is left; channels that were accepted stay.
"""

import asyncio
import ssl
from collections import Counter, deque
from collections.abc import Sequence

import structlog

from streams.channel import ChannelLimits
from streams.clock import Clock, RealClock
from streams.connection import Connection
from streams.errors import Closed, PeerLost, Reason, StreamError
from streams.event import Event
from streams.handshake import Handshake, Terms
from streams.tcp import TcpChannel

__all__ = ["Listener", "connect", "listen"]

_STRANGERS_MAX = 16
_SAY_AGAIN_NS = 1_000_000_000
_log = structlog.get_logger("streams")


async def connect(
    host: str, port: int, *, key: bytes, terms: Terms, limits: ChannelLimits | None = None, clock: Clock | None = None,
    tls: ssl.SSLContext | None = None, server_hostname: str | None = None,
) -> TcpChannel:  # fmt: skip
    """Open a channel to who listens there.

    Args:
        key: shared by both sides, 16 bytes or more (`read_key`).
        terms: who we are and what we run.
        tls: a context of purpose SERVER_AUTH; `server_hostname` is the name its certificate must have, `host` if None.
    Raises: PeerLost: nobody is there, or it is not who it should be; `reason` says which.
    Cancel: the connection is let go.
    """
    limits = limits or ChannelLimits()
    seconds = limits.silence_ms_max / 1000
    channel = TcpChannel(Handshake(key, terms, connects=True), limits, clock or RealClock())
    name = None if tls is None else server_hostname or host
    patience = None if tls is None else seconds
    try:
        async with asyncio.timeout(seconds):
            await asyncio.get_running_loop().create_connection(
                lambda: channel.connection, host, port, ssl=tls, server_hostname=name, ssl_handshake_timeout=patience
            )
        await channel.opened
    except (OSError, TimeoutError) as error:
        channel.connection.abort()
        raise PeerLost(Reason.UNREACHABLE, f"{host}:{port} cannot be reached: {error or 'no answer in time'}") from error
    except asyncio.CancelledError:
        channel.connection.abort()
        raise
    return channel


async def listen(
    host: str, port: int, *, key: bytes, terms: Terms, others: Sequence[Terms] = (), limits: ChannelLimits | None = None,
    clock: Clock | None = None, tls: ssl.SSLContext | None = None,
) -> "Listener":  # fmt: skip
    """Listen for channels; port 0 takes a free one.

    Args: as `connect`; others: further terms, for whoever comes with one of their fingerprints; tls: a context of purpose CLIENT_AUTH
        with a certificate.
    Raises: StreamError: the address cannot be had.
    """
    listener = Listener(key, terms, others, limits or ChannelLimits(), clock or RealClock())
    await listener.open(host, port, tls)
    return listener


class Listener:
    """Accepts channels; see `listen`."""

    def __init__(self, key: bytes, terms: Terms, others: Sequence[Terms], limits: ChannelLimits, clock: Clock) -> None:
        self._key = key
        self._terms = terms
        self._others = others
        self._limits = limits
        self._clock = clock
        self._server: asyncio.Server | None = None
        self._strangers: dict[TcpChannel, None] = {}  # in their handshake
        self._waiting: deque[TcpChannel] = deque()  # open, not accepted
        self._accepts: deque[asyncio.Future[None]] = deque()
        self._closed = False
        self._said: dict[str, tuple[int, int]] = {}  # by reason: when a line was written, in ns, and how many were refused since

    async def open(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        """Begin to listen. Raises StreamError."""
        patience = None if tls is None else self._limits.silence_ms_max / 1000
        try:
            # Begun in two parts: asyncio's loop forgets the socket of a server whose making is cancelled once it listens.
            self._server = await asyncio.get_running_loop().create_server(
                self._stranger, host, port, backlog=_STRANGERS_MAX, ssl=tls, ssl_handshake_timeout=patience, start_serving=False
            )
            await self._server.start_serving()
        except BaseException as error:
            await self.close()
            if isinstance(error, OSError):
                raise StreamError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
            raise

    @property
    def port(self) -> int:
        """The port it listens on."""
        assert self._server is not None, "not listening"
        return int(self._server.sockets[0].getsockname()[1])

    async def accept(self) -> TcpChannel:
        """The next channel whose handshake is done and which has not ended. Cancel: it waits for the next call. Raises Closed."""
        while not self._closed:
            while self._waiting:
                channel = self._waiting.popleft()
                if not channel.ended.done():
                    return channel
            waiter = asyncio.get_running_loop().create_future()
            self._accepts.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                self._wake()  # it may have been woken for a channel that somebody else can have
                raise
        raise Closed("the listener is closed")

    async def close(self) -> None:
        """Stop listening; end what nobody accepted."""
        self._closed = True
        server, self._server = self._server, None
        if server is not None:
            # asyncio's loop leaves a connection open for ever that it accepted in the round in which its server closes.
            for listening in server.sockets:
                asyncio.get_running_loop().remove_reader(listening.fileno())
            try:
                await asyncio.sleep(0)
            finally:
                server.close()
        self._wake()
        left = [*self._strangers, *self._waiting]
        self._waiting.clear()
        for channel in left:
            await channel.close()

    def _stranger(self) -> Connection:
        channel = TcpChannel(Handshake(self._key, self._terms, connects=False, others=self._others), self._limits, self._clock)
        channel.connection.admit = lambda: self._admit(channel)
        return channel.connection

    def _admit(self, channel: TcpChannel) -> bool:
        if self._closed or len(self._waiting) >= _STRANGERS_MAX:
            self._refused(channel.connection.peer_address, "busy", "too many connections wait to be accepted")
            return False
        if len(self._strangers) >= _STRANGERS_MAX:
            self._crowd_out()
        self._strangers[channel] = None
        channel.opened.on_done(lambda event: self._opened(channel, event))
        return True

    def _crowd_out(self) -> None:
        """Let go of the stranger that is first to go."""
        host_of = {stranger: stranger.connection.peer_address.rpartition(":")[0] for stranger in self._strangers}
        crowd, _ = Counter(host_of.values()).most_common(1)[0]
        oldest = next(stranger for stranger, host in host_of.items() if host == crowd)
        del self._strangers[oldest]
        self._refused(oldest.connection.peer_address, "busy", "newer connections needed its place, and it had not proved the key")
        oldest.connection.abort()

    def _opened(self, channel: TcpChannel, event: Event[None]) -> None:
        if channel not in self._strangers:  # its place was taken, and that was said
            return
        del self._strangers[channel]
        error = event.error()
        if error is not None:
            reason = error.reason if isinstance(error, PeerLost) else "closed"
            self._refused(channel.name, str(reason), str(error))
            return
        self._waiting.append(channel)
        self._wake()

    def _refused(self, peer: str, reason: str, error: str) -> None:
        """Log it, or count it for the next line of this reason."""
        now = self._clock.now_ns()
        said, more = self._said.get(reason, (now - _SAY_AGAIN_NS, 0))
        if now - said < _SAY_AGAIN_NS:
            self._said[reason] = said, more + 1
            return
        self._said[reason] = now, 0
        counted = {"more": more} if more else {}  # since the last line
        _log.warning("channel.refused", peer=peer, reason=reason, error=error, **counted)

    def _wake(self) -> None:
        while self._accepts and (self._waiting or self._closed):
            waiter = self._accepts.popleft()
            if not waiter.done():
                waiter.set_result(None)
                if not self._closed:
                    return
