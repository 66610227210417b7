"""A node's end of its control channel: takes calls in order, begins each at once, answers each when its work is done.

Knows what calls are called and who takes them; not what they do.

Invariants:
1. A call begins before the next one is looked at. What it begins may end later and in any order.
2. Whatever a call raises is its answer, and nothing more: the channel goes on.
3. Answers wait in the channel, whose limit is above the number of calls that the head may have open; past it the channel ends.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from engine.errors import ForebayError
from engine.node.wire import CALL, CALL_BYTES_MAX, REPLY, WINDOW, Call, Reply, failure_of
from streams import Channel, Event, Full, StreamError

__all__ = ["Answering", "Taker"]

_log = structlog.get_logger("engine")
_NOTHING = msgspec.Raw(msgspec.msgpack.encode(None))


@dataclass(frozen=True, slots=True)
class Taker:
    """Who takes a call. `begin` gets the body and returns the answer's body, an event whose result is it, or something to await."""

    body: type[Any]
    begin: Callable[[Any], Any]


class Answering:
    """Answers the calls of one channel until it ends."""

    def __init__(self, channel: Channel, takers: Mapping[str, Taker], run: Callable[[Awaitable[None], str], None]) -> None:
        """Args: run: has something awaited beside the loop's other work, to its end; the second is its name."""
        self._channel = channel
        self._takers = takers
        self._run = run
        self._asked = self._said = 0
        self._ended = False
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Call)
        for _ in range(WINDOW):
            self._ask()

    def tell(self, body: object) -> None:
        """Say something to the head that it has not asked for; nothing once the channel has ended."""
        self._say(Reply(-1, None, msgspec.Raw(self._encoder.encode(body))))

    def _ask(self) -> None:
        if self._ended:
            return
        try:
            self._channel.receive_bytes(kind=CALL, step=self._asked, bytes_max=CALL_BYTES_MAX).on_done(self._came)
        except StreamError:
            self._ended = True
        self._asked += 1

    def _came(self, event: Event[bytes]) -> None:
        if event.error() is not None:
            self._ended = True
            return
        self._ask()
        try:
            call = self._decoder.decode(event.result())
        except msgspec.MsgspecError as wrong:  # nobody can be answered: the number is not known
            _log.error("call.malformed", peer=self._channel.name, error=str(wrong))
            self._run(self._channel.close(), "close")
            return
        self._begin(call)

    def _begin(self, call: Call) -> None:
        try:
            taker = self._takers.get(call.name)
            if taker is None:
                raise ForebayError(f"this node knows no call {call.name!r}: it runs another version")
            found = taker.begin(msgspec.msgpack.decode(call.body, type=taker.body))
        except Exception as error:  # the edge of this call
            self._refuse(call, error)
            return
        if isinstance(found, Event):
            found.on_done(lambda done: self._answer(call, done))
        elif isinstance(found, Awaitable):
            self._run(self._awaited(call, found), call.name)
        else:
            self._say(Reply(call.number, None, msgspec.Raw(self._encoder.encode(found))))

    async def _awaited(self, call: Call, work: Awaitable[Any]) -> None:
        try:
            found = await work
        except Exception as error:  # the edge of this call
            self._refuse(call, error)
            return
        self._say(Reply(call.number, None, msgspec.Raw(self._encoder.encode(found))))

    def _answer(self, call: Call, event: Event[Any]) -> None:
        error = event.error()
        if error is not None:
            self._refuse(call, error)
        else:
            self._say(Reply(call.number, None, msgspec.Raw(self._encoder.encode(event.result()))))

    def _refuse(self, call: Call, error: BaseException) -> None:
        if isinstance(error, AssertionError):  # ours, not the world's
            _log.error("call.failed", call=call.name, error=repr(error), exc_info=error)
        self._say(Reply(call.number, failure_of(error), _NOTHING))

    def _say(self, reply: Reply) -> None:
        if self._ended:
            return
        try:
            self._channel.send(self._encoder.encode(reply), kind=REPLY, step=self._said)
        except Full as error:  # an answer that is not sent would be waited for until the end: the end is now
            _log.error("channel.overrun", peer=self._channel.name, error=str(error))
            self._run(self._channel.close(), "close")
            self._ended = True
            return
        except StreamError:
            self._ended = True
            return
        self._said += 1
