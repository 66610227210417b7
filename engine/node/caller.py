"""The head's end of a control channel: calls to one node, each an event.

Holds the calls that have no answer yet. Knows no stage and no sessions; whoever calls says what the answer's body is.

Invariants:
1. `call` never waits. Calls reach the node in the order they were made here.
2. Every call's event is settled once: by its answer, or by the error that ended the channel.
3. At most `calls_max` calls are without an answer; one more raises `Full`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from engine.node.wire import CALL, REPLY, REPLY_BYTES_MAX, WINDOW, Call, Reply, error_of
from streams import Channel, Event, Full, PeerLost, Reason

__all__ = ["Caller"]

T = TypeVar("T")
_CALLS_MAX = 2048


class Caller:
    """Calls on one channel, from its opening to its end."""

    def __init__(
        self, channel: Channel, told: Callable[[bytes], None], *, calls_max: int = _CALLS_MAX,
        lost: Callable[[BaseException], None] = lambda error: None,
    ) -> None:  # fmt: skip
        """Args: told: takes what the node says without having been asked, packed. lost: hears of the end before any caller does."""
        self._channel = channel
        self._told = told
        self._calls_max = calls_max
        self._tell_lost = lost
        self._waiting: dict[int, tuple[Event[Any], type[Any]]] = {}
        self._calls = self._replies = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._lost: BaseException | None = None
        channel.ended.on_done(self._ended)
        for _ in range(WINDOW):
            self._ask()

    @property
    def waiting(self) -> int:
        """Calls without an answer."""
        return len(self._waiting)

    def call(self, name: str, body: object, answer: type[T], *, session: str = "") -> Event[T]:
        """Call `name` with `body`; the event's result is the answer's body as `answer`.

        Raises: Full: too many calls have no answer yet; PeerLost, Closed: the channel has ended.
        """
        if self._lost is not None:
            raise self._lost.with_traceback(None)
        if len(self._waiting) >= self._calls_max:
            raise Full(f"{name} does not fit: {len(self._waiting)} calls to {self._channel.name} have no answer yet")
        packed = self._encoder.encode(Call(self._calls, name, msgspec.Raw(self._encoder.encode(body))))
        self._channel.send(packed, kind=CALL, step=self._calls, session=session)
        event: Event[T] = Event(name, stream=self._channel.name, session=session)
        self._waiting[self._calls] = (event, answer)
        self._calls += 1
        return event

    def _ask(self) -> None:
        """One more answer may come."""
        if self._lost is None:
            self._channel.receive_bytes(kind=REPLY, step=self._replies, bytes_max=REPLY_BYTES_MAX).on_done(self._came)
            self._replies += 1

    def _came(self, event: Event[bytes]) -> None:
        error = event.error()
        if error is not None:
            self._ended(event)
            return
        try:
            self._take(self._decoder.decode(event.result()))
        except (msgspec.MsgspecError, KeyError, ValueError) as wrong:
            self._end(PeerLost(Reason.MALFORMED, f"{self._channel.name} answered what cannot be read: {wrong}"))
        self._ask()

    def _take(self, reply: Reply) -> None:
        if reply.number < 0:
            self._told(bytes(reply.body))
            return
        event, answer = self._waiting.pop(reply.number)
        if reply.failure is not None:
            event.settle(None, error_of(reply.failure, self._channel.name))
            return
        try:
            body = msgspec.msgpack.decode(reply.body, type=answer)
        except msgspec.MsgspecError as wrong:
            event.settle(None, PeerLost(Reason.MALFORMED, f"{self._channel.name} answered {event.label} wrongly: {wrong}"))
            return
        event.settle(body, None)

    def _ended(self, event: Event[Any]) -> None:
        """The channel has ended, by our doing or not."""
        self._end(event.error() or PeerLost(Reason.CLOSED, f"the channel to {self._channel.name} was closed"))

    def _end(self, error: BaseException) -> None:
        if self._lost is None:
            self._lost = error
            self._tell_lost(error)
        waiting, self._waiting = self._waiting, {}
        for event, _ in waiting.values():
            event.settle(None, self._lost)
