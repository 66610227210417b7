"""When a poller asks next: at once, once more in the same round of the loop, or after a rest.

Numbers only: knows no device, no loop and no clock of its own.

Invariants:
1. Nothing is asked for longer than `SLICE_NS` in one round of the loop, and only while rounds hold nothing else: as soon as a round
   takes longer than an empty one the next asks once.
2. A rest is at most half of what is left to the expected end, and `REST_MAX_S`, so a wrong guess makes nobody late by more; an end that is
   overdue for `SPIN_NS`, or that nothing is known about, is asked for once a millisecond.
"""

from collections.abc import Iterable

__all__ = ["REST_MAX_S", "REST_S", "SLICE_NS", "SPIN_NS", "Pace"]

SPIN_NS = 5_000_000  # a decode step of a large model takes some milliseconds: spinning through one costs less than waking late
SLICE_NS = 50_000
REST_S = 0.001  # the grain of a loop's timers
REST_MAX_S = 0.05  # a device's failure, and an end that nobody foresaw, are met no later
_FIRST_SLICE_NS = 2_000
_GAP_MAX_NS = 10_000  # an empty round takes half a microsecond to some
_LABELS_MAX = 1_024


class Pace:
    """One poller's. Times are of one clock, in nanoseconds."""

    def __init__(self) -> None:
        self.left_ns = 0  # when a round had asked last
        self._took_ns: dict[str, int] = {}  # lately, at least; by label
        self._progress_ns = self._due_ns = 0
        self._gap_ns = _GAP_MAX_NS  # the shortest round so far: an empty one
        self._slice_ns = 0

    def ended(self, label: str, took_ns: int) -> None:
        """An operation ended that took so long by itself."""
        if len(self._took_ns) >= _LABELS_MAX and label not in self._took_ns:
            self._took_ns.clear()
        known_ns = self._took_ns.get(label, took_ns)
        self._took_ns[label] = min(took_ns, known_ns + known_ns // 8)  # an end seen late must not make the next one be seen late too

    def expect(self, now_ns: int, under_way: Iterable[tuple[str, int]]) -> None:
        """Something began or ended. `under_way`: label and begin of each operation that can end next."""
        self._progress_ns = now_ns
        self._due_ns = min((began_ns + self._took_ns.get(label, 0) for label, began_ns in under_way), default=now_ns)

    def slice_ns(self, now_ns: int) -> int:
        """How long this round of the loop may go on asking; called when it begins to. Grows from round to empty round."""
        gap_ns = now_ns - self.left_ns
        empty = gap_ns <= 2 * self._gap_ns
        self._gap_ns = min(gap_ns, self._gap_ns)  # never more again: a loop that is always busy must not pass for an empty one
        self._slice_ns = min(SLICE_NS, max(_FIRST_SLICE_NS, 2 * self._slice_ns)) if empty else 0
        return self._slice_ns

    def rest_s(self, now_ns: int, *, found: bool) -> float:
        """Seconds until the next round that asks; 0: the loop's next. Called when a round has asked. `found`: something had ended."""
        self.left_ns = now_ns
        if found:
            return 0.0
        left_ns = self._due_ns - now_ns
        if left_ns > SPIN_NS:
            return min(left_ns / 2e9, REST_MAX_S)
        return 0.0 if now_ns < max(self._due_ns, self._progress_ns) + SPIN_NS else REST_S
