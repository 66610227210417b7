"""How tensors pass from the streams of one process to those of another: what a stage hands on, and where a step's sessions stand.

A tensor in a device's memory goes by way of page-locked host memory, copied on a stream of its own; one in host memory goes from where it
lies. Buffers are kept a shape, so that recorded steps find them where they were; chunks, of any length, pass as views of the longest's.

Invariants:
1. Nothing is sent before the event that it comes with; if that fails, the other side's receive fails, and the channel goes on.
2. A buffer is received into only behind `free`: what still reads it. A buffer that is sent from is written again only behind the other
   side's answer to it, which is the rule of `Carried`.
3. Numbers are given by the head, one for each thing handed on, and are the same on both sides: a frame out of turn ends the channel.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.stage_calls import Carried
from streams import Channel, Event, PeerLost, Stream, StreamError

__all__ = ["AnyRows", "Form", "Passage", "together"]

_STATES, _BAD, _PICKS = "states", "bad", "picks"


@dataclass(frozen=True, slots=True)
class Form:
    """What of a `Carried` is not its count of rows."""

    hidden: int
    dtype: torch.dtype
    picks: int  # of a selection that goes along; 0: none does
    chunk_rows: int  # of the longest chunk


@dataclass(frozen=True, slots=True)
class AnyRows:
    """A key of what comes with more or fewer rows, one behind the other's reader whatever the lengths: one buffer for all."""

    rows_max: int


def together(events: Sequence[Event[Any]], label: str) -> Event[None]:
    """Done when all are; fails with the first failure in their order."""
    whole: Event[None] = Event(label)
    left = len(events)

    def one_done(_: Event[Any]) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            whole.settle(None, next((error for error in (event.error() for event in events) if error is not None), None))

    if not events:
        return Event.completed(None, label=label)
    for event in events:
        event.on_done(one_done)
    return whole


def _over(event: Event[Any]) -> Event[None]:
    """Done when the other one is, whatever came of it: a reader that failed reads no more either."""
    over: Event[None] = Event(event.label)
    event.on_done(lambda _: _end(over))
    return over


def _end(event: Event[None]) -> None:
    event.settle(None, None)


