"""The streams of a stage: those of its device, and of its peer's if it has one. Knows no steps."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from streams import Backend, Event, Stream

__all__ = ["StageStreams"]


_PARTS = ("compute", "selection", "prefetch", "copyback")


@dataclass(frozen=True, slots=True)
class StageStreams:
    """The streams of one device, and with them those of the peer."""

    compute: Stream
    selection: Stream
    prefetch: Stream
    copyback: Stream
    peer: "StageStreams | None" = None

    @staticmethod
    def of(backend: Backend, name: str, *, peered: bool = False) -> "StageStreams":
        """Args: peered: whether there is a peer; its streams are named `name`.peer.compute and so on, which is how a backend knows them."""
        compute, selection, prefetch, copyback = (backend.stream(f"{name}.{part}") for part in _PARTS)
        found = StageStreams(compute, selection, prefetch, copyback)
        return replace(found, peer=StageStreams.of(backend, f"{name}.peer")) if peered else found

    def renewed(self, stream_of: Callable[[str], Any]) -> "StageStreams":
        """Streams of the same names."""
        found = StageStreams(*(stream_of(each.name) for each in (self.compute, self.selection, self.prefetch, self.copyback)))
        return found if self.peer is None else replace(found, peer=self.peer.renewed(stream_of))

    def fences(self) -> tuple[Event[None], ...]:
        """Events of the streams beside compute, and of the peer's, done once all submitted to those so far is, whether it failed or not.

        Compute alone says when a step that ended well is over. What is left of a failed one may still plan or fill slots there.
        """
        beside = [self.selection, self.prefetch]
        if self.peer is not None:
            beside += [self.peer.compute, self.peer.selection, self.peer.prefetch]
        return tuple(stream.submit(_nothing, label="fence") for stream in beside)

    async def idle(self) -> None:
        """Wait until everything submitted so far is done."""
        for stream in (self.compute, self.selection, self.prefetch, self.copyback):
            await stream.idle()
        if self.peer is not None:
            await self.peer.idle()


def _nothing() -> None:
    pass
