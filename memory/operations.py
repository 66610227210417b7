"""What of a session is in flight, and whether a failed copy broke it.

Holds the session's outstanding events. Knows nothing of buffers: whoever owns some asks `when_idle` before letting them go.

Invariants:
1. An event is held from `hold` until it is done; its completion callbacks given before `hold` have run by then.
2. `when_idle` callbacks run once, when nothing is held, and never inside `when_idle` while something is.
3. `broken` keeps the first failure and is never cleared.
4. `frozen` while a copy of a block that is not full is in flight, whoever stopped waiting for it.
5. `placing` is what committed rows lie behind: until it is done nobody knows whether they are where the host says.
6. What one of a session's stages reports to another one's operations is held there for as long, and breaks it too.
"""

from collections.abc import Callable
from typing import Any

from streams import Event

__all__ = ["Operations"]


class Operations:
    """Outstanding events of one session. Loop thread only."""

    def __init__(self) -> None:
        self.broken: BaseException | None = None
        self.last_raise: Event[Any] | None = None  # the newest raise of MIRRORED; the next one comes after it (`copyback.py`)
        self._held: dict[Event[Any], None] = {}  # in order of submission
        self._freezing: set[Event[Any]] = set()
        self._placing: dict[Event[Any], None] = {}
        self._idle_callbacks: list[Callable[[], None]] = []
        self._told: Operations | None = None

    def report_to(self, told: "Operations") -> None:
        """From now on `told`, of the same session on another stage, holds what is held here, and breaks with it."""
        self._told = told
        for event in self._held:
            told.hold(event)
        if self.broken is not None:
            told.break_with(self.broken)

    @property
    def outstanding(self) -> int:
        """Events held now."""
        return len(self._held)

    @property
    def frozen(self) -> bool:
        """Whether a copy is in flight that reads rows next to those a step would write: no step may be submitted."""
        return bool(self._freezing)

    @property
    def placing(self) -> tuple[Event[Any], ...]:
        """Operations in flight that put committed rows or keys where they are (a fork's, a cut's): whoever copies those comes after."""
        return tuple(self._placing)

    def hold(self, event: Event[Any], *, freezes: bool = False, places: bool = False) -> None:
        """Count `event` as in flight until it is done; its failure is its submitter's to report. Steps of the session are given here.

        Args: freezes: it reads a block that is not full, so nothing may be written to the session's rows until then. places: see `placing`.
        """
        if event.done() or event in self._held:
            return
        self._held[event] = None
        if freezes:
            self._freezing.add(event)
        if places:
            self._placing[event] = None
        event.on_done(self._settled)
        if self._told is not None:
            self._told.hold(event)

    def _settled(self, event: Event[Any]) -> None:
        del self._held[event]
        self._freezing.discard(event)
        self._placing.pop(event, None)
        if not self._held:
            callbacks, self._idle_callbacks = self._idle_callbacks, []
            for callback in callbacks:
                callback()

    def break_with(self, error: BaseException) -> None:
        """The session cannot go on; keeps the first reason."""
        if self.broken is None:
            self.broken = error
        if self._told is not None:
            self._told.break_with(error)

    def when_idle(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, as soon as nothing is held; now if nothing is."""
        if self._held:
            self._idle_callbacks.append(callback)
        else:
            callback()

    async def settle(self) -> None:
        """Wait until nothing is held, work submitted meanwhile included. Raises none of the failures.

        Cancel: the operations go on and stay held.
        """
        while self._held:
            await next(reversed(self._held)).wait_done()