class Passage:
    """One direction or both over one channel. Loop thread only."""

    def __init__(self, channel: Channel | None, copies: Stream, device: torch.device) -> None:
        """Args: channel: None: there will be one (`rebind`). copies: where tensors of a device are brought to and from host memory."""
        self._bound = channel
        self._lost: Callable[[BaseException], None] = lambda error: None
        self._copies = copies
        self._device = device
        self._held: dict[Hashable, tuple[Tensor, Tensor]] = {}  # by kind, key and shape: in host memory, and where steps read it

    def rebind(self, channel: Channel, lost: Callable[[BaseException], None]) -> None:
        """From now on over another channel, with the same buffers: recorded steps know them. Nothing is in flight over the old one.

        Args: lost: hears that the channel has ended before anybody who waits for something of it.
        """
        self._bound, self._lost = channel, lost

    @property
    def _channel(self) -> Channel:
        assert self._bound is not None, "nothing passes before there is a channel"
        return self._bound

    def send(self, source: Tensor, key: Hashable, kind: str, number: int, after: Event[Any]) -> Event[None]:
        """Send a tensor behind `after`. Args: key: differs where two of a kind may be in flight. Raises PeerLost, Closed, Full."""
        if source.device.type == "cpu":
            return self._channel.send(source, kind=kind, step=number, after=(after,))
        host = self._buffers((kind, "out"), key, source.shape, source.dtype)[0]
        copied = self._copies.submit(partial(host.copy_, source, non_blocking=True), label=f"send.{kind}", after=(after,), reads=(source,))
        return self._channel.send(host, kind=kind, step=number, after=(copied,))

    def receive(
        self, key: Hashable, shape: Sequence[int], dtype: torch.dtype, kind: str, number: int, free: Sequence[Event[Any]] = ()
    ) -> tuple[Event[Any], Tensor]:  # fmt: skip
        """Ask for a tensor; returns its event, failed where the channel has ended, and its place, the same for each `key` and shape."""
        host, place = self._buffers(kind, key, shape, dtype)
        try:
            came = self._channel.receive(host, kind=kind, step=number, after=[_over(event) for event in free if not event.done()])
        except StreamError as error:
            came = Event(f"receive {kind}")
            came.settle(None, error)
            return came, place
        came.on_done(self._came)
        if host is place:
            return came, place
        copy = partial(place.copy_, host, non_blocking=True)
        return self._copies.submit(copy, label=f"receive.{kind}", after=(came,), writes=(place,)), place

    def _came(self, event: Event[Any]) -> None:
        error = event.error()
        if isinstance(error, PeerLost):
            self._lost(error)

    def _buffers(self, kind: Hashable, key: Hashable, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        longest = key.rows_max if isinstance(key, AnyRows) else shape[0]
        assert shape[0] <= longest, f"{shape[0]} rows in buffers of {longest}"
        whole, on_cpu = (longest, *shape[1:]), self._device.type == "cpu"
        found = self._held.get((kind, key, whole))
        if found is None:
            host = torch.zeros(whole, dtype=dtype, pin_memory=not on_cpu)
            found = self._held[kind, key, whole] = (host, host if on_cpu else torch.zeros(whole, dtype=dtype, device=self._device))
        if shape[0] == longest:
            return found
        host = found[0][: shape[0]]
        return host, host if on_cpu else found[1][: shape[0]]

    def hand_on(self, carried: Carried, key: Hashable, prefix: str, number: int) -> None:
        """Send all of it behind its event. Args: key: see `send`. Raises PeerLost, Closed, Full."""
        self.send(carried.states, key, prefix + _STATES, number, carried.event)
        self.send(carried.bad_layer, key, prefix + _BAD, number, carried.event)
        if carried.selection is not None:
            self.send(carried.selection, key, prefix + _PICKS, number, carried.event)

    def skip(self, form: Form, prefix: str, number: int, error: BaseException) -> None:
        """Tell the other side that what it waits for as `number` will not come. Raises PeerLost, Closed, Full."""
        failed: Event[None] = Event(f"{prefix}skipped")
        failed.settle(None, error)
        for kind in (_STATES, _BAD, _PICKS) if form.picks else (_STATES, _BAD):
            self._channel.send(b"", kind=prefix + kind, step=number, after=(failed,))

    def word(self, kind: str, number: int, after: Event[Any]) -> Event[None]:
        """Say that `after` is done; if it failed, whoever waits for the word fails. Raises PeerLost, Closed, Full."""
        return self._channel.send(b"", kind=kind, step=number, after=(after,))

    def arrive(
        self, key: Hashable, rows: int, form: Form, prefix: str, number: int, free: Sequence[Event[Any]] = ()
    ) -> Carried:  # fmt: skip
        """What the stage before hands on as `number`. Args: key: of its buffers; free: done once those are read."""
        states_event, states = self.receive(key, (rows, form.hidden), form.dtype, prefix + _STATES, number, free)
        bad_event, bad = self.receive(key, (rows,), torch.int64, prefix + _BAD, number, free)
        events, selection = [states_event, bad_event], None
        if form.picks:
            picked, selection = self.receive(key, (rows, form.picks), torch.int32, prefix + _PICKS, number, free)
            events.append(picked)
        return Carried(together(events, f"{prefix}arrived"), states, bad, selection)

    def nothing(self, key: Hashable, rows: int, form: Form, prefix: str, failed: Event[Any]) -> Carried:
        """What would have arrived in the same buffers, had it not failed already."""
        states = self._buffers(prefix + _STATES, key, (rows, form.hidden), form.dtype)[1]
        bad = self._buffers(prefix + _BAD, key, (rows,), torch.int64)[1]
        selection = self._buffers(prefix + _PICKS, key, (rows, form.picks), torch.int32)[1] if form.picks else None
        return Carried(failed, states, bad, selection)
